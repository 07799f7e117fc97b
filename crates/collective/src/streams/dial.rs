//! The opening of a link.

use std::sync::Arc;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use parking_lot::Mutex;
use shared_proto::ids::{Clock, Epoch, Origin, Role, Sequence};
use shared_proto::network::Network;
use shared_proto::security::chain_of;
use shared_proto::stream::{self, BodyKind, Encoded};
use shared_proto::transport::PROTOCOL_VERSION;
use shared_proto::wire::{self, link_message::Kind};

use super::exchange::Identity;
use super::link::{Link, OUTGOING, reason};
use super::peer::Peer;

/// The pauses between attempts: from the first to the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

/// Opens a link to a peer of a ring. Retries until the caller gives up. Stores the reason of the latest failure in `noted`.
pub(super) async fn dial(
    network: &Arc<dyn Network>,
    own: &Identity,
    ring: Epoch,
    peer: &Peer,
    noted: &Mutex<Option<String>>,
) -> Result<Link, String> {
    let attempt = || attempt(network, own, ring, peer);
    let pauses = ExponentialBuilder::default()
        .with_min_delay(PAUSES.0)
        .with_max_delay(PAUSES.1)
        .without_max_times();
    let note = |reason: &String, _| {
        tracing::debug!(peer = %peer.task, reason, "trying again");
        *noted.lock() = Some(reason.clone());
    };
    attempt.retry(pauses).notify(note).await
}

async fn attempt(
    network: &Arc<dyn Network>,
    own: &Identity,
    ring: Epoch,
    peer: &Peer,
) -> Result<Link, String> {
    let security = network.security();
    let remote = security.endpoint(&peer.address, Role::Worker);
    let remote = remote.map_err(|error| chain_of(&error))?;
    let channel = network.connect(remote).await;
    let channel = channel.map_err(|error| chain_of(&error))?;
    let (outgoing, body) = stream::body(OUTGOING, BodyKind::Request);
    let origin = Origin {
        job: own.job.clone(),
        run: own.run,
        task: own.task,
        epoch: ring,
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
    let incoming = called.map_err(|status| reason(&status))?;
    Ok(Link {
        outgoing,
        incoming: incoming.into(),
    })
}
