//! An open link: a stream in each direction.

use std::time::Duration;

use bytes::Bytes;
use shared_proto::stream::{Incoming, Sender};
use shared_proto::wire::{self, link_message::Kind};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tonic::Status;

/// The number of pieces that may wait for the transport.
pub(super) const OUTGOING: usize = 4;

/// The time to wait for the peer's reason after a link has broken.
const TOLD: Duration = Duration::from_secs(1);

/// A stream in each direction between two ranks.
pub(super) struct Link {
    pub(super) outgoing: Sender,
    pub(super) incoming: Mutex<Incoming<wire::LinkMessage>>,
}

impl Link {
    /// Sends a piece. Returns the reason if the link is broken.
    pub(super) async fn send(&self, piece: Bytes) -> Result<(), String> {
        let message = Kind::Piece(piece).into();
        if self.outgoing.send(Ok(message)).await.is_ok() {
            return Ok(());
        }
        // The peer may have said why.
        match timeout(TOLD, self.receive()).await {
            Ok(Err(reason)) => Err(reason),
            _ => Err("the connection has ended".to_owned()),
        }
    }

    /// Receives the next piece. Returns the reason if the link is broken.
    pub(super) async fn receive(&self) -> Result<Bytes, String> {
        let message = self.incoming.lock().await.message().await;
        match message.map_err(|status| reason(&status))? {
            Some(wire::LinkMessage {
                kind: Some(Kind::Piece(piece)),
            }) => Ok(piece),
            Some(_) => Err("it sent a message that is not a piece".to_owned()),
            None => Err("it has left the ring".to_owned()),
        }
    }

    /// Ends this side's stream, and returns once the peer has ended its own. A link that is dropped instead may lose pieces that are
    /// not written yet.
    pub(super) async fn close(self) {
        let Self { outgoing, incoming } = self;
        drop(outgoing);
        let mut incoming = incoming.into_inner();
        while let Ok(Some(_)) = incoming.message().await {}
    }
}

/// Returns the reason of a status, for people.
pub(super) fn reason(status: &Status) -> String {
    match status.message() {
        "" => status.code().to_string(),
        message => message.to_owned(),
    }
}
