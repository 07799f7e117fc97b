//! The shard map, which places blocks on shards.

mod wire_form;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{BlockId, VariableSpec};
use crate::ids::{Epoch, Task};
use crate::kind::VariableKind;
use crate::payload::Elements;
use crate::refusal::{Reason, Refusal};
use crate::step::PartOf;
use crate::table::{Rows, TableSpec};
use crate::values::Values;
use crate::wire;

/// A variable and the shards of its blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedVariable {
    /// The variable.
    pub spec: VariableSpec,
    /// Index i is the shard of block i. Empty for a variable that workers hold.
    pub shards: Vec<u32>,
}

/// A table and the shards of its buckets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacedTable {
    /// The table.
    pub spec: TableSpec,
    /// Index i is the shard of bucket i.
    pub shards: Vec<u32>,
}

/// The origin of a shard's values. A server that has held the values since `epoch` keeps them; any other server loads
/// them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The epoch in which the values were, or are to be, loaded.
    pub epoch: Epoch,
    /// The location of the checkpoint, and its number there; `None` if the worker that initialises the variables sends
    /// the values.
    pub checkpoint: Option<(String, u64)>,
    /// The id of the run that has written the checkpoint; empty if unknown.
    #[serde(default)]
    pub run: String,
}

impl Source {
    /// Returns the source of values that the worker that initialises the variables sends in an epoch.
    pub fn initializer(epoch: Epoch) -> Self {
        Self {
            epoch,
            checkpoint: None,
            run: String::new(),
        }
    }
}

/// The server of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardServer {
    /// This server holds the shard, at this address, as host:port or unix:PATH.
    At(Task, String),
    /// This server held the shard and is gone. The shard waits for another server.
    Lost(Task),
}

impl ShardServer {
    /// Returns the server at an address. An empty address means that the server is lost, as in messages and in stored
    /// maps.
    pub fn new(task: Task, address: String) -> Self {
        match address.is_empty() {
            true => Self::Lost(task),
            false => Self::At(task, address),
        }
    }

    /// Returns the server that holds the shard, or the lost one that held it.
    pub fn task(&self) -> Task {
        match self {
            Self::At(task, _) | Self::Lost(task) => *task,
        }
    }

    /// Returns the address; `None` if the server is lost.
    pub fn address(&self) -> Option<&str> {
        match self {
            Self::At(_, address) => Some(address),
            Self::Lost(_) => None,
        }
    }
}

/// A shard and where it lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredShard", into = "StoredShard")]
pub struct PlacedShard {
    /// Its server.
    pub server: ShardServer,
    /// The origin of its values.
    pub source: Source,
}

/// The stored form of a [`PlacedShard`].
#[derive(Serialize, Deserialize)]
struct StoredShard {
    address: String,
    server: Task,
    source: Source,
}

impl From<StoredShard> for PlacedShard {
    fn from(stored: StoredShard) -> Self {
        Self {
            server: ShardServer::new(stored.server, stored.address),
            source: stored.source,
        }
    }
}

impl From<PlacedShard> for StoredShard {
    fn from(shard: PlacedShard) -> Self {
        let (server, address) = match shard.server {
            ShardServer::At(server, address) => (server, address),
            ShardServer::Lost(server) => (server, String::new()),
        };
        Self {
            address,
            server,
            source: shard.source,
        }
    }
}

/// The placement of blocks on shards, and of shards on servers, in one epoch. Each block stays on the same shard while
/// a job runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardMap {
    /// The epoch of this map.
    pub epoch: Epoch,
    /// The shards, by number.
    pub shards: Vec<PlacedShard>,
    /// Index i is the variable with number i; sorted by name.
    pub variables: Vec<PlacedVariable>,
    /// Index i is the table with the number `variables.len() + i`; sorted by name.
    #[serde(default)]
    pub tables: Vec<PlacedTable>,
    /// The number of elements in each block of a variable. The last block may have fewer.
    pub block_elements: usize,
    /// The number of updates that a block will take over the whole job.
    pub total_updates: u64,
}

impl ShardMap {
    /// Makes all shards load their values from a source.
    pub fn fill_from(&mut self, source: &Source) {
        for shard in &mut self.shards {
            shard.source = source.clone();
        }
    }

    /// Returns the range of a variable's elements that a block holds.
    ///
    /// # Errors
    /// [`Reason::UnknownVariable`] or [`Reason::UnknownBlock`]; [`Reason::Malformed`] for a bucket of a table, which has
    /// no fixed elements.
    pub fn range(&self, id: BlockId) -> Result<Range<usize>, Refusal> {
        let Found::Variable(variable) = self.find(id)?.0 else {
            let what = format!("{} holds rows; name their ids", self.describe(id));
            return Err(Refusal::new(Reason::Malformed, what));
        };
        let start = id.index as usize * self.block_elements;
        Ok(start..(start + self.block_elements).min(variable.spec.elements()))
    }

