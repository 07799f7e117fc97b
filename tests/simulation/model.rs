//! A model whose weights tell which pushes were applied: push number p is a gradient of one in element
//! p of every block, so with a learning rate of one the element counts how often it was applied.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use ps_client::{
    Acknowledgement, ClientError, Gradients, ParameterServers, Pulled, PulledBlock, Settled,
};
use shared_proto::blocks::VariableSpec;
use shared_proto::ids::{Clock, ViewNumber};
use shared_proto::payload::{self, Elements};
use worker::model::Metrics;
use worker::replica::{Computed, Description, Positions, Replica, ReplicaError};
use worker::strategy::{ParameterServer, Strategy};

use crate::history::History;

/// Variables.
pub(crate) const VARIABLES: usize = 4;

/// How large variables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Of each variable.
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

    /// All blocks of all variables.
    pub(crate) const fn all_blocks(self) -> usize {
        VARIABLES * self.blocks
    }

    /// The number of a variable's block among all.
    pub(crate) const fn block(self, variable: usize, index: usize) -> usize {
        variable * self.blocks + index
    }

    /// The number of the block that begins with this element.
    pub(crate) const fn block_at(self, variable: usize, start: usize) -> usize {
        self.block(variable, start / self.block_elements)
    }

    /// Elements of a variable.
    const fn elements(self) -> usize {
        self.blocks * self.block_elements
    }

    /// A gradient of one in the push's element of every block.
    fn gradient(self, push: usize) -> Bytes {
        let mut gradient = vec![0.0; self.elements()];
        for block in gradient.chunks_mut(self.block_elements) {
            block[push] = 1.0;
        }
        payload::to_bytes(&gradient)
    }
}

/// What each element of a block that counts holds.
pub(crate) fn counters(values: &Elements) -> Vec<f32> {
    let mut all = vec![0.0; values.len()];
    values.copy_to(&mut all);
    all.truncate(PUSHES);
    all
}

/// The most pushes in a run.
pub(crate) const PUSHES: usize = 4096;

/// Training samples.
pub(crate) const SAMPLES: usize = 300;

/// Passes over them.
pub(crate) const EPOCHS: u32 = 2;

/// The worker's copy.
pub(crate) struct Counting {
    name: String,
    history: History,
    step: Duration,
    description: Description,
    prepared: RefCell<Option<Positions>>,
}

impl Counting {
    pub(crate) fn new(name: &str, history: &History, step: Duration) -> Self {
        let spec = |index| VariableSpec {
            name: format!("v{index}"),
            shape: vec![history.shape().elements()],
        };
        Self {
            name: name.to_owned(),
            history: history.clone(),
            step,
            description: Description {
                variables: (0..VARIABLES).map(spec).collect(),
                training_samples: SAMPLES,
                evaluation_samples: 1,
                data_digest: Default::default(),
            },
            prepared: RefCell::default(),
        }
    }
}

impl Replica for Counting {
    fn description(&self) -> &Description {
        &self.description
    }

    async fn prepare(&self, positions: Positions) {
        *self.prepared.borrow_mut() = Some(positions);
    }

    async fn take_in(&self, blocks: Vec<PulledBlock>) {
        for block in blocks {
            self.history.pulled(&self.name, &block);
        }
    }

    async fn compute(&self) -> Result<Computed, ReplicaError> {
        tokio::time::sleep(self.step).await;
        let positions = self.prepared.borrow_mut().take();
        let positions = positions.ok_or_else(|| ReplicaError::Panicked("nothing".to_owned()))?;
        let (push, finite) = self.history.computed(&self.name, positions);
        let shape = self.history.shape();
        let mut values = vec![shape.gradient(push); VARIABLES];
        if !finite {
            values[1] = payload::to_bytes(&vec![f32::NAN; shape.elements()]);
        }
        let norm = if finite { 2.0 } else { f64::NAN };
        Ok(Computed {
            loss: 0.0,
            gradients: Gradients { values, norm },
        })
    }

    async fn evaluate(&self) -> Result<Metrics, ReplicaError> {
        self.history.evaluated(&self.name);
        Ok([("loss".to_owned(), 0.0)].into())
    }

    async fn values(&self) -> Result<Vec<Bytes>, ReplicaError> {
        let zeros = vec![0.0; self.history.shape().elements()];
        Ok(vec![payload::to_bytes(&zeros); VARIABLES])
    }

    async fn save(&self, _: PathBuf) -> Result<(), ReplicaError> {
        Ok(())
    }
}

/// Parameter servers, and somebody who writes down what they promise.
pub(crate) struct Observed {
    pub(crate) inner: ParameterServer,
    pub(crate) name: String,
    pub(crate) history: History,
}

impl Observed {
    /// Of a worker that has just registered.
    pub(crate) fn new(servers: ParameterServers, name: &str, history: &History) -> Self {
        history.registered(name);
        Self {
            inner: ParameterServer::new(servers),
            name: name.to_owned(),
            history: history.clone(),
        }
    }
}

impl Strategy for Observed {
    async fn pull(
        &mut self,
        clock: Clock,
        take: impl AsyncFnMut(Vec<PulledBlock>),
    ) -> Result<Pulled, ClientError> {
        let pulled = self.inner.pull(clock, take).await?;
        self.history.pulled_all(&self.name, clock.0);
        Ok(pulled)
    }

    async fn pull_fresh(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        take: impl AsyncFnMut(Vec<PulledBlock>),
    ) -> Result<Pulled, ClientError> {
        let pulled = self.inner.pull_fresh(clock, view, take).await?;
        self.history.pulled_fresh(&self.name, pulled.epoch);
        Ok(pulled)
    }

    async fn push(
        &mut self,
        clock: Clock,
        gradients: &Gradients,
    ) -> Result<Acknowledgement, ClientError> {
        let acknowledgement = self.inner.push(clock, gradients).await?;
        self.history
            .acknowledged(&self.name, clock.0, &acknowledgement.blocks);
        Ok(acknowledgement)
    }

    fn settled(&self) -> Settled {
        self.inner.settled()
    }
}
