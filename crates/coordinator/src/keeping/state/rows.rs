//! The rows of the store: read as a state, and compared with a state that is to be written.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::StateError;
use crate::cluster::{Durable, TakeRows};

/// The row with the form of the state. In forms before the third it has the whole state.
const FORM_ROW: &str = "cluster";

/// The form of the state that this release writes. It is raised when an earlier release's state cannot be read as
/// this one's.
pub(super) const FORM: u32 = 3;

/// The values of rows, by name.
pub(super) type Rows = BTreeMap<String, Vec<u8>>;

/// The form of a state.
#[derive(Serialize, Deserialize)]
struct Form {
    #[serde(default)]
    form: u32,
}

/// Returns the state in rows that a coordinator has written; none if there are no rows.
pub(super) fn decode(rows: &Rows) -> Result<Option<Durable>, StateError> {
    let corrupted = |what: String| {
        redb::Error::Corrupted(format!("it is not what this release writes: {what}"))
    };
    let read = |error: serde_json::Error| corrupted(error.to_string());
    if rows.is_empty() {
        return Ok(None);
    }
    let form = rows.get(FORM_ROW).map_or(b"{}".as_slice(), Vec::as_slice);
    let Form { form } = serde_json::from_slice(form).map_err(read)?;
    if form != FORM {
        return Err(StateError::OtherRelease(form));
    }
    let parts = rows.iter().filter(|(name, _)| *name != FORM_ROW);
    let parts = parts.map(|(name, value)| (name.as_str(), value.as_slice()));
    let durable = Durable::of_rows(parts).map_err(read)?;
    durable.check().map_err(corrupted)?;
    Ok(Some(durable))
}

/// The differences between a state and the stored one.
pub(super) struct Changes {
    /// The rows that differ, with their new values.
    pub(super) rows: Vec<(String, Vec<u8>)>,
    /// The rows that the state has no longer.
    pub(super) removed: Vec<String>,
    /// The size of all rows of the state, in bytes.
    pub(super) encoded: usize,
}

impl Changes {
    /// Encodes a state, and checks that the rows that differ from the stored ones read back the same.
    pub(super) fn between(stored: &Rows, durable: &Durable) -> Result<Self, StateError> {
        let mut encoder = Encoder {
            stored,
            kept: BTreeSet::new(),
            changed: Vec::new(),
            value: Vec::new(),
            encoded: 0,
        };
        encoder.row(FORM_ROW, &Form { form: FORM })?;
        durable.rows(&mut encoder)?;
        let Encoder {
            kept,
            changed,
            encoded,
            ..
        } = encoder;
        let removed = stored.keys().filter(|name| !kept.contains(name.as_str()));
        Ok(Self {
            removed: removed.cloned().collect(),
            rows: changed,
            encoded,
        })
    }

    pub(super) fn apply_to(self, stored: &mut Rows) {
        for name in &self.removed {
            stored.remove(name);
        }
        stored.extend(self.rows);
    }
}

/// Finds the rows of a state that differ from the stored ones.
struct Encoder<'a> {
    stored: &'a Rows,
    /// The names of the stored rows that the state still has.
    kept: BTreeSet<&'a str>,
    changed: Vec<(String, Vec<u8>)>,
    value: Vec<u8>,
    encoded: usize,
}

impl TakeRows for Encoder<'_> {
    type Error = StateError;

    fn row<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        value: &T,
    ) -> Result<(), StateError> {
        let wrong = |what: String| StateError::NotReadBack(format!("{name}: {what}"));
        let wrong_json = |error: serde_json::Error| wrong(error.to_string());
        self.value.clear();
        serde_json::to_writer(&mut self.value, value).map_err(wrong_json)?;
        self.encoded += self.value.len();
        if let Some((name, stored)) = self.stored.get_key_value(name) {
            self.kept.insert(name);
            if *stored == self.value {
                return Ok(());
            }
        }
        let read: T = serde_json::from_slice(&self.value).map_err(wrong_json)?;
        if serde_json::to_vec(&read).map_err(wrong_json)? != self.value {
            return Err(wrong("a value changes when it is read back".to_owned()));
        }
        self.changed.push((name.to_owned(), self.value.clone()));
        Ok(())
    }
}
