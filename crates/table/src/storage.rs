//! The forms in which rows hold their values.

use half::{bf16, f16};
use shared_proto::hash::mix;
use shared_proto::table::Storage;

/// Returns the number of 32-bit words that a row's values take in a form. Two 16-bit values share a word; if their
/// number is odd, half of the last word is unused.
pub(crate) fn words(storage: Storage, dimension: usize) -> usize {
    match storage {
        Storage::F32 => dimension,
        Storage::Bf16 | Storage::F16 => dimension.div_ceil(2),
    }
}

/// Writes the values that `words` holds to `values`.
pub(crate) fn unpack(storage: Storage, words: &[u32], values: &mut [f32]) {
    let halves: &[u16] = bytemuck::cast_slice(words);
    let of_halves = |values: &mut [f32], number: fn(u16) -> f32| {
        for (value, half) in values.iter_mut().zip(halves) {
            *value = number(*half);
        }
    };
    match storage {
        Storage::F32 => values.copy_from_slice(bytemuck::cast_slice(words)),
        Storage::Bf16 => of_halves(values, |half| f32::from_bits(u32::from(half) << 16)),
        Storage::F16 => of_halves(values, |half| f16::from_bits(half).to_f32()),
    }
}

/// Returns whether all values are finite in one of the forms.
pub(crate) fn all_fit(storage: Storage, values: &[f32]) -> bool {
    values.iter().all(|value| match storage {
        Storage::F32 => value.is_finite(),
        Storage::Bf16 => bf16::from_f32(*value).is_finite(),
        Storage::F16 => f16::from_f32(*value).is_finite(),
    })
}

/// Writes values into words, each rounded to the nearest number that the form has.
pub(crate) fn pack(storage: Storage, values: &[f32], words: &mut [u32]) {
    match storage {
        Storage::F32 => words.copy_from_slice(bytemuck::cast_slice(values)),
        Storage::Bf16 => pack_by(values, words, |value| bf16::from_f32(value).to_bits()),
        Storage::F16 => pack_by(values, words, |value| f16::from_f32(value).to_bits()),
    }
}

/// Writes values into words, each rounded up or down at random, so that the mean over many draws is the value. Equal
/// draws round equally. Returns whether all written values are finite.
pub(crate) fn pack_by_chance(
    storage: Storage,
    values: &[f32],
    words: &mut [u32],
    draw: u64,
) -> bool {
    let mut draws = Draws {
        draw,
        bits: 0,
        left: 0,
    };
    let exponent = match storage {
        Storage::F32 => {
            pack(storage, values, words);
            return values.iter().all(|value| value.is_finite());
        }
        Storage::Bf16 => {
            pack_by(values, words, |value| bf16_by_chance(value, draws.next()));
            0x7f80
        }
        Storage::F16 => {
            pack_by(values, words, |value| f16_by_chance(value, draws.next()));
            0x7c00
        }
    };
    let halves: &[u16] = bytemuck::cast_slice(words);
    let finite = |half: &u16| half & exponent != exponent;
    halves[..values.len()].iter().all(finite)
}

fn pack_by(values: &[f32], words: &mut [u32], mut half: impl FnMut(f32) -> u16) {
    let halves: &mut [u16] = bytemuck::cast_slice_mut(words);
    for (place, value) in halves.iter_mut().zip(values) {
        *place = half(*value);
    }
}

/// Pseudo-random numbers of 16 bits from a seed.
struct Draws {
    draw: u64,
    bits: u64,
    /// The number of random numbers that are left in `bits`.
    left: u32,
}

impl Draws {
    #[inline(always)]
    fn next(&mut self) -> u16 {
        if self.left == 0 {
            // SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014): the state grows by a
            // constant, and each state is mixed.
            self.draw = self.draw.wrapping_add(0x9e37_79b9_7f4a_7c15);
            self.bits = mix(self.draw);
            self.left = 4;
        }
        self.left -= 1;
        let next = self.bits as u16;
        self.bits >>= 16;
        next
    }
}

/// Returns the bits of one of the two `bf16` between which a value lies. `draw`, which must be uniformly distributed,
/// decides which one.
#[inline(always)]
fn bf16_by_chance(value: f32, draw: u16) -> u16 {
    match value.is_finite() {
        true => {
            let rounded = (value.to_bits().wrapping_add(draw.into()) >> 16) as u16;
            match bf16::from_bits(rounded).is_finite() {
                true => rounded,
                // Above the largest number there is only the nearest one, as long as that is finite.
                false => bf16::from_f32(value).to_bits(),
            }
        }
        false => bf16::from_f32(value).to_bits(),
    }
}

/// The bits of an `f32` that an `f16` lacks, in numbers of normal size.
const DROPPED: u32 = (1 << 13) - 1;

