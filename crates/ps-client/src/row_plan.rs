//! The grouping of a step's rows into messages: as many buckets of a shard as fit into one.

use std::ops::Range;

use shared_proto::blocks::{BlockId, ShardMap};
use shared_proto::protocol::MESSAGE_PAYLOAD_BYTES;
use shared_proto::step::WantedRows;
use shared_proto::table::hash::bucket;

/// The number of bytes of a bucket's part of a message, without its ids and values.
const PART_BYTES: usize = 48;

/// The rows of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RowMessage {
    pub(crate) shard: usize,
    pub(crate) parts: Vec<RowPart>,
}

/// Rows of one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RowPart {
    pub(crate) block: BlockId,
    /// The index of the table's list among the lists of rows from which the plan was made.
    pub(crate) list: usize,
    /// The range of the rows in this list.
    pub(crate) rows: Range<usize>,
}

/// The form of the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Each bucket is in exactly one message, even if it has no rows, because a block takes one gradient in each step.
    Push,
    /// Only buckets with rows; the rows of a large bucket may be in several messages.
    Pull,
}

/// Plans the messages for lists of rows, each of a different table. The shards take turns. The size of a message is
/// computed with `value_bytes` bytes for each element.
pub(crate) fn plan(
    map: &ShardMap,
    lists: &[&WantedRows],
    value_bytes: usize,
    form: Form,
) -> Vec<RowMessage> {
    let mut by_shard: Vec<Vec<RowMessage>> = vec![Vec::new(); map.shards.len()];
    let mut filled = vec![0; map.shards.len()];
    for (list, wanted) in lists.iter().enumerate() {
        let Some(table) = map.tables.get(wanted.table) else {
            continue;
        };
        let (spec, variable) = (&table.spec, map.number_of_table(wanted.table));
        let row_bytes = size_of::<u64>() + spec.dimension as usize * value_bytes;
        let most = match form {
            Form::Push => usize::MAX,
            Form::Pull => ((MESSAGE_PAYLOAD_BYTES - PART_BYTES) / row_bytes).max(1),
        };
        let mut start = 0;
        for (index, shard) in (0u32..).zip(&table.shards) {
            let rest = &wanted.ids[start..];
            let end = start + rest.partition_point(|id| bucket(*id, spec.buckets) <= index);
            let (messages, filled) = (&mut by_shard[*shard as usize], &mut filled[*shard as usize]);
            let block = BlockId { variable, index };
            while start < end || form == Form::Push {
                let rows = start..end.min(start.saturating_add(most));
                start = rows.end;
                let bytes = PART_BYTES + rows.len() * row_bytes;
                *filled += bytes;
                if messages.is_empty() || *filled > MESSAGE_PAYLOAD_BYTES {
                    messages.push(RowMessage {
                        shard: *shard as usize,
                        parts: Vec::new(),
                    });
                    *filled = bytes;
                }
                if let Some(message) = messages.last_mut() {
                    message.parts.push(RowPart { block, list, rows });
                }
                if form == Form::Push {
                    break;
                }
            }
        }
    }
    in_turns(by_shard)
}

/// Returns the messages of all shards, the first of each, then the second of each, and so on.
fn in_turns(by_shard: Vec<Vec<RowMessage>>) -> Vec<RowMessage> {
    let mut queues: Vec<_> = by_shard.into_iter().map(Vec::into_iter).collect();
    let mut all = Vec::new();
    loop {
        let before = all.len();
        all.extend(queues.iter_mut().filter_map(Iterator::next));
        if all.len() == before {
            return all;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shared_proto::blocks::PlacedTable;
    use shared_proto::ids::Epoch;

    use shared_proto::table::TableSpec;
    use shared_proto::table::hash::hash;

    fn map(dimensions: &[u32], buckets: u32, shards: u32) -> ShardMap {
        let table = |(number, dimension): (usize, &u32)| PlacedTable {
            spec: TableSpec {
                name: format!("table{number}"),
                dimension: *dimension,
                buckets,
                ..TableSpec::default()
            },
            shards: (0..buckets).map(|bucket| bucket % shards).collect(),
        };
        ShardMap {
            epoch: Epoch(1),
            shards: vec![crate::maps::placed(""); shards as usize],
            variables: Vec::new(),
            tables: dimensions.iter().enumerate().map(table).collect(),
            block_elements: 1,
            total_updates: 1,
        }
    }

    fn rows(table: usize, count: u64) -> WantedRows {
        let mut ids: Vec<u64> = (0..count).collect();
        ids.sort_unstable_by_key(|id| hash(*id));
        WantedRows { table, ids }
    }

    proptest! {
        #[test]
        fn each_row_is_in_one_message_of_its_shard(
            counts in prop::collection::vec(0u64..3000, 1..3),
            dimension in 1u32..2000,
            buckets in 1u32..9,
            shards in 1u32..4,
            pulls: bool,
        ) {
            let map = map(&vec![dimension; counts.len()], buckets, shards);
            let lists: Vec<_> = counts.iter().enumerate().map(|(t, n)| rows(t, *n)).collect();
            let lists: Vec<&WantedRows> = lists.iter().collect();
            let form = if pulls { Form::Pull } else { Form::Push };
            let messages = plan(&map, &lists, 4, form);
            let mut seen = vec![Vec::new(); lists.len()];
            let mut named = Vec::new();
            for message in &messages {
                let mut bytes = 0;
                let mut blocks = Vec::new();
                for part in &message.parts {
                    prop_assert_eq!(map.shard(part.block).unwrap() as usize, message.shard);
                    prop_assert_eq!(part.block.variable as usize, part.list);
                    for id in &lists[part.list].ids[part.rows.clone()] {
                        prop_assert_eq!(bucket(*id, buckets), part.block.index);
                        seen[part.list].push(*id);
                    }
                    bytes += part.rows.len() * (8 + 4 * dimension as usize);
                    blocks.push(part.block);
                }
                // A bucket of a push stays whole.
                prop_assert!(bytes <= MESSAGE_PAYLOAD_BYTES || blocks.len() == 1);
                prop_assert!(bytes <= MESSAGE_PAYLOAD_BYTES || form == Form::Push);
                let count = blocks.len();
                named.extend(blocks.iter().copied());
                blocks.sort_unstable();
                blocks.dedup();
                prop_assert_eq!(blocks.len(), count);
            }
            for (seen, list) in seen.iter_mut().zip(&lists) {
                seen.sort_unstable_by_key(|id| hash(*id));
                prop_assert_eq!(&*seen, &list.ids);
            }
            if form == Form::Push {
                named.sort_unstable();
                let all: Vec<BlockId> = map.blocks().map(|(id, _)| id).collect();
                prop_assert_eq!(named, all);
            }
        }
    }
}
