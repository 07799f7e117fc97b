//! Fully connected layers.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, D, Layout, Result, Shape, Tensor, WithDType, bail};
use candle_nn::VarBuilder;

use crate::activation::{Activation, activate};
use crate::autocast::{matmul, operand_type};
use crate::backward::keep;
use crate::simd::Element;
use crate::storage::{computed_here, slice, with_slices, with_type};

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
    /// Those of `vars`.
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
    /// Those of [`linear`].
    pub fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        linear(inputs, &self.weight, &self.bias)
    }

    /// Returns [`linear_relu`] of the inputs with this layer's weight and bias.
    ///
    /// # Errors
    /// Those of [`linear`].
    pub fn forward_relu(&self, inputs: &Tensor) -> Result<Tensor> {
        linear_relu(inputs, &self.weight, &self.bias)
    }
}

/// Returns `inputs · weightᵀ + bias`: inputs of shape `[..., in]`, a weight of `[out, in]` and a bias of
/// `[out]` make a result of `[..., out]`.
///
/// # Errors
/// If the shapes do not fit, or candle's.
pub fn linear(inputs: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    apply(inputs, weight, bias, Activation::Identity)
}

/// Returns the [`relu`](crate::relu) of [`linear`], with the same gradient and the same results for NaN.
///
/// # Errors
/// Those of [`linear`].
pub fn linear_relu(inputs: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    apply(inputs, weight, bias, Activation::Relu)
}

fn apply(
    inputs: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
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
        return inputs.apply_op3(weight, &bias.contiguous()?, Affine { activation });
    }
    let leading = &inputs.dims()[..inputs.rank() - 1];
    let rows = inputs.reshape((leading.iter().product::<usize>(), features))?;
    let sum = matmul(&rows, &weight.t()?)?.broadcast_add(bias)?;
    activate(&sum, activation)?.reshape([leading, &[outputs]].concat())
}

/// Returns the number of rows in a shape `[..., size]`, and their size.
fn rows_of(shape: &Shape) -> Result<(usize, usize)> {
    let size = shape.dim(D::Minus1)?;
    Ok((shape.elem_count() / size, size))
}

/// The operation `inputs · weightᵀ + bias`, and the activation.
struct Affine {
    activation: Activation,
}

impl Affine {
    /// Adds the bias to each row of the product, and applies the activation.
    fn finish<T: Element>(&self, mut product: Vec<T>, bias: &[T]) -> Vec<T> {
        let limits = self.activation.limits();
        for row in product.chunks_exact_mut(bias.len()) {
            for (y, b) in row.iter_mut().zip(bias) {
                *y = limits.apply(*y + *b);
            }
        }
        product
    }

    /// Does the same with a product `weight · inputsᵀ`, and transposes it. It takes a block of outputs at a time, to
    /// stay in the first-level cache.
    fn finish_transposed<T: Element>(&self, product: Vec<T>, bias: &[T]) -> Vec<T> {
        const BLOCK: usize = 64;
        let limits = self.activation.limits();
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

    /// Returns the gradient of the activation's argument, of shape `[rows, outputs]`, and its sum over the rows, which is the
    /// gradient of the bias. One pass over the memory makes both.
    fn unfinish<T: Element>(&self, result: &Tensor, gradient: &Tensor) -> Result<(Tensor, Tensor)> {
        let (rows, outputs) = rows_of(result.shape())?;
        let mut sums = vec![T::zero(); outputs];
        let limits = self.activation.limits();
        let mask = |result: &[T], gradient: &[T]| {
            let mut masked = Vec::with_capacity(gradient.len());
            let rows = gradient.chunks_exact(outputs);
            for (row, result) in rows.zip(result.chunks_exact(outputs)) {
                let pairs = row.iter().zip(result);
                masked.extend(pairs.map(|(g, y)| limits.gradient(*y, *g)));
                let last = &masked[masked.len() - outputs..];
                sums.iter_mut().zip(last).for_each(|(sum, g)| *sum += *g);
            }
            masked
        };
        let gradient = gradient.contiguous()?;
        let masked = with_slices(result, &gradient, mask)?;
        let masked = Tensor::from_vec(masked, (rows, outputs), result.device())?;
        Ok((masked, Tensor::from_vec(sums, outputs, result.device())?))
    }
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
            T::to_cpu_storage_owned(match transposed {
                false => self.finish(product, bias),
                true => self.finish_transposed(product, bias),
            })
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
        let (gradient, of_bias) =
            with_type!(result.dtype(), T => self.unfinish::<T>(result, gradient))?;
        let rows = inputs.detach().reshape(rows_of(inputs.shape())?)?;
        let of_inputs = keep(inputs, || {
            gradient.matmul(&weight.detach())?.reshape(inputs.shape())
        })?;
        // In this order the gradient has the weight's own layout.
        let of_weight = keep(weight, || gradient.t()?.matmul(&rows))?;
        Ok((of_inputs, of_weight, keep(bias, || Ok(of_bias))?))
    }
}
