//! Dropout.

use candle_core::{Result, Tensor, bail};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::operation::{Function, apply};
use crate::simd::Element;
use crate::storage::{check_float, computed_here};

/// The random numbers that select the dropped elements. They are a function of the seed, the step and the worker's
/// rank, so a step that is computed again drops the same elements.
#[derive(Clone, Debug)]
pub struct DropoutStream(ChaCha8Rng);

impl DropoutStream {
    /// Returns the stream of a worker's step.
    pub fn new(seed: u64, step: u64, rank: u64) -> Self {
        let mut key = [0; 32];
        for (part, number) in key.chunks_exact_mut(8).zip([seed, step, rank]) {
            part.copy_from_slice(&number.to_le_bytes());
        }
        Self(ChaCha8Rng::from_seed(key))
    }
}

impl From<ChaCha8Rng> for DropoutStream {
    /// Takes a generator that the caller has seeded.
    fn from(random: ChaCha8Rng) -> Self {
        Self(random)
    }
}

/// Sets each element to 0 with probability `rate`, and divides the others by `1 - rate`. Without a stream, as in
/// evaluation, returns the inputs.
///
/// # Errors
/// If the rate is below 0, or not below 1, if the inputs are integers, or candle's.
pub fn dropout(inputs: &Tensor, rate: f64, stream: Option<&mut DropoutStream>) -> Result<Tensor> {
    if !(0.0..1.0).contains(&rate) {
        bail!("a dropout rate is from 0 to below 1, not {rate}");
    }
    check_float(inputs)?;
    let Some(stream) = stream else {
        return Ok(inputs.clone());
    };
    if rate == 0.0 {
        return Ok(inputs.clone());
    }
    let least = (rate * f64::from(u32::MAX)) as u32;
    let kept = (0..inputs.elem_count()).map(|_| stream.0.next_u32() >= least);
    let scale = 1.0 / (1.0 - rate);
    // Elements are chosen and not multiplied by 0, so that NaN and infinity are dropped too.
    if !computed_here(&[inputs]) {
        let kept: Vec<u8> = kept.map(u8::from).collect();
        let kept = Tensor::from_vec(kept, inputs.shape(), inputs.device())?;
        return kept.where_cond(&(inputs * scale)?, &inputs.zeros_like()?);
    }
    let kept = kept.collect();
    apply(Dropout { kept, scale }, inputs)
}

struct Dropout {
    kept: Vec<bool>,
    scale: f64,
}

impl Dropout {
    fn apply<T: Element>(&self, values: &[T]) -> Vec<T> {
        let (scale, zero) = (T::from_f64(self.scale), T::zero());
        let pairs = values.iter().zip(&self.kept);
        pairs
            .map(|(x, kept)| if *kept { *x * scale } else { zero })
            .collect()
    }
}

impl Function for Dropout {
    const NAME: &'static str = "dropout";

    fn forward<T: Element>(&self, x: &[T]) -> Vec<T> {
        self.apply(x)
    }

    fn backward<T: Element>(&self, _: &[T], _: &[T], gradient: &[T]) -> Vec<T> {
        self.apply(gradient)
    }
}
