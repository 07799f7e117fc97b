//! Windows of pictures, computed by candle's operations for devices on which this crate does not compute.

use candle_core::{Result, Tensor};

/// Windows of pictures of shape `[samples, channels, rows, columns]`.
pub(crate) struct Windows {
    /// The pictures with a border, large enough for a whole number of steps from each place in a window.
    padded: Tensor,
    /// The number of windows along each axis, and the distance from one window to the next.
    counts: [usize; 2],
    steps: [usize; 2],
}

impl Windows {
    /// Returns `counts` windows along each axis of the pictures, of `reach` pixels each. The pictures get a border of
    /// `padding` pixels with the value `border`.
    pub(crate) fn new(
        pictures: &Tensor,
        counts: [usize; 2],
        reach: [usize; 2],
        (stride, padding, border): (usize, usize, f64),
    ) -> Result<Self> {
        // A single window has no next one, and its stride may be much larger than the picture.
        let steps = counts.map(|count| if count == 1 { 1 } else { stride });
        let mut padded = pictures.clone();
        for axis in 0..2 {
            let (dim, size) = (axis + 2, counts[axis] * steps[axis] + reach[axis]);
            let after = size.saturating_sub(padded.dim(dim)? + padding);
            padded = bordered(&padded, dim, padding, after, border)?;
        }
        Ok(Self {
            padded,
            counts,
            steps,
        })
    }

    /// Returns the pixels at the same place of all windows, of shape `[samples, channels, rows of windows, columns of
    /// windows]`.
    pub(crate) fn at(&self, row: usize, column: usize) -> Result<Tensor> {
        let ([rows, columns], [down, right]) = (self.counts, self.steps);
        let (samples, channels, _, _) = self.padded.dims4()?;
        self.padded
            .narrow(2, row, rows * down)?
            .narrow(3, column, columns * right)?
            .reshape((samples, channels, rows, down, columns, right))?
            .narrow(3, 0, 1)?
            .narrow(5, 0, 1)?
            .reshape((samples, channels, rows, columns))
    }
}

/// Adds rows or columns with this value before and after pictures.
fn bordered(x: &Tensor, dim: usize, before: usize, after: usize, value: f64) -> Result<Tensor> {
    let border = |count| {
        let mut shape = x.dims().to_vec();
        shape[dim] = count;
        Tensor::full(value, shape, x.device())?.to_dtype(x.dtype())
    };
    // CUDA cannot launch a kernel for a tensor without elements.
    let mut parts = vec![x.clone()];
    if before > 0 {
        parts.insert(0, border(before)?);
    }
    if after > 0 {
        parts.push(border(after)?);
    }
    Tensor::cat(&parts, dim)
}
