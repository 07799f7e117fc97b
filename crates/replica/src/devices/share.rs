//! The share that a device has of a step.

use crate::step::{Positions, Step};
use crate::thread::ModelReplica;

/// A device's share of a step.
pub(super) struct Share<'a> {
    pub(super) replica: &'a ModelReplica,
    pub(super) positions: Positions,
    /// The index of the device, and the number of devices.
    pub(super) number: u32,
    pub(super) devices: u32,
    /// This share's fraction of the step's samples.
    pub(super) part: f64,
}

impl Share<'_> {
    /// Returns the step with a rank for this device, so that each device draws its own random numbers.
    pub(super) fn of(&self, step: Step) -> Step {
        let rank = step.rank.wrapping_mul(self.devices);
        Step {
            rank: rank.wrapping_add(self.number),
            ..step
        }
    }
}

/// Returns the positions of a device's samples. They are consecutive. The devices' numbers of samples differ by at most
/// one.
pub(super) fn part(all: Positions, device: usize, devices: usize) -> Positions {
    let samples = u128::from(all.samples());
    let before = |device: usize| {
        let samples = samples * device as u128 / devices as u128;
        all.start.saturating_add(samples as u64)
    };
    Positions {
        start: before(device),
        end: before(device + 1),
        ..all
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_sample_is_on_one_device(start in 0u64..1 << 48, samples in 0u64..1000, devices in 1usize..9) {
            let all = Positions { data_epoch: 3, start, end: start + samples };
            let parts: Vec<Positions> = (0..devices).map(|device| part(all, device, devices)).collect();
            prop_assert_eq!((parts[0].start, parts[devices - 1].end), (all.start, all.end));
            prop_assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
            let sizes = parts.iter().map(|part| part.end - part.start);
            let (least, most) = (sizes.clone().min().unwrap(), sizes.max().unwrap());
            prop_assert!(most - least <= 1);
        }
    }
}
