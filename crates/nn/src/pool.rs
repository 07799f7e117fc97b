//! Pooling of pictures.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};

use crate::backward::keep;
use crate::simd::{Element, Sum};
use crate::storage::{computed_here, elements, slice, with_type};

/// The windows of a pooling: as many rows as columns, a step, and a border around the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool2d {
    /// The rows and the columns of a window.
    pub kernel: usize,
    /// The distance from one window to the next.
    pub stride: usize,
    /// The rows and columns added at each side. They have no part in a maximum, and are zeros in an average.
    pub padding: usize,
}

impl Pool2d {
    /// Returns windows next to each other, without a border.
    pub fn new(kernel: usize) -> Self {
        Self {
            kernel,
            stride: kernel,
            padding: 0,
        }
    }

    fn output(&self, input: usize) -> Result<usize> {
        let padded = input + 2 * self.padding;
        if self.kernel == 0 || self.stride == 0 || padded < self.kernel {
            bail!("{self:?} does not fit {input} pixels");
        }
        if self.padding * 2 > self.kernel {
            bail!(
                "{self:?} has windows outside of the picture; a padding is at most half of the kernel"
            );
        }
        Ok((padded - self.kernel) / self.stride + 1)
    }

    /// Returns the inputs of a window.
    fn window(&self, output: usize, input: usize) -> std::ops::Range<usize> {
        let start = output * self.stride;
        let end = (start + self.kernel)
            .saturating_sub(self.padding)
            .min(input);
        start.saturating_sub(self.padding).min(end)..end
    }
}

/// Returns the largest value of each window of pictures of shape `[samples, channels, rows, columns]`. The first of
/// several equal values has the gradient. As in PyTorch, a NaN is the largest. Rows and columns that do not fill a
/// window are left out.
///
/// # Errors
/// If the windows do not fit the pictures, or candle's.
pub fn max_pool2d(inputs: &Tensor, windows: &Pool2d) -> Result<Tensor> {
    let op = Pool::new(inputs, windows, Kind::Max)?;
    if op.elsewhere(inputs) {
        let (shifts, [.., rows, columns]) = op.shifts(inputs, f64::NEG_INFINITY)?;
        let mut largest: Option<Tensor> = None;
        for shifted in shifts {
            largest = Some(match largest {
                // Of two equal values each has half of the gradient.
                Some(largest) => largest.maximum(&shifted)?,
                None => shifted,
            });
        }
        return match largest {
            Some(largest) => largest.narrow(2, 0, rows)?.narrow(3, 0, columns),
            None => bail!("{windows:?} has no elements"),
        };
    }
    inputs.contiguous()?.apply_op1(op)
}

/// Returns the mean of each window of pictures of shape `[samples, channels, rows, columns]`. Rows and columns that do
/// not fill a window are left out.
///
/// # Errors
/// If the windows do not fit the pictures, or candle's.
pub fn avg_pool2d(inputs: &Tensor, windows: &Pool2d) -> Result<Tensor> {
    let op = Pool::new(inputs, windows, Kind::Mean)?;
    if op.elsewhere(inputs) {
        let (shifts, [.., rows, columns]) = op.shifts(inputs, 0.0)?;
        let mut sum: Option<Tensor> = None;
        for shifted in shifts {
            sum = Some(match sum {
                Some(sum) => (sum + shifted)?,
                None => shifted,
            });
        }
        return match sum {
            Some(sum) => {
                let mean = (sum / (windows.kernel * windows.kernel) as f64)?;
                mean.narrow(2, 0, rows)?.narrow(3, 0, columns)
            }
            None => bail!("{windows:?} has no elements"),
        };
    }
    inputs.contiguous()?.apply_op1(op)
}

/// Returns the mean of each picture: `[samples, channels, rows, columns]` becomes `[samples, channels]`.
///
/// # Errors
/// If the inputs have another rank, or candle's.
pub fn global_avg_pool2d(inputs: &Tensor) -> Result<Tensor> {
    let (_, _, rows, columns) = inputs.dims4()?;
    if inputs.elem_count() == 0 || !computed_here(&[inputs]) {
        return inputs.flatten_from(2)?.mean(2);
    }
    let size = rows * columns;
    inputs.contiguous()?.apply_op1(Mean { size })
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Max,
    Mean,
}

struct Pool {
    windows: Pool2d,
    kind: Kind,
    /// Rows and columns of a picture.
    input: (usize, usize),
    output: (usize, usize),
}

