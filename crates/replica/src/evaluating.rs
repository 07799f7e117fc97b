//! An evaluation on the held-out samples, part by part: the rows of tables that a part wants are pulled before it is
//! computed.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use model::input::{Order, Samples, read};
use model::tables::{self, ModelTables};
use model::{Batch, Metric, Metrics, Model, Objective, Pass};
use shared_proto::step::{Want, WantedRows};

use super::error::ReplicaError;

/// The number of samples that are evaluated together.
pub const EVALUATION_BATCH: u64 = 256;

/// An evaluation that is under way.
pub struct Evaluating {
    /// The number of samples evaluated so far.
    done: u64,
    /// The sum of the losses of these samples.
    loss: f64,
    accumulators: Vec<(String, Box<dyn Metric>)>,
    /// The next samples, with the rows of each table that they want.
    pub read: Option<(Batch, Vec<Arc<WantedRows>>)>,
}

impl Evaluating {
    /// Begins an evaluation.
    pub fn begin(model: &dyn Model, objective: &Objective) -> Self {
        let mut accumulators = objective.accumulators();
        accumulators.extend(model.metrics());
        Self {
            done: 0,
            loss: 0.0,
            accumulators,
            read: None,
        }
    }

    /// Reads the next samples. Returns the rows of tables that they want, or `None` if all samples are evaluated.
    pub fn next(
        &mut self,
        held_out: &mut dyn Samples,
        tables: &ModelTables,
        device: &Device,
    ) -> Result<Option<Vec<Want>>, ReplicaError> {
        let end = held_out.count().min(self.done + EVALUATION_BATCH);
        if self.done == end {
            return Ok(None);
        }
        let batch = read(held_out, Order::Stored, self.done..end, &Device::Cpu)?;
        let mut batch = [batch];
        let rows = tables.distinct(&mut batch)?;
        let [batch] = batch;
        let wants = tables::wants(&rows).collect();
        self.read = Some((batch.to_device(device)?, rows));
        Ok(Some(wants))
    }

    /// Adds a batch, for which the model has these outputs, to the loss and to the metrics.
    pub fn add(
        &mut self,
        model: &dyn Model,
        outputs: &Tensor,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<(), ReplicaError> {
        let mean = model.loss(outputs, batch, pass)?.to_dtype(DType::F64)?;
        let samples = batch.samples() as u64;
        self.loss += mean.to_scalar::<f64>()? * samples as f64;
        for (_, metric) in &mut self.accumulators {
            metric.add(outputs, batch)?;
        }
        self.done += samples;
        Ok(())
    }

    /// Returns the loss and the metrics over all samples that were added.
    pub fn metrics(self) -> Metrics {
        let loss = ("loss".to_owned(), self.loss / self.done as f64);
        let values = self.accumulators.into_iter();
        let values = values.map(|(name, mut metric)| (name, metric.value()));
        values.chain([loss]).collect()
    }
}
