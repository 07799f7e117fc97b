//! The grouping of blocks into messages: as many blocks of a shard as fit into one.

use shared_proto::blocks::{BlockId, ShardMap};
use shared_proto::transport::MESSAGE_PAYLOAD_BYTES;

/// The blocks of each message, shard by shard. Small variables share a message, a full block has
/// one of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessagePlan {
    by_shard: Vec<Vec<Vec<BlockId>>>,
}

impl MessagePlan {
    /// Groups all blocks of the map.
    pub fn of(map: &ShardMap) -> Self {
        let mut by_shard: Vec<Vec<Vec<BlockId>>> = vec![Vec::new(); map.shards.len()];
        let mut filled = vec![usize::MAX; map.shards.len()];
        for (id, shard) in map.blocks() {
            let bytes = map.range(id).map_or(0, |range| range.len()) * size_of::<f32>();
            let (messages, filled) = (&mut by_shard[shard as usize], &mut filled[shard as usize]);
            *filled = filled.saturating_add(bytes);
            match messages.last_mut() {
                Some(message) if *filled <= MESSAGE_PAYLOAD_BYTES => message.push(id),
                _ => {
                    messages.push(vec![id]);
                    *filled = bytes;
                }
            }
        }
        Self { by_shard }
    }

    /// Returns each message's shard and blocks. The shards take turns, so that all of them have work.
    pub fn in_turns(&self) -> impl Iterator<Item = (usize, &[BlockId])> {
        let longest = self.by_shard.iter().map(Vec::len).max().unwrap_or(0);
        (0..longest).flat_map(move |turn| {
            let message_of = move |(shard, messages): (usize, &'_ Vec<Vec<BlockId>>)| {
                messages.get(turn).map(|_| shard)
            };
            let shards = self.by_shard.iter().enumerate().filter_map(message_of);
            shards.map(move |shard| (shard, self.by_shard[shard][turn].as_slice()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shared_proto::blocks::{BLOCK_ELEMENTS, PlacedVariable, VariableSpec};
    use shared_proto::ids::Epoch;

    fn map(sizes: &[usize], shards: u32) -> ShardMap {
        let placed = |(i, size): (usize, &usize)| {
            let spec = VariableSpec {
                name: format!("v{i:03}"),
                shape: vec![*size],
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
            block_elements: BLOCK_ELEMENTS,
            total_updates: 1,
        }
    }

    proptest! {
        #[test]
        fn each_block_is_in_one_frame_of_its_shard_and_no_frame_is_too_large(
            sizes in prop::collection::vec(1usize..2 * BLOCK_ELEMENTS, 1..20),
            shards in 1u32..4,
        ) {
            let map = map(&sizes, shards);
            let messages = MessagePlan::of(&map);
            let mut seen = Vec::new();
            for (shard, blocks) in messages.in_turns() {
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
    fn small_variables_travel_together() {
        let messages = MessagePlan::of(&map(&[10; 50], 1));
        assert_eq!(messages.in_turns().count(), 1);
    }
}
