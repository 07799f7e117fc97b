//! The shard map in messages.

use std::fmt;

use super::super::{MOST_SHARDS, VariableSpec};
use super::{PlacedShard, PlacedTable, PlacedVariable, ShardMap, ShardServer, Source};
use crate::ids::Epoch;
use crate::refusal::{Reason, Refusal};
use crate::table::TableSpec;
use crate::wire;

impl From<&Source> for wire::ShardSource {
    fn from(source: &Source) -> Self {
        let (location, checkpoint) = source.checkpoint.clone().unwrap_or_default();
        Self {
            epoch: source.epoch.0,
            location,
            checkpoint,
            run: source.run.clone(),
        }
    }
}

impl From<wire::ShardSource> for Source {
    fn from(source: wire::ShardSource) -> Self {
        let checkpoint = (!source.location.is_empty()).then_some(source.checkpoint);
        Self {
            epoch: Epoch(source.epoch),
            checkpoint: checkpoint.map(|number| (source.location, number)),
            run: source.run,
        }
    }
}

impl From<&ShardMap> for wire::ShardMap {
    fn from(map: &ShardMap) -> Self {
        Self {
            epoch: map.epoch.0,
            shard_addresses: map
                .shards
                .iter()
                .map(|s| s.server.address().unwrap_or_default().to_owned())
                .collect(),
            servers: map.shards.iter().map(|s| s.server.task().into()).collect(),
            sources: map.shards.iter().map(|s| (&s.source).into()).collect(),
            variables: map
                .variables
                .iter()
                .map(|v| wire::PlacedVariable {
                    variable: Some((&v.spec).into()),
                    shards: v.shards.clone(),
                })
                .collect(),
            block_elements: map.block_elements as u64,
            total_updates: map.total_updates,
            tables: map
                .tables
                .iter()
                .map(|table| wire::PlacedTable {
                    table: Some((&table.spec).into()),
                    shards: table.shards.clone(),
                })
                .collect(),
        }
    }
}

impl TryFrom<wire::ShardMap> for ShardMap {
    type Error = Refusal;

    fn try_from(map: wire::ShardMap) -> Result<Self, Refusal> {
        let malformed =
            |what: String| Refusal::new(Reason::Malformed, format!("shard map: {what}"));
        let block_elements = map.block_elements as usize;
        if block_elements == 0 {
            return Err(malformed("block_elements is 0".to_owned()));
        }
        let shards = map.shard_addresses.len();
        if shards > MOST_SHARDS {
            return Err(malformed(format!(
                "it has {shards} shards; {MOST_SHARDS} are the most"
            )));
        }
        if map.servers.len() != shards || map.sources.len() != shards {
            return Err(malformed(format!(
                "{shards} shards have {} servers and {} sources; each needs one",
                map.servers.len(),
                map.sources.len()
            )));
        }
        let check_shards = |of: &dyn fmt::Display, placed: &[u32]| match placed
            .iter()
            .find(|shard| **shard as usize >= shards)
        {
            Some(shard) => Err(malformed(format!(
                "{of} has a block on shard {shard}, which is not there"
            ))),
            None => Ok(()),
        };
        let mut variables = Vec::with_capacity(map.variables.len());
        for placed in map.variables {
            let variable = placed
                .variable
                .ok_or_else(|| malformed("a variable is missing".to_owned()))?;
            let spec = VariableSpec::read(&variable)?;
            let on_servers = !placed.shards.is_empty();
            if on_servers && placed.shards.len() != spec.blocks(block_elements) {
                return Err(malformed(format!(
                    "{spec} is cut into {} blocks; {} were expected",
                    placed.shards.len(),
                    spec.blocks(block_elements)
                )));
            }
            check_shards(&spec, &placed.shards)?;
            variables.push(PlacedVariable {
                spec,
                shards: placed.shards,
            });
        }
        let mut tables = Vec::with_capacity(map.tables.len());
        for placed in map.tables {
            let table = placed
                .table
                .ok_or_else(|| malformed("a table is missing".to_owned()))?;
            let spec = TableSpec::read(&table)?;
            if placed.shards.len() != spec.buckets as usize {
                return Err(malformed(format!(
                    "{spec} has {} buckets; {} were expected",
                    placed.shards.len(),
                    spec.buckets
                )));
            }
            check_shards(&spec, &placed.shards)?;
            tables.push(PlacedTable {
                spec,
                shards: placed.shards,
            });
        }
        Ok(Self {
            epoch: Epoch(map.epoch),
            shards: map
                .shard_addresses
                .into_iter()
                .zip(&map.servers)
                .zip(map.sources)
                .map(|((address, server), source)| {
                    Ok(PlacedShard {
                        server: ShardServer::new(server.try_into()?, address),
                        source: source.into(),
                    })
                })
                .collect::<Result<_, Refusal>>()?,
            variables,
            tables,
            block_elements,
            total_updates: map.total_updates,
        })
    }
}
