//! Samples that are held in memory, column by column.

use std::ops::Range;

use super::column::Column;
#[cfg(test)]
use super::column::Values;
use super::field::{Field, Signature};
use super::{Order, Samples};
use crate::error::InputError;
use crate::shuffle;

/// Samples in memory.
///
/// ```
/// # mod flambeau { pub use flambeau_data::*; }
/// use flambeau::{Column, InMemory};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Two samples: a point of two numbers each, and its class, one of three.
/// let samples = InMemory::new(
///     vec![Column::numbers("point", vec![2], vec![0.1, 0.2, 0.8, 0.9])],
///     vec![Column::category("side", vec![0, 2], 3)],
/// )?;
/// assert_eq!(samples.len(), 2);
/// assert_eq!(samples.select(&[1])?.len(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct InMemory {
    pub(crate) inputs: Vec<Column>,
    pub(crate) targets: Vec<Column>,
    /// The weight of each sample in the loss; `None` if all samples have the same weight.
    weights: Option<Vec<f32>>,
    count: usize,
    /// False if the data's digest leaves these samples out.
    compared: bool,
    /// The order of the last read, and the index of the sample at each position in it.
    order: Option<(Order, Vec<u32>)>,
}

impl InMemory {
    /// Returns samples of these columns.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if there is no input or no target, if there are more than `u32::MAX` samples, or if a
    /// column has a different number of samples than the first column, a name that occurs twice, or values that do not
    /// fit.
    pub fn new(inputs: Vec<Column>, targets: Vec<Column>) -> Result<Self, InputError> {
        let count = checked_count(inputs.iter().chain(&targets))?;
        if inputs.is_empty() || targets.is_empty() {
            return Err(InputError::Invalid(
                "the data needs at least one input and one target".to_owned(),
            ));
        }
        Self::of(inputs, targets, count)
    }

    /// Returns samples without targets, for predictions.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn without_targets(inputs: Vec<Column>) -> Result<Self, InputError> {
        let count = checked_count(&inputs)?;
        if inputs.is_empty() {
            return Err(InputError::Invalid(
                "the data needs at least one input".to_owned(),
            ));
        }
        Self::of(inputs, Vec::new(), count)
    }

    fn of(inputs: Vec<Column>, targets: Vec<Column>, count: usize) -> Result<Self, InputError> {
        countable(count)?;
        Ok(Self::of_checked(inputs, targets, None, count))
    }

    /// Returns `count` samples of columns that have been checked: all columns have this number of samples, and all ids
    /// and weights are valid.
    pub(crate) fn of_checked(
        inputs: Vec<Column>,
        targets: Vec<Column>,
        weights: Option<Vec<f32>>,
        count: usize,
    ) -> Self {
        Self {
            inputs,
            targets,
            weights,
            count,
            compared: true,
            order: None,
        }
    }

    /// Sets the weight of each sample in the loss.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if the number of weights is not the number of samples, or if a weight is negative or not
    /// finite.
    pub fn with_weights(mut self, weights: Vec<f32>) -> Result<Self, InputError> {
        let fits = |weight: &f32| weight.is_finite() && *weight >= 0.0;
        if weights.len() != self.count || !weights.iter().all(fits) {
            return Err(InputError::Invalid(format!(
                "there are {} weights for {} samples; each sample needs one that is finite and not negative",
                weights.len(),
                self.count
            )));
        }
        self.weights = Some(weights);
        Ok(self)
    }

    /// Leaves these samples out of the data's digest. Workers then train together without a comparison of the samples,
    /// because each worker generates them from the seed.
    #[must_use]
    pub fn not_compared(mut self) -> Self {
        self.compared = false;
        self
    }

    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the fields of each sample.
    pub fn signature(&self) -> Signature {
        let fields = |columns: &[Column]| columns.iter().map(|c| c.field().clone()).collect();
        Signature {
            inputs: fields(&self.inputs),
            targets: fields(&self.targets),
        }
    }

    /// Returns the inputs, the targets, and the weights of the samples. The weights are `None` if all samples have the
    /// same weight.
    pub fn into_columns(self) -> (Vec<Column>, Vec<Column>, Option<Vec<f32>>) {
        (self.inputs, self.targets, self.weights)
    }

    /// Returns the samples at these indices, in this order.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if there are no indices, or if an index is too large.
    pub fn select(&self, samples: &[u32]) -> Result<Self, InputError> {
        if samples.is_empty() {
            return Err(InputError::Invalid(
                "no sample was asked for; a batch needs at least one".to_owned(),
            ));
        }
        match samples.iter().find(|i| **i as usize >= self.count) {
            Some(sample) => Err(InputError::Invalid(format!(
                "there is no sample {sample}; there are {}, from 0",
                self.count
            ))),
            None => Ok(self.select_unchecked(samples)),
        }
    }

    /// Returns copies of the samples at these indices, in this order. Panics if an index is too large.
    pub(crate) fn select_unchecked(&self, samples: &[u32]) -> Self {
        let select = |columns: &[Column]| columns.iter().map(|c| c.select(samples)).collect();
        let weights = self.weights.as_ref();
        Self {
            inputs: select(&self.inputs),
            targets: select(&self.targets),
            weights: weights.map(|w| samples.iter().map(|i| w[*i as usize]).collect()),
            count: samples.len(),
            compared: self.compared,
            order: None,
        }
    }

    /// Appends samples with the same fields.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if the fields differ, or if there are more than `u32::MAX` samples afterwards.
    pub(crate) fn append(&mut self, more: Self) -> Result<(), InputError> {
        check_equal(&self.signature(), &more.signature())?;
        countable(self.count + more.count)?;
        let columns = self.inputs.iter_mut().chain(&mut self.targets);
        for (column, more) in columns.zip(more.inputs.into_iter().chain(more.targets)) {
            column.append(more);
        }
        if self.weights.is_some() || more.weights.is_some() {
            let weights = self.weights.get_or_insert_with(|| vec![1.0; self.count]);
            weights.extend(more.weights.unwrap_or_else(|| vec![1.0; more.count]));
        }
        self.count += more.count;
        self.order = None;
        Ok(())
    }

    /// Returns the index of the sample at each position of an order.
    fn order(&mut self, order: Order) -> &[u32] {
        let samples = self.len();
        self.order.take_if(|(of, _)| *of != order);
        let fresh = || match order {
            Order::Stored => (0u32..).take(samples).collect(),
            Order::Shuffled { seed, epoch } => shuffle::order(seed, epoch, samples),
        };
        &self.order.get_or_insert_with(|| (order, fresh())).1
    }
}

