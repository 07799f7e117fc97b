//! A coordinator without a process, files or threads of its own, for simulations.

use std::path::Path;
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

use crate::begin::{Keeping, Restore, Wish, begin};
use crate::keeper::{keep_claim, run_store_tasks};
use crate::record::Summary;
use crate::run::{CoordinatorError, FAREWELL, release, tick, until, until_ended};
use crate::service::Service;
use crate::shared::Shared;
use crate::state::State;

/// Records that may wait to be taken.
const RECORDS: usize = 1024;

/// A job, and the storage that outlives its coordinators.
pub struct Embedded<B> {
    /// The job.
    pub job: Job,
    /// The storage of the state.
    pub storage: B,
    /// The store of checkpoints.
    pub checkpoints: Store,
    /// True to begin with the newest checkpoint, if `storage` has no run yet.
    pub restore: bool,
    /// The id of the run, if `storage` has none yet.
    pub run: String,
}

impl<B: StorageBackend> Embedded<B> {
    /// Coordinates the job to its end, and passes each record to `tell` as in a line of `metrics.jsonl`. Only
    /// these and the answers to calls are tasks of their own.
    ///
    /// # Errors
    /// If the state cannot be read or written, another run owns the store of checkpoints, or there is
    /// nothing in it to begin with.
    pub async fn coordinate<S>(
        self,
        incoming: impl Stream<Item = std::io::Result<S>> + Send + 'static,
        tell: impl Fn(Value) + Send + 'static,
    ) -> Result<Summary, CoordinatorError>
    where
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let place = Path::new("(in memory)");
        let state = State::over(self.storage).map_err(|error| CoordinatorError::State {
            path: place.to_owned(),
            error,
        })?;
        let store = self.checkpoints;
        let wish = Wish {
            checkpoints: Some(store.clone()),
            restore: self.restore.then(|| Restore::NewestOf(store)),
            resume_failed: false,
            run: self.run,
            here: "(simulated)".to_owned(),
        };
        let begun = begin(self.job, place, &state, wish).await?;
        let cluster = begun.cluster;
        let had_ended = cluster.ended();
        let (records, mut queue) = mpsc::channel(RECORDS);
        let shared = Shared::new(cluster, records, state, Offload::Inline);
        let stop = CancellationToken::new();
        let _stop = stop.clone().drop_guard();
        let service = Service::new(Arc::clone(&shared), stop.clone());
        let server = transport::server()
            .add_service(CoordinatorServer::new(service))
            .serve_with_incoming_shutdown(incoming, stop.cancelled_owned());
        let keeping = begun.keeping.map(|Keeping { store, keep, claim }| {
            let claim = Arc::new(parking_lot::Mutex::new(claim));
            (store, keep, claim)
        });
        let checkpoints = async {
            if let Some((store, keep, claim)) = &keeping {
                let store_tasks = run_store_tasks(Arc::clone(&shared), store.clone(), *keep);
                let claims = keep_claim(
                    Arc::clone(&shared),
                    store.clone(),
                    Arc::clone(claim),
                    CancellationToken::new(),
                );
                let claims = async {
                    if !had_ended {
                        claims.await;
                    }
                };
                tokio::join!(store_tasks, claims);
            }
        };
        // Persisted records are passed on, however the coordinator ends.
        tokio::spawn(async move {
            while let Some(record) = queue.recv().await {
                tell(serde_json::to_value(record).unwrap_or_default());
            }
        });
        let ended = async {
            tokio::select! {
                biased;
                () = until_ended(&shared) => {}
                () = shared.broken() => return Err(CoordinatorError::StateLost),
            }
            let summary = shared.look(|cluster, now| cluster.summary(now));
            let all_left = until(&shared, |cluster| !cluster.anyone_there());
            let _ = tokio::time::timeout(FAREWELL, all_left).await;
            Ok(summary)
        };
        let summary = tokio::select! {
            biased;
            ended = ended => ended?,
            _ = async { tokio::join!(server, checkpoints, tick(Arc::clone(&shared))) } => {
                return Err(CoordinatorError::StateLost);
            }
        };
        if let Some((store, _, claim)) = keeping.filter(|_| !had_ended) {
            let claim = claim.lock().clone();
            release(&store, &claim).await;
        }
        Ok(summary)
    }
}
