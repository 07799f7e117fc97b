//! The opening of a link.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use network::Network;
use network::security::chain_of;
use network::stream::{self, BodyKind, Encoded, Incoming};
use parking_lot::Mutex;
use shared_proto::ids::{Clock, Epoch, Origin, Role, Sequence};
use shared_proto::protocol::PROTOCOL_VERSION;
use shared_proto::refusal::Refusal;
use shared_proto::wire::{self, link_message::Kind};
use tonic::Status;

use super::exchange::Identity;
use super::link::{Link, OUTGOING, reason};
use super::peer::Peer;

/// The first and the longest pause between attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

/// The opening of a link to a peer of a ring.
pub(super) struct Call<'a> {
    pub(super) network: &'a Arc<dyn Network>,
    pub(super) own: &'a Identity,
    pub(super) ring: Epoch,
    pub(super) peer: &'a Peer,
}

impl Call<'_> {
    /// Opens the link. Retries until the caller gives up, or the peer refuses the link for good. Stores the reason of the latest failure
    /// in `noted`.
    pub(super) async fn dial(&self, noted: &Mutex<Option<String>>) -> Result<Link, String> {
        let attempt = || self.attempt();
        let pauses = ExponentialBuilder::default()
            .with_min_delay(PAUSES.0)
            .with_max_delay(PAUSES.1)
            .without_max_times();
        let note = |status: &Status, _| {
            let reason = reason(status);
            tracing::debug!(peer = %self.peer.task, reason, "trying again");
            *noted.lock() = Some(reason);
        };
        let may_change = |status: &Status| Refusal::from_status(status).is_none();
        let opened = attempt.retry(pauses).when(may_change).notify(note).await;
        opened.map_err(|status| reason(&status))
    }

    async fn attempt(&self) -> Result<Link, Status> {
        let (own, peer, security) = (self.own, self.peer, self.network.security());
        let remote = security.endpoint(&peer.address, Role::Worker);
        let remote = remote.map_err(|error| unreachable(&error))?;
        let channel = self.network.connect(remote).await;
        let channel = channel.map_err(|error| unreachable(&error))?;
        let (outgoing, body) = stream::body(OUTGOING, BodyKind::Request);
        let origin = Origin {
            job: own.job.clone(),
            run: own.run,
            task: own.task,
            epoch: self.ring,
            clock: Clock(0),
            sequence: Sequence(0),
        };
        let greeting = Kind::Greeting(wire::Greeting {
            protocol_version: PROTOCOL_VERSION,
            origin: Some(origin.into()),
            to: Some(peer.task.into()),
        });
        // The queue is new and empty, so this does not wait.
        let _ = outgoing.send(Ok(Encoded::from(greeting))).await;
        let credentials = security.credentials();
        let called = stream::call(channel, stream::LINK_PATH, body, &credentials).await;
        let mut incoming: Incoming<wire::LinkMessage> = called?;
        let answer = incoming.message().await?;
        let Some(Kind::Admitted(_)) = answer.and_then(|message| message.kind) else {
            return Err(Status::internal("it does not answer the greeting"));
        };
        tracing::debug!(peer = %self.peer.task, "a link is open");
        Ok(Link::new(outgoing, incoming))
    }
}

fn unreachable(error: &(dyn Error + 'static)) -> Status {
    Status::unavailable(chain_of(error))
}
