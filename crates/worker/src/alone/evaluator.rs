//! A model that is evaluated again and again, with other weights each time.

use std::path::Path;

use candle_core::Device;
use model::Metrics;
use model::registry::Registry;
use model::tables::{SavedTables, restored};
use replica::ReplicaError;
use shared_proto::job::Job;

use super::local::{Loaded, evaluate_loaded};

/// A job's model and its held-out samples.
pub struct Evaluator {
    job: Job,
    loaded: Loaded,
    device: Device,
}

impl Evaluator {
    /// Builds the model, and opens the data as a worker does.
    ///
    /// # Errors
    /// The data's or the model's.
    pub fn open(job: &Job, registry: &Registry, device: &Device) -> Result<Self, ReplicaError> {
        Ok(Self {
            loaded: Loaded::as_in_training(job, registry, device)?,
            job: job.clone(),
            device: device.clone(),
        })
    }

    /// Returns the loss and the metrics on the held-out samples, with the weights of a file and these rows of tables.
    ///
    /// # Errors
    /// If the file holds other variables than the model has; or the data's or the model's.
    pub fn evaluate(
        &mut self,
        weights: &Path,
        tables: &SavedTables,
    ) -> Result<Metrics, ReplicaError> {
        self.loaded.built.variables.load(weights)?;
        let specs = self.loaded.built.tables.specs();
        if !specs.is_empty() {
            self.loaded.rows = restored(specs, tables)?;
        }
        evaluate_loaded(&mut self.loaded, &self.job, &self.device)
    }
}
