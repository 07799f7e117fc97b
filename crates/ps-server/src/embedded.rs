//! A parameter server without a process or threads of its own: for simulations.

use std::time::Duration;

use daemon::Offload;
use daemon::http::Readiness;
use daemon::membership::{Coordinator, Membership, Registration};
use network::connections::AcceptedStream;
use network::security::Security;
use tokio_util::sync::CancellationToken;

use crate::error::PsError;
use crate::row_settings::RowStorage;
use crate::server::{Parts, Server};
use crate::serving::serve;

pub use crate::following::Opener;

/// A server that has not started yet: its registration, its access to the cluster, and its options.
pub struct Embedded {
    /// The coordinator.
    pub coordinator: Coordinator,
    /// The server's registration.
    pub registration: Registration,
    /// Opens stores of checkpoints.
    pub checkpoints: Opener,
    /// The options for rows of tables.
    pub rows: RowStorage,
    /// Cancelled to stop the server.
    pub drain: CancellationToken,
}

impl Embedded {
    /// Serves a shard to the workers whose connections come from `incoming`, until the job has ended.
    ///
    /// # Errors
    /// See the variants of [`PsError`].
    pub async fn serve(self, incoming: AcceptedStream) -> Result<(), PsError> {
        let who = self.registration.clone();
        let membership = Membership::join(self.coordinator.clone(), who).await?;
        let server = Server::new(
            &membership,
            Parts {
                coordinator: self.coordinator,
                registration: self.registration,
                security: Security::default(),
                offload: Offload::Inline,
                checkpoints: self.checkpoints,
                rows: self.rows,
                readiness: Readiness::default(),
                drain: self.drain,
            },
        );
        let mut place = Some(membership);
        let outcome = tokio::select! {
            biased;
            outcome = server.follow(&mut place) => outcome,
            _ = serve(server.sessions.clone(), incoming, server.stop.clone()) => Ok(()),
        };
        // The last answers to workers are still on their way.
        tokio::time::sleep(Duration::from_millis(500)).await;
        server.end(place, outcome.as_ref().err()).await;
        outcome
    }
}
