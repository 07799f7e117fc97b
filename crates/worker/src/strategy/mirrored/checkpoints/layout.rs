//! Where the blocks of a checkpoint lie among the numbers of a replica.

use std::ops::Range;

use checkpoint::{SavedBlock, SavedValues};
use shared_proto::blocks::{BlockId, VariableSpec};
use shared_proto::ids::Version;
use shared_proto::job::Job;
use shared_proto::payload;

use replica::MirrorState;

/// The variables of a model, cut into blocks.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    variables: Vec<Placed>,
    block_elements: usize,
    /// The number of all values and slots.
    numbers: usize,
}

/// The places of a variable's values and slots among the numbers of a replica.
#[derive(Clone, Debug)]
struct Placed {
    name: String,
    takes_updates: bool,
    values: Range<usize>,
    slots: Range<usize>,
}

impl Placed {
    /// Returns the places of a block's values and of each of its slots; `None` if there is no such block.
    fn block(
        &self,
        index: u32,
        block_elements: usize,
    ) -> Option<(Range<usize>, Vec<Range<usize>>)> {
        let elements = self.values.len();
        let start = (index as usize).checked_mul(block_elements)?;
        if start >= elements {
            return None;
        }
        let end = elements.min(start + block_elements);
        let within = |from: usize| from + start..from + end;
        let slots = self.slots.clone().step_by(elements).map(within);
        Some((within(self.values.start), slots.collect()))
    }
}

impl Layout {
    /// The layout of a model's variables with the slots of the job's optimizers.
    pub(super) fn new(variables: &[VariableSpec], job: &Job, block_elements: usize) -> Self {
        let mut numbers = 0;
        let mut take = |count: usize| {
            let start = numbers;
            numbers += count;
            start..numbers
        };
        // A replica has the values of all variables, and then all slots.
        let values: Vec<Range<usize>> =
            variables.iter().map(|spec| take(spec.elements())).collect();
        let placed = variables.iter().zip(values).map(|(spec, values)| Placed {
            name: spec.name.clone(),
            takes_updates: spec.kind.takes_updates(),
            slots: take(values.len() * job.slots_of(&spec.name, spec.kind)),
            values,
        });
        let variables = placed.collect();
        Self {
            variables,
            block_elements,
            numbers,
        }
    }

    /// Returns the number of all values and slots.
    pub(super) fn numbers(&self) -> usize {
        self.numbers
    }

    /// Returns all blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        let of = |(variable, placed): (usize, &Placed)| {
            let blocks = placed.values.len().div_ceil(self.block_elements) as u32;
            let variable = variable as u32;
            (0..blocks).map(move |index| BlockId { variable, index })
        };
        self.variables.iter().enumerate().flat_map(of)
    }

    /// Describes a block for people.
    pub(super) fn describe(&self, id: BlockId) -> String {
        match self.variables.get(id.variable as usize) {
            Some(placed) => format!("block {} of variable {:?}", id.index, placed.name),
            None => format!("block {} of variable {}", id.index, id.variable),
        }
    }

    /// Returns a block as it is saved; `None` if there is no such block.
    pub(super) fn save(&self, id: BlockId, state: &MirrorState) -> Option<SavedBlock> {
        let placed = self.variables.get(id.variable as usize)?;
        let (values, slots) = placed.block(id.index, self.block_elements)?;
        let slots: Vec<f32> = slots
            .into_iter()
            .flat_map(|slot| &state.values[slot])
            .copied()
            .collect();
        let updates = if placed.takes_updates {
            state.updates
        } else {
            0
        };
        Some(SavedBlock {
            id,
            version: Version(updates),
            watermarks: Vec::new(),
            values: SavedValues::Dense {
                weights: payload::to_bytes(&state.values[values]),
                slots: payload::to_bytes(&slots),
            },
        })
    }

    /// Puts a saved block among the numbers of a replica.
    ///
    /// # Errors
    /// Describes why it does not fit.
    pub(super) fn place(&self, block: &SavedBlock, state: &mut MirrorState) -> Result<(), String> {
        let id = block.id;
        let missing = || format!("the model has no {}", self.describe(id));
        let placed = self
            .variables
            .get(id.variable as usize)
            .ok_or_else(missing)?;
        let (values, slots) = placed
            .block(id.index, self.block_elements)
            .ok_or_else(missing)?;
        let [saved, saved_slots] = block.values.numbers().map(payload::elements);
        if saved.len() != values.len() || saved_slots.len() != values.len() * slots.len() {
            return Err(format!(
                "{} has {} values and {} slots; {} and {} were expected",
                self.describe(id),
                saved.len(),
                saved_slots.len(),
                values.len(),
                values.len() * slots.len()
            ));
        }
        let length = values.len();
        copy(saved, &mut state.values[values]);
        for (slot, saved) in slots.into_iter().zip(saved_slots.chunks(length)) {
            copy(saved, &mut state.values[slot]);
        }
        state.updates = state.updates.max(block.version.0);
        Ok(())
    }
}

