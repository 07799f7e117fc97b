//! Pooling of pictures.

use candle_core::{Result, Shape, Tensor, bail};
use pulp::Arch;

use crate::operation::{Function, apply};
use crate::simd::{Element, Sum};
use crate::storage::computed_here;
use crate::windows::Windows;

/// The windows of a pooling: squares at regular distances, in a picture with a border.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool2d {
    /// The number of rows, and of columns, of a window.
    pub kernel: usize,
    /// The distance from one window to the next.
    pub stride: usize,
    /// The number of rows and columns added at each side. They do not count in a maximum, and are zeros in an average.
    pub padding: usize,
}

impl Pool2d {
    /// Returns adjacent windows, without a border.
    pub fn new(kernel: usize) -> Self {
        Self {
            kernel,
            stride: kernel,
            padding: 0,
        }
    }

    /// Returns the number of windows along an axis of `input` pixels.
    fn output(&self, input: usize) -> Result<usize> {
        let Self {
            kernel,
            stride,
            padding,
        } = *self;
        if padding > kernel / 2 {
            bail!(
                "windows of {kernel} pixels with padding {padding} would lie outside of the picture; \
                 a padding is at most half of the kernel"
            );
        }
        // A limit that keeps the area of a window within a `usize`.
        let padded = input
            .checked_add(2 * padding)
            .filter(|padded| input > 0 && *padded <= u32::MAX as usize);
        let steps = padded
            .and_then(|padded| padded.checked_sub(kernel))
            .and_then(|places| places.checked_div(stride));
        match steps {
            Some(steps) if kernel > 0 => Ok(steps + 1),
            _ => bail!(
                "windows of {kernel} pixels with stride {stride} and padding {padding} do not fit {input} pixels; \
                 kernel and stride are at least 1, and the kernel is not larger than the padded pixels"
            ),
        }
    }

    /// Returns the number of pixels of a window.
    fn area(&self) -> f64 {
        (self.kernel as f64).powi(2)
    }

    /// Returns the range of inputs of a window along an axis.
    fn window(&self, output: usize, input: usize) -> std::ops::Range<usize> {
        let start = output * self.stride;
        let end = (start + self.kernel)
            .saturating_sub(self.padding)
            .min(input);
        start.saturating_sub(self.padding).min(end)..end
    }
}

/// Returns the largest value of each window of pictures of shape `[samples, channels, rows, columns]`. Rows and columns
/// that do not fill a window are left out.
///
/// On the CPU, in `f32` and `f64`, this does the same as PyTorch: the first of several equal values gets the gradient,
/// and the result of a window with a NaN is NaN. Elsewhere candle's operations compute it: equal values share the
/// gradient, not always evenly, and a NaN may be lost.
///
/// # Errors
/// If the windows do not fit the pictures, or candle's.
pub fn max_pool2d(inputs: &Tensor, windows: &Pool2d) -> Result<Tensor> {
    let pool = Pool::new(inputs, windows, Kind::Max)?;
    match pool.is_elsewhere(inputs) {
        true => pool.elsewhere(inputs, f64::NEG_INFINITY, |a, b| a.maximum(b)),
        false => apply(pool, inputs),
    }
}

/// Returns the mean of each window of pictures of shape `[samples, channels, rows, columns]`. Rows and columns that do
/// not fill a window are left out. The zeros of the padding count.
///
/// # Errors
/// If the windows do not fit the pictures, or candle's.
pub fn avg_pool2d(inputs: &Tensor, windows: &Pool2d) -> Result<Tensor> {
    let pool = Pool::new(inputs, windows, Kind::Mean)?;
    match pool.is_elsewhere(inputs) {
        true => pool.elsewhere(inputs, 0.0, |a, b| a + b)? / windows.area(),
        false => apply(pool, inputs),
    }
}

/// Returns the mean of each picture: `[samples, channels, rows, columns]` becomes `[samples, channels]`.
///
/// # Errors
/// If the inputs have another rank, if the pictures have no pixels, or candle's.
pub fn global_avg_pool2d(inputs: &Tensor) -> Result<Tensor> {
    let (samples, channels, rows, columns) = inputs.dims4()?;
    if rows == 0 || columns == 0 {
        bail!("pictures of {rows} x {columns} pixels have no mean");
    }
    if samples == 0 || channels == 0 {
        return inputs.reshape((samples, channels));
    }
    match computed_here(&[inputs]) {
        true => apply(
            Mean {
                size: rows * columns,
            },
            inputs,
        ),
        false => inputs.flatten_from(2)?.mean(2),
    }
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

    fn is_elsewhere(&self, inputs: &Tensor) -> bool {
        inputs.elem_count() == 0 || !computed_here(&[inputs])
    }

    /// Computes the result with candle's operations: `join` combines two values, and `border` is the value of the
    /// padding.
    fn elsewhere(
        &self,
        inputs: &Tensor,
        border: f64,
        join: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let Pool2d {
            kernel,
            stride,
            padding,
        } = self.windows;
        let (rows, columns) = self.output;
        let frame = (stride, padding, border);
        let windows = Windows::new(inputs, [rows, columns], [kernel; 2], frame)?;
        let mut result = windows.at(0, 0)?;
        for place in 1..kernel * kernel {
            result = join(&result, &windows.at(place / kernel, place % kernel)?)?;
        }
        Ok(result)
    }

    /// Returns whether the windows are adjacent squares of 2 by 2 pixels, the most frequent case.
    fn in_pairs(&self) -> bool {
        self.windows == Pool2d::new(2)
    }
}

impl Function for Pool {
    const NAME: &'static str = "pool2d";

    fn shape(&self, inputs: &Shape) -> Result<Shape> {
        let (samples, channels, _, _) = inputs.dims4()?;
        Ok((samples, channels, self.output.0, self.output.1).into())
    }

    fn forward<T: Element>(&self, inputs: &[T]) -> Vec<T> {
        let (rows, columns) = self.output;
        let (height, width) = self.input;
        let pictures = inputs.chunks_exact(height * width);
        let mut result = Vec::with_capacity(pictures.len() * rows * columns);
        let area = T::from_f64(self.windows.area());
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
        let area = T::from_f64(self.windows.area());
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

/// Gives each gradient to the first of the four inputs of a window, in two rows, that is as large as the result.
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

/// The mean of each picture of `size` pixels.
struct Mean {
    size: usize,
}

impl Function for Mean {
    const NAME: &'static str = "global-avg-pool2d";

    fn shape(&self, inputs: &Shape) -> Result<Shape> {
        let (samples, channels, _, _) = inputs.dims4()?;
        Ok((samples, channels).into())
    }

    fn forward<T: Element>(&self, inputs: &[T]) -> Vec<T> {
        let size = T::from_f64(self.size as f64);
        let mean = |picture| Arch::new().dispatch(Sum(picture)) / size;
        inputs.chunks_exact(self.size).map(mean).collect()
    }

    fn backward<T: Element>(&self, inputs: &[T], _: &[T], gradient: &[T]) -> Vec<T> {
        let size = T::from_f64(self.size as f64);
        let mut of_inputs = Vec::with_capacity(inputs.len());
        for gradient in gradient {
            of_inputs.resize(of_inputs.len() + self.size, *gradient / size);
        }
        of_inputs
    }
}
