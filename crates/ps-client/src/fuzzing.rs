//! The driver of the fuzz target `members`: bytes as views and shard maps, and arbitrary answers to a worker.
//!
//! - `answers`: the input
//! - `worker`: pushes, pulls, and takes the answers

mod answers;
mod worker;

use arbitrary::Unstructured;
use fuzz_input::events;
use prost::Message;
use shared_proto::blocks::ShardMap;
use shared_proto::view::View;
use shared_proto::wire;

use crate::message_plan::MessagePlan;
use worker::Worker;

/// The most events of an input.
const MOST_EVENTS: usize = 100;

/// The most elements of a model that the worker uses. Larger models are skipped.
const MOST_ELEMENTS: usize = 4096;

/// Reads the bytes as a view and as a shard map, then plays the events that they encode.
pub fn members(bytes: &[u8]) {
    read(bytes);
    let mut input = Unstructured::new(bytes);
    let Ok(map) = input.arbitrary::<answers::Map>() else {
        return;
    };
    let Some(map) = taken(map.into()).filter(is_small) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.expect("a runtime").block_on(async {
        let mut worker = Worker::new(map);
        for event in events(&mut input, MOST_EVENTS) {
            worker.play(event).await;
        }
        worker.end().await;
    });
}

fn is_small(map: &ShardMap) -> bool {
    let elements = map.variables.iter().map(|v| v.spec.elements());
    elements.fold(0, usize::saturating_add) <= MOST_ELEMENTS
}

fn read(bytes: &[u8]) {
    if let Ok(view) = wire::View::decode(bytes)
        && let Ok(view) = View::try_from(view)
    {
        assert_eq!(View::try_from(wire::View::from(&view)), Ok(view));
    }
    if let Ok(map) = wire::ShardMap::decode(bytes) {
        taken(map);
    }
}

/// Reads a shard map, and checks what a worker derives from it. Returns `None` if the map is refused.
fn taken(map: wire::ShardMap) -> Option<ShardMap> {
    let map = ShardMap::try_from(map).ok()?;
    assert_eq!(
        ShardMap::try_from(wire::ShardMap::from(&map)).as_ref(),
        Ok(&map)
    );
    for (id, shard) in map.blocks() {
        let range = map.range(id).expect("a block of the map");
        assert!(!range.is_empty(), "{} has no elements", map.describe(id));
        assert_eq!(map.shard(id), Ok(shard));
    }
    let framed: usize = MessagePlan::new(&map)
        .in_turns()
        .map(|(_, message)| message.blocks.len())
        .sum();
    assert_eq!(framed, map.blocks().count());
    Some(map)
}

#[cfg(test)]
mod tests {
    use fuzz_input::replay;

    #[test]
    fn any_answers_are_taken_or_refused() {
        replay("members", super::members);
    }
}