/// Checks that there are at most `u32::MAX` samples, because orders and batches have their indices as `u32`.
///
/// # Errors
/// [`InputError::Invalid`] if there are more.
pub(crate) fn countable(samples: usize) -> Result<(), InputError> {
    match u32::try_from(samples) {
        Ok(_) => Ok(()),
        Err(_) => Err(InputError::Invalid(format!(
            "there are {samples} samples, but at most {} can be held in memory; implement `Samples` for larger data",
            u32::MAX
        ))),
    }
}

/// Checks that training samples and held-out samples have the same fields.
///
/// # Errors
/// [`InputError::Invalid`] names the first field that differs.
pub(crate) fn check_equal(training: &Signature, held_out: &Signature) -> Result<(), InputError> {
    if training == held_out {
        return Ok(());
    }
    let all = |s: &Signature| [s.inputs.clone(), s.targets.clone()].concat();
    let (ours, theirs) = (all(training), all(held_out));
    let differs = |(ours, theirs): &(&Field, &Field)| ours != theirs;
    let named = ours.iter().zip(&theirs).find(differs);
    Err(InputError::Invalid(match named {
        Some((ours, theirs)) => format!(
            "samples to train on have {ours}, those held out {theirs}; give them the same fields"
        ),
        None => format!(
            "samples to train on have {} fields, those held out {}; give them the same",
            ours.len(),
            theirs.len()
        ),
    }))
}

impl Samples for InMemory {
    fn count(&self) -> u64 {
        self.len() as u64
    }

    fn read(&mut self, order: Order, positions: Range<u64>) -> Result<Self, InputError> {
        let order = self.order(order);
        let samples = order.len();
        let range = positions.start as usize..positions.end as usize;
        let Some(indices) = order.get(range).map(<[u32]>::to_vec) else {
            return Err(InputError::Invalid(format!(
                "positions {} to {} are not in the data, which has {samples} samples",
                positions.start, positions.end,
            )));
        };
        self.select(&indices)
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        if !self.compared {
            return;
        }
        for column in self.inputs.iter().chain(&self.targets) {
            column.digest(hash);
        }
        if let Some(weights) = &self.weights {
            for weight in weights {
                hash(&weight.to_le_bytes());
            }
        }
    }
}

