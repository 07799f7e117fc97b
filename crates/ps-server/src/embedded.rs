//! A parameter server without a process or threads of its own: for simulations.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use checkpoint::CheckpointError;
use daemon::Offload;
use daemon::http::Readiness;
use daemon::membership::{Coordinator, Membership, Registration};
use shared_proto::security::Security;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::server::Connected;

use crate::follow::Follower;
use crate::run::PsError;
use crate::service::Sessions;
use crate::shard::Shard;
use crate::threads::serve_all;

/// Opens the store of checkpoints at a location.
pub type Opener = Arc<dyn Fn(&str) -> Result<checkpoint::Store, CheckpointError> + Send + Sync>;

/// A server's identity, and its connections to other processes.
pub struct Embedded {
    /// The coordinator.
    pub coordinator: Coordinator,
    /// The server's registration.
    pub registration: Registration,
    /// Opens stores of checkpoints.
    pub checkpoints: Opener,
    /// Cancelled when the server is to stop.
    pub drain: CancellationToken,
}

impl Embedded {
    /// Serves a shard until the job has ended.
    ///
    /// # Errors
    /// See the variants of [`PsError`].
    pub async fn serve<S>(
        self,
        incoming: impl Stream<Item = io::Result<S>> + 'static,
    ) -> Result<(), PsError>
    where
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let who = self.registration.clone();
        let membership = Membership::join(self.coordinator.clone(), who).await?;
        let shard = Arc::new(Shard::new(&membership.job));
        let stop = CancellationToken::new();
        let _stop = stop.clone().drop_guard();
        let sessions = TaskTracker::new();
        let service = Sessions {
            shard: Arc::clone(&shard),
            sessions: sessions.clone(),
            shutdown: stop.clone(),
            security: Security::default(),
            greeted: Arc::default(),
        };
        let follower = Follower {
            shard,
            coordinator: self.coordinator,
            registration: self.registration,
            offload: Offload::Inline,
            open: self.checkpoints,
            readiness: Readiness::default(),
            drain: self.drain,
        };
        let mut place = Some(membership);
        let outcome = tokio::select! {
            biased;
            outcome = follower.serve(&mut place, &stop) => outcome,
            _ = serve_all(service, incoming, stop.clone()) => Ok(()),
        };
        // The last answers to workers are still on their way.
        tokio::time::sleep(Duration::from_millis(500)).await;
        if let Some(membership) = place {
            membership.leave(None).await;
        }
        outcome
    }
}
