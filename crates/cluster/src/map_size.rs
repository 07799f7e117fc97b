//! Checks that a shard map fits into a control message.

use shared_proto::blocks::{MOST_SHARDS, VariableSpec};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::table::TableSpec;
use shared_proto::wire;

use super::model::ModelSpecs;

/// The maximum size of a shard map, in bytes. The map travels in one control message of at most 4 MiB.
const MOST_BYTES: usize = (4 << 20) - (64 << 10);

/// The maximum size of a variable or table in a shard map, in bytes. Its name, its shape or specification, and its
/// blocks come in addition.
const VARIABLE_BYTES: usize = 24;

/// The maximum size of a dimension of a variable, in bytes.
const DIMENSION_BYTES: usize = 10;

/// The maximum size of the place of a block or bucket, in bytes.
const PLACE_BYTES: usize = 3;

/// The maximum size of a shard, in bytes, without the location of its checkpoint: an address of 256 bytes, a task, a
/// source.
const SHARD_BYTES: usize = 256 + 96;

/// Checks that the shard map of a model fits into a control message, and has at most `MOST_SHARDS` shards. `location`
/// is the location of the checkpoint from which shards may be loaded.
///
/// # Errors
/// [`Reason::Oversized`].
pub(super) fn check_map_size(
    model: &ModelSpecs,
    block_elements: usize,
    shards: usize,
    location: &str,
) -> Result<(), Refusal> {
    let ModelSpecs { variables, tables } = model;
    let sum = |parts: &mut dyn Iterator<Item = usize>| parts.fold(0, usize::saturating_add);
    let blocks = sum(&mut variables.iter().map(|spec| spec.blocks(block_elements)));
    let buckets = sum(&mut tables.iter().map(|spec| spec.buckets as usize));
    let table = |spec: &TableSpec| VARIABLE_BYTES + wire::Table::from(spec).spec.len();
    let variable = |spec: &VariableSpec| {
        let shape = spec.shape.len().saturating_mul(DIMENSION_BYTES);
        VARIABLE_BYTES
            .saturating_add(spec.name.len())
            .saturating_add(shape)
    };
    let bytes = sum(&mut variables.iter().map(variable))
        .saturating_add(sum(&mut tables.iter().map(table)))
        .saturating_add(blocks.saturating_add(buckets).saturating_mul(PLACE_BYTES))
        .saturating_add(shards.saturating_mul(SHARD_BYTES + location.len()));
    if bytes <= MOST_BYTES && shards <= MOST_SHARDS {
        return Ok(());
    }
    Err(Refusal::new(
        Reason::Oversized,
        format!(
            "the shard map of a model with {} variables, in {blocks} blocks of {block_elements} elements, and {} tables, in {buckets} buckets, on {shards} servers, has about {bytes} bytes; a control message holds {MOST_BYTES}, and a map has at most {MOST_SHARDS} servers: use fewer variables, smaller ones, fewer buckets, or fewer servers",
            variables.len(),
            tables.len()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;
    use shared_proto::blocks::{PlacedShard, PlacedVariable, ShardMap, ShardServer, Source};
    use shared_proto::ids::{Epoch, Generation, Task, TaskId};

    fn specs(variables: usize, elements: usize) -> Vec<VariableSpec> {
        let spec = |i| VariableSpec {
            name: format!("layer{i:07}.weight"),
            shape: vec![1, elements],
            ..VariableSpec::default()
        };
        (0..variables).map(spec).collect()
    }

    /// Returns the largest shard map of a model.
    fn largest(
        specs: Vec<VariableSpec>,
        elements: usize,
        shards: usize,
        location: &str,
    ) -> ShardMap {
        let id = TaskId::ps(u32::MAX);
        let server = Task {
            id,
            generation: Generation(u64::MAX),
        };
        let source = Source {
            epoch: Epoch(u64::MAX),
            checkpoint: Some((location.to_owned(), u64::MAX)),
            run: "f".repeat(16),
        };
        let placed = PlacedShard {
            server: ShardServer::At(server, "a".repeat(256)),
            source,
        };
        let variable = |spec: VariableSpec| PlacedVariable {
            shards: vec![shards as u32 - 1; spec.blocks(elements)],
            spec,
        };
        ShardMap {
            epoch: Epoch(u64::MAX),
            shards: vec![placed; shards],
            variables: specs.into_iter().map(variable).collect(),
            tables: Vec::new(),
            block_elements: elements,
            total_updates: u64::MAX,
        }
    }

    #[test]
    fn what_is_taken_fits_into_a_control_message() {
        let location = "s3://bucket/".to_owned() + &"x".repeat(100);
        for (variables, elements, block, shards) in [
            (50_000, 1, 1 << 14, 2),
            (1, 1_300_000, 1, 3),
            (1, 100, 10, 8_000),
            (20_000, 1 << 20, 1 << 18, 1_000),
        ] {
            let mut shards_taken = 0;
            for shards in [shards, 2 * shards, 10 * shards] {
                let specs = specs(variables, elements);
                if check_map_size(&specs.clone().into(), block, shards, &location).is_ok() {
                    shards_taken += 1;
                    let map = largest(specs, block, shards, &location);
                    let bytes = wire::ShardMap::from(&map).encoded_len();
                    assert!(
                        bytes < 4 << 20,
                        "{bytes}: {variables} variables on {shards} shards"
                    );
                }
            }
            assert!(shards_taken > 0, "{variables} variables, {shards} shards");
        }
    }

    #[test]
    fn small_blocks_and_many_servers_are_counted() {
        let refused = |variables, elements, block, shards| {
            let refused = check_map_size(&specs(variables, elements).into(), block, shards, "");
            refused.unwrap_err().reason
        };
        assert_eq!(refused(1, 1 << 24, 1, 1), Reason::Oversized);
        check_map_size(&specs(1, 1 << 24).into(), 1 << 18, 1, "").unwrap();
        assert_eq!(refused(1, 1, 1, 20_000), Reason::Oversized);
        assert_eq!(refused(1, usize::MAX, 1, usize::MAX), Reason::Oversized);
    }
}
