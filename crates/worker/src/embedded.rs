//! A worker without a process, a thread or a candle model of its own, for simulations.

use std::sync::Arc;
use std::time::Duration;

use daemon::membership::{Coordinator, Registration};
use shared_proto::job::Job;
use shared_proto::transport::Network;

use crate::counters::Counters;
use crate::error::WorkerError;
use crate::member::{Member, Replicas, leave};
use crate::replica::Replica;
use crate::strategy::{Joining, Strategy, StrategyError};

/// A worker's identity and its connections.
#[derive(Debug)]
pub struct Embedded {
    /// The worker's coordinator.
    pub coordinator: Coordinator,
    /// The registration with which it joins.
    pub registration: Registration,
    /// The network by which it reaches servers.
    pub network: Arc<dyn Network>,
    /// The time for which it continues without an answer of a server.
    pub patience: Duration,
}

struct One<R>(Arc<R>);

impl<R: Replica> Replicas for One<R> {
    type Replica = R;

    fn job(&self, job: &Job) -> Result<Job, WorkerError> {
        Ok(job.clone())
    }

    async fn replica(&mut self, _: &Job) -> Result<Arc<R>, WorkerError> {
        Ok(Arc::clone(&self.0))
    }
}

impl Embedded {
    /// Works on the coordinator's job until it is done. Joins the cluster by `join`.
    ///
    /// # Errors
    /// See the variants of [`WorkerError`].
    pub async fn work<R: Replica>(
        self,
        replica: R,
        join: impl AsyncFn(&Joining<'_>, &dyn Replica) -> Result<Box<dyn Strategy>, StrategyError>,
    ) -> Result<(), WorkerError> {
        let mut member = Member {
            coordinator: self.coordinator,
            registration: self.registration,
            network: self.network,
            patience: self.patience,
            counters: Counters::new(),
            replicas: One(Arc::new(replica)),
            join,
        };
        let mut place = None;
        let outcome = member.work(|_| (), &mut place).await;
        if let Some(membership) = place {
            leave(membership, Some(&outcome)).await;
        }
        outcome
    }
}