impl Pool {
    fn new(inputs: &Tensor, windows: &Pool2d, kind: Kind) -> Result<Self> {
        let (_, _, rows, columns) = inputs.dims4()?;
        Ok(Self {
            windows: *windows,
            kind,
            input: (rows, columns),
            output: (windows.output(rows)?, windows.output(columns)?),
        })
    }

    fn elsewhere(&self, inputs: &Tensor) -> bool {
        inputs.elem_count() == 0 || !computed_here(&[inputs])
    }

    /// Returns, for each place in a window, the values of all windows there, with candle's operations; and the shape
    /// of the result.
    fn shifts(&self, inputs: &Tensor, border: f64) -> Result<(Vec<Tensor>, [usize; 4])> {
        let Pool2d {
            kernel,
            stride,
            padding,
        } = self.windows;
        let (samples, channels, _, _) = inputs.dims4()?;
        let (rows, columns) = self.output;
        let mut padded = inputs.clone();
        for (dim, outputs) in [(2, rows), (3, columns)] {
            // A whole number of steps for each place in the window.
            let size = outputs * stride + kernel;
            let after = size.saturating_sub(padded.dim(dim)? + padding);
            for (count, first) in [(padding, true), (after, false)] {
                if count > 0 {
                    let mut shape = padded.dims().to_vec();
                    shape[dim] = count;
                    let border = Tensor::full(border, shape, inputs.device())?;
                    let border = border.to_dtype(inputs.dtype())?;
                    let parts = match first {
                        true => [&border, &padded],
                        false => [&padded, &border],
                    };
                    padded = Tensor::cat(&parts, dim)?;
                }
            }
        }
        let mut shifts = Vec::with_capacity(kernel * kernel);
        for row in 0..kernel {
            for column in 0..kernel {
                let shifted = padded
                    .narrow(2, row, rows * stride)?
                    .narrow(3, column, columns * stride)?
                    .reshape((samples, channels, rows, stride, columns, stride))?
                    .narrow(3, 0, 1)?
                    .narrow(5, 0, 1)?
                    .reshape((samples, channels, rows, columns))?;
                shifts.push(shifted);
            }
        }
        Ok((shifts, [samples, channels, rows, columns]))
    }

    /// Returns whether the windows are the pairs of rows and columns, which is the most frequent case.
    fn in_pairs(&self) -> bool {
        self.windows == Pool2d::new(2)
    }

    fn forward<T: Element>(&self, inputs: &[T]) -> Vec<T> {
        let (rows, columns) = self.output;
        let (height, width) = self.input;
        let pictures = inputs.chunks_exact(height * width);
        let mut result = Vec::with_capacity(pictures.len() * rows * columns);
        let area = T::from_f64((self.windows.kernel * self.windows.kernel) as f64);
        for picture in pictures {
            if self.kind == Kind::Max && self.in_pairs() {
                for pair in picture.chunks_exact(2 * width).take(rows) {
                    let (above, below) = pair.split_at(width);
                    let pairs = above
                        .as_chunks::<2>()
                        .0
                        .iter()
                        .zip(below.as_chunks::<2>().0);
                    result.extend(
                        pairs.map(|([a, b], [c, d])| larger(larger(*a, *b), larger(*c, *d))),
                    );
                }
                continue;
            }
            for row in 0..rows {
                for column in 0..columns {
                    let of_columns = self.windows.window(column, width);
                    let parts = self
                        .windows
                        .window(row, height)
                        .map(|row| &picture[row * width..][of_columns.clone()]);
                    let values = parts.flatten().copied();
                    result.push(match self.kind {
                        Kind::Max => values.reduce(larger).unwrap_or(T::zero()),
                        Kind::Mean => values.fold(T::zero(), |sum, x| sum + x) / area,
                    });
                }
            }
        }
        result
    }

    fn backward<T: Element>(&self, inputs: &[T], result: &[T], gradient: &[T]) -> Vec<T> {
        let (rows, columns) = self.output;
        let (height, width) = self.input;
        let mut of_inputs = vec![T::zero(); inputs.len()];
        let area = T::from_f64((self.windows.kernel * self.windows.kernel) as f64);
        let pictures = inputs.chunks_exact(height * width);
        let results = result.chunks_exact(rows * columns);
        let gradients = gradient.chunks_exact(rows * columns);
        let of_pictures = of_inputs.chunks_exact_mut(height * width);
        for (((picture, result), gradient), of_picture) in
            pictures.zip(results).zip(gradients).zip(of_pictures)
        {
            let results = result.chunks_exact(columns);
            for (row, (result, gradient)) in results.zip(gradient.chunks_exact(columns)).enumerate()
            {
                if self.kind == Kind::Max && self.in_pairs() {
                    let pair = 2 * row * width..2 * (row + 1) * width;
                    give_to_largest(
                        &picture[pair.clone()],
                        result,
                        gradient,
                        &mut of_picture[pair],
                    );
                    continue;
                }
                for (column, (largest, gradient)) in result.iter().zip(gradient).enumerate() {
                    let of_columns = self.windows.window(column, width);
                    let places = self.windows.window(row, height).flat_map(|row| {
                        let of_columns = of_columns.clone();
                        of_columns.map(move |column| row * width + column)
                    });
                    if self.kind == Kind::Mean {
                        places.for_each(|place| of_picture[place] += *gradient / area);
                    } else if let Some(place) =
                        { places }.find(|place| is_largest(picture[*place], *largest))
                    {
                        of_picture[place] += *gradient;
                    }
                }
            }
        }
        of_inputs
    }
}

