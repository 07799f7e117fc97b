//! The interface of strategies.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use collective::Exchange;
use daemon::membership::Membership;
use model::Metrics;
use network::Network;
use replica::{Computed, Positions, Prepared, Replica, Step};
use shared_proto::ids::{Clock, Epoch, ViewNumber};
use shared_proto::job::Job;
use shared_proto::step::Gradients;
use shared_proto::wire;
use tokio::time::{Instant, timeout};

use super::error::StrategyError;
use super::stores::Stores;

/// The time between two warnings of a wait for a newer epoch.
const WARN_EVERY: Duration = Duration::from_secs(30);

/// A registered worker that joins a cluster by a strategy.
#[derive(Clone, Copy, Debug)]
pub struct Joining<'a> {
    /// The coordinator's job with this worker's own settings.
    pub job: &'a Job,
    /// This worker's place in the cluster.
    pub membership: &'a Membership,
    /// The network through which the worker reaches other processes.
    pub network: &'a Arc<dyn Network>,
    /// The place where links from other workers arrive.
    pub links: &'a Exchange,
    /// The stores of checkpoints.
    pub stores: &'a Stores,
    /// The time for which the worker continues without an answer of another process.
    pub patience: Duration,
}

/// A way to train together with others. It is created by joining a cluster: it registers what it needs, connects,
/// and agrees with the others on the initial values.
#[async_trait(?Send)]
pub trait Strategy {
    /// Sets the factor of the learning rate for later updates. The default leaves it to the servers, which have the
    /// factor from views.
    async fn scale_learning_rate(&mut self, _: f64, _: &dyn Replica) -> Result<(), StrategyError> {
        Ok(())
    }

    /// Writes the values that the batch of the step at `clock` wants into the replica.
    async fn pull(
        &mut self,
        clock: Clock,
        batch: &mut Prepared,
        replica: &dyn Replica,
    ) -> Result<Pulled, StrategyError>;

    /// Computes the loss and the gradients of a step. Without samples there is nothing to compute, but other workers
    /// may wait for this one in the middle of their passes. `next` is the batch of the next step, if it is known, so
    /// that its values can be requested meanwhile. The default requests nothing, and lets the replica compute by
    /// itself.
    async fn compute(
        &mut self,
        positions: Positions,
        step: Step,
        _: Option<&mut Prepared>,
        replica: &dyn Replica,
    ) -> Result<Computed, StrategyError> {
        Ok(match positions.is_empty() {
            true => Computed::nothing(),
            false => replica.compute(positions, step).await?,
        })
    }

    /// Pushes the mean gradients of the step at `clock` over `samples` samples. They count once the result is
    /// acknowledged; the caller pushes no other gradients before. `next` is the batch of the next step, if it is known,
    /// so that its values can be requested right behind the gradients.
    async fn push(
        &mut self,
        clock: Clock,
        gradients: Gradients,
        samples: u64,
        next: Option<&mut Prepared>,
        replica: &dyn Replica,
    ) -> Result<Pushing, StrategyError>;

    /// Forms a new group with the other workers, because the last group of this worker is over. Returns the number of
    /// steps that the values include. It is called only for strategies in which workers form groups.
    async fn regroup(&mut self, _: &dyn Replica) -> Result<Clock, StrategyError> {
        Err(StrategyError::Answer {
            call: "LeaseWork",
            problem: "it says that the workers form a ring, but this strategy has none".to_owned(),
        })
    }

    /// Copies the values, and writes them as a checkpoint in the background. `ordered` is the first view that orders it. It is
    /// called only for strategies with a ring.
    async fn write_checkpoint(
        &mut self,
        _: &wire::CopyValues,
        _: ViewNumber,
        _: &dyn Replica,
    ) -> Result<(), StrategyError> {
        Err(StrategyError::Answer {
            call: "LeaseWork",
            problem: "it orders a checkpoint of this worker, but servers have the values"
                .to_owned(),
        })
    }

    /// Evaluates the newest weights under `view` or a later one, or their moving averages if the job keeps them.
    /// Afterwards the replica holds what was evaluated.
    async fn evaluate(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        replica: &dyn Replica,
    ) -> Result<Evaluated, StrategyError>;

    /// Writes the weights that the last evaluation measured to a safetensors file.
    async fn save(&mut self, path: PathBuf, replica: &dyn Replica) -> Result<(), StrategyError>;

    /// Returns a watch on the epoch in which this worker's steps count.
    fn reconciled(&self) -> Box<dyn Reconciled>;
}

/// The result of a pull.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// The time for which other processes held the pull back.
    pub waited: Duration,
}

/// A push that is not acknowledged yet. If it is dropped, the worker does not learn whether the push counts.
#[must_use = "a push counts once it is acknowledged"]
pub struct Pushing(Pin<Box<dyn Future<Output = Result<Pushed, StrategyError>>>>);

impl Pushing {
    /// Returns a push that counts already.
    pub fn done(pushed: Pushed) -> Self {
        Self::until(async { Ok(pushed) })
    }

    /// Returns a push that counts once `acknowledged` returns `Ok`.
    pub fn until(
        acknowledged: impl Future<Output = Result<Pushed, StrategyError>> + 'static,
    ) -> Self {
        Self(Box::pin(acknowledged))
    }

    /// Waits until the push counts. If the future is dropped first, the method may be called again; once it has
    /// returned, it must not be.
    ///
    /// # Errors
    /// The strategy's, if the push does not count.
    pub async fn acknowledged(&mut self) -> Result<Pushed, StrategyError> {
        (&mut self.0).await
    }
}

/// The result of a push.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pushed {
    /// In sync mode, the proofs for the coordinator that the gradients are held where the step needs them.
    pub receipts: Vec<wire::ShardReceipt>,
    /// The versions of the blocks that servers have updated.
    pub blocks: Vec<wire::BlockVersion>,
}

/// The result of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluated {
    /// The metrics on the held-out samples.
    pub metrics: Metrics,
    /// The epoch to which the weights belong. With servers, the evaluation does not count if there is a newer one.
    pub epoch: Epoch,
}

/// A watch on the epoch that a strategy has reconciled in. The coordinator raises the epoch when processes are
/// replaced, and counts a step only if it was made in the newest epoch.
#[async_trait]
pub trait Reconciled: Send {
    /// Returns the newest epoch in which the strategy has finished reconciling. Does not wait.
    fn epoch(&self) -> Epoch;

    /// Waits until the strategy has reconciled in this epoch or a later one.
    async fn reaches(&mut self, epoch: Epoch) -> Result<(), StrategyError>;

    /// Waits as [`reaches`](Self::reaches) does, and logs a warning every 30 seconds.
    async fn await_epoch(&mut self, epoch: Epoch) -> Result<(), StrategyError> {
        let begin = Instant::now();
        loop {
            if let Ok(reached) = timeout(WARN_EVERY, self.reaches(epoch)).await {
                return reached;
            }
            let (seconds, now) = (begin.elapsed().as_secs(), self.epoch().0);
            tracing::warn!(
                seconds,
                epoch = now,
                awaited = epoch.0,
                "still waiting for the values of a newer epoch"
            );
        }
    }
}
