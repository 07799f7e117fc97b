//! The gradients of a step as one vector, followed by the number of samples. The sum of all members' vectors gives the
//! weighted mean.

use shared_proto::kernel::Kernel;
use shared_proto::payload::LeF32;
use shared_proto::step::Gradients;

use replica::{Description, Replica};

/// The largest number of samples that is exact in the vector. A larger one is carried as a sum of two.
const EXACT: u64 = 1 << 24;

/// The number of elements behind the gradients: the samples, as a multiple of [`EXACT`] and the rest, and a flag that asks to add up
/// again.
pub(super) const COUNTS: usize = 3;

/// Returns the elements that follow the gradients of a member with `samples` samples.
pub(super) fn counts(samples: u64, again: bool) -> [f32; COUNTS] {
    let again = f32::from(u8::from(again));
    [(samples / EXACT) as f32, (samples % EXACT) as f32, again]
}

/// Takes the counts of all members off the end of their sum. Returns the samples, and whether to add up again.
pub(super) fn take_counts(sum: &mut Vec<f32>) -> (f64, bool) {
    let counts = sum.split_off(sum.len().saturating_sub(COUNTS));
    match counts[..] {
        [multiples, rest, again] => {
            let samples = f64::from(multiples) * EXACT as f64 + f64::from(rest);
            (samples, again != 0.0)
        }
        _ => (0.0, false),
    }
}

/// The sample counts of a member's gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampleCounts {
    /// The number of samples over which the gradients are a mean.
    pub(super) samples: u64,
    /// The number of samples that this member adds to the total. Of several members that compute the same samples, only
    /// one counts them.
    pub(super) counted: u64,
}

/// Fills `memory` with the gradients, each times `factor`, and the counts. Without samples all gradients are 0, and so
/// are those of variables that another member computes.
pub(super) fn fill(
    memory: &mut Vec<f32>,
    gradients: &Gradients,
    SampleCounts { samples, counted }: SampleCounts,
    factor: f32,
    description: &Description,
) {
    let changing = || {
        let variables = description.variables.iter().enumerate();
        variables.filter(|(_, spec)| spec.kind.takes_updates())
    };
    let elements: usize = changing().map(|(_, spec)| spec.elements()).sum();
    memory.resize(elements + COUNTS, 0.0);
    let (values, own_counts) = memory.split_at_mut(elements);
    own_counts.copy_from_slice(&counts(counted, false));
    if samples == 0 {
        return values.fill(0.0);
    }
    let mut rest = values;
    for (variable, spec) in changing() {
        let (own, others) = rest.split_at_mut(spec.elements());
        rest = others;
        match gradients.values.get(variable) {
            Some(gradient) if !gradient.is_empty() => {
                assert_eq!(gradient.len(), own.len(), "the gradient of {spec}");
                gradient.for_parts(|range, part| copy_times(&mut own[range], part, factor));
            }
            _ => own.fill(0.0),
        }
    }
}

/// What the members' vectors add up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Total {
    /// The mean gradient over all samples.
    Mean,
    /// No member had samples.
    Nothing,
}

/// Turns the sum of the members' vectors, with its counts, into the mean gradient.
pub(super) fn mean(memory: &mut Vec<f32>) -> Total {
    let (samples, _) = take_counts(memory);
    if samples == 0.0 {
        return Total::Nothing;
    }
    scale(memory, (1.0 / samples) as f32);
    Total::Mean
}

/// Takes the counts off the gradient of the only member, which is the mean.
pub(super) fn total(memory: &mut Vec<f32>) -> Total {
    match take_counts(memory) {
        (0.0, _) => Total::Nothing,
        _ => Total::Mean,
    }
}

/// Copies elements, each times a factor.
fn copy_times(to: &mut [f32], elements: &[LeF32], factor: f32) {
    Kernel::best().run(|| {
        for (to, element) in to.iter_mut().zip(elements) {
            *to = element.get() * factor;
        }
    });
}

/// Multiplies numbers by a factor.
pub(super) fn scale(values: &mut [f32], factor: f32) {
    Kernel::best().run(|| {
        for value in values.iter_mut() {
            *value *= factor;
        }
    });
}

/// Describes a gradient that is not finite, by the first variable that has such an element.
pub(super) fn not_finite(gradients: &Gradients, replica: &dyn Replica) -> String {
    let specs = &replica.description().variables;
    let mut pairs = specs.iter().zip(&gradients.values);
    match pairs.find(|(_, gradient)| !gradient.all_finite()) {
        Some((spec, _)) => format!("the gradient of {spec} has a NaN or infinite element"),
        None => "the norm of the gradients is not finite".to_owned(),
    }
}
