//! The shard map that the messages use.

use shared_proto::blocks::{
    BlockId, PlacedShard, PlacedTable, PlacedVariable, ShardMap, ShardServer, Source, VariableKind,
    VariableSpec,
};
use shared_proto::ids::{Epoch, Generation, Role, Task, TaskId};
use shared_proto::job::Adagrad;
use shared_proto::table::{Admission, Age, Eviction, Initializer, RowOptimizer, TableSpec};

/// The number of elements of a full block, and of the shard's trained variable.
const BLOCK_ELEMENTS: usize = 4;
const ELEMENTS: usize = 7;

/// Returns the number of elements of a block, or of a full block if the block is unknown.
pub(super) fn elements(id: BlockId) -> usize {
    map(Epoch(1))
        .range(id)
        .map_or(BLOCK_ELEMENTS, |range| range.len())
}

pub(super) fn task(role: Role, index: u32, generation: u64) -> Task {
    Task {
        id: TaskId { role, index },
        generation: Generation(generation),
    }
}

/// The number by which block ids name the shard's table. The table has one bucket.
pub(super) const TABLE: u32 = 3;

fn table() -> TableSpec {
    TableSpec {
        name: "t".to_owned(),
        dimension: 2,
        buckets: 1,
        initializer: Initializer::Uniform { limit: 1.0 },
        optimizer: RowOptimizer::Adagrad(Adagrad::default()),
        seed: 1,
        admission: Admission::Sights { count: 2, width: 8 },
        eviction: Eviction {
            age: Some(Age::Updates(3)),
            ..Eviction::default()
        },
        ..TableSpec::default()
    }
}

/// Returns a map of two shards. The desk has the first one.
pub(super) fn map(epoch: Epoch) -> ShardMap {
    let variable = |name: &str, kind, elements, shards| PlacedVariable {
        spec: VariableSpec {
            name: name.to_owned(),
            shape: vec![elements],
            kind,
        },
        shards,
    };
    let (trained, frozen) = (VariableKind::Trained, VariableKind::Frozen);
    let placed = |index| PlacedShard {
        server: ShardServer::Lost(task(Role::Ps, index, 1)),
        source: Source::initializer(Epoch(1)),
    };
    ShardMap {
        epoch,
        shards: [0, 1].map(placed).to_vec(),
        variables: vec![
            variable("w", trained, ELEMENTS, vec![0, 0]),
            variable("x", trained, BLOCK_ELEMENTS, vec![1]),
            variable("y", frozen, BLOCK_ELEMENTS, vec![0]),
        ],
        tables: vec![PlacedTable {
            spec: table(),
            shards: vec![0],
        }],
        block_elements: BLOCK_ELEMENTS,
        total_updates: 1,
    }
}
