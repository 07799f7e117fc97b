//! A block's entry in a pull, and its part of a variable's values.

use shared_proto::blocks::BlockId;
use shared_proto::payload::Elements;
use shared_proto::step::Want;
use shared_proto::wire;

use crate::error::ClientError;
use crate::held::{Held, ValuesOf};
use crate::shards::Shards;

impl Shards {
    /// Returns a block's entry in a pull with these wants, or `None` if the wants do not include the block.
    pub(crate) fn wanted(&self, wants: &[Want], id: BlockId) -> Option<wire::WantedBlock> {
        let values = self.wanted_values(wants, id)?;
        // Averages have no version.
        let is_same = |held: &&Held| held.values == values && values != ValuesOf::Averages;
        let held = self.held.get(&id).filter(is_same);
        let version = held.map(|held| held.version).unwrap_or_default();
        Some(wire::WantedBlock {
            block: Some(id.into()),
            epoch: version.epoch,
            version: version.version,
            average: values == ValuesOf::Averages,
            ids: Default::default(),
            look_ahead: values == ValuesOf::LookAhead,
        })
    }

    /// Records that the model has the values of a block that a pull with these wants has returned.
    pub(crate) fn hold(&mut self, wants: &[Want], id: BlockId, version: wire::BlockVersion) {
        if let Some(values) = self.wanted_values(wants, id) {
            self.held.insert(id, Held { version, values });
        }
    }

    /// Returns which kind of a block's values the wants include, or `None` if they do not include the block. The values
    /// of rows are always the stored weights.
    pub(crate) fn wanted_values(&self, wants: &[Want], id: BlockId) -> Option<ValuesOf> {
        let Some(variable) = self.map.variables.get(id.variable as usize) else {
            return Some(ValuesOf::Weights);
        };
        let kind = variable.spec.kind;
        wants.iter().find_map(|want| match want {
            Want::Dense if kind.is_optimized() && self.looks_ahead => Some(ValuesOf::LookAhead),
            Want::Averages if kind.takes_updates() => Some(ValuesOf::Averages),
            Want::Dense | Want::Stored | Want::Averages => Some(ValuesOf::Weights),
            _ => None,
        })
    }

    /// Returns the part of all variables' values that belongs to a block.
    ///
    /// # Errors
    /// If the map has no such block.
    pub(crate) fn part(&self, values: &[Elements], id: BlockId) -> Result<Elements, ClientError> {
        Ok(values[id.variable as usize].slice(self.map.range(id)?))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use shared_proto::blocks::{PlacedVariable, ShardMap, VariableKind, VariableSpec};
    use shared_proto::ids::Epoch;
    use shared_proto::payload::Dtype;
    use shared_proto::step::WantedRows;
    use shared_proto::table::TableSpec;
    use tokio::sync::mpsc;

    use super::*;
    use crate::identity::Identity;

    const TRAINED: BlockId = BlockId {
        variable: 0,
        index: 0,
    };
    const MEASURED: BlockId = BlockId {
        variable: 1,
        index: 0,
    };
    const BUCKET: BlockId = BlockId {
        variable: 2,
        index: 0,
    };

    fn shards(looks_ahead: bool) -> Shards {
        let variable = |kind| PlacedVariable {
            spec: VariableSpec {
                name: "w".to_owned(),
                shape: vec![2],
                kind,
            },
            shards: vec![0],
        };
        let map = ShardMap {
            epoch: Epoch(1),
            shards: vec![crate::maps::placed("127.0.0.1:1")],
            variables: [VariableKind::Trained, VariableKind::Averaged]
                .map(variable)
                .to_vec(),
            tables: Vec::new(),
            block_elements: 1 << 14,
            total_updates: 1,
        };
        let identity = Identity {
            looks_ahead,
            ..Identity::of_a_test(Dtype::F32, mpsc::channel(1).0)
        };
        let (_, maps) = crate::MapSource::new(map);
        Shards::connect(&maps, &identity)
    }

    /// Returns the epoch, the version and the flags of a block's entry.
    fn entry(shards: &Shards, want: Want, id: BlockId) -> (u64, u64, bool, bool) {
        let entry = shards.wanted(&[want], id).unwrap();
        (entry.epoch, entry.version, entry.look_ahead, entry.average)
    }

    fn take(shards: &mut Shards, want: Want, id: BlockId, version: u64) {
        let version = wire::BlockVersion {
            block: Some(id.into()),
            epoch: 1,
            version,
        };
        shards.hold(&[want], id, version);
    }

    #[tokio::test]
    async fn values_of_another_kind_do_not_count_as_those_that_are_held() {
        let mut shards = shards(true);
        assert_eq!(entry(&shards, Want::Dense, TRAINED), (0, 0, true, false));
        take(&mut shards, Want::Dense, TRAINED, 5);
        assert_eq!(entry(&shards, Want::Dense, TRAINED), (1, 5, true, false));
        assert_eq!(entry(&shards, Want::Stored, TRAINED), (0, 0, false, false));
        assert_eq!(shards.based_on(TRAINED), 5);
        take(&mut shards, Want::Stored, TRAINED, 6);
        assert_eq!(entry(&shards, Want::Stored, TRAINED), (1, 6, false, false));
        assert_eq!(entry(&shards, Want::Dense, TRAINED), (0, 0, true, false));
        // Averages have no version.
        take(&mut shards, Want::Averages, TRAINED, 7);
        assert_eq!(entry(&shards, Want::Averages, TRAINED), (0, 0, false, true));
        assert_eq!(entry(&shards, Want::Stored, TRAINED), (0, 0, false, false));
        // A measured variable has no momentum.
        take(&mut shards, Want::Dense, MEASURED, 3);
        for want in [Want::Dense, Want::Stored] {
            assert_eq!(entry(&shards, want, MEASURED), (1, 3, false, false));
        }
        assert_eq!(
            entry(&shards, Want::Averages, MEASURED),
            (0, 0, false, true)
        );
    }

    #[tokio::test]
    async fn stored_values_are_asked_for_where_nothing_looks_ahead() {
        let mut shards = shards(false);
        take(&mut shards, Want::Dense, TRAINED, 5);
        assert_eq!(entry(&shards, Want::Dense, TRAINED), (1, 5, false, false));
        assert_eq!(entry(&shards, Want::Stored, TRAINED), (1, 5, false, false));
    }

    #[tokio::test]
    async fn a_push_of_rows_names_the_version_that_was_pulled_alone() {
        let mut shards = shards(true);
        shards.map.tables = vec![shared_proto::blocks::PlacedTable {
            spec: TableSpec::default(),
            shards: vec![0],
        }];
        let rows = WantedRows {
            table: 0,
            ids: vec![1],
        };
        take(&mut shards, Want::Rows(Arc::new(rows)), BUCKET, 4);
        assert_eq!(shards.based_on(BUCKET), 4);
    }
}
