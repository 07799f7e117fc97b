//! Which shard holds which block: balanced by bytes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use shared_proto::blocks::{PlacedVariable, VariableSpec};

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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: usize = 16;

    fn specs(sizes: &[usize]) -> Vec<VariableSpec> {
        let spec = |(i, size): (usize, &usize)| VariableSpec {
            name: format!("v{i}"),
            shape: vec![*size],
        };
        sizes.iter().enumerate().map(spec).collect()
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