fn copy(from: &[payload::LeF32], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.get();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shared_proto::blocks::VariableKind;
    use shared_proto::job::Optimizer;

    fn specs(sizes: &[usize]) -> Vec<VariableSpec> {
        let kinds = [
            VariableKind::Trained,
            VariableKind::Averaged,
            VariableKind::Frozen,
        ];
        let spec = |(number, size): (usize, &usize)| VariableSpec {
            name: format!("v{number}"),
            shape: vec![*size],
            kind: kinds[number % kinds.len()],
        };
        sizes.iter().enumerate().map(spec).collect()
    }

    fn adam() -> Job {
        Job {
            optimizer: Optimizer::Adam(Default::default()),
            ..Job::default()
        }
    }

    #[test]
    fn a_block_has_its_part_of_each_slot() {
        let layout = Layout::new(&specs(&[5]), &adam(), 2);
        // 5 values, then two slots of 5.
        let state = MirrorState {
            values: (0..15).map(|number| number as f32).collect(),
            updates: 7,
            ..MirrorState::default()
        };
        let saved = layout
            .save(
                BlockId {
                    variable: 0,
                    index: 1,
                },
                &state,
            )
            .unwrap();
        assert_eq!(saved.version, Version(7));
        let SavedValues::Dense { weights, slots } = saved.values else {
            panic!("it has rows");
        };
        assert_eq!(weights, payload::to_bytes(&[2.0, 3.0]));
        assert_eq!(slots, payload::to_bytes(&[7.0, 8.0, 12.0, 13.0]));
        assert!(
            layout
                .save(
                    BlockId {
                        variable: 0,
                        index: 3
                    },
                    &state
                )
                .is_none()
        );
    }

    #[test]
    fn a_block_that_does_not_fit_is_refused() {
        let layout = Layout::new(&specs(&[5]), &adam(), 2);
        let mut state = MirrorState {
            values: vec![0.0; 15],
            updates: 0,
            ..MirrorState::default()
        };
        let block = layout
            .save(
                BlockId {
                    variable: 0,
                    index: 2,
                },
                &state,
            )
            .unwrap();
        let moved = |variable, index| SavedBlock {
            id: BlockId { variable, index },
            ..block.clone()
        };
        let untouched = state.clone();
        for (block, expected) in [
            (moved(0, 0), "1 values and 2 slots; 2 and 4"),
            (moved(1, 0), "no block 0"),
        ] {
            let refused = layout.place(&block, &mut state).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
        assert_eq!(state, untouched);
    }

    proptest! {
        #[test]
        fn what_is_saved_is_placed_again(
            sizes in prop::collection::vec(1usize..40, 1..8),
            block_elements in 1usize..20,
            updates in any::<u64>(),
        ) {
            let layout = Layout::new(&specs(&sizes), &adam(), block_elements);
            let state = MirrorState {
                values: (0..layout.numbers()).map(|number| number as f32 + 1.0).collect(),
                updates,
                ..MirrorState::default()
            };
            let mut found = MirrorState {
                values: vec![0.0; layout.numbers()],
                updates: 0,
                ..MirrorState::default()
            };
            for id in layout.blocks() {
                layout.place(&layout.save(id, &state).unwrap(), &mut found).unwrap();
            }
            prop_assert_eq!(found, state);
        }
    }
}