/// Returns the larger of two numbers, or NaN if one is NaN.
fn larger<T: Element>(a: T, b: T) -> T {
    if b > a || is_nan(b) { b } else { a }
}

/// Returns whether a number is the largest of its window.
fn is_largest<T: Element>(x: T, largest: T) -> bool {
    x >= largest || is_nan(x)
}

#[allow(clippy::eq_op)]
fn is_nan<T: Element>(x: T) -> bool {
    x != x
}

/// Gives each gradient to the first of four inputs, from two rows, that is as large as the result.
fn give_to_largest<T: Element>(inputs: &[T], result: &[T], gradient: &[T], of_inputs: &mut [T]) {
    let width = inputs.len() / 2;
    let (above, below) = inputs.split_at(width);
    let (of_above, of_below) = of_inputs.split_at_mut(width);
    let above = above
        .as_chunks::<2>()
        .0
        .iter()
        .zip(below.as_chunks::<2>().0);
    let of_above = of_above.as_chunks_mut::<2>().0.iter_mut();
    let of_above = of_above.zip(of_below.as_chunks_mut::<2>().0);
    for ((([a, b], [c, _]), (above, below)), (y, g)) in
        above.zip(of_above).zip(result.iter().zip(gradient))
    {
        let largest = [a, b, c].map(|x| is_largest(*x, *y));
        let give = |to: bool| if to { *g } else { T::zero() };
        above[0] = give(largest[0]);
        above[1] = give(largest[1] & !largest[0]);
        below[0] = give(largest[2] & !largest[1] & !largest[0]);
        below[1] = give(!largest[2] & !largest[1] & !largest[0]);
    }
}

impl CustomOp1 for Pool {
    fn name(&self) -> &'static str {
        "pool2d"
    }

    fn cpu_fwd(&self, inputs: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (samples, channels, _, _) = layout.shape().dims4()?;
        let shape = (samples, channels, self.output.0, self.output.1).into();
        with_type!(inputs.dtype(), T => {
            let result = self.forward::<T>(slice(inputs, layout)?);
            Ok((T::to_cpu_storage_owned(result), shape))
        })
    }

    fn bwd(&self, inputs: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        keep(inputs, || {
            with_type!(inputs.dtype(), T => {
                let (of, result, gradient) = (elements(inputs), elements(result), elements(&gradient));
                let of_inputs = self.backward::<T>(of.slice()?, result.slice()?, gradient.slice()?);
                Tensor::from_vec(of_inputs, inputs.shape(), inputs.device())
            })
        })
    }
}

/// The mean over pictures of a number of pixels.
struct Mean {
    size: usize,
}

impl CustomOp1 for Mean {
    fn name(&self) -> &'static str {
        "global-avg-pool2d"
    }

    fn cpu_fwd(&self, inputs: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (samples, channels, _, _) = layout.shape().dims4()?;
        with_type!(inputs.dtype(), T => {
            let pictures = slice::<T>(inputs, layout)?.chunks_exact(self.size);
            let mean = |picture| pulp::Arch::new().dispatch(Sum(picture)) / self.size as T;
            let means: Vec<T> = pictures.map(mean).collect();
            Ok((T::to_cpu_storage_owned(means), (samples, channels).into()))
        })
    }

    fn bwd(&self, inputs: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        keep(inputs, || {
            with_type!(inputs.dtype(), T => {
                let gradient = elements(&gradient);
                let mut of_inputs = Vec::with_capacity(inputs.elem_count());
                for gradient in gradient.slice::<T>()? {
                    let part = *gradient / self.size as T;
                    of_inputs.resize(of_inputs.len() + self.size, part);
                }
                Tensor::from_vec(of_inputs, inputs.shape(), inputs.device())
            })
        })
    }
}