/// The smallest `f16` of normal size. Below it, `f16` are multiples of 2^-24.
const SMALLEST: f32 = 6.103_515_6e-5;
const STEPS: f32 = 16_777_216.0;

/// Returns the bits of one of the two `f16` between which a value lies. `draw`, which must be uniformly distributed,
/// decides which one.
#[inline(always)]
fn f16_by_chance(value: f32, draw: u16) -> u16 {
    if !value.is_finite() {
        return f16::from_f32(value).to_bits();
    }
    let sign = (value.to_bits() >> 16) as u16 & 0x8000;
    let size = value.abs();
    if size < SMALLEST {
        let steps = size * STEPS;
        let up = steps.fract() * 65536.0 > f32::from(draw);
        return sign | (steps as u16 + u16::from(up));
    }
    let sum = size.to_bits() + (u32::from(draw) & DROPPED);
    let rounded = f16::from_f32(f32::from_bits(sum & !DROPPED));
    match rounded.is_finite() {
        true => sign | rounded.to_bits(),
        // Above the largest number there is only the nearest one, as long as that is finite.
        false => f16::from_f32(value).to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HALVES: [Storage; 2] = [Storage::Bf16, Storage::F16];

    fn number(storage: Storage, half: u16) -> f32 {
        match storage {
            Storage::F32 => unreachable!("it has 32 bits"),
            Storage::Bf16 => bf16::from_bits(half).to_f32(),
            Storage::F16 => f16::from_bits(half).to_f32(),
        }
    }

    /// Over all draws, the mean of what a value is rounded to is the value, but for the draws' own step.
    #[test]
    fn the_mean_over_all_draws_is_the_value() {
        let values = [
            1.0f32, 1.001, -3.3, 1e-3, 7.7e-5, 6e-5, -1e-6, 3e-8, 0.0, -0.0, 1000.3, 60000.0,
        ];
        for storage in HALVES {
            for value in values {
                let round = |draw| match storage {
                    Storage::Bf16 => bf16_by_chance(value, draw),
                    _ => f16_by_chance(value, draw),
                };
                let all = (0..=u16::MAX).map(|draw| number(storage, round(draw)));
                let (mut sum, mut least, mut most) = (0.0, f32::MAX, f32::MIN);
                for rounded in all {
                    sum += f64::from(rounded);
                    (least, most) = (least.min(rounded), most.max(rounded));
                }
                let mean = sum / 65536.0;
                let step = f64::from(most - least);
                let off = (mean - f64::from(value)).abs();
                assert!(
                    off <= step / 8192.0,
                    "{storage:?}: {value}: {mean}, a step of {step}"
                );
                assert!(least <= value && value <= most, "{storage:?}: {value}");
            }
        }
    }

    proptest! {
        #[test]
        fn representable_values_are_unchanged(halves in prop::collection::vec(any::<u16>(), 1..9), draw: u64) {
            for storage in HALVES {
                let values: Vec<f32> = halves.iter().map(|half| number(storage, *half)).collect();
                let mut words = vec![0; words(storage, values.len())];
                let finite = pack_by_chance(storage, &values, &mut words, draw);
                prop_assert_eq!(finite, values.iter().all(|value| value.is_finite()));
                let mut found = vec![0.0; values.len()];
                unpack(storage, &words, &mut found);
                for (found, value) in found.iter().zip(&values) {
                    prop_assert!(found == value || found.is_nan() && value.is_nan());
                }
                pack(storage, &values, &mut words);
                unpack(storage, &words, &mut found);
                for (found, value) in found.iter().zip(&values) {
                    prop_assert!(found == value || found.is_nan() && value.is_nan());
                }
            }
        }

        #[test]
        fn a_value_becomes_one_of_its_two_neighbours(value in -6e4f32..6e4, draw: u16) {
            for (storage, half, nearest) in [
                (Storage::Bf16, bf16_by_chance(value, draw), bf16::from_f32(value).to_bits()),
                (Storage::F16, f16_by_chance(value, draw), f16::from_f32(value).to_bits()),
            ] {
                let next = (half as i16).abs_diff(nearest as i16);
                prop_assert!(next <= 1, "{storage:?}: {value} became {}", number(storage, half));
            }
        }
    }

    #[test]
    fn too_large_values_are_not_finite() {
        let mut words = [0];
        assert!(!pack_by_chance(Storage::F16, &[70_000.0], &mut words, 1));
        // The nearest number of this value is finite, so it never becomes infinite.
        assert!((0..1000).all(|draw| pack_by_chance(Storage::F16, &[-65_510.0], &mut words, draw)));
        assert!(!pack_by_chance(Storage::Bf16, &[f32::NAN], &mut words, 1));
        assert!(pack_by_chance(Storage::Bf16, &[70_000.0], &mut words, 1));
    }
}
