//! The operation of batch normalisation, with its gradients.

use candle_core::Result;
use pulp::{Arch, Simd};

use super::joint::Joint;
use crate::activation::{Activation, Limits};
use crate::operation::{Gradients, Layer, Pass};
use crate::simd::{BLOCK, Element, extend_with, extend_with_pairs};

/// The normalisation of a channel: an element x becomes `x · factor + summand`, within limits.
#[derive(Clone, Copy)]
struct ChannelMap<T> {
    factor: T,
    summand: T,
    /// The mean of the channel.
    mean: T,
    limits: Limits<T>,
}

impl<T: Element> ChannelMap<T> {
    /// Returns the gradient of `x · factor + summand`, given the gradient of the result.
    #[inline(always)]
    fn gradient_of_sum(self, x: T, gradient: T) -> T {
        self.limits
            .gradient(x * self.factor + self.summand, gradient)
    }
}

/// Appends the normalised elements of a channel.
#[pulp::with_simd(extend_with_map = Arch::new())]
#[inline(always)]
fn extend_with_map_simd<S: Simd, T: Element>(
    _: S,
    result: &mut Vec<T>,
    values: &[T],
    map: ChannelMap<T>,
) {
    extend_with(result, values, |x| {
        map.limits.apply(x * map.factor + map.summand)
    });
}

/// Returns two sums over the elements of a channel: the sum of the gradients of `x · factor + summand`, and the sum of
/// the products of these gradients with `x - mean`.
#[pulp::with_simd(sums_of_gradients = Arch::new())]
#[inline(always)]
fn sums_of_gradients_simd<S: Simd, T: Element>(
    _: S,
    values: &[T],
    gradient: &[T],
    map: ChannelMap<T>,
) -> (f64, f64) {
    let (mut of_bias, mut of_weight) = ([T::zero(); BLOCK], [T::zero(); BLOCK]);
    let (chunks, rest) = values.as_chunks::<BLOCK>();
    let (of_chunks, of_rest) = gradient.as_chunks::<BLOCK>();
    for (x, g) in chunks.iter().zip(of_chunks) {
        for i in 0..BLOCK {
            let g = map.gradient_of_sum(x[i], g[i]);
            of_bias[i] += g;
            of_weight[i] += g * (x[i] - map.mean);
        }
    }
    for (i, (x, g)) in rest.iter().zip(of_rest).enumerate() {
        let g = map.gradient_of_sum(*x, *g);
        of_bias[i] += g;
        of_weight[i] += g * (*x - map.mean);
    }
    let total = |sums: [T; BLOCK]| sums.iter().fold(0.0, |sum, x| sum + x.to_f64());
    (total(of_bias), total(of_weight))
}

/// Appends the gradients of a channel's elements. Each has a part that comes through the mean, `shift`, and a part that
/// comes through the variance, `(x - mean) · slope`. With running statistics, `shift` and `slope` are 0.
#[pulp::with_simd(extend_with_gradients = Arch::new())]
#[inline(always)]
fn extend_with_gradients_simd<S: Simd, T: Element>(
    _: S,
    result: &mut Vec<T>,
    values: &[T],
    gradient: &[T],
    map: ChannelMap<T>,
    shift: T,
    slope: T,
) {
    extend_with_pairs(result, values, gradient, |x, g| {
        map.factor * map.gradient_of_sum(x, g) + shift + (x - map.mean) * slope
    });
}

/// The operation: `(x - mean) · scale · weight + bias`, then the activation.
pub(super) struct Normalize {
    size: usize,
    mean: Vec<f64>,
    /// 1 / the standard deviation.
    scale: Vec<f64>,
    origin: Origin,
    activation: Activation,
}

/// The elements over which the mean and the variance were computed. They decide which gradient reaches the inputs
/// through the mean and the variance.
#[derive(Clone)]
pub(super) enum Origin {
    /// Inputs of earlier steps.
    Earlier,
    /// The inputs themselves.
    Batch,
    /// The inputs of all replicas of the step.
    Replicas(Joint),
}

impl Normalize {
    /// Returns the normalisation of inputs with `size` elements for each channel of a sample. `eps` is added to the
    /// variance.
    pub(super) fn new(
        size: usize,
        (mean, variance): (Vec<f64>, &[f64]),
        eps: f64,
        origin: Origin,
        activation: Activation,
    ) -> Self {
        let scale = |variance: &f64| 1.0 / (variance + eps).sqrt();
        Self {
            size,
            mean,
            scale: variance.iter().map(scale).collect(),
            origin,
            activation,
        }
    }

