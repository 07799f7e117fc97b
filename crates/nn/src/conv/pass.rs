//! The forward and the backward pass of a convolution, over slices.

use std::array::from_fn;

use pulp::{Simd, WithSimd};

use super::geometry::Geometry;
use super::kernel::correlate;
use super::lines::{Combination, Pixels};
use crate::activation::Limits;
use crate::simd::{Element, extend_with};

/// The number of zeros behind the last frame, so that it can be read in whole vectors.
const BEHIND: usize = 128;

/// The forward pass, with a bias for each channel of the result, and an activation.
pub(super) struct Forward<'a, T> {
    pub(super) geometry: Geometry,
    pub(super) inputs: &'a [T],
    pub(super) weight: &'a [T],
    pub(super) bias: &'a [T],
    pub(super) limits: Limits<T>,
}

impl<T: Element> WithSimd for Forward<'_, T> {
    type Output = Vec<T>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<T> {
        // As many sums at a time as registers hold; a depthwise convolution has one channel to sum for.
        match (self.geometry.outputs, S::REGISTER_COUNT) {
            (1, _) => self.run::<S, 1, 8>(simd),
            (_, 32..) => self.run::<S, 8, 3>(simd),
            _ => self.run::<S, 4, 3>(simd),
        }
    }
}

impl<T: Element> Forward<'_, T> {
    #[inline(always)]
    fn run<S: Simd, const M: usize, const V: usize>(self, simd: S) -> Vec<T> {
        let g = &self.geometry;
        let channels = (g.groups, g.outputs, g.inputs);
        let (inputs, outputs) = (g.groups * g.inputs, g.groups * g.outputs);
        let weight = |group, output, input, tap| {
            self.weight[((group * g.outputs + output) * g.inputs + input) * g.taps() + tap]
        };
        let mut result = Vec::with_capacity(g.samples * outputs * g.output_size());
        let mut lines = Vec::new();
        if g.is_product() {
            let mut pixels = Pixels::new(self.inputs, inputs, g.input_size());
            let sum = Combination::<T, M>::new(channels, pixels.plane(), &[(0, 0)], weight);
            for piece in 0..pixels.pieces() {
                let (source, samples) = pixels.piece(piece);
                let length = samples * g.output_size();
                sum.run::<S, V>(simd, source, length, &mut lines);
                for sample in 0..samples {
                    for output in 0..outputs {
                        let line = sum.line(&lines, output, length);
                        let line = &line[sample * g.output_size()..][..g.output_size()];
                        self.append(output, line, &mut result);
                    }
                }
            }
            return result;
        }
        let width = g.columns.input_frame();
        let plane = g.input_plane(width);
        let sum = Combination::<T, M>::new(channels, plane, &g.taps_by_frame(width), weight);
        let mut frames = vec![T::zero(); inputs * plane + BEHIND];
        for sample in self.inputs.chunks_exact(inputs * g.input_size()) {
            g.frame_inputs(sample, width, &mut frames);
            sum.run::<S, V>(simd, &frames, g.line(width), &mut lines);
            for output in 0..outputs {
                let line = sum.line(&lines, output, g.line(width));
                for row in line.chunks(width) {
                    self.append(output, &row[..g.columns.output], &mut result);
                }
            }
        }
        result
    }

    /// Adds the bias to a part of a channel, limits it, and appends it to the result.
    #[inline(always)]
    fn append(&self, output: usize, part: &[T], result: &mut Vec<T>) {
        let (bias, limits) = (self.bias[output], self.limits);
        extend_with(result, part, |y| limits.apply(y + bias));
    }
}

/// The backward pass. It computes the gradients of the inputs and of the weight, each only if it is requested.
pub(super) struct Backward<'a, T> {
    pub(super) geometry: Geometry,
    pub(super) inputs: &'a [T],
    pub(super) weight: &'a [T],
    pub(super) gradient: &'a [T],
    pub(super) of_inputs: bool,
    pub(super) of_weight: bool,
}

impl<T: Element> WithSimd for Backward<'_, T> {
    type Output = (Vec<T>, Vec<T>);

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> (Vec<T>, Vec<T>) {
        let g = &self.geometry;
        match (g.inputs.max(g.outputs), S::REGISTER_COUNT) {
            (1, _) => self.run::<S, 1, 8, 1, 9>(simd),
            (_, 32..) => self.run::<S, 8, 3, 4, 6>(simd),
            _ => self.run::<S, 4, 3, 4, 2>(simd),
        }
    }
}

