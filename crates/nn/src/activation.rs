//! Element-wise functions.

use std::f64::consts;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail};
use pulp::{Arch, Simd};

use crate::backward::keep;
use crate::operation::{Function, apply};
use crate::simd::{Element, extend_with, extend_with_pairs};
use crate::storage::{check_float, computed_here, elements, slice, with_type};

/// An element-wise function that a layer may apply to its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Leaves the result as it is.
    #[default]
    Identity,
    /// The larger of the element and 0.
    Relu,
    /// The element, limited to the range from 0 to 6.
    Relu6,
}

/// An activation as the lower and the upper limit of its result. NaN stands for no limit.
#[derive(Clone, Copy)]
pub(crate) struct Limits<T> {
    low: T,
    high: T,
}

impl<T: Element> Limits<T> {
    /// Returns `x` within the limits. The comparisons are written so that NaN stays NaN.
    #[inline(always)]
    pub(crate) fn apply(self, x: T) -> T {
        let x = if x <= self.low { self.low } else { x };
        if x >= self.high { self.high } else { x }
    }

    /// Returns the gradient of the activation's argument, given the gradient of its result. `x` is the argument or the
    /// result. As in PyTorch, the gradient is 0 where the argument is exactly a limit.
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

    /// Returns the activation of each element, computed by candle's operations.
    pub(crate) fn elsewhere(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Identity => Ok(x.clone()),
            Self::Relu => x.relu(),
            Self::Relu6 => x.clamp(0.0, 6.0),
        }
    }
}

/// Returns the larger of each element and 0.
///
/// On the CPU, in `f32` and `f64`, this does the same as PyTorch: the gradient is 0 where the result is 0, and NaN
/// stays NaN. Elsewhere it does the same as candle: the gradient is 1 where the element is exactly 0, and NaN may
/// become 0.
///
/// # Errors
/// candle's.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Relu)
}

/// Returns each element, limited to the range from 0 to 6.
///
/// On the CPU, in `f32` and `f64`, this does the same as PyTorch: the gradient is 0 where the result is 0 or 6, and NaN
/// stays NaN. Elsewhere it does the same as candle: where the element is exactly 0 or 6, the gradient is half of the
/// result's gradient.
///
/// # Errors
/// candle's.
pub fn relu6(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Relu6)
}

/// Returns `x · Φ(x)`, where Φ is the cumulative distribution function of the standard normal distribution: GELU with
/// the exact error function, as in PyTorch.
///
/// # Errors
/// If `x` is of an integer type, or candle's.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    check_float(x)?;
    match computed_here(&[x]) {
        true => apply(Gelu, x),
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

/// Returns the activation of each element.
pub(crate) fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    if activation == Activation::Identity {
        return Ok(x.clone());
    }
    match computed_here(&[x]) {
        true => apply(Activate(activation), x),
        false => activation.elsewhere(x),
    }
}

/// Returns the gradient of an activation's argument, given its result and the gradient of the result.
pub(crate) fn before<T: Element>(activation: Activation, result: &[T], gradient: &[T]) -> Vec<T> {
    before_limits(activation.limits(), result, gradient)
}

/// Returns the gradient of each element before it was limited, given the limited elements and their gradient.
#[pulp::with_simd(before_limits = Arch::new())]
#[inline(always)]
fn before_limits_simd<S: Simd, T: Element>(
    _: S,
    limits: Limits<T>,
    result: &[T],
    gradient: &[T],
) -> Vec<T> {
    let mut before = Vec::with_capacity(gradient.len());
    extend_with_pairs(&mut before, result, gradient, |y, g| limits.gradient(y, g));
    before
}

/// Returns each element, clamped to the limits.
#[pulp::with_simd(limited = Arch::new())]
#[inline(always)]
fn limited_simd<S: Simd, T: Element>(_: S, limits: Limits<T>, x: &[T]) -> Vec<T> {
    let mut result = Vec::with_capacity(x.len());
    extend_with(&mut result, x, |x| limits.apply(x));
    result
}

struct Activate(Activation);

impl Function for Activate {
    const NAME: &'static str = "activation";

    fn forward<T: Element>(&self, x: &[T]) -> Vec<T> {
        limited(self.0.limits(), x)
    }

    fn backward<T: Element>(&self, _: &[T], result: &[T], gradient: &[T]) -> Vec<T> {
        before(self.0, result, gradient)
    }
}

/// Returns the sum of each pair of elements, clamped to the limits.
#[pulp::with_simd(limited_sums = Arch::new())]
#[inline(always)]
fn limited_sums_simd<S: Simd, T: Element>(_: S, limits: Limits<T>, a: &[T], b: &[T]) -> Vec<T> {
    let mut sums = Vec::with_capacity(a.len());
    extend_with_pairs(&mut sums, a, b, |a, b| limits.apply(a + b));
    sums
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
            let sums = limited_sums(Activation::Relu.limits(), a, b);
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
        let gradient = gradient.contiguous()?;
        let of_sum = with_type!(result.dtype(), T => {
            let (values, gradient) = (elements(result), elements(&gradient));
            let of_sum = before::<T>(Activation::Relu, values.slice()?, gradient.slice()?);
            Tensor::from_vec(of_sum, result.shape(), result.device())?
        });
        let of_a = keep(result, a, || Ok(of_sum.clone()))?;
        Ok((of_a, keep(result, b, || Ok(of_sum))?))
    }
}

/// Returns Φ(x), the cumulative distribution function of the standard normal distribution, and `exp(-x²/2)`.
#[inline(always)]
fn normal_and_exponential<T: Element>(x: T) -> (T, T) {
    let half = T::from_f64(0.5);
    let (erf, exponential) =
        (x * T::from_f64(consts::FRAC_1_SQRT_2)).error_function_and_exponential();
    (half + half * erf, exponential)
}

/// Returns GELU of a number: `x · Φ(x)`.
#[inline(always)]
pub(crate) fn gelu_of<T: Element>(x: T) -> T {
    x * normal_and_exponential(x).0
}

/// Returns the derivative of GELU at `x`.
#[inline(always)]
pub(crate) fn gelu_slope<T: Element>(x: T) -> T {
    // 1 / sqrt(2 pi)
    let factor = T::from_f64(0.5 * consts::FRAC_2_SQRT_PI * consts::FRAC_1_SQRT_2);
    let (normal, exponential) = normal_and_exponential(x);
    normal + x * exponential * factor
}

/// Returns GELU of each element.
#[pulp::with_simd(gelu_forward = Arch::new())]
#[inline(always)]
pub(crate) fn gelu_forward_simd<S: Simd, T: Element>(_: S, x: &[T]) -> Vec<T> {
    let mut result = Vec::with_capacity(x.len());
    extend_with(&mut result, x, |x| gelu_of(x));
    result
}

/// Returns the gradient of each argument of GELU, given the gradient of its result.
#[pulp::with_simd(gelu_backward = Arch::new())]
#[inline(always)]
fn gelu_backward_simd<S: Simd, T: Element>(_: S, x: &[T], gradient: &[T]) -> Vec<T> {
    let mut before = Vec::with_capacity(x.len());
    extend_with_pairs(&mut before, x, gradient, |x, g| g * gelu_slope(x));
    before
}

struct Gelu;

impl Function for Gelu {
    const NAME: &'static str = "gelu";

    fn forward<T: Element>(&self, x: &[T]) -> Vec<T> {
        gelu_forward(x)
    }

    fn backward<T: Element>(&self, x: &[T], _: &[T], gradient: &[T]) -> Vec<T> {
        gelu_backward(x, gradient)
    }
}
