//! A model whose weights tell which pushes were applied: push number p is a gradient of one in element
//! p of every variable, so with a learning rate of one the element counts how often it was applied.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use ps_client::{
    Acknowledgement, ClientError, Gradients, ParameterServers, Pulled, PulledBlock, Settled,
};
use shared_proto::blocks::VariableSpec;
use shared_proto::ids::{Clock, ViewNumber};
use shared_proto::payload;
use worker::model::Metrics;
use worker::replica::{Computed, Description, Positions, Replica, ReplicaError};
use worker::strategy::{ParameterServer, Strategy};

use crate::history::{Event, History};

/// Variables, of one block each.
pub(crate) const VARIABLES: usize = 4;

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
    weights: RefCell<Vec<Vec<f32>>>,
    prepared: RefCell<Option<Positions>>,
}

impl Counting {
    pub(crate) fn new(name: &str, history: &History, step: Duration) -> Self {
        let spec = |index| VariableSpec {
            name: format!("v{index}"),
            shape: vec![PUSHES],
        };
        Self {
            name: name.to_owned(),
            history: history.clone(),
            step,
            description: Description {
                variables: (0..VARIABLES).map(spec).collect(),
                training_samples: SAMPLES,
                evaluation_samples: 1,
            },
            weights: RefCell::new(vec![vec![0.0; PUSHES]; VARIABLES]),
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
            block
                .values
                .copy_to(&mut self.weights.borrow_mut()[block.variable]);
        }
    }

    async fn compute(&self) -> Result<Computed, ReplicaError> {
        tokio::time::sleep(self.step).await;
        let positions = self.prepared.borrow_mut().take();
        let positions = positions.ok_or_else(|| ReplicaError::Panicked("nothing".to_owned()))?;
        let push = self.history.computed(&self.name, positions);
        let mut gradient = vec![0.0; PUSHES];
        gradient[push] = 1.0;
        Ok(Computed {
            loss: 0.0,
            gradients: Gradients {
                values: vec![payload::to_bytes(&gradient); VARIABLES],
                norm: 2.0,
            },
        })
    }

    async fn evaluate(&self) -> Result<Metrics, ReplicaError> {
        self.history.add(Event::Evaluated {
            name: self.name.clone(),
            weights: self.weights.borrow().clone(),
        });
        Ok([("loss".to_owned(), 0.0)].into())
    }

    async fn values(&self) -> Result<Vec<Bytes>, ReplicaError> {
        Ok(vec![payload::to_bytes(&vec![0.0; PUSHES]); VARIABLES])
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
    pub(crate) fn new(servers: ParameterServers, name: &str, history: &History) -> Self {
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
        self.history.add(Event::Pulls(self.name.clone()));
        self.inner.pull_fresh(clock, view, take).await
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
