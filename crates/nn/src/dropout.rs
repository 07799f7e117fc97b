//! Dropout.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::backward::keep;
use crate::storage::{computed_here, elements, slice, with_type};

/// The random numbers by which elements are dropped, a function of the seed, the step and the worker's rank: a step that
/// is computed again drops the same elements.
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

/// Sets each element to 0 with probability `rate`, and divides the others by `1 - rate`. Without a stream, which is
/// evaluation, it returns the inputs.
///
/// # Errors
/// If the rate is not from 0 to below 1, or candle's.
pub fn dropout(inputs: &Tensor, rate: f64, stream: Option<&mut DropoutStream>) -> Result<Tensor> {
    if !(0.0..1.0).contains(&rate) {
        bail!("a dropout rate is from 0 to below 1, not {rate}");
    }
    let Some(stream) = stream else {
        return Ok(inputs.clone());
    };
    if rate == 0.0 {
        return Ok(inputs.clone());
    }
    let least = (rate * f64::from(u32::MAX)) as u32;
    let kept = (0..inputs.elem_count()).map(|_| stream.0.next_u32() >= least);
    let op = Dropout {
        kept: kept.collect(),
        scale: 1.0 / (1.0 - rate),
    };
    if !computed_here(&[inputs]) {
        let factors: Vec<f32> = op.kept.iter().map(|kept| op.factor(*kept)).collect();
        let factors = Tensor::from_vec(factors, inputs.shape(), inputs.device())?;
        return inputs * factors.to_dtype(inputs.dtype())?;
    }
    inputs.contiguous()?.apply_op1(op)
}

struct Dropout {
    kept: Vec<bool>,
    scale: f64,
}

impl Dropout {
    fn factor<T: WithDType>(&self, kept: bool) -> T {
        if kept {
            T::from_f64(self.scale)
        } else {
            T::zero()
        }
    }

    fn apply<T: WithDType>(&self, values: &[T]) -> Vec<T> {
        let (scale, zero) = (self.factor::<T>(true), T::zero());
        let pairs = values.iter().zip(&self.kept);
        // Not a product, so that NaN and infinity are dropped too.
        pairs
            .map(|(x, kept)| if *kept { *x * scale } else { zero })
            .collect()
    }
}

impl CustomOp1 for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        with_type!(x.dtype(), T => {
            let result = self.apply::<T>(slice(x, layout)?);
            Ok((T::to_cpu_storage_owned(result), layout.shape().clone()))
        })
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        keep(x, || {
            with_type!(x.dtype(), T => {
                let before = self.apply::<T>(elements(&gradient).slice()?);
                Tensor::from_vec(before, x.shape(), x.device())
            })
        })
    }
}
