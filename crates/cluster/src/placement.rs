//! The placement of blocks on shards, balanced by bytes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use shared_proto::blocks::{BLOCK_ELEMENTS, PlacedTable, PlacedVariable, VariableSpec};
use shared_proto::table::TableSpec;

/// The minimum number of blocks that a shard should have, so that the shards can be balanced.
const BLOCKS_PER_SHARD: usize = 8;

/// The minimum number of elements of a block that is made smaller for balance: 64 KiB of `f32`.
const LEAST_BLOCK_ELEMENTS: usize = BLOCK_ELEMENTS / 16;

/// The number of elements of a full block: 4 KiB less than the maximum, so that an allocator's header fits into the
/// same MiB. With blocks of the maximum size, a server's memory is 6 % larger than its values.
const FULL_BLOCK_ELEMENTS: usize = BLOCK_ELEMENTS - 1024;

/// Returns the number of elements of a block: that of a full block for one shard or a large model, a smaller one if the
/// model would have too few blocks to balance the shards.
pub(crate) fn block_elements(variables: &[VariableSpec], shards: u32) -> usize {
    if shards == 1 {
        return FULL_BLOCK_ELEMENTS;
    }
    let elements: usize = variables.iter().map(VariableSpec::elements).sum();
    let share = elements / (shards as usize * BLOCKS_PER_SHARD);
    share
        .next_power_of_two()
        .clamp(LEAST_BLOCK_ELEMENTS, FULL_BLOCK_ELEMENTS)
}

/// Places each block, largest first, on the shard that holds the least (Graham's LPT rule, "Bounds
/// on Multiprocessing Timing Anomalies", 1969, section 5). The same input gives the same placement.
pub(crate) fn place(
    variables: Vec<VariableSpec>,
    shards: u32,
    block_elements: usize,
) -> Vec<PlacedVariable> {
    let mut blocks = Vec::new();
    for (variable, spec) in variables.iter().enumerate() {
        let elements = spec.elements();
        for index in 0..spec.blocks(block_elements) {
            let size = block_elements.min(elements - index * block_elements);
            blocks.push((size, variable, index));
        }
    }
    blocks.sort_by_key(|&(size, variable, index)| (Reverse(size), variable, index));

    let mut loads: BinaryHeap<_> = (0..shards).map(|shard| Reverse((0, shard))).collect();
    let mut placed: Vec<PlacedVariable> = variables
        .into_iter()
        .map(|spec| PlacedVariable {
            shards: vec![0; spec.blocks(block_elements)],
            spec,
        })
        .collect();
    for (size, variable, index) in blocks {
        if let Some(mut least) = loads.peek_mut() {
            let Reverse((load, shard)) = *least;
            *least = Reverse((load + size, shard));
            placed[variable].shards[index] = shard;
        }
    }
    placed
}

/// Returns the variables of a job whose workers hold them: they are placed on no shard.
pub(crate) fn held_by_workers(variables: &[VariableSpec]) -> Vec<PlacedVariable> {
    let held = |spec: &VariableSpec| PlacedVariable {
        spec: spec.clone(),
        shards: Vec::new(),
    };
    variables.iter().map(held).collect()
}

/// Places the buckets of each table on the shards in turn. The rows of a bucket are not known before training; hashing
/// makes buckets about equally large.
pub(crate) fn place_tables(tables: &[TableSpec], shards: u32) -> Vec<PlacedTable> {
    let mut next = (0..shards).cycle();
    let mut place = |spec: &TableSpec| PlacedTable {
        spec: spec.clone(),
        shards: next.by_ref().take(spec.buckets as usize).collect(),
    };
    tables.iter().map(&mut place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: usize = 16;

    fn specs(sizes: &[usize]) -> Vec<VariableSpec> {
        let spec = |(i, size): (usize, &usize)| VariableSpec {
            name: format!("v{i}"),
            shape: vec![*size],
            ..VariableSpec::default()
        };
        sizes.iter().enumerate().map(spec).collect()
    }

    #[test]
    fn a_model_of_one_small_layer_still_spreads_over_the_shards() {
        let layer = vec![VariableSpec {
            name: "w".to_owned(),
            shape: vec![784, 256],
            ..VariableSpec::default()
        }];
        let size = block_elements(&layer, 2);
        let shards = &place(layer, 2, size)[0].shards;
        let of = |shard| shards.iter().filter(|s| **s == shard).count();
        assert!(
            of(0).abs_diff(of(1)) <= 1 && shards.len() >= 8,
            "{shards:?}"
        );
        let large = vec![VariableSpec {
            name: "w".to_owned(),
            shape: vec![1 << 28],
            ..VariableSpec::default()
        }];
        assert_eq!(block_elements(&large, 2), FULL_BLOCK_ELEMENTS);
    }

    #[test]
    fn blocks_are_as_large_as_spreading_allows() {
        let of = |elements: usize, shards| block_elements(&specs(&[elements]), shards);
        // A full block has 4 KiB less than 1 MiB; one of a small model has 64 KiB.
        let full = ((1 << 20) - (4 << 10)) / size_of::<f32>();
        let least = (64 << 10) / size_of::<f32>();
        assert_eq!((of(100, 1), of(1 << 28, 3)), (full, full));
        assert_eq!(of(100, 2), least);
        // Eight blocks for each of two shards.
        assert_eq!(of(16 * 2 * least, 2), 2 * least);
    }

    proptest! {
        #[test]
        fn every_block_has_a_shard_and_none_is_overloaded(
            sizes in prop::collection::vec(1usize..100, 1..20),
            shards in 1u32..6,
        ) {
            let placed = place(specs(&sizes), shards, BLOCK);
            prop_assert_eq!(&placed, &place(specs(&sizes), shards, BLOCK));
            let mut loads = vec![0; shards as usize];
            for variable in &placed {
                let elements = variable.spec.elements();
                prop_assert_eq!(variable.shards.len(), elements.div_ceil(BLOCK));
                for (index, shard) in variable.shards.iter().enumerate() {
                    loads[*shard as usize] += BLOCK.min(elements - index * BLOCK);
                }
            }
            prop_assert_eq!(loads.iter().sum::<usize>(), sizes.iter().sum::<usize>());
            let spread = loads.iter().max().unwrap() - loads.iter().min().unwrap();
            prop_assert!(spread <= BLOCK, "loads {:?}", loads);
        }
    }
}
