//! Functions and layers over slices, as candle's custom operations.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Tensor, WithDType};

use crate::backward::keep_values;
use crate::simd::Element;
use crate::storage::{elements, slice, with_type};

/// A function of one tensor, with its gradient.
pub(crate) trait Function: Send + Sync + 'static {
    const NAME: &'static str;

    /// Returns the shape of the result.
    fn shape(&self, x: &Shape) -> Result<Shape> {
        Ok(x.clone())
    }

    fn forward<T: Element>(&self, x: &[T]) -> Vec<T>;

    /// Returns the gradient of `x`, given the result and the gradient of the result.
    fn backward<T: Element>(&self, x: &[T], result: &[T], gradient: &[T]) -> Vec<T>;
}

/// A layer with a weight and a bias, with its gradients.
pub(crate) trait Layer: Send + Sync + 'static {
    const NAME: &'static str;

    /// Returns the shape of the result.
    fn shape(&self, inputs: &Shape) -> Result<Shape> {
        Ok(inputs.clone())
    }

    fn forward<T: Element>(&self, inputs: &[T], weight: &[T], bias: &[T]) -> Vec<T>;

    /// Returns the gradients that the pass asks for. The others may be empty.
    fn backward<T: Element>(&self, pass: &Pass<T>) -> Result<Gradients<T>>;
}

/// The operands of a layer's backward pass, and which gradients it computes.
pub(crate) struct Pass<'a, T> {
    pub(crate) inputs: &'a [T],
    pub(crate) weight: &'a [T],
    pub(crate) bias: &'a [T],
    pub(crate) result: &'a [T],
    /// The gradient of the result.
    pub(crate) gradient: &'a [T],
    pub(crate) of_inputs: bool,
    pub(crate) of_weight: bool,
    pub(crate) of_bias: bool,
}

/// The gradients of a layer's three operands.
pub(crate) struct Gradients<T> {
    pub(crate) of_inputs: Vec<T>,
    pub(crate) of_weight: Vec<T>,
    pub(crate) of_bias: Vec<T>,
}

/// Applies a function to a tensor on the CPU. The tensor is of `f32` or `f64`.
pub(crate) fn apply(function: impl Function, x: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op1(Operation(function))
}

/// Returns a layer's result for tensors on the CPU, all of `f32` or all of `f64`.
pub(crate) fn apply_layer(
    layer: impl Layer,
    inputs: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
) -> Result<Tensor> {
    let (weight, bias) = (weight.contiguous()?, bias.contiguous()?);
    let operation = Operation(layer);
    inputs.contiguous()?.apply_op3(&weight, &bias, operation)
}

/// A function or a layer as an operation of candle's.
struct Operation<O>(O);

impl<F: Function> CustomOp1 for Operation<F> {
    fn name(&self) -> &'static str {
        F::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let shape = self.0.shape(layout.shape())?;
        with_type!(x.dtype(), T => {
            let result = self.0.forward::<T>(slice(x, layout)?);
            Ok((T::to_cpu_storage_owned(result), shape))
        })
    }

    fn bwd(&self, x: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        with_type!(x.dtype(), T => {
            keep_values(result, x, || {
                let (x, result, gradient) = (elements(x), elements(result), elements(&gradient));
                Ok(self.0.backward::<T>(x.slice()?, result.slice()?, gradient.slice()?))
            })
        })
    }
}

impl<L: Layer> CustomOp3 for Operation<L> {
    fn name(&self) -> &'static str {
        L::NAME
    }

    fn cpu_fwd(
        &self,
        inputs: &CpuStorage,
        inputs_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let shape = self.0.shape(inputs_layout.shape())?;
        with_type!(inputs.dtype(), T => {
            let (weight, bias) = (slice(weight, weight_layout)?, slice(bias, bias_layout)?);
            let result = self.0.forward::<T>(slice(inputs, inputs_layout)?, weight, bias);
            Ok((T::to_cpu_storage_owned(result), shape))
        })
    }

    fn bwd(
        &self,
        inputs: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        with_type!(inputs.dtype(), T => {
            let gradients = self.0.backward::<T>(&Pass {
                inputs: elements(inputs).slice()?,
                weight: elements(weight).slice()?,
                bias: elements(bias).slice()?,
                result: elements(result).slice()?,
                gradient: elements(&gradient).slice()?,
                of_inputs: inputs.track_op(),
                of_weight: weight.track_op(),
                of_bias: bias.track_op(),
            })?;
            Ok((
                keep_values(result, inputs, || Ok(gradients.of_inputs))?,
                keep_values(result, weight, || Ok(gradients.of_weight))?,
                keep_values(result, bias, || Ok(gradients.of_bias))?,
            ))
        })
    }
}
