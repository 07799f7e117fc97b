//! Convolutions computed by candle's operations, for devices on which this crate does not compute.
//!
//! candle's own gradient of the inputs computes each element by itself, which is slow on a GPU. Here, the gradient of
//! the inputs is a convolution of the result's gradient, with zeros between its elements, by the kernel rotated by 180
//! degrees (Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", 2016, section 4).

use std::sync::{Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, DType, Layout, Result, Shape, Storage, Tensor, bail,
};
use candle_nn::Conv2dConfig;

use super::geometry::Geometry;
use crate::windows::Windows;

/// Returns whether [`conv2d`] can compute a convolution of these inputs: on the CPU or an NVIDIA GPU, with a single
/// group or with a group for each channel.
pub(super) fn computes(inputs: &Tensor, geometry: &Geometry) -> bool {
    let device = inputs.device().is_cpu() || inputs.device().is_cuda();
    let per_channel = (geometry.inputs, geometry.outputs) == (1, 1);
    device && (geometry.groups == 1 || per_channel)
}

/// Returns a convolution for which [`computes`] returns true.
pub(super) fn conv2d(inputs: &Tensor, weight: &Tensor, config: &Conv2dConfig) -> Result<Tensor> {
    let (_, _, rows, columns) = weight.dims4()?;
    let kind = match (rows, columns, config.padding, config.stride) {
        _ if config.groups > 1 => Kind::Depthwise,
        (1, 1, 0, 1) => Kind::Product,
        _ => Kind::Unrolled,
    };
    let result = kind.forward(&inputs.detach(), &weight.detach(), config)?;
    let computed = Computed {
        kind,
        config: *config,
        result: Mutex::new(Some(result)),
    };
    inputs.apply_op2(weight, computed)
}

/// How a convolution is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A kernel of one pixel: a product of matrices for each sample.
    Product,
    /// candle's algorithm: each window becomes a row (im2col), then one product of matrices.
    Unrolled,
    /// Each channel has its own kernel. candle would compute the channels one after the other.
    Depthwise,
}

impl Kind {
    fn forward(self, inputs: &Tensor, weight: &Tensor, config: &Conv2dConfig) -> Result<Tensor> {
        match self {
            Self::Product => product(inputs, weight),
            Self::Unrolled => inputs.conv2d_with_algo(
                weight,
                config.padding,
                config.stride,
                config.dilation,
                1,
                config.cudnn_fwd_algo,
            ),
            Self::Depthwise => depthwise(inputs, weight, config),
        }
    }

    fn gradient_of_weight(
        self,
        inputs: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
        config: &Conv2dConfig,
    ) -> Result<Tensor> {
        match self {
            Self::Product => weight_of_product(inputs, weight, gradient),
            Self::Unrolled => weight_of_unrolled(inputs, weight, gradient, config),
            Self::Depthwise => weight_of_depthwise(inputs, weight, gradient, config),
        }
    }

    /// Returns the gradient of the inputs: a convolution of the result's gradient by the rotated kernel.
    fn gradient_of_inputs(
        self,
        inputs: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
        config: &Conv2dConfig,
    ) -> Result<Tensor> {
        let (_, _, height, width) = inputs.dims4()?;
        let (_, _, rows, columns) = weight.dims4()?;
        let flipped = flipped(&flipped(weight, 2)?, 3)?;
        let flipped = match self {
            Self::Product => return product(gradient, &flipped.transpose(0, 1)?.contiguous()?),
            Self::Unrolled => flipped.transpose(0, 1)?.contiguous()?,
            Self::Depthwise => flipped,
        };
        // A kernel of one pixel only mixes channels, which is less work before zeros are added.
        let mixes = self == Self::Unrolled && (rows, columns) == (1, 1);
        let first = match mixes {
            true => product(gradient, &flipped)?,
            false => gradient.clone(),
        };
        let dilated = dilated(&dilated(&first, 2, config.stride)?, 3, config.stride)?;
        let above = Around::new(config, height, rows, dilated.dim(2)?);
        let left = Around::new(config, width, columns, dilated.dim(3)?);
        let padded = padded(&padded(&dilated, 2, above)?, 3, left)?;
        let plain = Conv2dConfig {
            padding: 0,
            stride: 1,
            ..*config
        };
        match mixes {
            true => Ok(padded),
            false => self.forward(&padded, &flipped, &plain),
        }
    }
}

