//! The layout of a convolution's data in memory.
//!
//! Each picture is copied into a larger plane with a border of zeros, its *frame*. A frame is a single line of numbers,
//! row after row. There, the distance between two taps of the kernel is the same at every position of the kernel: for a
//! position (row, column) of the result, a tap (row, column) reads the frame at the sum of both. So a convolution is a
//! sum of shifted lines times weights. The positions where a row ends and the next one begins are computed too, and
//! left out of the result.
//!
//! A convolution with stride `s` splits a picture into *phases*. Each phase has every `s`-th row and every `s`-th
//! column, from its own offset on. At neighbouring positions of the kernel, a tap reads neighbouring elements of one
//! phase. Each phase that taps read has its own frame; the other phases have none, so the frames stay small however
//! large the stride is.

use candle_core::{Result, Tensor, bail};
use candle_nn::Conv2dConfig;

use super::axis::Axis;
use crate::simd::Element;

/// The sizes of a convolution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) samples: usize,
    pub(super) groups: usize,
    /// The number of input channels of a group.
    pub(super) inputs: usize,
    /// The number of output channels of a group.
    pub(super) outputs: usize,
    pub(super) rows: Axis,
    pub(super) columns: Axis,
}

impl Geometry {
    /// Returns the sizes of a convolution of `inputs` with `weight`.
    ///
    /// # Errors
    /// If the shapes do not fit, or if the sizes are larger than memory.
    pub(super) fn new(inputs: &Tensor, weight: &Tensor, config: &Conv2dConfig) -> Result<Self> {
        let (samples, channels, height, width) = inputs.dims4()?;
        let (outputs, of_group, kernel_rows, kernel_columns) = weight.dims4()?;
        let groups = config.groups;
        check_groups(channels, outputs, groups)?;
        if of_group != channels / groups {
            bail!(
                "inputs of shape {:?} and a weight of {:?} do not fit {groups} groups; \
                 inputs [samples, channels, rows, columns] fit a weight [outputs, channels / groups, rows, columns]",
                inputs.shape(),
                weight.shape()
            );
        }
        let geometry = Self {
            samples,
            groups,
            inputs: of_group,
            outputs: outputs / groups,
            rows: Axis::new(height, kernel_rows, config)?,
            columns: Axis::new(width, kernel_columns, config)?,
        };
        if !geometry.is_addressable() {
            bail!(
                "a convolution of inputs of shape {:?} with a weight of {:?}, padding {} and dilation {} needs more \
                 memory than there can be; use a smaller padding or dilation",
                inputs.shape(),
                weight.shape(),
                config.padding,
                config.dilation
            );
        }
        Ok(geometry)
    }

    /// Returns true if an upper bound of this convolution's memory, in bytes, does not overflow.
    fn is_addressable(&self) -> bool {
        let (rows, columns) = (&self.rows, &self.columns);
        let frame = |axis: &Axis| axis.phases * axis.input_frame().max(axis.gradient_frame());
        // Channels are computed by up to 8 at a time, and an element has up to 8 bytes.
        let factors = [
            self.samples.max(1),
            self.groups,
            self.inputs.max(self.outputs).max(8) * 2,
            frame(rows),
            frame(columns),
            size_of::<f64>(),
        ];
        let size = factors
            .into_iter()
            .try_fold(1usize, |size, factor| size.checked_mul(factor));
        size.is_some_and(|size| size <= isize::MAX as usize)
    }

    /// Returns the shape of the result.
    pub(super) fn result(&self) -> (usize, usize, usize, usize) {
        let (rows, columns) = (self.rows.output, self.columns.output);
        (self.samples, self.groups * self.outputs, rows, columns)
    }

    pub(super) fn taps(&self) -> usize {
        self.rows.kernel * self.columns.kernel
    }

    pub(super) fn input_size(&self) -> usize {
        self.rows.input * self.columns.input
    }

    pub(super) fn output_size(&self) -> usize {
        self.rows.output * self.columns.output
    }

    /// Returns the number of elements of a sample.
    pub(super) fn sample_inputs(&self) -> usize {
        self.groups * self.inputs * self.input_size()
    }

    /// Returns the number of elements of a sample's result.
    pub(super) fn sample_outputs(&self) -> usize {
        self.groups * self.outputs * self.output_size()
    }

    /// Returns true if each result needs a single pixel of each channel, the one at its own place. The convolution is
    /// then a product of matrices.
    pub(super) fn is_product(&self) -> bool {
        [self.rows, self.columns]
            .iter()
            .all(|axis| axis.kernel == 1 && axis.padding == 0 && axis.input == axis.output)
    }

    /// Returns the number of elements of an input channel in frames of the given width.
    pub(super) fn input_plane(&self, width: usize) -> usize {
        self.rows.phases * self.columns.phases * self.rows.input_frame() * width
    }

    /// Returns the number of elements of a gradient's channel in a frame of the given width.
    pub(super) fn gradient_plane(&self, width: usize) -> usize {
        self.rows.gradient_frame() * width
    }

    /// Returns the offset of each tap in the frames of a channel.
    pub(super) fn tap_offsets(&self, width: usize) -> Vec<usize> {
        let frame = self.rows.input_frame() * width;
        let mut offsets = Vec::with_capacity(self.taps());
        for row in 0..self.rows.kernel {
            let (row_phase, down) = self.rows.tap(row);
            for column in 0..self.columns.kernel {
                let (column_phase, right) = self.columns.tap(column);
                let phase = row_phase * self.columns.phases + column_phase;
                offsets.push(phase * frame + down * width + right);
            }
        }
        offsets
    }

