//! The places of a convolution's numbers in memory.
//!
//! Each picture is copied into a larger plane with a border of zeros, its *frame*. There, the taps of a kernel are at fixed
//! distances from each other at every position of the kernel: for a position (row, column) of the result, a tap
//! (row, column) reads the frame at the sum of both. With all rows of a frame in one line, of one width, a
//! convolution is a sum of shifted lines times weights. The positions where a row ends and the next one begins are
//! computed too, and left out of the result.
//!
//! A convolution with stride `s` has `s · s` frames for each picture, its *phases*: rows and columns `s` apart, so
//! that neighbours of a phase are what neighbouring positions read by the same tap.

use std::ops::Range;

/// One of the two axes of a convolution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub(super) input: usize,
    pub(super) output: usize,
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
    pub(super) dilation: usize,
}

impl Axis {
    /// Returns the phase that a tap reads, and how far from the position of the result.
    pub(super) fn tap(&self, tap: usize) -> (usize, usize) {
        let place = tap * self.dilation;
        (place % self.stride, place / self.stride)
    }

    /// Returns the largest distance of a tap.
    fn reach(&self) -> usize {
        (self.kernel - 1) * self.dilation / self.stride
    }

    /// Returns the size of a frame for the inputs.
    pub(super) fn input_frame(&self) -> usize {
        self.output + self.reach()
    }

    /// Returns the places in a phase that inputs have.
    pub(super) fn places(&self, phase: usize) -> Range<usize> {
        let start = self.padding.saturating_sub(phase).div_ceil(self.stride);
        let end = (self.input + self.padding).saturating_sub(phase);
        start..end.div_ceil(self.stride).max(start)
    }

    /// Returns the input at a place of a phase.
    pub(super) fn input(&self, phase: usize, place: usize) -> usize {
        place * self.stride + phase - self.padding
    }

    /// Returns the number of zeros before the gradients in their frame: the taps of the first input reach back by it.
    pub(super) fn lead(&self) -> usize {
        let back = |tap| {
            let (phase, distance) = self.tap(tap);
            distance.saturating_sub(self.places(phase).start)
        };
        (0..self.kernel).map(back).max().unwrap_or(0)
    }

    /// Returns the size of a frame for the gradients.
    pub(super) fn gradient_frame(&self) -> usize {
        let ends = (0..self.stride).map(|phase| self.places(phase).end);
        self.lead() + ends.max().unwrap_or(0).max(self.output)
    }
}

/// The sizes of a convolution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) samples: usize,
    pub(super) groups: usize,
    /// Channels of a group.
    pub(super) inputs: usize,
    /// Channels of a group.
    pub(super) outputs: usize,
    pub(super) rows: Axis,
    pub(super) columns: Axis,
}

impl Geometry {
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

    /// Returns whether each result needs one pixel of each channel only, that of its own place: a product of matrices.
    pub(super) fn is_product(&self) -> bool {
        [self.rows, self.columns]
            .iter()
            .all(|axis| axis.kernel == 1 && axis.stride == 1 && axis.padding == 0)
    }

    /// Returns the number of elements of an input channel in frames of the given width.
    pub(super) fn input_plane(&self, width: usize) -> usize {
        self.rows.stride * self.columns.stride * self.rows.input_frame() * width
    }

    /// Returns the number of elements of a gradient's channel in a frame of the given width.
    pub(super) fn gradient_plane(&self, width: usize) -> usize {
        self.rows.gradient_frame() * width
    }

    /// Returns where each tap begins in the frames of a channel.
    pub(super) fn tap_offsets(&self, width: usize) -> Vec<usize> {
        let frame = self.rows.input_frame() * width;
        let mut offsets = Vec::with_capacity(self.taps());
        for row in 0..self.rows.kernel {
            let (row_phase, down) = self.rows.tap(row);
            for column in 0..self.columns.kernel {
                let (column_phase, right) = self.columns.tap(column);
                let phase = row_phase * self.columns.stride + column_phase;
                offsets.push(phase * frame + down * width + right);
            }
        }
        offsets
    }

    /// Returns each tap with the place where it begins.
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
                let (row_phase, column_phase) = (phase / columns.stride, phase % columns.stride);
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

    /// Returns the place of the first gradient in its frame.
    pub(super) fn first_gradient(&self, width: usize) -> usize {
        self.rows.lead() * width + self.columns.lead()
    }

    /// Returns how many places of a line lie between the first result and the last, both included.
    pub(super) fn line(&self, width: usize) -> usize {
        (self.rows.output - 1) * width + self.columns.output
    }

    /// Returns all phases. Together, their taps make the gradients of the inputs, row by row.
    pub(super) fn phases(&self, width: usize) -> Vec<Phase> {
        let strides = self.rows.stride * self.columns.stride;
        let phases = (0..strides).map(|phase| self.phase(phase, width));
        phases.collect()
    }

    /// Appends the gradients of a channel's inputs, from the lines of all phases.
    #[inline(always)]
    pub(super) fn append_phases<'a, T: Copy + 'a>(
        &self,
        phases: &[Phase],
        line: impl Fn(usize) -> &'a [T],
        width: usize,
        result: &mut Vec<T>,
    ) {
        let (rows, columns) = (&self.rows, &self.columns);
        for row in 0..rows.input {
            let place = row + rows.padding;
            let (row_phase, row) = (place % rows.stride, place / rows.stride);
            let phase = |column_phase| row_phase * columns.stride + column_phase;
            if columns.stride == 1 {
                let line = &line(phase(0))[(row - phases[phase(0)].first.0) * width..];
                result.extend_from_slice(&line[..columns.input]);
                continue;
            }
            for column in 0..columns.input {
                let place = column + columns.padding;
                let (column_phase, column) = (place % columns.stride, place / columns.stride);
                let (phase, line) = (&phases[phase(column_phase)], line(phase(column_phase)));
                let (row, column) = (row - phase.first.0, column - phase.first.1);
                result.push(line[row * width + column]);
            }
        }
    }

    fn phase(&self, phase: usize, width: usize) -> Phase {
        let (rows, columns) = (&self.rows, &self.columns);
        let phase = (phase / columns.stride, phase % columns.stride);
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
            first: (down.start, right.start),
        }
    }
}

/// The inputs that one phase's taps read.
pub(super) struct Phase {
    /// Taps, and where each begins in the frame of the gradients.
    pub(super) taps: Vec<(usize, usize)>,
    /// The places of a line from the first input to the last.
    pub(super) length: usize,
    /// The row and the column of the first input in the phase.
    pub(super) first: (usize, usize),
}
