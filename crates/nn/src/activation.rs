//! Functions of each element.

use std::f64::consts;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail,
};
use pulp::Arch;

use crate::backward::keep;
use crate::simd::{Element, extend_with, extend_with_pairs};
use crate::storage::{computed_here, elements, slice, with_type};

/// A function of each element that a layer may apply to its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Leaves the result as it is.
    #[default]
    Identity,
    /// The larger of the element and 0.
    Relu,
    /// The element between 0 and 6.
    Relu6,
}

/// An activation as the two limits between which a number stays as it is; a limit that is NaN is none.
#[derive(Clone, Copy)]
pub(crate) struct Limits<T> {
    low: T,
    high: T,
}

impl<T: Element> Limits<T> {
    /// Comparisons are written so that NaN stays NaN.
    #[inline(always)]
    pub(crate) fn apply(self, x: T) -> T {
        let x = if x <= self.low { self.low } else { x };
        if x >= self.high { self.high } else { x }
    }

    /// Returns the gradient before the activation, from that after it and its argument or its result. As in PyTorch it
    /// is 0 where the argument is exactly a limit.
    #[inline(always)]
    pub(crate) fn gradient(self, x: T, gradient: T) -> T {
        if (x <= self.low) | (x >= self.high) {
            T::zero()
        } else {
            gradient
        }
    }
}

impl Activation {
    pub(crate) fn limits<T: Element>(self) -> Limits<T> {
        let (low, high) = match self {
            Self::Identity => (f64::NAN, f64::NAN),
            Self::Relu => (0.0, f64::NAN),
            Self::Relu6 => (0.0, 6.0),
        };
        Limits {
            low: T::from_f64(low),
            high: T::from_f64(high),
        }
    }

    /// Applies it with candle's own operations.
    pub(crate) fn elsewhere(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Identity => Ok(x.clone()),
            Self::Relu => x.relu(),
            Self::Relu6 => x.clamp(0.0, 6.0),
        }
    }
}

/// Returns the larger of each element and 0. On the CPU, in `f32` and `f64`, it behaves as PyTorch's: where the result
/// is 0 its gradient is 0 (candle's own is 1), and NaN stays NaN (candle makes it 0).
///
/// # Errors
/// candle's.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Relu)
}

/// Returns each element between 0 and 6, with the gradients of PyTorch.
///
/// # Errors
/// candle's.
pub fn relu6(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Relu6)
}

/// Returns `x · Φ(x)`, where Φ is the normal distribution: GELU by the error function, as in PyTorch.
///
/// # Errors
/// candle's.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    match computed_here(&[x]) {
        true => x.contiguous()?.apply_op1(Gelu),
        false => x.gelu_erf(),
    }
}

/// Returns the ReLU of a sum of two tensors of the same shape: the end of a residual block.
///
/// # Errors
/// If the shapes differ, or candle's.
pub fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.dims() != b.dims() {
        bail!(
            "tensors of shapes {:?} and {:?} are not added",
            a.shape(),
            b.shape()
        );
    }
    if !computed_here(&[a, b]) {
        return (a + b)?.relu();
    }
    a.contiguous()?.apply_op2(&b.contiguous()?, AddRelu)
}

fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    match computed_here(&[x]) {
        true => x.contiguous()?.apply_op1(Activate(activation)),
        false => activation.elsewhere(x),
    }
}

/// Returns the gradient before an activation, from its result and the gradient after it.
pub(crate) fn before<T: Element>(activation: Activation, result: &[T], gradient: &[T]) -> Vec<T> {
    let limits = activation.limits();
    let mut before = Vec::with_capacity(gradient.len());
    Arch::new().dispatch(|| {
        extend_with_pairs(&mut before, result, gradient, |y, g| limits.gradient(y, g));
    });
    before
}

struct Activate(Activation);

impl CustomOp1 for Activate {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        with_type!(x.dtype(), T => {
            let (values, limits) = (slice::<T>(x, layout)?, self.0.limits());
            let mut result = Vec::with_capacity(values.len());
            Arch::new().dispatch(|| extend_with(&mut result, values, |x| limits.apply(x)));
            Ok((T::to_cpu_storage_owned(result), layout.shape().clone()))
        })
    }

    fn bwd(&self, x: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        keep(x, || {
            with_type!(x.dtype(), T => {
                let (result, gradient) = (elements(result), elements(&gradient));
                let before = before::<T>(self.0, result.slice()?, gradient.slice()?);
                Tensor::from_vec(before, x.shape(), x.device())
            })
        })
    }
}

struct AddRelu;

impl CustomOp2 for AddRelu {
    fn name(&self) -> &'static str {
        "add-relu"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        with_type!(a.dtype(), T => {
            let (a, b) = (slice::<T>(a, a_layout)?, slice::<T>(b, b_layout)?);
            let limits = Activation::Relu.limits();
            let mut sums = Vec::with_capacity(a.len());
            Arch::new().dispatch(|| {
                extend_with_pairs(&mut sums, a, b, |a, b| limits.apply(a + b));
            });
            Ok((T::to_cpu_storage_owned(sums), a_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let of_sum = Activate(Activation::Relu).bwd(result, result, gradient)?;
        let Some(of_sum) = of_sum else {
            return Ok((None, None));
        };
        let of_a = keep(a, || Ok(of_sum.clone()))?;
        Ok((of_a, keep(b, || Ok(of_sum))?))
    }
}

struct Gelu;

/// Returns Φ(x).
#[inline(always)]
fn normal<T: Element>(x: T) -> T {
    let half = T::from_f64(0.5);
    half + half * (x * T::from_f64(consts::FRAC_1_SQRT_2)).error_function()
}

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        with_type!(x.dtype(), T => {
            let values = slice::<T>(x, layout)?;
            let mut result = Vec::with_capacity(values.len());
            Arch::new().dispatch(|| extend_with(&mut result, values, |x| x * normal(x)));
            Ok((T::to_cpu_storage_owned(result), layout.shape().clone()))
        })
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        keep(x, || {
            with_type!(x.dtype(), T => {
                let (values, gradient) = (elements(x), elements(&gradient));
                let (values, gradient) = (values.slice::<T>()?, gradient.slice()?);
                let mut before = Vec::with_capacity(values.len());
                // 1 / sqrt(2 pi)
                let factor = 0.5 * consts::FRAC_2_SQRT_PI * consts::FRAC_1_SQRT_2;
                let factor = factor as T;
                Arch::new().dispatch(|| {
                    extend_with_pairs(&mut before, values, gradient, |x, g| {
                        let density = (x * x * -0.5).exponential() * factor;
                        g * (normal(x) + x * density)
                    });
                });
                Tensor::from_vec(before, x.shape(), x.device())
            })
        })
    }
}
