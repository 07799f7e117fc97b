//! Gradients and updates that stay in the memory of a device. Variables with the same rule are updated together, as one vector: a GPU takes
//! nearly as long for a small operation as for a large one.
//!
//! - `gradients`: the gradients of a step
//! - `slots`: the optimizer's slots, and updates
//! - `rules`: the update rules as candle's operations

mod gradients;
mod rules;
mod slots;

use std::ops::Range;

use candle_core::{Result, Tensor};
use optimizer::VariableRule;
use shared_proto::blocks::VariableKind;
use shared_proto::job::Job;

use super::set::Variables;

pub use gradients::{DeviceGradients, MeasuredOnDevice};
pub(super) use slots::DeviceSlots;

/// The number of elements from which on a group takes no more variables, because an update needs memory for several
/// vectors as long as the group's.
const ELEMENTS: usize = 1 << 24;

/// The groups in which variables are updated. Frozen variables are in none.
#[derive(Debug)]
pub struct UpdateGroups(Vec<Group>);

/// Variables that are updated together.
#[derive(Debug)]
struct Group {
    /// Their numbers, in ascending order.
    variables: Vec<usize>,
    /// The range of each variable's elements in the group's vectors, in the order of `variables`.
    places: Vec<Range<usize>>,
    kind: VariableKind,
}

impl UpdateGroups {
    /// Returns the groups of a job's variables.
    pub fn new(job: &Job, variables: &Variables) -> Self {
        Self::of_size(job, variables, ELEMENTS)
    }

    /// Returns groups that take no more variables once they have `most` elements.
    pub fn of_size(job: &Job, variables: &Variables, most: usize) -> Self {
        let mut groups: Vec<(VariableRule, Group)> = Vec::new();
        for (number, (spec, _)) in variables.0.iter().enumerate() {
            if !spec.kind.takes_updates() {
                continue;
            }
            let rule = VariableRule::new(job, spec, 0);
            let fits = |(other, joined): &(VariableRule, Group)| {
                rule.is_like(other) && joined.elements() < most
            };
            let place = match groups.iter().position(fits) {
                Some(place) => place,
                None => {
                    let (variables, places) = (Vec::new(), Vec::new());
                    let group = Group {
                        variables,
                        places,
                        kind: spec.kind,
                    };
                    groups.push((rule, group));
                    groups.len() - 1
                }
            };
            let (_, group) = &mut groups[place];
            let start = group.elements();
            group.variables.push(number);
            group.places.push(start..start + spec.elements());
        }
        Self(groups.into_iter().map(|(_, group)| group).collect())
    }
}

impl Group {
    fn elements(&self) -> usize {
        self.places.last().map_or(0, |last| last.end)
    }

    /// Returns the variables' tensors as one vector, without the operations that computed them. With these operations,
    /// the slots would keep the tensors of all earlier steps in memory.
    fn join(&self, tensor: impl Fn(usize) -> Result<Tensor>) -> Result<Tensor> {
        let flat = |number: &usize| tensor(*number)?.detach().flatten_all();
        let flat: Vec<Tensor> = self.variables.iter().map(flat).collect::<Result<_>>()?;
        Tensor::cat(&flat, 0)
    }

    /// Returns each variable's number, and its elements in one of the group's vectors.
    fn split<'a>(
        &'a self,
        vector: &'a Tensor,
    ) -> impl Iterator<Item = (usize, Result<Tensor>)> + 'a {
        let places = self.variables.iter().zip(&self.places);
        places.map(|(number, place)| (*number, vector.narrow(0, place.start, place.len())))
    }
}
