//! A stream to a shard's server: its opening, its greeting and its ends.

use network::security::chain_of;
use network::stream::{self, Encoded, Incoming, Sender};
use network::transport::CALL_TIMEOUT;
use shared_proto::blocks::ShardMap;
use shared_proto::ids::Epoch;
use shared_proto::ids::Role;
use shared_proto::protocol::PROTOCOL_VERSION;
use shared_proto::refusal::Reason;
use shared_proto::wire;
use shared_proto::wire::client_message::Kind as ClientKind;
use shared_proto::wire::server_message::Kind as ServerKind;
use tokio::time::timeout;
use tonic::Status;

use crate::error::{ClientError, refusal_of};
use crate::target::Target;

/// The number of messages that may wait for the transport.
const OUTGOING: usize = 4;

/// The end of a stream.
pub(crate) enum StreamEnd {
    /// The stream may be opened again.
    Broken(String),
    /// The stream may be opened again with a newer map.
    Outdated(String),
    /// The stream must not be opened again.
    Fatal(ClientError),
}

/// Opens a stream to the shard's server, and sends Hello.
pub(crate) async fn open(
    target: &Target,
    map: &ShardMap,
) -> Result<(Sender, Incoming<wire::ServerMessage>), StreamEnd> {
    let placed = map.shards.get(target.shard as usize);
    let address = placed.and_then(|shard| shard.server.address());
    let address =
        address.ok_or_else(|| StreamEnd::Outdated("it has no server at present".to_owned()))?;
    let failed = |error: tonic::transport::Error| StreamEnd::Broken(chain_of(&error));
    let security = target.network.security();
    let endpoint = security.endpoint(address, Role::Ps).map_err(failed)?;
    let channel = timeout(CALL_TIMEOUT, target.network.connect(endpoint)).await;
    let late = |error: tokio::time::error::Elapsed| StreamEnd::Broken(error.to_string());
    let channel = channel.map_err(late)?.map_err(failed)?;
    let (outgoing, body) = stream::body(OUTGOING, stream::BodyKind::Request);
    let hello = ClientKind::Hello(wire::Hello {
        protocol_version: PROTOCOL_VERSION,
        origin: Some(target.origin.clone().into()),
        view: target.view.0,
    });
    // The queue is new and empty, so this does not wait.
    let _ = outgoing.send(Ok(encode(hello, map.epoch))).await;
    let greeted = async {
        let credentials = security.credentials();
        let called = stream::call(channel, stream::SESSION_PATH, body, &credentials);
        let mut incoming: Incoming<wire::ServerMessage> = called.await?;
        Ok::<_, Status>((incoming.message().await?, incoming))
    };
    match timeout(2 * CALL_TIMEOUT, greeted).await {
        Ok(Ok((Some(first), incoming))) => match first.kind {
            Some(ServerKind::Welcome(welcome)) if welcome.shard != target.shard => {
                let shard = welcome.shard;
                Err(StreamEnd::Broken(format!(
                    "shard {shard} is at its address"
                )))
            }
            Some(ServerKind::Welcome(_)) => Ok((outgoing, incoming)),
            _ => Err(StreamEnd::Broken("it did not say welcome".to_owned())),
        },
        Ok(Ok((None, _))) => Err(StreamEnd::Broken("it closed the stream".to_owned())),
        Ok(Err(status)) => Err(end_of(&status)),
        Err(_) => Err(StreamEnd::Broken("it did not answer the hello".to_owned())),
    }
}

/// Encodes a message for a stream of this epoch.
pub(crate) fn encode(mut message: ClientKind, epoch: Epoch) -> Encoded {
    let origin = match &mut message {
        ClientKind::Hello(hello) => &mut hello.origin,
        ClientKind::Initialize(initialize) => &mut initialize.origin,
        ClientKind::Push(push) => &mut push.origin,
        ClientKind::Pull(pull) => &mut pull.origin,
        ClientKind::AskOutcome(ask) => &mut ask.origin,
    };
    if let Some(origin) = origin {
        origin.epoch = epoch.0;
    }
    message.into()
}

pub(crate) fn end_of(status: &Status) -> StreamEnd {
    match refusal_of(status) {
        Some(refusal) if refusal.reason == Reason::StaleEpoch => {
            StreamEnd::Outdated(refusal.message)
        }
        Some(refusal) => StreamEnd::Fatal(refusal.into()),
        None => StreamEnd::Broken(status.message().to_owned()),
    }
}