    /// Reads the elements of a block of a variable from a message.
    ///
    /// # Errors
    /// Those of [`Self::range`] or of [`Elements::read`]. The message names the block.
    pub fn read(&self, id: BlockId, payload: Option<&wire::Payload>) -> Result<Elements, Refusal> {
        let expected = self.range(id)?.len();
        let variable = &self.variables[id.variable as usize];
        let read = Elements::read(payload, variable.spec.kind, expected);
        read.map_err(|refusal| self.about(id, refusal))
    }

    /// Reads the values or the gradients of a block, elements or rows, from a message.
    ///
    /// # Errors
    /// [`Reason::UnknownVariable`], [`Reason::UnknownBlock`], or those of [`Elements::read`] or [`Rows::read`]. The message
    /// names the block.
    pub fn read_values(
        &self,
        id: BlockId,
        payload: Option<&wire::Payload>,
    ) -> Result<Values, Refusal> {
        let Some(spec) = self.table(id)? else {
            return self.read(id, payload).map(Values::Dense);
        };
        let rows = Rows::read(payload, spec, id.index);
        rows.map(Values::Rows)
            .map_err(|refusal| self.about(id, refusal))
    }

    /// Returns the table of a bucket; `None` if the block belongs to a variable.
    ///
    /// # Errors
    /// [`Reason::UnknownVariable`] or [`Reason::UnknownBlock`].
    pub fn table(&self, id: BlockId) -> Result<Option<&TableSpec>, Refusal> {
        Ok(match self.find(id)?.0 {
            Found::Variable(_) => None,
            Found::Table(table) => Some(&table.spec),
        })
    }

    /// Returns the variable or the table that has the index `number` in block ids.
    pub fn part_of(&self, number: u32) -> PartOf {
        let number = number as usize;
        match number.checked_sub(self.variables.len()) {
            None => PartOf::Variable(number),
            Some(table) => PartOf::Table(table),
        }
    }

    /// Returns the index in block ids of a table, which follows those of all variables.
    pub fn number_of_table(&self, table: usize) -> u32 {
        (self.variables.len() + table) as u32
    }

    /// Returns a refusal with the name of the block put before its message.
    pub fn about(&self, id: BlockId, refusal: Refusal) -> Refusal {
        Refusal::new(refusal.reason, format!("{} {refusal}", self.describe(id)))
    }

    /// Returns the shard that holds a block.
    ///
    /// # Errors
    /// [`Reason::UnknownVariable`] or [`Reason::UnknownBlock`].
    pub fn shard(&self, id: BlockId) -> Result<u32, Refusal> {
        self.find(id).map(|(_, shard)| shard)
    }

    /// Describes a block for messages to people, as in `block 3 of variable "fc.weight"`.
    pub fn describe(&self, id: BlockId) -> String {
        match self.owner(id) {
            Some(Found::Variable(v)) => format!("block {} of variable {:?}", id.index, v.spec.name),
            Some(Found::Table(t)) => format!("bucket {} of table {:?}", id.index, t.spec.name),
            None => format!("block {} of variable number {}", id.index, id.variable),
        }
    }

    /// Returns the name of a block's variable or table.
    pub fn name(&self, id: BlockId) -> Option<&str> {
        Some(match self.owner(id)? {
            Found::Variable(variable) => &variable.spec.name,
            Found::Table(table) => &table.spec.name,
        })
    }