/// A convolution in candle's graph. Its result is computed beforehand, and the forward pass only takes the result.
struct Computed {
    kind: Kind,
    config: Conv2dConfig,
    result: Mutex<Option<Tensor>>,
}

impl Computed {
    /// Returns a copy of the result, and frees the result.
    fn take<S>(&self, clone: impl FnOnce(&Storage, &Layout) -> Result<S>) -> Result<(S, Shape)> {
        let mut result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(result) = result.take() else {
            bail!("the result of a convolution was taken before");
        };
        let (storage, layout) = result.storage_and_layout();
        Ok((clone(&storage, layout)?, layout.shape().clone()))
    }
}

impl CustomOp2 for Computed {
    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.take(|storage, layout| match storage {
            Storage::Cpu(storage) => storage.try_clone(layout),
            Storage::Cuda(_) | Storage::Metal(_) => bail!("a convolution has changed the device"),
        })
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.take(|storage, layout| match storage {
            Storage::Cuda(storage) => storage.try_clone(layout),
            Storage::Cpu(_) | Storage::Metal(_) => bail!("a convolution has changed the device"),
        })
    }

    fn bwd(
        &self,
        inputs: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (kind, config) = (self.kind, &self.config);
        let (of_inputs, of_weight) = (inputs.track_op(), weight.track_op());
        let (inputs, weight) = (inputs.detach(), weight.detach());
        let gradient = gradient.contiguous()?;
        let of_inputs =
            of_inputs.then(|| kind.gradient_of_inputs(&inputs, &weight, &gradient, config));
        let of_weight =
            of_weight.then(|| kind.gradient_of_weight(&inputs, &weight, &gradient, config));
        Ok((of_inputs.transpose()?, of_weight.transpose()?))
    }
}

/// Returns a convolution with a kernel of one pixel.
fn product(inputs: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (samples, channels, rows, columns) = inputs.dims4()?;
    let outputs = weight.dim(0)?;
    let weight = weight.reshape((1, outputs, channels))?;
    let weight = weight.broadcast_as((samples, outputs, channels))?;
    let result = weight.matmul(&inputs.reshape((samples, channels, rows * columns))?)?;
    result.reshape((samples, outputs, rows, columns))
}

/// Returns the gradient of a product's weight. It is either a sum of products, one for each sample, or one product over
/// all samples, whichever takes less memory.
fn weight_of_product(inputs: &Tensor, weight: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    let (samples, channels, rows, columns) = inputs.dims4()?;
    let (outputs, size) = (weight.dim(0)?, rows * columns);
    let inputs = inputs.reshape((samples, channels, size))?;
    let gradient = gradient.reshape((samples, outputs, size))?;
    let sum = match outputs * channels <= size * (outputs + channels) {
        true => gradient.matmul(&inputs.transpose(1, 2)?)?.sum(0)?,
        false => {
            let flat = |x: &Tensor| x.transpose(0, 1)?.flatten_from(1);
            flat(&gradient)?.matmul(&flat(&inputs)?.t()?)?
        }
    };
    sum.reshape(weight.shape())
}

/// Returns the gradient of a weight: a convolution of the inputs by the result's gradient, both with samples and
/// channels exchanged.
fn weight_of_unrolled(
    inputs: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    config: &Conv2dConfig,
) -> Result<Tensor> {
    let (_, _, rows, columns) = weight.dims4()?;
    let exchanged = Conv2dConfig {
        stride: config.dilation,
        dilation: config.stride,
        ..*config
    };
    let exchange = |x: &Tensor| x.transpose(0, 1)?.contiguous();
    let sums = Kind::Unrolled.forward(&exchange(inputs)?, &exchange(gradient)?, &exchanged)?;
    // Pixels behind the last window make more.
    exchange(&sums.narrow(2, 0, rows)?.narrow(3, 0, columns)?)
}

