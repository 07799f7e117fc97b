//! What a job minimises, and what it measures.

use shared_proto::job::{self, LossName};

use super::loss::Loss;
use super::metric::Metric;
use super::metrics;
use crate::input::{Field, InputError, Scale, Signature, ValueType};

/// The loss and the metrics of a job, for its data.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Objective {
    /// The loss.
    pub loss: Loss,
    /// The metrics of evaluations, beside the loss.
    pub metrics: Vec<metrics::Name>,
    /// The number of outputs that a model returns for each sample; 0 if the loss is the model's own.
    pub outputs: usize,
    /// The standardisation of the target; `None` if the model learns the labels as they are, or if the loss is the
    /// model's own. Metrics and predictions are in the unit of the labels; the loss is not.
    pub scale: Option<Scale>,
}

impl Objective {
    /// Returns the objective of a job for data with these fields. If the data does not have exactly one target, the
    /// loss is the model's own.
    ///
    /// # Errors
    /// [`InputError::Target`] if the loss does not fit the target; [`InputError::Metric`] for an unknown metric;
    /// [`InputError::Fields`] if the job has settings for the objective and the data does not have exactly one target;
    /// [`InputError::Invalid`] for label smoothing with a loss other than cross entropy.
    pub fn new(settings: &job::Objective, data: &Signature) -> Result<Self, InputError> {
        match data.target() {
            Err(_) if *settings == job::Objective::default() => Ok(Self::default()),
            target => Self::for_target(settings, target?),
        }
    }

    fn for_target(settings: &job::Objective, target: &Field) -> Result<Self, InputError> {
        let classes = target
            .categories
            .filter(|_| target.values == ValueType::U32);
        let binary = target.categories == Some(2);
        let misfit = |loss: LossName| InputError::Target {
            loss: loss.name(),
            target: target.name.clone(),
            is: match (classes, binary) {
                (Some(classes), _) => format!("one of {classes} classes"),
                (None, true) => "0 or 1".to_owned(),
                (None, false) => "a number".to_owned(),
            },
        };
        let name = match (settings.loss, classes, binary) {
            (LossName::Auto, Some(_), _) => LossName::CrossEntropy,
            (LossName::Auto, None, true) => LossName::BinaryCrossEntropy,
            (LossName::Auto, None, false) => LossName::MeanSquaredError,
            (named, _, _) => named,
        };
        let (loss, outputs) = match (name, classes) {
            (LossName::CrossEntropy, Some(classes)) => {
                let smoothing = settings.label_smoothing;
                (Loss::CrossEntropy { smoothing }, classes as usize)
            }
            (LossName::BinaryCrossEntropy, _) if binary => (Loss::BinaryCrossEntropy, 1),
            (LossName::MeanSquaredError, None) => (Loss::MeanSquaredError, target.elements()),
            (LossName::MeanAbsoluteError, None) => (Loss::MeanAbsoluteError, target.elements()),
            (LossName::Model, _) => (Loss::Model, 0),
            (name, _) => return Err(misfit(name)),
        };
        if settings.label_smoothing != 0.0 && name != LossName::CrossEntropy {
            return Err(InputError::Invalid(format!(
                "objective.label_smoothing is {}, but does not count with the loss {}; leave it out",
                settings.label_smoothing,
                name.name()
            )));
        }
        let metrics = match settings.metrics.is_empty() {
            true => metrics::Name::usual(loss).to_vec(),
            false => settings
                .metrics
                .iter()
                .map(|name| metrics::Name::read(name, loss, outputs))
                .collect::<Result<_, _>>()?,
        };
        Ok(Self {
            loss,
            metrics,
            outputs,
            // Outputs for a loss of the model's own may be in any unit.
            scale: target.scale.filter(|_| loss != Loss::Model),
        })
    }

    /// Returns the accumulators of the metrics.
    #[doc(hidden)]
    pub fn accumulators(&self) -> Vec<(String, Box<dyn Metric>)> {
        let metric = |name: &metrics::Name| (name.to_string(), name.metric(self.loss, self.scale));
        self.metrics.iter().map(metric).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_follows_from_the_target_or_is_refused_with_the_ways_out() {
        let of = |name: LossName, target: Field| {
            let settings = job::Objective {
                loss: name,
                ..job::Objective::default()
            };
            let data = Signature {
                inputs: Vec::new(),
                targets: vec![target],
            };
            Objective::new(&settings, &data).map_err(|error| error.to_string())
        };
        let (class, binary) = (Field::category("kind", 3), Field::binary("click"));
        let price = Field::numbers("price", Vec::new());
        let auto = |field: &Field| {
            let objective = of(LossName::Auto, field.clone()).unwrap();
            (objective.loss, objective.outputs)
        };
        assert_eq!(auto(&class), (Loss::CrossEntropy { smoothing: 0.0 }, 3));
        assert_eq!(auto(&binary), (Loss::BinaryCrossEntropy, 1));
        assert_eq!(auto(&price), (Loss::MeanSquaredError, 1));
        for (name, field) in [
            (LossName::CrossEntropy, &price),
            (LossName::BinaryCrossEntropy, &price),
            (LossName::MeanSquaredError, &class),
        ] {
            let error = of(name, field.clone()).unwrap_err();
            let named = error.contains(name.name()) && error.contains(&field.name);
            assert!(named && error.contains("\"auto\""), "{error}");
        }
        // Two classes may be a binary target.
        let two = of(LossName::BinaryCrossEntropy, Field::category("kind", 2)).unwrap();
        let outputs = candle_core::Tensor::new(&[[0.5f32], [-1.0]], &candle_core::Device::Cpu);
        let target = candle_core::Tensor::new(&[1u32, 0], &candle_core::Device::Cpu).unwrap();
        let batch = crate::input::Batch::new(2).with_target("kind", target);
        let loss = two.loss.of(&outputs.unwrap(), &batch).unwrap();
        assert!(loss.to_scalar::<f32>().unwrap() < 0.5);
    }
}