impl<T: Element> Backward<'_, T> {
    #[inline(always)]
    fn run<S: Simd, const M: usize, const V: usize, const A: usize, const B: usize>(
        self,
        simd: S,
    ) -> (Vec<T>, Vec<T>) {
        match self.geometry.is_product() {
            true => self.product::<S, M, V, A, B>(simd),
            false => self.frames::<S, M, V, A, B>(simd),
        }
    }

    /// Returns the weight for a group's output, input and tap.
    #[inline(always)]
    fn weight(&self, group: usize, output: usize, input: usize, tap: usize) -> T {
        let g = &self.geometry;
        self.weight[((group * g.outputs + output) * g.inputs + input) * g.taps() + tap]
    }

    #[inline(always)]
    fn product<S: Simd, const M: usize, const V: usize, const A: usize, const B: usize>(
        self,
        simd: S,
    ) -> (Vec<T>, Vec<T>) {
        let g = &self.geometry;
        let size = g.input_size();
        let (inputs, outputs) = (g.groups * g.inputs, g.groups * g.outputs);
        let mut pixels = Pixels::new(self.inputs, inputs, size);
        let mut gradients = Pixels::new(self.gradient, outputs, size);
        let channels = (g.groups, g.inputs, g.outputs);
        let sum =
            Combination::<T, M>::new(channels, pixels.plane(), &[(0, 0)], |group, i, o, _| {
                self.weight(group, o, i, 0)
            });
        let mut of_weight = WeightGradient::<T>::new(g, pixels.plane(), &[0], 0, pixels.plane());
        let mut of_inputs = Vec::with_capacity(if self.of_inputs { self.inputs.len() } else { 0 });
        let mut lines = Vec::new();
        for piece in 0..pixels.pieces() {
            let (gradient, samples) = gradients.piece(piece);
            let length = samples * size;
            if self.of_inputs {
                sum.run::<S, V>(simd, gradient, length, &mut lines);
                for sample in 0..samples {
                    for input in 0..inputs {
                        let line = sum.line(&lines, input, length);
                        of_inputs.extend_from_slice(&line[sample * size..][..size]);
                    }
                }
            }
            if self.of_weight {
                let (pixels, _) = pixels.piece(piece);
                of_weight.add::<S, A, B>(simd, gradient, pixels, 1, length);
            }
        }
        (of_inputs, of_weight.sums)
    }

    #[inline(always)]
    fn frames<S: Simd, const M: usize, const V: usize, const A: usize, const B: usize>(
        self,
        simd: S,
    ) -> (Vec<T>, Vec<T>) {
        let g = &self.geometry;
        let (inputs, outputs) = (g.groups * g.inputs, g.groups * g.outputs);
        // Both kinds of frames have the same width, so that a line of one meets a line of the other.
        let width = g.columns.input_frame().max(g.columns.gradient_frame());
        let (plane, of_plane) = (g.input_plane(width), g.gradient_plane(width));
        let block = self.block(inputs * plane + outputs * of_plane, g.line(width));
        let mut frames = vec![T::zero(); block * inputs * plane];
        let mut gradients = vec![T::zero(); block * outputs * of_plane + BEHIND];

        let phases = g.phases(width);
        let channels = (g.groups, g.inputs, g.outputs);
        let sums: Vec<Combination<T, M>> = phases
            .iter()
            .map(|phase| {
                Combination::new(channels, of_plane, &phase.taps, |group, i, o, tap| {
                    self.weight(group, o, i, tap)
                })
            })
            .collect();
        let taps = g.tap_offsets(width);
        let first = g.first_gradient(width);
        let mut of_weight = WeightGradient::<T>::new(g, plane, &taps, first, of_plane);
        let mut of_inputs = Vec::with_capacity(if self.of_inputs { self.inputs.len() } else { 0 });
        let mut lines = vec![Vec::new(); phases.len()];

        let samples = self.inputs.chunks(block * inputs * g.input_size());
        let of_samples = self.gradient.chunks(block * outputs * g.output_size());
        for (samples, of_samples) in samples.zip(of_samples) {
            let of_samples = of_samples.chunks_exact(outputs * g.output_size());
            let count = of_samples.len();
            for (i, gradient) in of_samples.enumerate() {
                let frame = &mut gradients[i * outputs * of_plane..];
                g.frame_gradients(gradient, width, &mut frame[..outputs * of_plane]);
                if self.of_inputs {
                    for ((sum, phase), lines) in sums.iter().zip(&phases).zip(&mut lines) {
                        sum.run::<S, V>(simd, frame, phase.length, lines);
                    }
                    for input in 0..inputs {
                        let line = |phase: usize| {
                            let length = phases[phase].length;
                            sums[phase].line(&lines[phase], input, length)
                        };
                        g.append_inputs(&phases, line, width, &mut of_inputs);
                    }
                }
            }
            if self.of_weight {
                let samples = samples.chunks_exact(inputs * g.input_size());
                let frame = frames.chunks_exact_mut(inputs * plane);
                samples
                    .zip(frame)
                    .for_each(|(sample, frame)| g.frame_inputs(sample, width, frame));
                of_weight.add::<S, A, B>(simd, &gradients, &frames, count, g.line(width));
            }
        }
        (of_inputs, of_weight.sums)
    }

    /// Returns the number of samples over which the weight's gradient is summed at a time: enough that the sum over the
    /// lanes of a vector costs little, and few enough for the second-level cache.
    fn block(&self, sample: usize, line: usize) -> usize {
        const LINE: usize = 4096;
        const BYTES: usize = 768 << 10;
        let fit = BYTES / (sample * size_of::<T>());
        let block = LINE.div_ceil(line).min(fit).min(self.geometry.samples);
        if self.of_weight { block.max(1) } else { 1 }
    }
}

