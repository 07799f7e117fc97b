//! Normalisation of each sample by itself.

use candle_core::{D, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};
use pulp::{Arch, Simd};

use super::moments;
use crate::operation::{Gradients, Layer, Pass, apply_layer};
use crate::simd::{BLOCK, Element};
use crate::storage::{check_float, computed_here};

/// Layer normalisation over the last dimension, with a weight and a bias for each of its elements.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    /// Asks `vars` for `weight` and `bias`, initially 1 and 0. `eps` is added to the variance; PyTorch's is 1e-5.
    ///
    /// # Errors
    /// Those of `vars`.
    pub fn new(size: usize, eps: f64, vars: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: vars.get_with_hints(size, "weight", Init::Const(1.0))?,
            bias: vars.get_with_hints(size, "bias", Init::Const(0.0))?,
            eps,
        })
    }

    /// Returns the normalised inputs, of shape `[..., size]`.
    ///
    /// # Errors
    /// If the inputs do not have this layer's size or are integers, or candle's.
    pub fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        check_float(inputs)?;
        let size = self.weight.elem_count();
        if inputs.rank() == 0 || inputs.dim(D::Minus1)? != size {
            bail!("inputs of shape {:?} are not [..., {size}]", inputs.shape());
        }
        let rows = Rows {
            size,
            run: 1,
            groups: 1,
            eps: self.eps,
        };
        rows.apply(inputs, &self.weight, &self.bias)
    }
}

/// Group normalisation of inputs of shape `[samples, channels, ...]`: the channels of a group are normalised together,
/// with a weight and a bias for each channel.
#[derive(Clone, Debug)]
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    groups: usize,
    eps: f64,
}

impl GroupNorm {
    /// Asks `vars` for `weight` and `bias`, initially 1 and 0. `eps` is added to the variance; PyTorch's is 1e-5.
    ///
    /// # Errors
    /// If the groups do not divide the channels, or those of `vars`.
    pub fn new(groups: usize, channels: usize, eps: f64, vars: VarBuilder) -> Result<Self> {
        if groups == 0 || !channels.is_multiple_of(groups) {
            bail!("{groups} groups do not divide {channels} channels");
        }
        Ok(Self {
            weight: vars.get_with_hints(channels, "weight", Init::Const(1.0))?,
            bias: vars.get_with_hints(channels, "bias", Init::Const(0.0))?,
            groups,
            eps,
        })
    }

    /// Returns the normalised inputs.
    ///
    /// # Errors
    /// If the inputs do not have this layer's channels, if they are integers, or if candle fails.
    pub fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        check_float(inputs)?;
        let channels = self.weight.elem_count();
        if inputs.rank() < 2 || inputs.dims()[1] != channels {
            bail!(
                "inputs of shape {:?} are not [samples, {channels}, ...]",
                inputs.shape()
            );
        }
        let run: usize = inputs.dims()[2..].iter().product();
        let rows = Rows {
            size: channels / self.groups * run,
            run,
            groups: self.groups,
            eps: self.eps,
        };
        rows.apply(inputs, &self.weight, &self.bias)
    }
}

/// Normalises each row of `size` elements. A sample has `groups` rows. In a row, every `run` consecutive elements share
/// a weight and a bias.
struct Rows {
    size: usize,
    run: usize,
    groups: usize,
    eps: f64,
}

impl Rows {
    fn apply(self, inputs: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
        if inputs.elem_count() == 0 {
            return Ok(inputs.clone());
        }
        if computed_here(&[inputs, weight, bias]) {
            return apply_layer(self, inputs, weight, bias);
        }
        let rows = inputs.reshape(((), self.groups, self.size / self.run, self.run))?;
        let centered = rows.broadcast_sub(&rows.mean_keepdim((2, 3))?)?;
        let variance = centered.sqr()?.mean_keepdim((2, 3))?;
        let normal = centered.broadcast_div(&(variance + self.eps)?.sqrt()?)?;
        let channel = |tensor: &Tensor| tensor.reshape((1, self.groups, (), 1));
        let scaled = normal.broadcast_mul(&channel(weight)?)?;
        let result = scaled.broadcast_add(&channel(bias)?)?;
        result.reshape(inputs.shape())
    }

    /// Repeats each value `run` times, so that there is one for each element of a sample.
    fn spread<T: Element>(&self, values: &[T]) -> Vec<T> {
        let runs = values
            .iter()
            .flat_map(|v| std::iter::repeat_n(*v, self.run));
        runs.collect()
    }

    /// Returns the sum of each run.
    fn gather<T: Element>(&self, values: &[T]) -> Vec<T> {
        let sum = |run: &[T]| run.iter().fold(T::zero(), |sum, v| sum + *v);
        values.chunks_exact(self.run).map(sum).collect()
    }
}

/// Returns the mean of a row, and 1 / its standard deviation.
#[inline(always)]
fn statistics<T: Element>(row: &[T], eps: f64) -> (T, T) {
    let (mean, squares) = moments(row);
    let variance = squares / row.len() as f64;
    (
        T::from_f64(mean),
        T::from_f64(1.0 / (variance + eps).sqrt()),
    )
}

