//! Fully connected layers.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, D, Layout, Result, Shape, Tensor, WithDType, bail};
use candle_nn::VarBuilder;
use pulp::{Arch, Simd};

use crate::activation::{Activation, Limits, activate, gelu, gelu_forward, gelu_of, gelu_slope};
use crate::autocast::{matmul, operand_type};
use crate::backward::keep;
use crate::simd::{Element, extend_with, extend_with_pairs};
use crate::storage::{computed_here, elements, slice, with_type};

/// A fully connected layer: a weight of shape `[outputs, inputs]` and a bias of shape `[outputs]`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    /// Asks `vars` for `weight` and `bias`, with the initial values of [`candle_nn::linear()`].
    ///
    /// # Errors
    /// Returns the errors of `vars`.
    pub fn new(inputs: usize, outputs: usize, vars: VarBuilder) -> Result<Self> {
        let layer = candle_nn::linear(inputs, outputs, vars)?;
        match layer.bias() {
            Some(bias) => Ok(Self {
                weight: layer.weight().clone(),
                bias: bias.clone(),
            }),
            None => bail!("a linear layer was made without a bias"),
        }
    }

    /// Returns [`linear`] of the inputs with this layer's weight and bias.
    ///
    /// # Errors
    /// Returns the errors of [`linear`].
    pub fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        linear(inputs, &self.weight, &self.bias)
    }

    /// Returns [`linear_relu`] of the inputs with this layer's weight and bias.
    ///
    /// # Errors
    /// Returns the errors of [`linear`].
    pub fn forward_relu(&self, inputs: &Tensor) -> Result<Tensor> {
        linear_relu(inputs, &self.weight, &self.bias)
    }

    /// Returns [`linear_gelu`] of the inputs with this layer's weight and bias.
    ///
    /// # Errors
    /// Returns the errors of [`linear`].
    pub fn forward_gelu(&self, inputs: &Tensor) -> Result<Tensor> {
        linear_gelu(inputs, &self.weight, &self.bias)
    }
}

/// Returns `inputs · weightᵀ + bias`: inputs of shape `[..., in]`, a weight of `[out, in]` and a bias of
/// `[out]` make a result of `[..., out]`.
///
/// # Errors
/// If the shapes do not fit, or candle's.
pub fn linear(inputs: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    apply(inputs, weight, bias, Function::Limit(Activation::Identity))
}

/// Returns the [`relu`](crate::relu) of [`linear`], with the same gradient and the same results for NaN.
///
/// # Errors
/// Returns the errors of [`linear`].
pub fn linear_relu(inputs: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    apply(inputs, weight, bias, Function::Limit(Activation::Relu))
}

/// Returns the [`gelu`] of [`linear`].
///
/// # Errors
/// Returns the errors of [`linear`].
pub fn linear_gelu(inputs: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    apply(inputs, weight, bias, Function::Gelu(OnceLock::new()))
}

fn apply(inputs: &Tensor, weight: &Tensor, bias: &Tensor, function: Function) -> Result<Tensor> {
    let (outputs, features) = weight.dims2()?;
    if inputs.rank() < 2 || inputs.dim(D::Minus1)? != features || bias.dims() != [outputs] {
        bail!(
            "inputs of shape {:?} and a bias of {:?} do not fit a weight of {:?}; \
             inputs [..., in] and a bias [out] fit a weight [out, in]",
            inputs.shape(),
            bias.shape(),
            weight.shape()
        );
    }
    let empty = inputs.elem_count() == 0 || outputs == 0;
    let narrow = operand_type(inputs).is_some();
    if !empty && !narrow && computed_here(&[inputs, weight, bias]) {
        let inputs = match inputs.rank() {
            2 => inputs.clone(),
            _ => inputs.contiguous()?,
        };
        return inputs.apply_op3(weight, &bias.contiguous()?, Affine { function });
    }
    let leading = &inputs.dims()[..inputs.rank() - 1];
    let rows = inputs.reshape((leading.iter().product::<usize>(), features))?;
    let sum = matmul(&rows, &weight.t()?)?.broadcast_add(bias)?;
    let result = match function {
        Function::Limit(activation) => activate(&sum, activation)?,
        Function::Gelu(_) => gelu(&sum)?,
    };
    result.reshape([leading, &[outputs]].concat())
}