    /// Returns each tap with its offset in the frames of a channel.
    pub(super) fn taps_by_frame(&self, width: usize) -> Vec<(usize, usize)> {
        self.tap_offsets(width).into_iter().enumerate().collect()
    }

    /// Copies the channels of a sample into frames. The borders are not written.
    pub(super) fn frame_inputs<T: Copy>(&self, sample: &[T], width: usize, frames: &mut [T]) {
        let (rows, columns) = (&self.rows, &self.columns);
        let frame = rows.input_frame() * width;
        let pictures = sample.chunks_exact(self.input_size());
        for (picture, frames) in pictures.zip(frames.chunks_exact_mut(self.input_plane(width))) {
            for (phase, frame) in frames.chunks_exact_mut(frame).enumerate() {
                let (row_phase, column_phase) = (phase / columns.phases, phase % columns.phases);
                let mut places = columns.places(column_phase);
                places.end = places.end.min(columns.input_frame());
                if places.is_empty() {
                    continue;
                }
                let first = columns.input(column_phase, places.start);
                for row in rows.places(row_phase) {
                    if row >= rows.input_frame() {
                        break;
                    }
                    let from = &picture[rows.input(row_phase, row) * columns.input + first..];
                    let to = &mut frame[row * width..][places.clone()];
                    if columns.stride == 1 {
                        to.copy_from_slice(&from[..to.len()]);
                    } else {
                        let from = from.iter().step_by(columns.stride);
                        to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
                    }
                }
            }
        }
    }

    /// Copies the gradients of a sample's results into frames. The borders are not written.
    pub(super) fn frame_gradients<T: Copy>(&self, sample: &[T], width: usize, frames: &mut [T]) {
        let start = self.first_gradient(width);
        let pictures = sample.chunks_exact(self.output_size());
        for (picture, frame) in pictures.zip(frames.chunks_exact_mut(self.gradient_plane(width))) {
            let from = picture.chunks_exact(self.columns.output);
            let to = frame[start..].chunks_mut(width);
            from.zip(to)
                .for_each(|(from, to)| to[..from.len()].copy_from_slice(from));
        }
    }

    /// Returns the offset of the first gradient in its frame.
    pub(super) fn first_gradient(&self, width: usize) -> usize {
        self.rows.lead() * width + self.columns.lead()
    }

    /// Returns the number of places in a line from the first result to the last, both included.
    pub(super) fn line(&self, width: usize) -> usize {
        (self.rows.output - 1) * width + self.columns.output
    }

    /// Returns the phases that taps read, with the taps that make the gradients of their inputs.
    pub(super) fn phases(&self, width: usize) -> Vec<Phase> {
        let columns = self.columns.phases;
        let phases = (0..self.rows.phases * columns)
            .map(|phase| self.phase((phase / columns, phase % columns), width));
        phases.collect()
    }

    fn phase(&self, phase: (usize, usize), width: usize) -> Phase {
        let (rows, columns) = (&self.rows, &self.columns);
        let (down, right) = (rows.places(phase.0), columns.places(phase.1));
        let mut taps = Vec::new();
        for row in 0..rows.kernel {
            for column in 0..columns.kernel {
                let (row_tap, column_tap) = (rows.tap(row), columns.tap(column));
                if (row_tap.0, column_tap.0) == phase {
                    let down = down.start + rows.lead() - row_tap.1;
                    let right = right.start + columns.lead() - column_tap.1;
                    taps.push((row * columns.kernel + column, down * width + right));
                }
            }
        }
        let empty = down.is_empty() || right.is_empty();
        Phase {
            taps,
            length: match empty {
                true => 0,
                false => (down.len() - 1) * width + right.len(),
            },
            first: (
                rows.input(phase.0, down.start),
                columns.input(phase.1, right.start),
            ),
            columns: right.len(),
        }
    }

    /// Appends the gradients of a channel's inputs, from the lines of all phases. An input that no tap reads has the
    /// gradient 0.
    #[inline(always)]
    pub(super) fn append_inputs<'a, T: Element>(
        &self,
        phases: &[Phase],
        line: impl Fn(usize) -> &'a [T],
        width: usize,
        result: &mut Vec<T>,
    ) {
        let start = result.len();
        result.resize(start + self.input_size(), T::zero());
        let picture = &mut result[start..];
        let (down, right) = (self.rows.stride, self.columns.stride);
        for (number, phase) in phases.iter().enumerate() {
            let rows = line(number).chunks(width);
            for (from, row) in rows.zip((phase.first.0..self.rows.input).step_by(down)) {
                let from = &from[..phase.columns];
                let to = &mut picture[row * self.columns.input + phase.first.1..];
                if right == 1 {
                    to[..from.len()].copy_from_slice(from);
                } else {
                    let to = to.iter_mut().step_by(right);
                    to.zip(from).for_each(|(to, from)| *to = *from);
                }
            }
        }
    }
}

/// Refuses groups that do not divide the channels.
pub(super) fn check_groups(inputs: usize, outputs: usize, groups: usize) -> Result<()> {
    let divides = |channels: usize| groups > 0 && channels.is_multiple_of(groups);
    if !divides(inputs) || !divides(outputs) {
        bail!(
            "{groups} groups do not divide {inputs} channels of the inputs and {outputs} of the outputs; \
             the number of groups is at least 1 and divides both"
        );
    }
    Ok(())
}

/// The inputs that one phase's taps read.
pub(super) struct Phase {
    /// Each tap, with its offset in the frame of the gradients.
    pub(super) taps: Vec<(usize, usize)>,
    /// The distance from the first input to the end of the last one, in a line.
    pub(super) length: usize,
    /// The row and the column of the first input in its picture.
    first: (usize, usize),
    /// The number of inputs in a row.
    columns: usize,
}
