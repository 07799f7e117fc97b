//! The kinds of measurements, the model that has only a table, and a replica without a model.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Storage, Tensor, bail};
use candle_nn::VarBuilder;
use clap::ValueEnum;
use model::tables::{Embeddings, Table};
use model::{Batch, Model, Pass, Setup};
use parking_lot::Mutex;
use replica::{
    Computed, Description, Evaluation, EvaluationPart, Positions, Prepared, Replica, ReplicaError,
    Step,
};
use shared_proto::payload::Elements;
use shared_proto::step::{Gradients, Part, RowGradients, Want, WantedRows};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// Rows are pulled, and the same gradients pushed.
    Communication,
    /// Ids are merged, rows looked up for each id, and the gradients of each id summed.
    Step,
    /// DeepFM is trained.
    Deepfm,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Communication, Self::Step, Self::Deepfm];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Communication => "communication",
            Self::Step => "step",
            Self::Deepfm => "deepfm",
        }
    }

    /// Returns the number of workers that are measured if the user gives none.
    pub(super) fn workers(self) -> u32 {
        match self {
            Self::Communication => 1,
            Self::Step | Self::Deepfm => 2,
        }
    }

    /// Returns the optimizers that are measured if the user gives none.
    pub(super) fn optimizers(self) -> &'static [&'static str] {
        match self {
            Self::Communication => &["sgd"],
            Self::Step => &["sgd", "adagrad"],
            Self::Deepfm => &["row-adagrad"],
        }
    }
}

/// The name of [`Squares`].
pub(super) const SQUARES: &str = "squares of rows";

/// A model that has only a table. Its loss is half the sum of the squares of all values that are looked up, times
/// 0.001.
pub(super) struct Squares(Embeddings);

impl Model for Squares {
    fn new(setup: &Setup, _: VarBuilder) -> Result<Self> {
        let dimension = setup.settings.embedding as u32;
        let table = Table::dim(dimension).column("categories");
        setup.table("rows", table).map(Self)
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        self.0.lookup(batch, "categories")
    }

    fn loss(&self, outputs: &Tensor, _: &Batch, _: &Pass) -> Result<Tensor> {
        outputs.contiguous()?.apply_op1(HalfSquares)
    }
}

/// Half the sum of the squares of all values, times 0.001. One pass over the values computes it, as in a compiled
/// graph.
struct HalfSquares;

const SCALE: f32 = 0.001;

impl CustomOp1 for HalfSquares {
    fn name(&self) -> &'static str {
        "half-squares"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let values = storage.as_slice::<f32>()?;
        let start = layout.start_offset();
        let values = &values[start..start + layout.shape().elem_count()];
        // Sums side by side: a single one would wait for each addition before the next.
        let (chunks, rest) = values.as_chunks::<16>();
        let mut sums = [0f32; 16];
        for chunk in chunks {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum += value * value;
            }
        }
        let rest: f32 = rest.iter().map(|value| value * value).sum();
        let sum = sums.iter().sum::<f32>() + rest;
        Ok((CpuStorage::F32(vec![SCALE / 2.0 * sum]), Shape::from(())))
    }

    fn bwd(&self, values: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let factor = gradient.to_scalar::<f32>()? * SCALE;
        let (storage, layout) = values.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            bail!("the rows are not on the CPU");
        };
        let start = layout.start_offset();
        let own = &storage.as_slice::<f32>()?[start..start + values.elem_count()];
        let gradient = own.iter().map(|value| value * factor).collect();
        Tensor::from_vec(gradient, values.shape(), values.device()).map(Some)
    }
}

/// A replica without a model. Its steps want the rows of its batches in rotation; each batch always has the same
/// gradients.
pub(super) struct Rotating {
    description: Description,
    batches: Vec<(Arc<WantedRows>, Elements)>,
    /// The buffer for pulled rows, in place of a model's.
    memory: Mutex<Vec<f32>>,
}

impl Rotating {
    /// Returns a replica with the description of a model, and the rows that each of its batches wants.
    pub(super) fn new(description: Description, batches: Vec<Arc<WantedRows>>) -> Self {
        let dimension = description
            .tables
            .first()
            .map_or(0, |t| t.dimension as usize);
        let with_gradients = |rows: Arc<WantedRows>| {
            let gradients = vec![1e-3; rows.ids.len() * dimension];
            (rows, gradients.into())
        };
        Self {
            description,
            batches: batches.into_iter().map(with_gradients).collect(),
            memory: Mutex::default(),
        }
    }

    fn batch(&self, positions: Positions) -> &(Arc<WantedRows>, Elements) {
        let samples = positions.end - positions.start;
        let number = positions.start / samples.max(1);
        &self.batches[number as usize % self.batches.len()]
    }
}

#[async_trait(?Send)]
impl Replica for Rotating {
    fn description(&self) -> &Description {
        &self.description
    }

    async fn prepare(&self, positions: Positions) -> Prepared {
        let rows = Arc::clone(&self.batch(positions).0);
        Prepared::new(positions, vec![Want::Rows(rows)])
    }

    async fn load(&self, parts: Vec<Part>) {
        let mut memory = self.memory.lock();
        for part in parts {
            let end = part.start + part.values.len();
            if memory.len() < end {
                memory.resize(end, 0.0);
            }
            part.values.copy_to(&mut memory[part.start..end]);
        }
    }

    async fn compute(
        &self,
        positions: Positions,
        _: Step,
    ) -> std::result::Result<Computed, ReplicaError> {
        let (rows, values) = self.batch(positions);
        let gradients = Gradients {
            values: Vec::new(),
            rows: vec![RowGradients {
                rows: Arc::clone(rows),
                values: values.clone(),
            }],
            // A worker has the norm from the pass that takes gradients out of candle.
            norm: 1.0,
        };
        Ok(Computed::new(0.0, gradients))
    }

    async fn evaluate(&self, _: EvaluationPart) -> std::result::Result<Evaluation, ReplicaError> {
        Ok(Evaluation::Done(Default::default()))
    }

    async fn initial_values(&self) -> std::result::Result<Vec<Elements>, ReplicaError> {
        Ok(Vec::new())
    }

    async fn save(&self, _: PathBuf) -> std::result::Result<(), ReplicaError> {
        Ok(())
    }
}
