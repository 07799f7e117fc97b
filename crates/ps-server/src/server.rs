//! A server of one run: the shard, the service through which workers reach it, and its part in the cluster. Both the
//! process and the simulation use it.

use std::sync::Arc;
use std::time::Duration;

use daemon::Offload;
use daemon::http::Readiness;
use daemon::membership::{Coordinator, Membership, Registration};
use network::security::Security;
use parking_lot::Mutex;
use shared_proto::wire::WorkerFailure;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::PsError;
use crate::following::{Follower, Opener};
use crate::lookup::Served;
use crate::row_settings::RowStorage;
use crate::serving::Sessions;
use crate::shard::Shard;

/// The longest time for which a stopping server waits for its sessions to end.
pub(crate) const DRAIN: Duration = Duration::from_secs(2);

/// What a process or a simulation supplies to its server.
pub(crate) struct Parts {
    pub(crate) coordinator: Coordinator,
    pub(crate) registration: Registration,
    pub(crate) security: Security,
    pub(crate) offload: Offload,
    /// Opens stores of checkpoints.
    pub(crate) checkpoints: Opener,
    pub(crate) rows: RowStorage,
    pub(crate) readiness: Readiness,
    /// Cancelled to stop the process.
    pub(crate) drain: CancellationToken,
}

/// A server of one run of a job.
pub(crate) struct Server {
    /// The sessions of workers.
    pub(crate) sessions: Sessions,
    follower: Follower,
    running: TaskTracker,
    /// Cancelled to end the sessions.
    pub(crate) stop: CancellationToken,
}

impl Server {
    /// Returns a server of the run that `membership` belongs to.
    pub(crate) fn new(membership: &Membership, parts: Parts) -> Self {
        let shard = Arc::new(Shard::new(&membership.job, parts.rows));
        let (running, stop) = (TaskTracker::new(), CancellationToken::new());
        Self {
            sessions: Sessions {
                shard: Arc::clone(&shard),
                running: running.clone(),
                shutdown: stop.clone(),
                security: parts.security,
                greeted: Arc::default(),
            },
            follower: Follower {
                shard,
                run: membership.run,
                coordinator: parts.coordinator,
                registration: parts.registration,
                offload: parts.offload,
                open: parts.checkpoints,
                readiness: parts.readiness,
                drain: parts.drain,
                followed: Mutex::default(),
            },
            running,
            stop,
        }
    }

    /// Returns what the lookup service needs: the shard and the security settings.
    pub(crate) fn served(&self) -> Served {
        Served {
            shard: Arc::clone(&self.sessions.shard),
            security: self.sessions.security.clone(),
        }
    }

    /// Sets the address at which lookups are answered. The next report tells it to the coordinator.
    pub(crate) fn answers_lookups_at(&self, address: String) {
        let _ = self.sessions.shard.lookup_address.set(address);
    }

    /// Takes part in the job until the job has ended, and registers again as often as necessary. The caller must pass
    /// the membership that is left in `place` to [`Self::end`].
    ///
    /// # Errors
    /// See the variants of [`PsError`].
    pub(crate) async fn follow(&self, place: &mut Option<Membership>) -> Result<(), PsError> {
        self.follower.follow(place, &self.stop).await
    }

    /// Ends the sessions, and leaves the cluster. If the error is about the store of checkpoints or an outdated
    /// coordinator, gives it to the coordinator as the reason.
    pub(crate) async fn end(self, membership: Option<Membership>, error: Option<&PsError>) {
        self.stop.cancel();
        self.running.close();
        let _ = tokio::time::timeout(DRAIN, self.running.wait()).await;
        if let Some(membership) = membership {
            match error {
                Some(error @ PsError::Checkpoint(_)) => {
                    let failure = WorkerFailure::Checkpoints;
                    membership.leave_because(failure, &error.to_string()).await;
                }
                Some(error @ PsError::OlderState { .. }) => {
                    membership.leave(Some(&error.to_string())).await;
                }
                _ => membership.leave(None).await,
            }
        }
    }
}