    /// Returns all blocks with their shards, variable by variable, then the buckets of each table.
    pub fn blocks(&self) -> impl Iterator<Item = (BlockId, u32)> + '_ {
        let variables = self.variables.iter().map(|v| &v.shards);
        let tables = self.tables.iter().map(|table| &table.shards);
        (0u32..)
            .zip(variables.chain(tables))
            .flat_map(|(variable, shards)| {
                (0u32..)
                    .zip(shards)
                    .map(move |(index, shard)| (BlockId { variable, index }, *shard))
            })
    }

    /// Returns the blocks of one shard.
    pub fn blocks_of(&self, shard: u32) -> impl Iterator<Item = BlockId> + '_ {
        self.blocks()
            .filter_map(move |(id, s)| (s == shard).then_some(id))
    }

    /// Returns whether workers send updates for a block.
    pub fn takes_updates(&self, id: BlockId) -> bool {
        match self.owner(id) {
            Some(Found::Variable(variable)) => variable.spec.kind.takes_updates(),
            Some(Found::Table(_)) => true,
            None => false,
        }
    }

    /// Returns whether an optimizer changes a block by its gradients.
    pub fn is_trained(&self, id: BlockId) -> bool {
        match self.owner(id) {
            Some(Found::Variable(variable)) => variable.spec.kind == VariableKind::Trained,
            Some(Found::Table(_)) => true,
            None => false,
        }
    }

    /// Returns the variable or the table that a block belongs to.
    fn owner(&self, id: BlockId) -> Option<Found<'_>> {
        let number = id.variable as usize;
        match self.variables.get(number) {
            Some(variable) => Some(Found::Variable(variable)),
            None => self
                .tables
                .get(number - self.variables.len())
                .map(Found::Table),
        }
    }

    /// Returns the variable or the table of a block, and the block's shard.
    fn find(&self, id: BlockId) -> Result<(Found<'_>, u32), Refusal> {
        let found = self.owner(id).ok_or_else(|| {
            Refusal::new(
                Reason::UnknownVariable,
                format!(
                    "there is no variable number {}; the shard map of epoch {} has {}, from 0, and {} tables after them",
                    id.variable,
                    self.epoch,
                    self.variables.len(),
                    self.tables.len()
                ),
            )
        })?;
        let (shards, of, what) = match found {
            Found::Variable(variable) => (&variable.shards, variable.spec.to_string(), "block"),
            Found::Table(table) => (&table.shards, table.spec.to_string(), "bucket"),
        };
        let shard = shards.get(id.index as usize).ok_or_else(|| {
            Refusal::new(
                Reason::UnknownBlock,
                format!(
                    "{of} has no {what} {}; it has {}, from 0",
                    id.index,
                    shards.len()
                ),
            )
        })?;
        Ok((found, *shard))
    }
}

/// The variable or the table of a block.
#[derive(Clone, Copy)]
enum Found<'a> {
    Variable(&'a PlacedVariable),
    Table(&'a PlacedTable),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Generation, TaskId};

    fn server(index: u32) -> Task {
        Task {
            id: TaskId::ps(index),
            generation: Generation(2),
        }
    }

    fn map() -> ShardMap {
        ShardMap {
            epoch: Epoch(1),
            shards: vec![
                PlacedShard {
                    server: ShardServer::At(server(0), "a:1".into()),
                    source: Source::initializer(Epoch(1)),
                },
                PlacedShard {
                    server: ShardServer::Lost(server(4)),
                    source: Source {
                        epoch: Epoch(3),
                        checkpoint: Some(("s3://bucket/run".into(), 7)),
                        run: "3f9c".into(),
                    },
                },
            ],
            variables: vec![
                PlacedVariable {
                    spec: VariableSpec {
                        name: "scalar".into(),
                        shape: vec![],
                        ..VariableSpec::default()
                    },
                    shards: vec![1],
                },
                PlacedVariable {
                    spec: VariableSpec {
                        name: "w".into(),
                        shape: vec![5, 2],
                        ..VariableSpec::default()
                    },
                    shards: vec![0, 1, 0],
                },
            ],
            tables: Vec::new(),
            block_elements: 4,
            total_updates: 10,
        }
    }

    #[test]
    fn blocks_cover_each_variable_once() {
        let map = map();
        let w = |index| BlockId { variable: 1, index };
        assert_eq!(map.range(w(0)).unwrap(), 0..4);
        assert_eq!(map.range(w(2)).unwrap(), 8..10);
        assert_eq!(map.shard(w(1)).unwrap(), 1);
        assert_eq!(map.blocks_of(0).collect::<Vec<_>>(), [w(0), w(2)]);
        assert_eq!(map.blocks().count(), 4);
    }

    #[test]
    fn what_is_not_there_is_named() {
        let unknown = map()
            .range(BlockId {
                variable: 9,
                index: 0,
            })
            .unwrap_err();
        assert_eq!(unknown.reason, Reason::UnknownVariable);
        let beyond = map()
            .range(BlockId {
                variable: 1,
                index: 3,
            })
            .unwrap_err();
        assert_eq!(beyond.reason, Reason::UnknownBlock);
        assert!(beyond.message.contains("\"w\"") && beyond.message.contains("it has 3"));
    }

    #[test]
    fn the_map_survives_the_wire_and_bad_maps_do_not() {
        let wire = wire::ShardMap::from(&map());
        assert_eq!(ShardMap::try_from(wire.clone()).unwrap(), map());
        let mut short = wire.clone();
        short.variables[1].shards.pop();
        assert!(ShardMap::try_from(short).is_err());
        let mut held_by_workers = wire.clone();
        held_by_workers.variables[1].shards.clear();
        let read = ShardMap::try_from(held_by_workers).unwrap();
        assert_eq!(read.blocks().count(), 1);
        let mut unserved = wire.clone();
        unserved.servers.pop();
        assert!(ShardMap::try_from(unserved).is_err());
        let mut astray = wire;
        astray.variables[1].shards[0] = 2;
        assert!(
            ShardMap::try_from(astray)
                .unwrap_err()
                .message
                .contains("shard 2")
        );
    }
}