/// Returns the convolution of each channel with its own kernel: a sum over the taps of the kernel, each computed for
/// all pixels at once. Sums are `f32` if the inputs have a lower precision.
fn depthwise(inputs: &Tensor, weight: &Tensor, config: &Conv2dConfig) -> Result<Tensor> {
    let (channels, _, rows, columns) = weight.dims4()?;
    let windows = windows_of(inputs, weight, config)?;
    let mut sum: Option<Tensor> = None;
    for (row, column) in taps(rows, columns) {
        let weight = weight.narrow(2, row, 1)?.narrow(3, column, 1)?;
        let weight = in_sums(&weight.reshape((1, channels, 1, 1))?)?;
        let pixels = windows.at(row * config.dilation, column * config.dilation)?;
        let part = in_sums(&pixels)?.broadcast_mul(&weight)?;
        sum = Some(match sum {
            Some(sum) => (sum + part)?,
            None => part,
        });
    }
    let Some(sum) = sum else {
        bail!("a kernel has no pixels");
    };
    sum.to_dtype(inputs.dtype())
}

/// Returns the gradient of the weight of [`depthwise`].
fn weight_of_depthwise(
    inputs: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    config: &Conv2dConfig,
) -> Result<Tensor> {
    let (_, _, rows, columns) = weight.dims4()?;
    let windows = windows_of(inputs, weight, config)?;
    let gradient = in_sums(gradient)?;
    let sums = taps(rows, columns).map(|(row, column)| {
        let pixels = windows.at(row * config.dilation, column * config.dilation)?;
        let products = (in_sums(&pixels)? * &gradient)?;
        // In two steps: candle computes each sum in one block of threads, so one step would use few of them.
        products.flatten_from(2)?.sum(2)?.sum(0)
    });
    let sums: Vec<Tensor> = sums.collect::<Result<_>>()?;
    let sums = Tensor::stack(&sums, 1)?.reshape(weight.shape())?;
    sums.to_dtype(weight.dtype())
}

fn taps(rows: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)))
}

/// Returns a tensor in the type in which sums are computed: `f64` for `f64`, otherwise `f32`.
fn in_sums(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F64 => Ok(x.clone()),
        _ => x.to_dtype(DType::F32),
    }
}

/// Returns the windows of the inputs that the kernel covers.
fn windows_of(inputs: &Tensor, weight: &Tensor, config: &Conv2dConfig) -> Result<Windows> {
    let (_, _, height, width) = inputs.dims4()?;
    let (_, _, rows, columns) = weight.dims4()?;
    let Conv2dConfig {
        padding,
        stride,
        dilation,
        ..
    } = *config;
    let reach = [rows, columns].map(|kernel| dilation * (kernel - 1) + 1);
    let count = |size: usize, reach: usize| (size + 2 * padding - reach) / stride + 1;
    let counts = [count(height, reach[0]), count(width, reach[1])];
    Windows::new(inputs, counts, reach, (stride, padding, 0.0))
}

/// The zeros before and after an axis; a negative number of zeros cuts elements off.
#[derive(Clone, Copy, Debug)]
struct Around {
    before: isize,
    after: isize,
}

impl Around {
    /// Returns the zeros around a gradient that has `dilated` elements with the zeros between them, for inputs of
    /// `size` pixels.
    fn new(config: &Conv2dConfig, size: usize, kernel: usize, dilated: usize) -> Self {
        let reach = config.dilation * (kernel - 1);
        let before = reach as isize - config.padding as isize;
        Self {
            before,
            after: (size + reach) as isize - dilated as isize - before,
        }
    }
}

/// Returns a tensor with a dimension in reverse order.
fn flipped(x: &Tensor, dim: usize) -> Result<Tensor> {
    let size = x.dim(dim)?;
    if size == 1 {
        return Ok(x.clone());
    }
    let order: Vec<u32> = (0..size as u32).rev().collect();
    x.contiguous()?
        .index_select(&Tensor::new(order, x.device())?, dim)
}

/// Returns a tensor with `stride - 1` zeros between the elements of a dimension.
fn dilated(x: &Tensor, dim: usize, stride: usize) -> Result<Tensor> {
    let size = x.dim(dim)?;
    if stride == 1 || size == 1 {
        return Ok(x.clone());
    }
    let mut dims = x.dims().to_vec();
    dims[dim] = size * stride;
    let dilated = x.unsqueeze(dim + 1)?;
    let dilated = dilated
        .pad_with_zeros(dim + 1, 0, stride - 1)?
        .reshape(dims)?;
    dilated.narrow(dim, 0, (size - 1) * stride + 1)
}

