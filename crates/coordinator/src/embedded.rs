//! A coordinator without a process, files or threads of its own: for simulations.

use std::sync::Arc;

use checkpoint::Store;
use daemon::Offload;
use redb::StorageBackend;
use serde_json::Value;
use shared_proto::job::Job;
use shared_proto::transport;
use shared_proto::wire::coordinator_server::CoordinatorServer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use crate::begin::claim;
use crate::cluster::{Cluster, Place};
use crate::keeper::{keep_claim, run_errands};
use crate::record::Summary;
use crate::run::{CoordinatorError, tick, until, until_ended};
use crate::service::Service;
use crate::shared::Shared;
use crate::state::State;

/// Records that may wait to be taken.
const RECORDS: usize = 1024;

/// What is wrong with a coordinator on purpose, to see whether a test finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Its leases never end.
    EndlessLeases,
    /// The min clock is that of the fastest worker.
    FastestMinClock,
    /// What workers report lost is not counted.
    SilentLosses,
    /// What workers lack that have died is not derived.
    ForgottenLives,
    /// A shard that goes back while the last checkpoint is written leaves the model as it is.
    StaleModel,
    /// What a dead worker has not done is not given to others.
    LostData,
    /// Generations do not grow when a process registers again.
    OneGeneration,
}

/// A job, and what outlives its coordinators.
pub struct Embedded<B> {
    /// The job.
    pub job: Job,
    /// Where the state is kept.
    pub storage: B,
    /// Where checkpoints lie.
    pub checkpoints: Store,
    /// Something wrong on purpose, to see whether a test finds it.
    pub fault: Option<Fault>,
}

impl<B: StorageBackend> Embedded<B> {
    /// Coordinates the job to its end, and hands each record of it to `tell`, as a line of
    /// `metrics.jsonl` would have it.
    ///
    /// # Errors
    /// If the state cannot be read.
    pub async fn coordinate<S>(
        self,
        incoming: impl Stream<Item = std::io::Result<S>> + Send + 'static,
        tell: impl Fn(Value) + Send + 'static,
    ) -> Result<Summary, CoordinatorError>
    where
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let unreadable = |error| CoordinatorError::State {
            path: "(in memory)".into(),
            error,
        };
        let state = State::over(self.storage).map_err(unreadable)?;
        let mut cluster = match state.read().map_err(unreadable)? {
            Some(saved) => {
                let now = tokio::time::Instant::now().into_std();
                Cluster::resume(self.job.clone(), saved, now)
            }
            None => Cluster::new(self.job.clone()),
        };
        let run = format!("{:016x}", self.job.seed);
        let store = self.checkpoints.of_run(&run);
        let listed = store.list().await?;
        let place = Place {
            location: store.location().to_owned(),
            probe: run.clone(),
        };
        let before = store.owner().await?;
        let claim = claim(&self.job, &run, "(simulated)".to_owned());
        let claim = store.claim(claim, before.as_ref()).await?;
        let next = listed.last().map_or(0, |last| last.number + 1);
        cluster = cluster.with_checkpoints(place, next);
        if let Some(fault) = self.fault {
            cluster = cluster.with_fault(fault);
        }
        let (records, mut queue) = mpsc::channel(RECORDS);
        let shared = Shared::new(cluster, records, state, Offload::Inline);
        let stop = CancellationToken::new();
        let _stop = stop.clone().drop_guard();
        let service = Service::new(Arc::clone(&shared), stop.clone());
        let server = transport::server()
            .add_service(CoordinatorServer::new(service))
            .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
        tokio::spawn(server);
        let keep = self.job.checkpoint.keep as usize;
        let errands = run_errands(Arc::clone(&shared), store.clone(), keep);
        tokio::spawn(stop.clone().run_until_cancelled_owned(errands));
        let held = Arc::new(parking_lot::Mutex::new(claim));
        let claims = keep_claim(Arc::clone(&shared), store, held);
        tokio::spawn(stop.clone().run_until_cancelled_owned(claims));
        tokio::spawn(
            stop.clone()
                .run_until_cancelled_owned(tick(Arc::clone(&shared))),
        );
        tokio::spawn(async move {
            while let Some(record) = queue.recv().await {
                tell(serde_json::to_value(record).unwrap_or_default());
            }
        });
        until_ended(&shared).await;
        let summary = shared.look(|cluster, now| cluster.summary(now));
        let all_left = until(&shared, |cluster| !cluster.anyone_there());
        let _ = tokio::time::timeout(crate::run::FAREWELL, all_left).await;
        Ok(summary)
    }
}
