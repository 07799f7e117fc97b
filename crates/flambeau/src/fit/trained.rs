//! A trained model: its weights, evaluated and used for predictions.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::Device;
use model::input::{Column, InMemory, RowBatch};
use model::registry::Registry;
use replica::ReplicaError;
use worker::alone::local::{Evaluated, Trained, evaluate_trained};
use worker::alone::predict::{values, values_of_rows};

use super::outside_of_runtimes;
use crate::command::{FinishedRun, Weights};
use crate::error::CommandError;

/// The weights of a finished training: the final weights ([`Trainer::last`](super::Trainer::last)), or those of the
/// best evaluation ([`Trainer::best`](super::Trainer::best)).
///
/// ```
/// use flambeau::settings::Best;
/// use flambeau::{Error, Job, Trainer};
///
/// # fn main() -> Result<(), Error> {
/// let mut trainer = Trainer::new(Job::from_toml("epochs = 5")?)
///     .callback(Best { metric: "accuracy".to_owned(), goal: None });
/// let history = trainer.fit()?;
/// let best = history.values("accuracy").into_iter().fold(0.0, f64::max);
/// assert_eq!(trainer.best()?.evaluate()?["accuracy"], best);
/// assert_eq!(trainer.best()?.predict_held_out()?.len(), 360);
/// # Ok(())
/// # }
/// ```
pub struct TrainedModel<'a> {
    finished: FinishedRun,
    registry: &'a Registry,
    device: Device,
}

impl<'a> TrainedModel<'a> {
    /// Reads the weights and the job in a run directory.
    pub(super) fn read(
        dir: &Path,
        which: Weights,
        registry: &'a Registry,
        device: Device,
    ) -> Result<Self, CommandError> {
        Ok(Self {
            finished: FinishedRun::read(dir, which, None)?,
            registry,
            device,
        })
    }

    /// Evaluates the weights on the held-out samples, and returns the loss and the other metrics.
    ///
    /// # Errors
    /// If the data or the model cannot be used, or if the model has tables and these are the best weights.
    pub fn evaluate(&self) -> Result<BTreeMap<String, f64>, CommandError> {
        self.compute(|trained, registry, device| {
            evaluate_trained(trained, registry, device, Evaluated::HeldOut)
                .map(|(metrics, _)| metrics)
        })
    }

    /// Returns the model's outputs for each sample: the probability of each class for classes, the probability of 1 for
    /// a binary target, otherwise numbers. `inputs` are the model's inputs, as `forward` receives them.
    ///
    /// # Errors
    /// If the columns are not those of the training, or for the reasons of [`evaluate`](Self::evaluate).
    pub fn predict(&self, inputs: Vec<Column>) -> Result<Vec<Vec<f32>>, CommandError> {
        let samples = InMemory::without_targets(inputs).map_err(ReplicaError::from)?;
        self.outputs(Some(samples))
    }

    /// Returns the model's outputs for each of these rows, as [`predict`](Self::predict) does. The rows have the
    /// columns of the training data, as its files or record batches have them. The label may be missing. The training
    /// data itself is not read.
    ///
    /// # Errors
    /// If a row does not fit the columns of the training, if the training data had no columns, or if the model cannot be used.
    pub fn predict_rows(&self, rows: impl RowBatch) -> Result<Vec<Vec<f32>>, CommandError> {
        self.compute(|trained, registry, device| values_of_rows(trained, registry, device, rows))
    }

    /// Returns the model's outputs for each held-out sample, as [`predict`](Self::predict) does.
    ///
    /// # Errors
    /// For the reasons of [`evaluate`](Self::evaluate).
    pub fn predict_held_out(&self) -> Result<Vec<Vec<f32>>, CommandError> {
        self.outputs(None)
    }

    fn outputs(&self, samples: Option<InMemory>) -> Result<Vec<Vec<f32>>, CommandError> {
        self.compute(|trained, registry, device| values(trained, registry, device, samples))
    }

    /// Calls a function that computes with the weights.
    fn compute<T: Send>(
        &self,
        compute: impl FnOnce(&Trained, &Registry, &Device) -> Result<T, ReplicaError> + Send,
    ) -> Result<T, CommandError> {
        let Self {
            finished,
            registry,
            device,
        } = self;
        Ok(outside_of_runtimes(|| {
            compute(&finished.trained(), registry, device)
        })?)
    }

    /// Returns the path of the weights, which is a safetensors file.
    pub fn weights(&self) -> PathBuf {
        self.finished.weights().to_owned()
    }
}
