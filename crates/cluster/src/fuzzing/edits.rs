//! Persisted states with changes.

use std::sync::OnceLock;

use arbitrary::{Arbitrary, Unstructured};
use fuzz_input::{Near, events};
use serde_json::Value;

use super::events::{Call, Caller, Event, Setting};
use super::player::Player;

/// The maximum number of changes to a state.
const MOST_EDITS: usize = 8;

/// A change to a value in a persisted state.
#[derive(Arbitrary, Debug)]
struct Edit {
    /// The index of the value in the order of the text, modulo the number of values.
    at: u16,
    change: Change,
}

#[derive(Arbitrary, Debug)]
enum Change {
    Number(Near),
    Float(f64),
    /// A list loses its last entry, anything else becomes null.
    Less,
    /// A list gets its last entry twice, a string becomes longer.
    More,
    Flip,
}

/// Returns a persisted state with the changes that an input describes.
pub(super) fn edited(input: &mut Unstructured<'_>) -> arbitrary::Result<Value> {
    let states = states();
    let mut state = states[usize::from(u8::arbitrary(input)?) % states.len()].clone();
    let size = count(&state);
    for edit in events::<Edit>(input, MOST_EDITS) {
        let mut at = usize::from(edit.at) % size;
        if let Some(value) = find(&mut state, &mut at) {
            edit.change.make(value);
        }
    }
    Ok(state)
}

impl Change {
    fn make(self, value: &mut Value) {
        match (self, &mut *value) {
            (Self::Number(near), _) => *value = near.of(value.as_u64().unwrap_or(0)).into(),
            (Self::Float(number), _) => *value = number.into(),
            (Self::Less, Value::Array(list)) => drop(list.pop()),
            (Self::Less, _) => *value = Value::Null,
            (Self::More, Value::Array(list)) => list.extend(list.last().cloned()),
            (Self::More, Value::String(text)) => text.push('7'),
            (Self::Flip, Value::Bool(flag)) => *flag = !*flag,
            (Self::More | Self::Flip, _) => {}
        }
    }
}

fn children(value: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match value {
        Value::Array(list) => Box::new(list.iter()),
        Value::Object(fields) => Box::new(fields.values()),
        _ => Box::new(std::iter::empty()),
    }
}

fn count(value: &Value) -> usize {
    1 + children(value).map(count).sum::<usize>()
}

/// Returns the value at index `after` in the order of the text. Counts `after` down.
fn find<'a>(value: &'a mut Value, after: &mut usize) -> Option<&'a mut Value> {
    if *after == 0 {
        return Some(value);
    }
    *after -= 1;
    match value {
        Value::Array(list) => list.iter_mut().find_map(|value| find(value, after)),
        Value::Object(fields) => fields.values_mut().find_map(|value| find(value, after)),
        _ => None,
    }
}

/// Returns persisted states of jobs: at the beginning, while they train, and after the loss of a server or of a member
/// of a ring.
fn states() -> &'static [Value] {
    static STATES: OnceLock<Vec<Value>> = OnceLock::new();
    STATES.get_or_init(|| {
        let jobs = [0, 1, 2].map(Setting::training).into_iter();
        let jobs = jobs.chain([Setting::rings()]);
        let mut states = vec![Player::new(&Setting::default()).state()];
        for setting in jobs {
            let mut player = Player::new(&setting);
            for worker in [0, 1, 0, 1, 0] {
                player.play(Event::Work { worker, times: 0 });
            }
            states.push(player.state());
            let has_servers = !player.cluster.has_ring();
            player.call(&Caller::good(has_servers, 0), gone());
            player.settle();
            states.push(player.state());
        }
        states
    })
}

fn gone() -> Call {
    let (failure, error) = (0, false);
    Call::Leave { failure, error }
}