    /// Returns the map of each channel.
    fn maps<T: Element>(&self, weight: &[T], bias: &[T]) -> Vec<ChannelMap<T>> {
        let limits = self.activation.limits();
        let channels = self
            .mean
            .iter()
            .zip(&self.scale)
            .zip(weight.iter().zip(bias));
        let maps = channels.map(|((mean, scale), (weight, bias))| {
            let factor = scale * weight.to_f64();
            ChannelMap {
                factor: T::from_f64(factor),
                summand: T::from_f64(bias.to_f64() - mean * factor),
                mean: T::from_f64(*mean),
                limits,
            }
        });
        maps.collect()
    }
}

impl Layer for Normalize {
    const NAME: &'static str = "batch-norm";

    fn forward<T: Element>(&self, inputs: &[T], weight: &[T], bias: &[T]) -> Vec<T> {
        let maps = self.maps(weight, bias);
        let mut result = Vec::with_capacity(inputs.len());
        let channels = inputs.chunks_exact(self.size).zip(maps.iter().cycle());
        for (values, map) in channels {
            extend_with_map(&mut result, values, *map);
        }
        result
    }

    /// Computes the argument of the activation again, which is faster than reading the result.
    fn backward<T: Element>(&self, pass: &Pass<T>) -> Result<Gradients<T>> {
        let channels = self.mean.len();
        let maps = self.maps(pass.weight, pass.bias);
        let mut sums = vec![(0.0, 0.0); channels];
        for (i, (values, gradient)) in self.parts(pass).enumerate() {
            let channel = i % channels;
            let (of_bias, of_weight) = sums_of_gradients(values, gradient, maps[channel]);
            sums[channel].0 += of_bias;
            sums[channel].1 += of_weight;
        }

        let mut of_inputs = Vec::new();
        if pass.of_inputs {
            let by_statistics = self.by_statistics(pass, &sums)?;
            of_inputs.reserve_exact(pass.inputs.len());
            for (i, (values, gradient)) in self.parts(pass).enumerate() {
                let channel = i % channels;
                let (shift, slope) = by_statistics[channel];
                let (shift, slope) = (T::from_f64(shift), T::from_f64(slope));
                let map = maps[channel];
                extend_with_gradients(&mut of_inputs, values, gradient, map, shift, slope);
            }
        }
        let scaled = sums.iter().zip(&self.scale);
        Ok(Gradients {
            of_inputs,
            of_weight: scaled
                .map(|(sums, scale)| T::from_f64(sums.1 * scale))
                .collect(),
            of_bias: sums.iter().map(|sums| T::from_f64(sums.0)).collect(),
        })
    }
}

impl Normalize {
    /// Returns the elements of each channel of each sample, with the gradients of the results.
    fn parts<'a, T: Element>(
        &self,
        pass: &Pass<'a, T>,
    ) -> impl Iterator<Item = (&'a [T], &'a [T])> + use<'a, T> {
        let gradients = pass.gradient.chunks_exact(self.size);
        pass.inputs.chunks_exact(self.size).zip(gradients)
    }

    /// Returns the `shift` and the `slope` of each channel, for [`extend_with_gradients`]. `sums` has the
    /// [`sums_of_gradients`] of each channel.
    fn by_statistics<T: Element>(
        &self,
        pass: &Pass<T>,
        sums: &[(f64, f64)],
    ) -> Result<Vec<(f64, f64)>> {
        let channels = self.mean.len();
        // The gradients of the means, then of the variances. Those of one mean by another statistic add up to 0.
        let mut gradients = vec![0.0; 2 * channels];
        let (of_means, of_variances) = gradients.split_at_mut(channels);
        for (channel, (of_bias, of_weight)) in sums.iter().enumerate() {
            let scale = self.scale[channel];
            let factor = scale * pass.weight[channel].to_f64();
            of_means[channel] = -factor * of_bias;
            of_variances[channel] = -0.5 * factor * scale * scale * of_weight;
        }
        match &self.origin {
            Origin::Earlier => gradients.fill(0.0),
            Origin::Batch => {
                let count = (pass.inputs.len() / channels) as f64;
                gradients.iter_mut().for_each(|sum| *sum /= count);
            }
            Origin::Replicas(joint) => joint.mean_gradients(&mut gradients)?,
        }
        let (of_means, of_variances) = gradients.split_at(channels);
        let pairs = of_means.iter().zip(of_variances);
        Ok(pairs
            .map(|(mean, variance)| (*mean, 2.0 * variance))
            .collect())
    }
}
