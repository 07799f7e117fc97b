//! One axis of a convolution: rows or columns. `geometry` explains frames and phases.

use std::ops::Range;

use candle_core::{Result, bail};
use candle_nn::Conv2dConfig;

/// The sizes of one of the two axes of a convolution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub(super) input: usize,
    pub(super) output: usize,
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
    dilation: usize,
    /// The number of phases that taps read.
    pub(super) phases: usize,
}

impl Axis {
    /// The most pixels of an axis with its padding, so that sums and products of two sizes do not overflow.
    const MOST: usize = u32::MAX as usize;

    pub(super) fn new(input: usize, kernel: usize, config: &Conv2dConfig) -> Result<Self> {
        let Conv2dConfig {
            padding,
            stride,
            dilation,
            ..
        } = *config;
        let places = || {
            let padded = padding.checked_mul(2)?.checked_add(input)?;
            let span = kernel
                .checked_sub(1)?
                .checked_mul(dilation)?
                .checked_add(1)?;
            padded.checked_sub(span).filter(|_| padded <= Self::MOST)
        };
        match places() {
            Some(places) if dilation > 0 && stride > 0 => {
                // A larger stride does not change anything.
                let stride = stride.min(places + 1);
                // The offsets of the taps repeat from the tap on that has the offset of the first one, 0.
                let repeats = |tap: &usize| (tap * dilation).is_multiple_of(stride);
                Ok(Self {
                    input,
                    output: places / stride + 1,
                    kernel,
                    stride,
                    padding,
                    dilation,
                    phases: (1..kernel).find(repeats).unwrap_or(kernel),
                })
            }
            _ => bail!(
                "a kernel of {kernel} pixels with dilation {dilation} and stride {stride} does not fit {input} pixels \
                 with padding {padding}; kernel, dilation and stride are at least 1, the kernel is not larger than the \
                 padded pixels, and these are at most {}",
                Self::MOST
            ),
        }
    }

    /// Returns the phase that a tap reads, and the distance in this phase from the position of the result to the tap.
    pub(super) fn tap(&self, tap: usize) -> (usize, usize) {
        (tap % self.phases, tap * self.dilation / self.stride)
    }

    /// Returns the first row or column of a phase.
    fn offset(&self, phase: usize) -> usize {
        phase * self.dilation % self.stride
    }

    /// Returns the largest distance of a tap.
    fn reach(&self) -> usize {
        (self.kernel - 1) * self.dilation / self.stride
    }

    /// Returns the size of a frame for the inputs.
    pub(super) fn input_frame(&self) -> usize {
        self.output + self.reach()
    }

    /// Returns the range of places in a phase that inputs have. All other places are zeros.
    pub(super) fn places(&self, phase: usize) -> Range<usize> {
        let offset = self.offset(phase);
        let start = self.padding.saturating_sub(offset).div_ceil(self.stride);
        let end = (self.input + self.padding).saturating_sub(offset);
        start..end.div_ceil(self.stride).max(start)
    }

    /// Returns the input at a place of a phase.
    pub(super) fn input(&self, phase: usize, place: usize) -> usize {
        place * self.stride + self.offset(phase) - self.padding
    }

    /// Returns the number of zeros before the gradients in their frame. Taps that reach back before the first gradient
    /// read them.
    pub(super) fn lead(&self) -> usize {
        let back = |tap| {
            let (phase, distance) = self.tap(tap);
            distance.saturating_sub(self.places(phase).start)
        };
        (0..self.kernel).map(back).max().unwrap_or(0)
    }

    /// Returns the size of a frame for the gradients.
    pub(super) fn gradient_frame(&self) -> usize {
        let ends = (0..self.phases).map(|phase| self.places(phase).end);
        self.lead() + ends.max().unwrap_or(0).max(self.output)
    }
}