/// Returns the normalised inputs. `weights` and `biases` have a number for each element of a sample.
#[pulp::with_simd(normalised = Arch::new())]
#[inline(always)]
fn normalised_simd<S: Simd, T: Element>(
    _: S,
    rows: &Rows,
    inputs: &[T],
    weights: &[T],
    biases: &[T],
) -> Vec<T> {
    let affine = weights
        .chunks_exact(rows.size)
        .zip(biases.chunks_exact(rows.size));
    let mut result = Vec::with_capacity(inputs.len());
    for (row, (weight, bias)) in inputs.chunks_exact(rows.size).zip(affine.cycle()) {
        let (mean, scale) = statistics(row, rows.eps);
        let y = |x: T, weight: T, bias: T| (x - mean) * scale * weight + bias;
        let (blocks, rest) = row.as_chunks::<BLOCK>();
        let affine_blocks = weight
            .as_chunks::<BLOCK>()
            .0
            .iter()
            .zip(bias.as_chunks::<BLOCK>().0);
        for (x, (weight, bias)) in blocks.iter().zip(affine_blocks) {
            let mut new = [T::zero(); BLOCK];
            for i in 0..BLOCK {
                new[i] = y(x[i], weight[i], bias[i]);
            }
            result.extend_from_slice(&new);
        }
        for i in rows.size - rest.len()..rows.size {
            result.push(y(row[i], weight[i], bias[i]));
        }
    }
    result
}

impl Layer for Rows {
    const NAME: &'static str = "row-norm";

    fn forward<T: Element>(&self, inputs: &[T], weight: &[T], bias: &[T]) -> Vec<T> {
        normalised(self, inputs, &self.spread(weight), &self.spread(bias))
    }

    fn backward<T: Element>(&self, pass: &Pass<T>) -> Result<Gradients<T>> {
        let weights = self.spread(pass.weight);
        let (of_inputs, of_weights, of_biases) =
            gradients(self, pass.inputs, pass.gradient, &weights);
        Ok(Gradients {
            of_inputs,
            of_weight: self.gather(&of_weights),
            of_bias: self.gather(&of_biases),
        })
    }
}

/// Returns the gradients of the inputs, and of each weight and each bias of a sample.
#[pulp::with_simd(gradients = Arch::new())]
#[inline(always)]
fn gradients_simd<S: Simd, T: Element>(
    _: S,
    rows: &Rows,
    inputs: &[T],
    gradient: &[T],
    weights: &[T],
) -> (Vec<T>, Vec<T>, Vec<T>) {
    let mut of_weights = vec![T::zero(); weights.len()];
    let mut of_biases = vec![T::zero(); weights.len()];
    let mut of_inputs = vec![T::zero(); inputs.len()];
    let pairs = inputs
        .chunks_exact(rows.size)
        .zip(gradient.chunks_exact(rows.size));
    for (i, ((x, g), of)) in pairs.zip(of_inputs.chunks_exact_mut(rows.size)).enumerate() {
        let group = i % rows.groups * rows.size;
        let weight = &weights[group..][..rows.size];
        let of_weight = &mut of_weights[group..][..rows.size];
        let of_bias = &mut of_biases[group..][..rows.size];
        row_backward(
            statistics(x, rows.eps),
            x,
            g,
            weight,
            of,
            of_weight,
            of_bias,
        );
    }
    (of_inputs, of_weights, of_biases)
}

/// Writes the gradient of a row to `of_inputs`, and adds its part of the other gradients to `of_weight` and `of_bias`.
#[inline(always)]
fn row_backward<T: Element>(
    (mean, scale): (T, T),
    x: &[T],
    gradient: &[T],
    weight: &[T],
    of_inputs: &mut [T],
    of_weight: &mut [T],
    of_bias: &mut [T],
) {
    let size = x.len();
    let (gradient, weight) = (&gradient[..size], &weight[..size]);
    let (of_weight, of_bias) = (&mut of_weight[..size], &mut of_bias[..size]);
    let (mut sums, mut products) = ([T::zero(); BLOCK], [T::zero(); BLOCK]);
    let whole = size / BLOCK * BLOCK;
    for start in (0..whole).step_by(BLOCK) {
        let (x, g, w) = (
            &x[start..][..BLOCK],
            &gradient[start..][..BLOCK],
            &weight[start..][..BLOCK],
        );
        let (of_w, of_b) = (
            &mut of_weight[start..][..BLOCK],
            &mut of_bias[start..][..BLOCK],
        );
        for i in 0..BLOCK {
            let normal = (x[i] - mean) * scale;
            of_w[i] += g[i] * normal;
            of_b[i] += g[i];
            sums[i] += g[i] * w[i];
            products[i] += g[i] * w[i] * normal;
        }
    }
    for i in whole..size {
        let normal = (x[i] - mean) * scale;
        of_weight[i] += gradient[i] * normal;
        of_bias[i] += gradient[i];
        sums[0] += gradient[i] * weight[i];
        products[0] += gradient[i] * weight[i] * normal;
    }
    let total = |sums: [T; BLOCK]| sums.iter().fold(0.0, |sum, x| sum + x.to_f64());
    let sum = T::from_f64(total(sums) / size as f64);
    let product = T::from_f64(total(products) / size as f64);
    for (of, ((x, g), w)) in of_inputs.iter_mut().zip(x.iter().zip(gradient).zip(weight)) {
        *of = scale * (*g * *w - sum - (*x - mean) * scale * product);
    }
}
