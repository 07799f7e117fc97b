//! A worker without a process, a thread or a candle model of its own, for simulations.

use std::sync::Arc;

use daemon::membership::Membership;
use daemon::process::Onward;
use replica::Replica;
use shared_proto::job::Job;
use tokio_util::sync::CancellationToken;

use crate::error::WorkerError;
use crate::member::{Member, Replicas};
use crate::strategy::{Joining, Strategy, StrategyError};

pub use crate::member::Parts;

/// Works on the coordinator's job until it is done or `stop` is cancelled, with this replica. Joins the cluster by `join`.
///
/// # Errors
/// See the variants of [`WorkerError`].
pub async fn work<R: Replica>(
    parts: Parts,
    replica: R,
    stop: &CancellationToken,
    join: impl AsyncFn(&Joining<'_>, &dyn Replica) -> Result<Box<dyn Strategy>, StrategyError>,
) -> Result<(), WorkerError> {
    let member = Member::new(parts, One(Arc::new(replica)), join);
    member.run(stop, |_| (), async |_| Onward::Ends).await
}

/// The same replica for each job.
struct One<R>(Arc<R>);

impl<R: Replica> Replicas for One<R> {
    type Replica = R;

    fn job(&self, membership: &Membership) -> Result<Job, WorkerError> {
        Ok(membership.job.clone())
    }

    async fn replica(&mut self, _: &Job) -> Result<Arc<R>, WorkerError> {
        Ok(Arc::clone(&self.0))
    }

    fn forget(&mut self) {}
}
