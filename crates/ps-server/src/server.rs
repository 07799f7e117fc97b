//! A server of one run, put together: the shard, the service through which workers reach it, and its part in the
//! cluster. The process and the simulation both run it.

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

/// The time in which sessions must end.
pub(crate) const DRAIN: Duration = Duration::from_secs(2);

/// A server's identity, its credentials, and its ways to the outside.
pub(crate) struct Parts {
    pub(crate) coordinator: Coordinator,
    pub(crate) registration: Registration,
    pub(crate) security: Security,
    pub(crate) offload: Offload,
    /// Opens stores of checkpoints.
    pub(crate) checkpoints: Opener,
    pub(crate) rows: RowStorage,
    pub(crate) readiness: Readiness,
    /// Cancelled when the process is to stop.
    pub(crate) drain: CancellationToken,
}

/// A server of one run of a job.
pub(crate) struct Server {
    /// The sessions of workers.
    pub(crate) sessions: Sessions,
    follower: Follower,
    running: TaskTracker,
    /// Cancelled when the sessions are to end.
    pub(crate) stop: CancellationToken,
}

impl Server {
    /// Returns a server of the run that it is a member of.
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

    /// Returns what lookups are answered from.
    pub(crate) fn served(&self) -> Served {
        Served {
            shard: Arc::clone(&self.sessions.shard),
            security: self.sessions.security.clone(),
        }
    }

    /// Tells the coordinator, with the next report, where lookups are answered.
    pub(crate) fn answers_lookups_at(&self, address: String) {
        let _ = self.sessions.shard.lookup_address.set(address);
    }

    /// Takes part in the job until it has ended, under as many registrations as it takes. The caller gives the
    /// membership that is left in `place` to [`Self::end`].
    ///
    /// # Errors
    /// See the variants of [`PsError`].
    pub(crate) async fn follow(&self, place: &mut Option<Membership>) -> Result<(), PsError> {
        self.follower.follow(place, &self.stop).await
    }

    /// Ends the sessions, and gives back the membership, because of this error if there is one.
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