/// Returns the number of samples of each column. Checks that it is the same for all columns, and that their names
/// differ.
fn checked_count<'a>(columns: impl IntoIterator<Item = &'a Column>) -> Result<usize, InputError> {
    let mut count = None;
    let mut names: Vec<&str> = Vec::new();
    for column in columns {
        let (name, samples) = (column.field().name.as_str(), column.samples()?);
        let first = *count.get_or_insert(samples);
        let what = if names.contains(&name) {
            "there are two columns of this name".to_owned()
        } else if samples != first {
            format!("it has {samples} samples, the first column {first}")
        } else {
            names.push(name);
            continue;
        };
        return Err(InputError::Invalid(format!("column {name:?}: {what}")));
    }
    Ok(count.unwrap_or(0))
}

#[cfg(test)]
impl InMemory {
    /// Returns the values of a column, as a batch has them.
    pub(crate) fn numbers(&self, name: &str) -> Vec<f64> {
        let mut columns = self.inputs.iter().chain(&self.targets);
        let column = columns.find(|column| column.field().name == name);
        match column.unwrap().clone().into_batch().values {
            Values::U8(values) => values.into_iter().map(f64::from).collect(),
            Values::F16(values) => values.into_iter().map(f64::from).collect(),
            Values::F32(values) => values.into_iter().map(f64::from).collect(),
            Values::U32(values) => values.into_iter().map(f64::from).collect(),
            Values::I64(values) => values.into_iter().map(|value| value as f64).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(inputs: Column, classes: Vec<u32>) -> Result<InMemory, InputError> {
        InMemory::new(vec![inputs], vec![Column::category("label", classes, 5)])
    }

    #[test]
    fn values_that_do_not_fit_are_refused_with_their_column() {
        let numbers = |count| Column::numbers("x", vec![2], vec![0.0; count]);
        assert!(samples(numbers(4), vec![0, 1]).is_ok());
        for (column, labels, named) in [
            (numbers(5), vec![0, 1], "5 values are no whole number"),
            (
                numbers(6),
                vec![0, 1],
                "it has 2 samples, the first column 3",
            ),
            (numbers(4), vec![0, 5], "\"label\": 5 is not below 5"),
            (
                Column::numbers("x", vec![0], vec![]),
                vec![0],
                "has no values",
            ),
            (
                Column::numbers("label", vec![2], vec![0.0; 4]),
                vec![0, 1],
                "two columns",
            ),
            (
                Column::ragged("x", Values::U32(vec![1, 2]), vec![0, 2, 1], None, None),
                vec![0, 1],
                "offsets",
            ),
        ] {
            let error = samples(column, labels).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
        assert!(InMemory::new(Vec::new(), Vec::new()).is_err());
        let weighted = samples(numbers(4), vec![0, 1])
            .unwrap()
            .with_weights(vec![1.0, -1.0]);
        assert!(weighted.unwrap_err().to_string().contains("not negative"));
    }

    #[test]
    fn more_samples_than_numbers_are_refused() {
        let most = u32::MAX as usize;
        assert!(countable(most).is_ok());
        let error = countable(most + 1).unwrap_err().to_string();
        assert!(error.contains("4294967296 samples"), "{error}");
    }

    #[test]
    fn each_pass_has_an_order_of_its_own() {
        let numbers = Column::numbers("x", vec![1], vec![0.0; 5]);
        let mut samples = samples(numbers, vec![0, 1, 2, 3, 4]).unwrap();
        let mut read = |order, positions| -> Vec<u32> {
            let batch = samples.read(order, positions).unwrap();
            batch
                .numbers("label")
                .into_iter()
                .map(|label| label as u32)
                .collect()
        };
        let shuffled = |epoch| Order::Shuffled { seed: 7, epoch };
        let order = shuffle::order(7, 1, 5);
        assert_eq!(read(shuffled(1), 1..4), order[1..4]);
        assert_eq!(read(Order::Stored, 1..4), [1, 2, 3]);
        assert_eq!(read(shuffled(2), 0..5), shuffle::order(7, 2, 5));
        assert_eq!(read(shuffled(1), 4..5), order[4..]);
        let beyond = samples.read(Order::Stored, 4..6).unwrap_err();
        assert!(beyond.to_string().contains("4 to 6"), "{beyond}");
    }
}
