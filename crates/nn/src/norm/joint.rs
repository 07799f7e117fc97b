//! The mean and the variance of a channel over the elements of all replicas, and the gradients that pass through them.

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, bail};

use crate::replicas::Share;
use crate::storage::elements;

/// The elements of a channel on all replicas, of which this one has a share.
#[derive(Clone, Debug)]
pub(super) struct Joint {
    share: Share,
    /// The number of elements that each channel has on all replicas.
    elements: f64,
}

/// The statistics of each channel over the elements of all replicas.
pub(super) struct JointStatistics {
    pub(super) mean: Vec<f64>,
    /// The biased variance.
    pub(super) variance: Vec<f64>,
    pub(super) joint: Joint,
}

impl Joint {
    /// Returns the number of elements that each channel has on all replicas.
    pub(super) fn elements(&self) -> f64 {
        self.elements
    }

    /// Joins the mean and the biased variance over this replica's `count` elements of each channel with those of all
    /// replicas.
    ///
    /// The replicas add up counts, sums and sums of squares in `f64`, in which the square of an `f32` is exact. So,
    /// however large the mean is, rounding changes the variance less than the rounding of the elements to `f32` did.
    ///
    /// # Errors
    /// Those of the replicas, or if all replicas together have fewer than two elements for each channel.
    pub(super) fn statistics(
        share: Share,
        mean: &[f64],
        variance: &[f64],
        count: usize,
    ) -> Result<JointStatistics> {
        let count = count as f64;
        let sums = mean.iter().map(|mean| mean * count);
        let squares = mean.iter().zip(variance);
        let squares = squares.map(|(mean, variance)| (variance + mean * mean) * count);
        let mut values: Vec<f64> = sums.chain(squares).chain([count]).collect();
        share.replicas.add_up(&mut values)?;
        let channels = mean.len();
        let elements = values[2 * channels];
        if elements < 2.0 {
            bail!(
                "the batches of all replicas have {elements} elements for each channel, and so no variance; at least two are needed"
            );
        }
        let mean: Vec<f64> = values[..channels]
            .iter()
            .map(|sum| sum / elements)
            .collect();
        let squares = values[channels..2 * channels].iter().zip(&mean);
        let variance = squares.map(|(squares, mean)| {
            let variance = squares / elements - mean * mean;
            // Equal values may leave less than 0, by the rounding of their sums. NaN stays NaN.
            if variance < 0.0 { 0.0 } else { variance }
        });
        Ok(JointStatistics {
            variance: variance.collect(),
            mean,
            joint: Self { share, elements },
        })
    }

    /// Takes the gradients of this replica's loss with respect to the statistics over all replicas. Replaces them by
    /// sums over all replicas: the gradients with respect to an element's part in the mean, and to its squared
    /// deviation.
    ///
    /// The loss of a step is the mean of the replicas' losses, weighted by their samples, and each loss depends on the
    /// statistics. A replica's gradient is multiplied by its weight later, so these sums are divided by it here.
    ///
    /// # Errors
    /// Those of the replicas.
    pub(super) fn mean_gradients(&self, gradients: &mut [f64]) -> Result<()> {
        let Share { replicas, samples } = &self.share;
        gradients
            .iter_mut()
            .for_each(|gradient| *gradient *= samples);
        replicas.add_up(gradients)?;
        let divisor = self.elements * samples;
        gradients
            .iter_mut()
            .for_each(|gradient| *gradient /= divisor);
        Ok(())
    }

    /// Joins statistics as [`Self::statistics`] does, for candle's operations on any device. Returns the mean and the
    /// variance over all replicas as tensors on the CPU, through which gradients reach the mean and the variance of
    /// this replica; and the number of elements.
    pub(super) fn differentiable(
        share: Share,
        mean: &Tensor,
        variance: &Tensor,
        count: usize,
    ) -> Result<(Tensor, Tensor, f64)> {
        let here = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64);
        let (mean, variance) = (here(mean)?, here(variance)?);
        let numbers = |tensor: &Tensor| tensor.to_vec1::<f64>();
        let (means, variances) = (numbers(&mean)?, numbers(&variance)?);
        let all = Self::statistics(share, &means, &variances, count)?;
        let elements = all.joint.elements;
        let squares = ((variance + mean.sqr()?)? * count as f64)?;
        let sums = Tensor::cat(&[(mean * count as f64)?, squares], 0)?;
        let joined = sums.apply_op1(OfAll(all))?;
        let channels = means.len();
        let mean = joined.narrow(0, 0, channels)?;
        Ok((mean, joined.narrow(0, channels, channels)?, elements))
    }
}

/// The operation that turns this replica's sums and sums of squares into the means and the variances over all replicas.
struct OfAll(JointStatistics);

impl CustomOp1 for OfAll {
    fn name(&self) -> &'static str {
        "statistics-of-all-replicas"
    }

    /// Returns the statistics, which are known before this operation runs. The replicas add up their sums earlier, so
    /// that an error names the layer and not this operation.
    fn cpu_fwd(&self, _: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let JointStatistics { mean, variance, .. } = &self.0;
        let all = [&mean[..], variance].concat();
        Ok((CpuStorage::F64(all), layout.shape().clone()))
    }

    fn bwd(&self, sums: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let JointStatistics { mean, joint, .. } = &self.0;
        let gradient = gradient.contiguous()?;
        let mut gradients = elements(&gradient).slice::<f64>()?.to_vec();
        joint.mean_gradients(&mut gradients)?;
        // A variance is the mean square minus the squared mean.
        let (of_sums, of_squares) = gradients.split_at_mut(mean.len());
        for ((of_sum, of_square), mean) in of_sums.iter_mut().zip(of_squares).zip(mean) {
            *of_sum -= 2.0 * mean * *of_square;
        }
        Tensor::from_vec(gradients, sums.shape(), sums.device()).map(Some)
    }
}
