//! A coordinator without a process, files or threads of its own, for simulations.

use std::path::Path;

use checkpoint::Store;
use cluster::{Summary, Turn};
use daemon::Offload;
use network::connections::AcceptedStream;
use network::security::Security;
use serde_json::Value;
use shared_proto::job::Job;
use shared_proto::receipt::ReceiptKey;
use shared_proto::task;
use tokio::sync::mpsc;

use super::begin::{Restore, Resume, Wish, begin};
use super::error::CoordinatorError;
use super::wiring::Parts;
pub use crate::keeping::log::{LogFile, Storage};
use crate::keeping::state::State;

/// The maximum number of records that wait to be passed on.
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

impl<B: Storage> Embedded<B> {
    /// Coordinates the job to its end, and passes each record to `tell` as the JSON of its line in `metrics.jsonl`.
    /// Spawns tasks only for records and for the answers to calls.
    ///
    /// # Errors
    /// If the state cannot be read or written, another run owns the store of checkpoints, or the store lacks a
    /// checkpoint to begin with.
    pub async fn coordinate(
        self,
        incoming: AcceptedStream,
        tell: impl Fn(Value) + Send + 'static,
    ) -> Result<Summary, CoordinatorError> {
        let place = Path::new("(in memory)");
        let state = State::over(self.storage).map_err(|error| CoordinatorError::State {
            path: place.to_owned(),
            error,
        })?;
        let store = self.checkpoints;
        // One for each run, and the same bytes when a simulation is repeated.
        let mut receipt_key = ReceiptKey([0; 32]);
        let of_run = self.run.bytes().cycle();
        receipt_key
            .0
            .iter_mut()
            .zip(of_run)
            .for_each(|(key, byte)| *key = byte);
        let wish = Wish {
            checkpoints: Some(store.clone()),
            restore: self.restore.then(|| Restore::NewestOf(store)),
            resume: Resume::Unable,
            run: self.run,
            receipt_key,
            turn: Turn::Alone,
            here: "(simulated)".to_owned(),
        };
        let begun = begin(self.job, place, &state, wish).await?;
        let (records, mut queue) = mpsc::channel(RECORDS);
        let parts = Parts {
            begun,
            state,
            records,
            offload: Offload::Inline,
            security: Security::default(),
        };
        let (running, work) = parts.build(incoming);
        // Persisted records are passed on, however the coordinator ends.
        task::spawn(async move {
            while let Some(record) = queue.recv().await {
                tell(record.to_value().unwrap_or_default());
            }
        });
        let ended = async {
            let summary = running.ended().await?;
            running.all_left().await;
            Ok::<_, CoordinatorError>(summary)
        };
        let summary = tokio::select! {
            biased;
            ended = ended => ended?,
            _ = work => return Err(CoordinatorError::StateLost),
        };
        running.release().await;
        Ok(summary)
    }
}