/// The gradient of a weight, summed over samples.
struct WeightGradient<T> {
    groups: usize,
    outputs: usize,
    /// The offset of each term in the frames of a group's inputs, and the number of elements of these frames.
    terms: Vec<usize>,
    inputs: usize,
    /// The offset of a channel's gradients in their frame, and the number of elements of this frame.
    first: usize,
    plane: usize,
    sums: Vec<T>,
}

impl<T: Element> WeightGradient<T> {
    fn new(g: &Geometry, input_plane: usize, taps: &[usize], first: usize, plane: usize) -> Self {
        let terms =
            (0..g.inputs).flat_map(|input| taps.iter().map(move |t| input * input_plane + t));
        let terms: Vec<usize> = terms.collect();
        Self {
            groups: g.groups,
            outputs: g.outputs,
            inputs: g.inputs * input_plane,
            first,
            plane,
            sums: vec![T::zero(); g.groups * g.outputs * terms.len()],
            terms,
        }
    }

    /// Adds the parts of the gradient that come from these samples.
    #[inline(always)]
    fn add<S: Simd, const A: usize, const B: usize>(
        &mut self,
        simd: S,
        gradients: &[T],
        inputs: &[T],
        samples: usize,
        length: usize,
    ) {
        let (outputs, terms) = (self.outputs, self.terms.len());
        let of_sample = self.groups * outputs * self.plane;
        let sample = self.groups * self.inputs;
        for group in 0..self.groups {
            for output in (0..outputs).step_by(A) {
                // The last place is repeated where fewer are left; its sums are computed again, and not used.
                let lefts: [usize; A] = from_fn(|i| {
                    let output = group * outputs + (output + i).min(outputs - 1);
                    output * self.plane + self.first
                });
                for term in (0..terms).step_by(B) {
                    let rights: [usize; B] =
                        from_fn(|j| group * self.inputs + self.terms[(term + j).min(terms - 1)]);
                    let mut sums = [[T::splat(simd, T::zero()); B]; A];
                    for i in 0..samples {
                        let left = (&gradients[i * of_sample..], lefts);
                        let right = (&inputs[i * sample..], rights);
                        sums = correlate::<S, T, A, B>(simd, left, right, length, sums);
                    }
                    for (i, sums) in sums.iter().take(outputs - output).enumerate() {
                        let at = (group * outputs + output + i) * terms + term;
                        let kept = &mut self.sums[at..(at + B).min(at - term + terms)];
                        for (kept, sum) in kept.iter_mut().zip(sums) {
                            *kept += T::sum(simd, *sum);
                        }
                    }
                }
            }
        }
    }
}
