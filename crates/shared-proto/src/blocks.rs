//! The blocks of variables, and the shard map, which places them on shards.

mod map;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::job::MOST_SERVERS;
use crate::refusal::{Reason, Refusal};
use crate::wire;

pub use crate::kind::VariableKind;
pub use map::{PlacedShard, PlacedTable, PlacedVariable, ShardMap, ShardServer, Source};

/// The number of elements in the largest blocks: 1 MiB of `f32`. A shard map may have smaller blocks.
pub const BLOCK_ELEMENTS: usize = (1 << 20) / size_of::<f32>();

/// The maximum number of shards of a map. It equals the maximum number of servers of a job.
pub const MOST_SHARDS: usize = MOST_SERVERS;

/// The id of a block of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId {
    /// The index of the variable in the shard map. The indices of tables follow those of all variables.
    pub variable: u32,
    /// The index of the block within the variable, or of the bucket within the table.
    pub index: u32,
}

impl From<BlockId> for wire::BlockId {
    fn from(id: BlockId) -> Self {
        Self {
            variable: id.variable,
            index: id.index,
        }
    }
}

impl From<wire::BlockId> for BlockId {
    fn from(id: wire::BlockId) -> Self {
        Self {
            variable: id.variable,
            index: id.index,
        }
    }
}

impl BlockId {
    /// Reads the id of a block from a part of a message.
    ///
    /// # Errors
    /// [`Reason::Malformed`] if it is missing.
    pub fn read(id: Option<wire::BlockId>) -> Result<Self, Refusal> {
        id.map(Self::from).ok_or_else(|| {
            Refusal::new(
                Reason::Malformed,
                "a block is not named; its `block` is missing",
            )
        })
    }
}

/// A named dense tensor of `f32`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VariableSpec {
    /// The variable's name, as in the model.
    pub name: String,
    /// The size of each dimension, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// The way in which the variable changes.
    #[serde(default)]
    pub kind: VariableKind,
}

impl VariableSpec {
    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the number of blocks of `block_elements` each.
    pub fn blocks(&self, block_elements: usize) -> usize {
        self.elements().div_ceil(block_elements)
    }

    /// Reads a variable from the wire.
    ///
    /// # Errors
    /// [`Reason::WrongShape`] if the variable is empty or too large for the address space; [`Reason::Malformed`] for an
    /// unknown kind.
    pub fn read(variable: &wire::Variable) -> Result<Self, Refusal> {
        let kind = VariableKind::read(variable.kind).map_err(|found| {
            let what = format!(
                "variable {:?} is of kind {found}, which is unknown here; run the same release everywhere",
                variable.name
            );
            Refusal::new(Reason::Malformed, what)
        })?;
        let spec = Self {
            name: variable.name.clone(),
            shape: variable.shape.iter().map(|d| *d as usize).collect(),
            kind,
        };
        let bytes = spec
            .shape
            .iter()
            .try_fold(size_of::<f32>(), |n, d| n.checked_mul(*d));
        match bytes {
            Some(1..) => Ok(spec),
            _ => Err(Refusal::new(
                Reason::WrongShape,
                format!(
                    "{spec} is empty or larger than any memory; give each dimension a size of at least 1"
                ),
            )),
        }
    }
}

impl fmt::Display for VariableSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "variable {:?} of shape {:?}", self.name, self.shape)
    }
}

impl From<&VariableSpec> for wire::Variable {
    fn from(spec: &VariableSpec) -> Self {
        Self {
            name: spec.name.clone(),
            shape: spec.shape.iter().map(|d| *d as u64).collect(),
            kind: wire::VariableKind::from(spec.kind).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_of_impossible_size_is_refused() {
        for shape in [vec![u64::MAX, 3], vec![0]] {
            let variable = wire::Variable {
                kind: 0,
                name: "w".into(),
                shape,
            };
            assert_eq!(
                VariableSpec::read(&variable).unwrap_err().reason,
                Reason::WrongShape
            );
        }
    }
}