/// Returns a tensor with zeros around a dimension.
fn padded(x: &Tensor, dim: usize, around: Around) -> Result<Tensor> {
    let length = x.dim(dim)? as isize;
    let [cut_before, cut_after] =
        [around.before, around.after].map(|zeros| zeros.min(0).unsigned_abs());
    let kept = (length as usize).saturating_sub(cut_before + cut_after);
    if kept == 0 {
        let mut dims = x.dims().to_vec();
        dims[dim] = (length + around.before + around.after).unsigned_abs();
        return Tensor::zeros(dims, x.dtype(), x.device());
    }
    let kept = x.narrow(dim, cut_before, kept)?.contiguous()?;
    match (around.before.max(0), around.after.max(0)) {
        (0, 0) => Ok(kept),
        (before, after) => kept.pad_with_zeros(dim, before as usize, after as usize),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    fn numbers(shape: (usize, usize, usize, usize), factor: f64) -> Var {
        let (a, b, c, d) = shape;
        let numbers = (0..a * b * c * d).map(|n| (n as f64 * factor).sin());
        let numbers = Tensor::from_iter(numbers, &Device::Cpu).unwrap();
        Var::from_tensor(&numbers.reshape(shape).unwrap()).unwrap()
    }

    fn flat(x: &Tensor) -> Vec<f64> {
        let x = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
        x.to_vec1().unwrap()
    }

    /// Compares two results, and the gradients of a loss of each.
    fn compare(inputs: &Var, weight: &Var, results: [Tensor; 2], config: &Conv2dConfig) {
        let factors = numbers(results[0].dims4().unwrap(), 0.3);
        let [expected, found] = results.map(|result| {
            let loss = (&result * factors.as_tensor()).unwrap().sum_all().unwrap();
            let gradients = loss.backward().unwrap();
            let of = |var: &Var| flat(gradients.get(var).unwrap());
            [flat(&result), of(inputs), of(weight)].concat()
        });
        assert_eq!(expected.len(), found.len());
        for (expected, found) in expected.iter().zip(&found) {
            assert!(
                (expected - found).abs() < 1e-9,
                "inputs {:?}, weight {:?}, {config:?}: {found} in place of {expected}",
                inputs.shape(),
                weight.shape()
            );
        }
    }

    #[test]
    fn results_and_gradients_are_those_of_the_layer_on_the_cpu() {
        let mut compared = 0;
        for kernel in [(1, 1), (2, 3), (3, 3), (4, 1)] {
            for (padding, stride, dilation) in (0..4)
                .flat_map(|padding| [1, 2, 3, 5].map(move |stride| (padding, stride)))
                .flat_map(|(padding, stride)| {
                    (1..3).map(move |dilation| (padding, stride, dilation))
                })
            {
                for (rows, columns) in [(7, 7), (6, 8), (9, 5), (1, 1), (2, 11)] {
                    let config = Conv2dConfig {
                        padding,
                        stride,
                        dilation,
                        ..Conv2dConfig::default()
                    };
                    let inputs = numbers((2, 3, rows, columns), 0.7);
                    let weight = numbers((4, 3, kernel.0, kernel.1), 1.3);
                    let Ok(expected) = crate::conv2d(&inputs, &weight, None, &config) else {
                        continue;
                    };
                    let found = conv2d(&inputs, &weight, &config).unwrap();
                    compare(&inputs, &weight, [expected, found], &config);
                    let config = Conv2dConfig {
                        groups: 3,
                        ..config
                    };
                    let weight = numbers((3, 1, kernel.0, kernel.1), 1.3);
                    let expected = crate::conv2d(&inputs, &weight, None, &config).unwrap();
                    let found = conv2d(&inputs, &weight, &config).unwrap();
                    compare(&inputs, &weight, [expected, found], &config);
                    compared += 1;
                }
            }
        }
        assert!(compared > 200, "{compared}");
    }
}
