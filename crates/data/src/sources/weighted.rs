//! Samples whose weight in the loss depends on their class.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::dataset::Dataset;
use crate::error::InputError;
use crate::features::fitted::Fitted;
use crate::features::target::Target;
use crate::samples::column::Values;
use crate::samples::field::ValueType;
use crate::samples::memory::InMemory;
use crate::samples::{Order, Samples};

/// Returns a data set in which the weight of each sample is multiplied by the weight of its class. `weights` has the
/// weights of classes by label, as the labels are in the data. All other classes have the weight 1.
///
/// # Errors
/// [`InputError::Invalid`] if the target is not a class, or if the data does not have a label.
pub(super) fn weigh_classes(
    data: Dataset,
    weights: &BTreeMap<String, f32>,
) -> Result<Dataset, InputError> {
    let target = data.signature.target()?;
    let of_each = !target.ragged && target.shape.is_empty();
    let is_class = of_each && matches!(target.values, ValueType::U32 | ValueType::F32);
    let classes = target.categories.filter(|_| is_class);
    let Some(classes) = classes else {
        return Err(InputError::Invalid(format!(
            "`data.class_weight` is for classes, and target {:?} is a number; leave it out, or give the weights as a column with data.weight",
            target.name
        )));
    };
    let mut of_class = vec![1.0; classes as usize];
    for (label, weight) in weights {
        let class = class_of(label, data.transforms.as_ref());
        let place = class.and_then(|class| of_class.get_mut(class as usize));
        match place {
            Some(place) => *place = *weight,
            None => {
                return Err(InputError::Invalid(format!(
                    "`data.class_weight` has {label:?}, which is no label of the data; it has {}",
                    labels(data.transforms.as_ref(), classes)
                )));
            }
        }
    }
    let weighted = |samples| -> Box<dyn Samples> {
        Box::new(Weighted {
            samples,
            of_class: of_class.clone(),
        })
    };
    Ok(Dataset {
        training: weighted(data.training),
        evaluation: weighted(data.evaluation),
        ..data
    })
}

/// Returns the class of a label; `None` if the data does not have the label.
fn class_of(label: &str, fitted: Option<&Fitted>) -> Option<u32> {
    match fitted.map(|fitted| &fitted.target) {
        Some(Target::Class { numbers, .. }) => numbers.get(label).copied(),
        Some(Target::Binary { values }) => values.get(label).map(|value| *value as u32),
        Some(Target::Number { .. }) => None,
        None => label.parse().ok(),
    }
}

/// Returns the labels of the data, for messages.
fn labels(fitted: Option<&Fitted>, classes: u64) -> String {
    const SHOWN: usize = 10;
    let names: Vec<&str> = match fitted.map(|fitted| &fitted.target) {
        Some(Target::Class { numbers, .. }) => numbers.keys().map(String::as_str).collect(),
        Some(Target::Binary { values }) => values.keys().map(String::as_str).collect(),
        _ => return format!("the classes 0 to {}", classes.saturating_sub(1)),
    };
    let more = if names.len() > SHOWN { ", ..." } else { "" };
    format!("{}{more}", names[..names.len().min(SHOWN)].join(", "))
}

struct Weighted {
    samples: Box<dyn Samples>,
    of_class: Vec<f32>,
}

impl Samples for Weighted {
    fn count(&self) -> u64 {
        self.samples.count()
    }

    fn read(&mut self, order: Order, positions: Range<u64>) -> Result<InMemory, InputError> {
        let samples = self.samples.read(order, positions)?;
        let count = samples.len();
        let (inputs, targets, weights) = samples.into_columns();
        let of = |class: usize| self.of_class.get(class).copied().unwrap_or(1.0);
        let target = targets.first().map(|target| target.plain_values());
        let mut of_samples: Vec<f32> = match target {
            Some(Values::U32(classes)) => classes.iter().map(|class| of(*class as usize)).collect(),
            Some(Values::F32(values)) => values.iter().map(|value| of(*value as usize)).collect(),
            _ => {
                return Err(InputError::Invalid(
                    "`data.class_weight` is for classes, and the target is none".to_owned(),
                ));
            }
        };
        for (weight, own) in of_samples.iter_mut().zip(weights.into_iter().flatten()) {
            *weight *= own;
        }
        Ok(InMemory::of_checked(
            inputs,
            targets,
            Some(of_samples),
            count,
        ))
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        self.samples.digest(hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::column::Column;

    fn data() -> Dataset {
        let samples = || {
            let inputs = Column::numbers("x", vec![1], vec![0.0; 3]);
            let labels = Column::category("label", vec![1, 0, 2], 3);
            InMemory::new(vec![inputs], vec![labels])
                .unwrap()
                .with_weights(vec![1.0, 2.0, 3.0])
                .unwrap()
        };
        Dataset::in_memory(samples(), samples()).unwrap()
    }

    #[test]
    fn the_weight_of_a_class_is_multiplied_by_that_of_the_sample() {
        let weights = [("0".to_owned(), 0.5), ("2".to_owned(), 4.0)].into();
        let mut data = weigh_classes(data(), &weights).unwrap();
        let read = data.evaluation.read(Order::Stored, 0..3).unwrap();
        assert_eq!(read.into_columns().2, Some(vec![1.0, 1.0, 12.0]));
    }

    #[test]
    fn a_label_that_is_not_there_is_named() {
        let weights = [("3".to_owned(), 0.5)].into();
        let error = weigh_classes(data(), &weights).unwrap_err().to_string();
        assert!(
            error.contains("\"3\"") && error.contains("0 to 2"),
            "{error}"
        );
    }
}
