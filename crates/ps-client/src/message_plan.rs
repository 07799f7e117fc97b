//! The grouping of variables' blocks into messages: as many blocks of a shard as fit into one.

use shared_proto::blocks::{BlockId, ShardMap};
use shared_proto::protocol::MESSAGE_PAYLOAD_BYTES;

/// The blocks of each message, shard by shard. Small variables share a message, a full block has
/// one of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessagePlan {
    by_shard: Vec<Vec<PlannedMessage>>,
}

/// The blocks of one message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannedMessage {
    /// The blocks that travel together.
    pub blocks: Vec<BlockId>,
    /// The blocks among these that take updates. A push names only them.
    pub updated: Vec<BlockId>,
}

impl MessagePlan {
    /// Groups all blocks of the map's variables.
    pub fn new(map: &ShardMap) -> Self {
        let mut by_shard: Vec<Vec<PlannedMessage>> = vec![Vec::new(); map.shards.len()];
        let mut filled = vec![usize::MAX; map.shards.len()];
        for (id, shard) in map.blocks() {
            // The rows of tables differ from step to step.
            let Ok(range) = map.range(id) else { continue };
            let bytes = range.len() * size_of::<f32>();
            let (messages, filled) = (&mut by_shard[shard as usize], &mut filled[shard as usize]);
            *filled = filled.saturating_add(bytes);
            if messages.is_empty() || *filled > MESSAGE_PAYLOAD_BYTES {
                messages.push(PlannedMessage::default());
                *filled = bytes;
            }
            if let Some(message) = messages.last_mut() {
                message.blocks.push(id);
                message.updated.extend(map.takes_updates(id).then_some(id));
            }
        }
        Self { by_shard }
    }

    /// Returns each message with its shard. The shards take turns, so that all of them have work.
    pub fn in_turns(&self) -> impl Iterator<Item = (usize, &PlannedMessage)> {
        let longest = self.by_shard.iter().map(Vec::len).max().unwrap_or(0);
        (0..longest).flat_map(move |turn| {
            let message_of = move |(shard, messages): (usize, &'_ Vec<PlannedMessage>)| {
                messages.get(turn).map(|_| shard)
            };
            let shards = self.by_shard.iter().enumerate().filter_map(message_of);
            shards.map(move |shard| (shard, &self.by_shard[shard][turn]))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shared_proto::blocks::{BLOCK_ELEMENTS, PlacedVariable, VariableKind, VariableSpec};
    use shared_proto::ids::Epoch;

    fn map(sizes: &[usize], shards: u32) -> ShardMap {
        let placed = |(i, size): (usize, &usize)| {
            let spec = VariableSpec {
                name: format!("v{i:03}"),
                shape: vec![*size],
                ..VariableSpec::default()
            };
            PlacedVariable {
                shards: (0..spec.blocks(BLOCK_ELEMENTS) as u32)
                    .map(|block| (block + i as u32) % shards)
                    .collect(),
                spec,
            }
        };
        ShardMap {
            epoch: Epoch(1),
            shards: vec![crate::maps::placed(""); shards as usize],
            variables: sizes.iter().enumerate().map(placed).collect(),
            tables: Vec::new(),
            block_elements: BLOCK_ELEMENTS,
            total_updates: 1,
        }
    }

    proptest! {
        #[test]
        fn each_block_is_in_one_message_of_its_shard_and_no_message_is_too_large(
            sizes in prop::collection::vec(1usize..2 * BLOCK_ELEMENTS, 1..20),
            shards in 1u32..4,
        ) {
            let map = map(&sizes, shards);
            let messages = MessagePlan::new(&map);
            let mut seen = Vec::new();
            for (shard, message) in messages.in_turns() {
                let blocks = &message.blocks;
                let elements: usize = blocks.iter().map(|id| map.range(*id).unwrap().len()).sum();
                prop_assert!(elements * 4 <= MESSAGE_PAYLOAD_BYTES);
                for id in blocks {
                    prop_assert_eq!(map.shard(*id).unwrap() as usize, shard);
                    seen.push(*id);
                }
            }
            seen.sort();
            let all: Vec<BlockId> = map.blocks().map(|(id, _)| id).collect();
            prop_assert_eq!(seen, all);
        }
    }

    #[test]
    fn a_push_leaves_out_what_takes_no_updates() {
        let mut map = map(&[10, 10, 10], 1);
        map.variables[1].spec.kind = VariableKind::Frozen;
        let plan = MessagePlan::new(&map);
        let [(0, message)] = plan.in_turns().collect::<Vec<_>>()[..] else {
            panic!("{plan:?}");
        };
        let of = |variable| BlockId { variable, index: 0 };
        assert_eq!(message.blocks, [of(0), of(1), of(2)]);
        assert_eq!(message.updated, [of(0), of(2)]);
    }

    #[test]
    fn small_variables_travel_together() {
        let messages = MessagePlan::new(&map(&[10; 50], 1));
        assert_eq!(messages.in_turns().count(), 1);
    }
}