/// Returns the number of rows in a shape `[..., size]`, and their size.
fn rows_of(shape: &Shape) -> Result<(usize, usize)> {
    let size = shape.dim(D::Minus1)?;
    Ok((shape.elem_count() / size, size))
}

/// The operation `inputs · weightᵀ + bias`, followed by a function of each element of the sum.
struct Affine {
    function: Function,
}

/// The function that a layer applies to each element of its sum.
enum Function {
    Limit(Activation),
    /// GELU, and its arguments. The forward pass keeps them for the backward pass.
    Gelu(OnceLock<CpuStorage>),
}

impl Function {
    /// Adds the bias to a product, and applies the function. A transposed product is `weight · inputsᵀ`.
    fn finish<T: Element>(
        &self,
        mut product: Vec<T>,
        bias: &[T],
        transposed: bool,
    ) -> Result<Vec<T>> {
        match self {
            Self::Limit(activation) if transposed => {
                Ok(finish_transposed(&product, bias, activation.limits()))
            }
            Self::Limit(activation) => {
                finish(&mut product, bias, activation.limits());
                Ok(product)
            }
            Self::Gelu(arguments) => {
                let result = if transposed {
                    product = finish_transposed(&product, bias, Activation::Identity.limits());
                    gelu_forward(&product)
                } else {
                    finish_gelu(&mut product, bias)
                };
                if arguments.set(T::to_cpu_storage_owned(product)).is_err() {
                    bail!(
                        "the operation of a linear layer ran twice; each forward pass needs its own operation"
                    );
                }
                Ok(result)
            }
        }
    }
}

/// Adds the bias to each row of the product, and applies the activation.
#[pulp::with_simd(finish = Arch::new())]
#[inline(always)]
fn finish_simd<S: Simd, T: Element>(_: S, product: &mut [T], bias: &[T], limits: Limits<T>) {
    for row in product.chunks_exact_mut(bias.len()) {
        for (y, b) in row.iter_mut().zip(bias) {
            *y = limits.apply(*y + *b);
        }
    }
}

/// Adds the bias to each row of the product, and returns GELU of each sum.
#[pulp::with_simd(finish_gelu = Arch::new())]
#[inline(always)]
fn finish_gelu_simd<S: Simd, T: Element>(_: S, product: &mut [T], bias: &[T]) -> Vec<T> {
    let mut result = Vec::with_capacity(product.len());
    for row in product.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(y, b)| *y += *b);
        extend_with(&mut result, row, |x| gelu_of(x));
    }
    result
}

/// Transposes a product `weight · inputsᵀ`, adds the bias to each row, and applies the activation. It takes a block of
/// outputs at a time, to stay in the first-level cache.
fn finish_transposed<T: Element>(product: &[T], bias: &[T], limits: Limits<T>) -> Vec<T> {
    const BLOCK: usize = 64;
    let (outputs, rows) = (bias.len(), product.len() / bias.len());
    let mut result = vec![T::zero(); product.len()];
    for start in (0..outputs).step_by(BLOCK) {
        let end = outputs.min(start + BLOCK);
        let (product, bias) = (&product[start * rows..end * rows], &bias[start..end]);
        for (row, result) in result.chunks_exact_mut(outputs).enumerate() {
            let column = product[row..].iter().step_by(rows);
            for (y, (x, b)) in result[start..end].iter_mut().zip(column.zip(bias)) {
                *y = limits.apply(*x + *b);
            }
        }
    }
    result
}

/// Returns the gradient of each sum before the activation, and the gradient of the bias: these gradients, summed over
/// all rows of `outputs` elements.
#[pulp::with_simd(finish_backward = Arch::new())]
#[inline(always)]
fn finish_backward_simd<S: Simd, T: Element>(
    _: S,
    result: &[T],
    gradient: &[T],
    outputs: usize,
    limits: Limits<T>,
) -> (Vec<T>, Vec<T>) {
    with_sums(result, gradient, outputs, |y, g| limits.gradient(y, g))
}

