//! An open link: a stream of pieces in each direction.

use std::time::Duration;

use bytes::Bytes;
use network::stream::{Incoming, Sender};
use shared_proto::wire::{self, link_message::Kind};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// The number of messages that may wait for the transport.
pub(super) const OUTGOING: usize = 4;

/// The time to wait for the peer's reason after a link has broken.
const TOLD: Duration = Duration::from_secs(1);

/// The reason why a link has ended that the peer has replaced.
const SUPERSEDED: &str = "it has opened another link";

/// A stream in each direction between two ranks.
pub(super) struct Link {
    outgoing: Sender,
    incoming: tokio::sync::Mutex<Incoming<wire::LinkMessage>>,
    /// Cancelled when the peer has opened another link in place of this one.
    superseded: CancellationToken,
}

impl Link {
    /// Creates a link from the streams of both directions, after the greeting.
    pub(super) fn new(outgoing: Sender, messages: Incoming<wire::LinkMessage>) -> Self {
        Self {
            outgoing,
            incoming: messages.into(),
            superseded: CancellationToken::new(),
        }
    }

    /// Returns a token that ends this link while it is in use.
    pub(super) fn superseded(&self) -> CancellationToken {
        self.superseded.clone()
    }

    /// Tells the caller that it is admitted. The link is new, so this does not wait.
    pub(super) fn admit(&self) {
        let admitted = Kind::Admitted(wire::Admitted {});
        let _ = self.outgoing.try_send(Ok(admitted.into()));
    }

    /// Sends a piece. Returns the reason if the link is broken. Calls must not overlap.
    pub(super) async fn send(&self, piece: Bytes) -> Result<(), String> {
        let sending = self.outgoing.send(Ok(Kind::Piece(piece).into()));
        match self.superseded.run_until_cancelled(sending).await {
            None => return Err(SUPERSEDED.to_owned()),
            Some(Ok(())) => return Ok(()),
            Some(Err(_)) => {}
        }
        // The peer may have said why. Its pieces no longer count.
        let told = async {
            let mut incoming = self.incoming.lock().await;
            loop {
                if let Err(reason) = next_message(&mut incoming).await {
                    return reason;
                }
            }
        };
        let told = timeout(TOLD, told).await;
        Err(told.unwrap_or_else(|_| "the connection has ended".to_owned()))
    }

    /// Receives the next piece. Returns the reason if the link is broken. The future may be dropped and the method called again.
    pub(super) async fn receive(&self) -> Result<Bytes, String> {
        let next = async {
            let mut incoming = self.incoming.lock().await;
            match next_message(&mut incoming).await? {
                Some(Kind::Piece(piece)) => Ok(piece),
                _ => Err("it sent a message that is not due".to_owned()),
            }
        };
        let received = self.superseded.run_until_cancelled(next).await;
        received.unwrap_or_else(|| Err(SUPERSEDED.to_owned()))
    }

    /// Ends this side's stream, and returns once the peer has ended its own. A link that is dropped instead may lose pieces that are
    /// not written yet.
    pub(super) async fn close(self) {
        let Self {
            outgoing, incoming, ..
        } = self;
        drop(outgoing);
        let mut messages = incoming.into_inner();
        while let Ok(Some(_)) = messages.message().await {}
    }
}

/// Returns the content of the next message, or the reason why there is none.
async fn next_message(incoming: &mut Incoming<wire::LinkMessage>) -> Result<Option<Kind>, String> {
    let message = incoming.message().await;
    let message = message.map_err(|status| reason(&status))?;
    let message = message.ok_or_else(|| "it has left the ring".to_owned())?;
    Ok(message.kind)
}

/// Returns the text of a status for people: the message, or the code if there is no message.
pub(super) fn reason(status: &Status) -> String {
    match status.message() {
        "" => status.code().to_string(),
        message => message.to_owned(),
    }
}
