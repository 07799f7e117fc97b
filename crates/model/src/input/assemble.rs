//! Converts samples to batches.

use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};
use data::{BatchColumn, Column, InMemory, InputError, Order, Samples, Values};

use super::batch::{Batch, Feature, Ragged};
use crate::candle_error::plain;

impl Batch {
    /// Returns a batch of all these samples, in a device's memory.
    ///
    /// # Errors
    /// candle's.
    pub fn of_samples(samples: InMemory, device: &Device) -> Result<Self> {
        let mut batch = Self::new(samples.len());
        let (inputs, targets, weights) = samples.into_columns();
        for column in inputs {
            let name = column.field().name.clone();
            batch = match feature(column, device)? {
                Feature::Dense(values) => batch.with_input(&name, values),
                Feature::Ragged(values) => batch.with_ragged(&name, values),
            };
        }
        for column in targets {
            let name = column.field().name.clone();
            batch = match feature(column, device)? {
                Feature::Dense(values) => batch.with_target(&name, values),
                Feature::Ragged(_) => bail!("target {name:?} has any number of values"),
            };
        }
        if let Some(weights) = weights {
            let count = weights.len();
            batch = batch.with_weights(Tensor::from_vec(weights, count, device)?);
        }
        Ok(batch)
    }
}

fn feature(column: Column, device: &Device) -> Result<Feature> {
    let BatchColumn {
        field,
        values,
        offsets,
        weights,
    } = column.into_batch();
    let Some(offsets) = offsets else {
        let mut shape = vec![values.len() / field.elements().max(1)];
        shape.extend(&field.shape);
        return Ok(Feature::Dense(tensor(values, shape, device)?));
    };
    let count = values.len();
    let weights = weights.map(|weights| Tensor::from_vec(weights, count, device));
    Ok(Feature::Ragged(Ragged {
        values: tensor(values, vec![count], device)?,
        offsets,
        weights: weights.transpose()?,
    }))
}

fn tensor(values: Values, shape: Vec<usize>, device: &Device) -> Result<Tensor> {
    match values {
        Values::U8(values) => Tensor::from_vec(values, shape, device),
        Values::F16(values) => Tensor::from_vec(values, shape, device),
        Values::F32(values) => Tensor::from_vec(values, shape, device),
        Values::U32(values) => Tensor::from_vec(values, shape, device),
        Values::I64(values) => Tensor::from_vec(values, shape, device),
    }
}

/// An error of a batch.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// The samples cannot be read.
    #[error(transparent)]
    Data(#[from] InputError),
    /// candle cannot make a tensor.
    #[error("candle: {}", plain(.0))]
    Candle(#[from] candle_core::Error),
}

/// Reads one batch, and checks that it has a sample for each position.
///
/// # Errors
/// Those of the samples and of candle, and [`InputError::Invalid`] for a batch of another size.
pub fn read(
    samples: &mut dyn Samples,
    order: Order,
    positions: Range<u64>,
    device: &Device,
) -> std::result::Result<Batch, BatchError> {
    let expected = (positions.end - positions.start) as usize;
    let read = samples.read(order, positions.clone())?;
    if read.len() != expected {
        let problem = format!(
            "the data source has returned {} samples for the {expected} positions from {} on; `Samples::read` returns one for every position",
            read.len(),
            positions.start
        );
        return Err(InputError::Invalid(problem).into());
    }
    Ok(Batch::of_samples(read, device)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source that leaves out bad samples.
    struct Filtered {
        left_out: usize,
    }

    impl Samples for Filtered {
        fn count(&self) -> u64 {
            10
        }

        fn read(
            &mut self,
            _: Order,
            positions: Range<u64>,
        ) -> std::result::Result<InMemory, InputError> {
            let left = (positions.end - positions.start) as usize - self.left_out;
            InMemory::new(
                vec![Column::numbers("x", vec![3], vec![0.0; 3 * left])],
                vec![Column::category("y", vec![0; left], 2)],
            )
        }
    }

    #[test]
    fn a_batch_with_too_few_samples_is_refused() {
        let read = |left_out| {
            read(
                &mut Filtered { left_out },
                Order::Stored,
                2..6,
                &Device::Cpu,
            )
        };
        assert_eq!(read(0).unwrap().input().unwrap().dims(), [4, 3]);
        let error = read(1).unwrap_err().to_string();
        assert!(
            error.contains("3 samples") && error.contains("4 positions"),
            "{error}"
        );
    }

    #[test]
    fn a_batch_has_named_inputs_of_any_type_and_length() {
        let ids = Values::I64(vec![7, 8, 9, -1]);
        let weights = Some(vec![0.5, 1.0, 1.5, 2.0]);
        let columns = vec![
            Column::ragged("genres", ids, vec![0, 2, 2, 4], weights, None),
            Column::bytes("image", vec![1, 2], vec![0, 255, 51, 102, 0, 0], 255.0),
            Column::category("user", vec![3, 1, 2], 4),
        ];
        let targets = vec![Column::numbers("rating", vec![], vec![1.0, 2.0, 3.0])];
        let samples = InMemory::new(columns, targets)
            .unwrap()
            .with_weights(vec![1.0, 2.0, 3.0]);
        let whole = samples.unwrap();
        let reversed = whole.select(&[2, 1, 0]).unwrap();
        for (samples, order) in [(&whole, [2, 0, 1]), (&reversed, [0, 2, 1])] {
            let batch = Batch::of_samples(samples.select(&order).unwrap(), &Device::Cpu).unwrap();
            let genres = batch.ragged("genres").unwrap();
            assert_eq!(genres.offsets, [0, 2, 4, 4]);
            assert_eq!(genres.values.to_vec1::<i64>().unwrap(), [9, -1, 7, 8]);
            let weights = genres.weights.as_ref().unwrap();
            assert_eq!(weights.to_vec1::<f32>().unwrap(), [1.5, 2.0, 0.5, 1.0]);
            let image = batch.input_of("image").unwrap();
            assert_eq!(image.dims(), [3, 1, 2]);
            assert_eq!(
                image.flatten_all().unwrap().to_vec1::<f32>().unwrap()[3],
                1.0
            );
            let users = batch.input_of("user").unwrap().to_vec1::<u32>().unwrap();
            assert_eq!(users, [2, 3, 1]);
            let ratings = batch.target().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(ratings, [3.0, 1.0, 2.0]);
            let weights = batch.weights().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(weights, [3.0, 1.0, 2.0]);
            assert!(batch.input().is_err() && batch.input_of("genres").is_err());
        }
    }
}