/// Returns the gradient of each argument of GELU, and the gradient of the bias: these gradients, summed over all rows
/// of `outputs` elements.
#[pulp::with_simd(finish_gelu_backward = Arch::new())]
#[inline(always)]
fn finish_gelu_backward_simd<S: Simd, T: Element>(
    _: S,
    arguments: &[T],
    gradient: &[T],
    outputs: usize,
) -> (Vec<T>, Vec<T>) {
    with_sums(arguments, gradient, outputs, |x, g| g * gelu_slope(x))
}

/// Returns `of(value, gradient)` for each pair of elements, and these results summed over all rows of `outputs`
/// elements. One pass over the memory computes both.
#[inline(always)]
fn with_sums<T: Element>(
    values: &[T],
    gradient: &[T],
    outputs: usize,
    of: impl Fn(T, T) -> T,
) -> (Vec<T>, Vec<T>) {
    let mut sums = vec![T::zero(); outputs];
    let mut result = Vec::with_capacity(gradient.len());
    let rows = values.chunks_exact(outputs);
    for (values, gradient) in rows.zip(gradient.chunks_exact(outputs)) {
        extend_with_pairs(&mut result, values, gradient, &of);
        let last = &result[result.len() - outputs..];
        sums.iter_mut().zip(last).for_each(|(sum, g)| *sum += *g);
    }
    (result, sums)
}

impl CustomOp3 for Affine {
    fn name(&self) -> &'static str {
        "linear"
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
        let (rows, features) = rows_of(inputs_layout.shape())?;
        let as_rows = match inputs_layout.dims() {
            [_, _] => inputs_layout.clone(),
            _ => Layout::contiguous_with_offset((rows, features), inputs_layout.start_offset()),
        };
        let outputs = weight_layout.dims()[0];
        // A product of few rows spends much of its time on rearranging the weight, unless it comes
        // first. Measured: 1.1 to 3 times as fast with 2 to 64 rows, not faster with 256.
        let transposed = (2..=64).contains(&rows) && outputs >= 64;
        let product = if transposed {
            let (size, inputs_t) = ((1, outputs, rows, features), as_rows.transpose(0, 1)?);
            weight.matmul(inputs, size, weight_layout, &inputs_t)?
        } else {
            let (size, weight_t) = ((1, rows, outputs, features), weight_layout.transpose(0, 1)?);
            inputs.matmul(weight, size, &as_rows, &weight_t)?
        };
        let result = with_type!(product.dtype(), T => {
            let (product, bias) = (T::cpu_storage_data(product)?, slice::<T>(bias, bias_layout)?);
            T::to_cpu_storage_owned(self.function.finish(product, bias, transposed)?)
        });
        let leading = &inputs_layout.dims()[..inputs_layout.dims().len() - 1];
        Ok((result, [leading, &[outputs]].concat().into()))
    }

    fn bwd(
        &self,
        inputs: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (count, outputs) = rows_of(result.shape())?;
        let gradient = gradient.contiguous()?;
        let (gradient, of_bias) = with_type!(result.dtype(), T => {
            let gradient = elements(&gradient);
            let gradient = gradient.slice::<T>()?;
            let (before, sums) = match &self.function {
                Function::Limit(activation) => {
                    let result = elements(result);
                    finish_backward(result.slice()?, gradient, outputs, activation.limits())
                }
                Function::Gelu(arguments) => match arguments.get() {
                    Some(arguments) => {
                        finish_gelu_backward(T::cpu_storage_as_slice(arguments)?, gradient, outputs)
                    }
                    None => bail!("the backward pass of a linear layer ran before its forward pass"),
                },
            };
            (
                Tensor::from_vec(before, (count, outputs), result.device())?,
                Tensor::from_vec(sums, outputs, result.device())?,
            )
        });
        let rows = inputs.detach().reshape(rows_of(inputs.shape())?)?;
        let of_inputs = keep(result, inputs, || {
            gradient.matmul(&weight.detach())?.reshape(inputs.shape())
        })?;
        // In this order the gradient has the weight's own layout.
        let of_weight = keep(result, weight, || gradient.t()?.matmul(&rows))?;
        Ok((of_inputs, of_weight, keep(result, bias, || Ok(of_bias))?))
    }
}
