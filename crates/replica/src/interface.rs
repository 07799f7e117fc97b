//! The interface of replicas.

use std::path::PathBuf;
use std::pin::Pin;

use async_trait::async_trait;
use bytes::Bytes;
use model::Metrics;
use shared_proto::blocks::VariableSpec;
use shared_proto::payload::Elements;
use shared_proto::step::{Part, Want};
use shared_proto::table::TableSpec;
use tokio::sync::oneshot;

use super::error::ReplicaError;
use super::mirror::Mirror;
use super::step::{Computed, Positions, Step};

/// A batch that a replica prepares.
#[derive(Debug)]
pub struct Prepared {
    positions: Positions,
    wants: Vec<Want>,
    /// The wants of a batch that is still being assembled.
    assembling: Option<oneshot::Receiver<Vec<Want>>>,
    /// The parts of the batch, if several replicas prepare it.
    parts: Vec<Prepared>,
}

impl Prepared {
    /// Returns a batch with known wants.
    pub fn new(positions: Positions, wants: Vec<Want>) -> Self {
        Self {
            positions,
            wants,
            assembling: None,
            parts: Vec::new(),
        }
    }

    /// Returns a batch in several parts. It wants the values that any part wants.
    pub(super) fn of_parts(positions: Positions, parts: Vec<Prepared>) -> Self {
        Self {
            parts,
            ..Self::new(positions, Vec::new())
        }
    }

    /// Returns a batch with wants that become known when it is assembled.
    pub(super) fn assembling(positions: Positions, wants: oneshot::Receiver<Vec<Want>>) -> Self {
        Self {
            assembling: Some(wants),
            ..Self::new(positions, Vec::new())
        }
    }

    /// Returns the positions of the batch's samples.
    pub fn positions(&self) -> Positions {
        self.positions
    }

    /// Waits until the batch is assembled, and returns the values that it wants. A batch that cannot be assembled
    /// wants nothing; its computation returns the error.
    pub async fn wants(&mut self) -> &[Want] {
        if let Some(assembling) = self.assembling.take() {
            self.wants = assembling.await.unwrap_or_default();
        }
        for mut part in std::mem::take(&mut self.parts) {
            for want in Box::pin(part.wants()).await {
                if !self.wants.contains(want) {
                    self.wants.push(want.clone());
                }
            }
        }
        &self.wants
    }
}

/// A computation that is queued or running. If it is dropped, its batch has to be prepared again.
pub struct Computing {
    positions: Positions,
    step: Step,
    computed: Pin<Box<dyn Future<Output = Result<Computed, ReplicaError>>>>,
}

impl Computing {
    /// Returns the computation of a step on these positions. `computed` returns its result.
    pub fn new(
        positions: Positions,
        step: Step,
        computed: impl Future<Output = Result<Computed, ReplicaError>> + 'static,
    ) -> Self {
        Self {
            positions,
            step,
            computed: Box::pin(computed),
        }
    }

    /// Returns whether this is the computation of this step on these positions.
    pub fn is_of(&self, positions: Positions, step: Step) -> bool {
        (self.positions, self.step) == (positions, step)
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// The computation's.
    pub async fn computed(self) -> Result<Computed, ReplicaError> {
        self.computed.await
    }
}

/// A part of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvaluationPart {
    /// Begins an evaluation, and reads the first samples. Drops an evaluation that was not finished.
    First,
    /// Evaluates the samples that the previous call has read, and reads the next. The values that the previous answer
    /// wants must be loaded.
    Next,
}

/// The answer to a part of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub enum Evaluation {
    /// The values that the samples just read want, beside the dense variables.
    Wants(Vec<Want>),
    /// All samples are evaluated: the mean loss, and the metrics.
    Done(Metrics),
}

/// The variables of a model and the sizes of its data.
#[derive(Clone, Debug)]
pub struct Description {
    /// The variables, sorted by name.
    pub variables: Vec<VariableSpec>,
    /// The tables, sorted by name.
    pub tables: Vec<TableSpec>,
    /// The number of samples to train on.
    pub training_samples: u64,
    /// The number of held-out samples.
    pub evaluation_samples: u64,
    /// The SHA-256 of the samples; empty for data that workers do not compare.
    pub data_digest: Bytes,
}

/// A worker's copy of the model, with its data.
#[async_trait(?Send)]
pub trait Replica {
    /// Returns the model's variables and tables, and the sizes of its data.
    fn description(&self) -> &Description;

    /// Starts to assemble a batch. Several batches may be prepared ahead of their computation.
    async fn prepare(&self, positions: Positions) -> Prepared;

    /// Writes values into the variables, and keeps rows of tables for the next batch. Calls take effect in order. A
    /// call during a computation takes effect after it. If values cannot be loaded, the next computation returns the
    /// error.
    async fn load(&self, parts: Vec<Part>);

    /// Computes the loss and the gradients of the prepared batch with these positions. Batches must be computed in the
    /// order in which they were prepared. A batch that is skipped is dropped.
    async fn compute(&self, positions: Positions, step: Step) -> Result<Computed, ReplicaError>;

    /// Begins a computation like [`Self::compute`], after all earlier calls, and does not wait for the result. Returns
    /// `None` if the replica does not support this, as by default.
    async fn begin(&self, _: Positions, _: Step) -> Option<Computing> {
        None
    }

    /// Begins or continues an evaluation on the held-out samples.
    async fn evaluate(&self, part: EvaluationPart) -> Result<Evaluation, ReplicaError>;

    /// Returns the values with which the variables were created, even if they have been overwritten since.
    async fn initial_values(&self) -> Result<Vec<Elements>, ReplicaError>;

    /// Returns the additional interface for strategies without servers; `None` by default.
    fn mirror(&self) -> Option<&dyn Mirror> {
        None
    }

    /// Writes the variables to a safetensors file. Beside it, writes the parameters that were fitted to the columns of
    /// the data (`transforms.json`).
    async fn save(&self, path: PathBuf) -> Result<(), ReplicaError>;
}
