//! A model with weights that show which pushes were applied: push number p is a gradient of one in element
//! p of every block, so with a learning rate of one the element counts the times that it was applied.

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use shared_proto::blocks::VariableSpec;
use shared_proto::ids::{Clock, ViewNumber};
use shared_proto::payload::Elements;
use shared_proto::step::{EVERY_BATCH, Gradients, Want};
use worker::replica::{
    Computed, Description, Evaluation, EvaluationPart, Positions, Prepared, Replica, ReplicaError,
    Step,
};
use worker::strategy::{
    Evaluated, Joining, ParameterServer, Pulled, Pushed, Reconciled, Strategy, StrategyError,
};
use worker::variables::Part;

use crate::history::History;

/// The number of variables.
pub(crate) const VARIABLES: usize = 4;

/// The size of variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// The number of blocks of each variable.
    blocks: usize,
    block_elements: usize,
}

impl Shape {
    /// One block each, all of them in one message.
    pub(crate) const SMALL: Self = Self {
        blocks: 1,
        block_elements: PUSHES,
    };

    /// Blocks of the size that the coordinator chooses for them, and more on each shard than a message holds.
    pub(crate) const LARGE: Self = Self {
        blocks: 3,
        block_elements: 1 << 16,
    };

    /// Returns the number of all blocks of all variables.
    pub(crate) const fn all_blocks(self) -> usize {
        VARIABLES * self.blocks
    }

    /// Returns the number of a variable's block among all.
    pub(crate) const fn block(self, variable: usize, index: usize) -> usize {
        variable * self.blocks + index
    }

    /// Returns the number of the block that begins with this element.
    pub(crate) const fn block_at(self, variable: usize, start: usize) -> usize {
        self.block(variable, start / self.block_elements)
    }

    /// Returns the number of elements of a variable.
    const fn elements(self) -> usize {
        self.blocks * self.block_elements
    }

    /// Returns a gradient of one in the push's element of every block.
    fn gradient(self, push: usize) -> Elements {
        let mut gradient = vec![0.0; self.elements()];
        for block in gradient.chunks_mut(self.block_elements) {
            block[push] = 1.0;
        }
        gradient.into()
    }
}

/// Returns the elements of a block that count pushes.
pub(crate) fn counters(values: &Elements) -> Vec<f32> {
    let mut all = values.to_vec();
    all.truncate(PUSHES);
    all
}

/// The most pushes in a run.
pub(crate) const PUSHES: usize = 4096;

/// The number of training samples.
pub(crate) const SAMPLES: usize = 300;

/// The number of passes over the samples.
pub(crate) const EPOCHS: u32 = 2;

/// A worker's replica of the model.
pub(crate) struct Counting {
    name: String,
    history: History,
    step: Duration,
    description: Description,
}

impl Counting {
    pub(crate) fn new(name: &str, history: &History, step: Duration) -> Self {
        let spec = |index| VariableSpec {
            name: format!("v{index}"),
            shape: vec![history.shape().elements()],
            ..VariableSpec::default()
        };
        Self {
            name: name.to_owned(),
            history: history.clone(),
            step,
            description: Description {
                variables: (0..VARIABLES).map(spec).collect(),
                tables: Vec::new(),
                training_samples: SAMPLES as u64,
                evaluation_samples: 1,
                data_digest: Default::default(),
            },
        }
    }
}

#[async_trait(?Send)]
impl Replica for Counting {
    fn description(&self) -> &Description {
        &self.description
    }

    async fn prepare(&self, positions: Positions) -> Prepared {
        Prepared::new(positions, EVERY_BATCH.to_vec())
    }

    async fn take_in(&self, _: Vec<Part>) {}

    async fn compute(&self, positions: Positions, _: Step) -> Result<Computed, ReplicaError> {
        tokio::time::sleep(self.step).await;
        let (push, finite) = self.history.computed(&self.name, positions);
        let shape = self.history.shape();
        let mut values = vec![shape.gradient(push); VARIABLES];
        if !finite {
            values[1] = vec![f32::NAN; shape.elements()].into();
        }
        let norm = if finite { 2.0 } else { f64::NAN };
        Ok(Computed {
            loss: 0.0,
            gradients: Gradients {
                values,
                rows: Vec::new(),
                norm,
            },
        })
    }

    async fn evaluate(&self, _: EvaluationPart) -> Result<Evaluation, ReplicaError> {
        self.history.evaluated(&self.name);
        Ok(Evaluation::Done([("loss".to_owned(), 0.0)].into()))
    }

    async fn initial_values(&self) -> Result<Vec<Elements>, ReplicaError> {
        let zeros = vec![0.0; self.history.shape().elements()];
        Ok(vec![zeros.into(); VARIABLES])
    }

    async fn save(&self, _: PathBuf) -> Result<(), ReplicaError> {
        Ok(())
    }
}

/// The strategy of parameter servers, which records its observations in the history.
pub(crate) struct Observed {
    inner: ParameterServer,
    name: String,
    history: History,
}

impl Observed {
    /// Joins the cluster for a worker that has just registered.
    pub(crate) async fn join(
        joining: &Joining<'_>,
        replica: &dyn Replica,
        name: &str,
        history: &History,
    ) -> Result<Box<dyn Strategy>, StrategyError> {
        let inner = ParameterServer::join(joining, replica).await?;
        history.registered(name);
        Ok(Box::new(Self {
            inner,
            name: name.to_owned(),
            history: history.clone(),
        }))
    }
}

#[async_trait(?Send)]
impl Strategy for Observed {
    async fn pull(
        &mut self,
        clock: Clock,
        wants: &[Want],
        _: &dyn Replica,
    ) -> Result<Pulled, StrategyError> {
        let (name, history) = (&self.name, &self.history);
        let take = async |blocks| history.pulled(name, blocks);
        let pulled = self.inner.pull_blocks(clock, wants, take).await?;
        self.history.pulled_all(&self.name, clock.0);
        Ok(pulled)
    }

    async fn push(
        &mut self,
        clock: Clock,
        gradients: Gradients,
        next: &[Want],
    ) -> Result<Pushed, StrategyError> {
        let acknowledged = self.inner.push_blocks(clock, &gradients, next).await?;
        self.history
            .acknowledged(&self.name, clock.0, &acknowledged.blocks);
        Ok(Pushed {
            receipts: acknowledged.receipts,
        })
    }

    async fn evaluate(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        replica: &dyn Replica,
    ) -> Result<Evaluated, StrategyError> {
        let (name, history) = (&self.name, &self.history);
        let take = async |blocks| history.pulled(name, blocks);
        let epoch = self.inner.pull_fresh_blocks(clock, view, take).await?;
        self.history.pulled_fresh(&self.name, epoch);
        match replica.evaluate(EvaluationPart::First).await? {
            Evaluation::Done(metrics) => Ok(Evaluated { metrics, epoch }),
            Evaluation::Wants(_) => unreachable!("a counting replica has no tables"),
        }
    }

    async fn save(&mut self, path: PathBuf, replica: &dyn Replica) -> Result<(), StrategyError> {
        self.inner.save(path, replica).await
    }

    fn reconciled(&self) -> Box<dyn Reconciled> {
        self.inner.reconciled()
    }
}
