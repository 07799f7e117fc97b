//! An open link: a stream in each direction. Between processes of a host, larger pieces go through shared memory, and
//! the streams carry their lengths.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use network::stream::{Incoming, Sender};
use parking_lot::Mutex;
use shared_proto::wire::{self, link_message::Kind};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;
use tonic::Status;

use super::shared_memory::{SLOTS, SharedMemory};
use crate::pieces::PIECE_BYTES;

/// The number of messages that may wait for the transport.
pub(super) const OUTGOING: usize = 4;

/// The number of slots that are freed at a time: half of them, so that the peer can write to the others meanwhile.
const FREED: usize = SLOTS / 2;

/// The time to wait for the peer's reason after a link has broken.
const TOLD: Duration = Duration::from_secs(1);

/// The size in bytes from which a piece goes through shared memory. A smaller piece is in the message itself.
const SHARED_BYTES: usize = 16 << 10;

/// The most bytes of pieces that have arrived and are not received yet. Bytes in shared memory do not count. A peer
/// that follows the protocol sends fewer.
const MOST_ARRIVED: usize = 8 << 20;

/// The number of bytes that count for each piece in addition to its content.
const EACH: usize = 128;

/// A stream in each direction between two ranks.
pub(super) struct Link {
    outgoing: Sender,
    incoming: tokio::sync::Mutex<Incoming<wire::LinkMessage>>,
    arrived: Mutex<Arrivals>,
    changed: Arc<Changed>,
    shared: Option<Shared>,
}

/// Wakes the tasks that wait on a link.
#[derive(Default)]
pub(super) struct Changed {
    /// Notified when a message has come, or the link is superseded.
    notify: Notify,
    superseded: AtomicBool,
}

impl Changed {
    /// Ends the link, because the peer has opened another one in its place.
    pub(super) fn supersede(&self) {
        self.superseded.store(true, Relaxed);
        self.notify.notify_waiters();
    }
}

/// The pieces that have come and are not received yet.
#[derive(Default)]
struct Arrivals {
    pieces: VecDeque<Arrived>,
    bytes: usize,
}

impl Arrivals {
    /// Adds a piece. Returns `None` if there are too many bytes now.
    fn add(&mut self, piece: Arrived) -> Option<()> {
        self.bytes += piece.bytes();
        self.pieces.push_back(piece);
        (self.bytes <= MOST_ARRIVED).then_some(())
    }

    fn next(&mut self) -> Option<Arrived> {
        let piece = self.pieces.pop_front()?;
        self.bytes -= piece.bytes();
        Some(piece)
    }
}

/// A piece that has come.
enum Arrived {
    Here(Bytes),
    /// The length in bytes of a piece in shared memory.
    Shared(usize),
}

impl Arrived {
    fn bytes(&self) -> usize {
        match self {
            Self::Here(piece) => piece.len() + EACH,
            Self::Shared(_) => EACH,
        }
    }
}

/// Memory that is shared with the peer, and the state of its slots.
struct Shared {
    memory: SharedMemory,
    /// The number of pieces that this side has written.
    written: AtomicUsize,
    /// The number of pieces that this side has read.
    read: AtomicUsize,
    /// The free slots of this side: the unused ones, and those that the peer has read.
    free: Semaphore,
}

impl Link {
    /// Creates a link from the streams of both directions, after the greeting.
    pub(super) fn new(
        outgoing: Sender,
        messages: Incoming<wire::LinkMessage>,
        memory: Option<SharedMemory>,
    ) -> Self {
        Self {
            outgoing,
            incoming: messages.into(),
            arrived: Mutex::default(),
            changed: Arc::default(),
            shared: memory.map(|memory| Shared {
                memory,
                written: AtomicUsize::new(0),
                read: AtomicUsize::new(0),
                free: Semaphore::new(SLOTS),
            }),
        }
    }

    /// Returns a handle that can end this link while it is in use.
    pub(super) fn changed(&self) -> Arc<Changed> {
        Arc::clone(&self.changed)
    }

    /// Tells the caller that it is admitted. The link is new, so this does not wait.
    pub(super) fn admit(&self) {
        let admitted = wire::Admitted {
            shares_memory: self.shared.is_some(),
        };
        let _ = self.outgoing.try_send(Ok(Kind::Admitted(admitted).into()));
    }

    /// Sends a piece. Returns the reason if the link is broken. Calls must not overlap.
    pub(super) async fn send(&self, piece: Bytes) -> Result<(), String> {
        let message = match &self.shared {
            Some(shared) if (SHARED_BYTES..=PIECE_BYTES).contains(&piece.len()) => {
                self.until(|| shared.free.try_acquire().ok())
                    .await?
                    .forget();
                let number = shared.written.fetch_add(1, Relaxed);
                let written = shared.memory.write(number, &piece);
                written.map_err(|error| format!("memory that is shared with it: {error}"))?;
                // A piece has less than 4 GiB.
                Kind::Shared(piece.len() as u32)
            }
            _ => Kind::Piece(piece),
        };
        self.tell(message).await
    }

    /// Receives the next piece. Returns the reason if the link is broken.
    pub(super) async fn receive(&self) -> Result<Bytes, String> {
        let arrived = self.until(|| self.arrived.lock().next()).await?;
        let (length, shared) = match (arrived, &self.shared) {
            (Arrived::Here(piece), _) => return Ok(piece),
            (Arrived::Shared(length), Some(shared)) if length <= PIECE_BYTES => (length, shared),
            _ => return Err("it names shared memory that does not exist".to_owned()),
        };
        let number = shared.read.load(Relaxed);
        let piece = shared.memory.read(number, length);
        let piece = piece.map_err(|error| format!("memory that is shared with it: {error}"))?;
        shared.read.store(number + 1, Relaxed);
        if (number + 1).is_multiple_of(FREED) {
            // A peer that has left needs no slots. The piece counts all the same.
            let _ = self
                .outgoing
                .send(Ok(Kind::Freed(FREED as u32).into()))
                .await;
        }
        Ok(piece)
    }

    /// Receives messages until `found` returns a value. Another task may do the same meanwhile.
    async fn until<T>(&self, found: impl Fn() -> Option<T>) -> Result<T, String> {
        loop {
            let changed = self.changed.notify.notified();
            tokio::pin!(changed);
            // Registered before the look, so that no change is missed.
            changed.as_mut().enable();
            if let Some(found) = found() {
                return Ok(found);
            }
            if self.changed.superseded.load(Relaxed) {
                return Err("it has opened another link".to_owned());
            }
            tokio::select! {
                biased;
                () = changed => {}
                received = self.receive_message() => received?,
            }
        }
    }

    /// Receives the next message. The future may be dropped and the method called again.
    async fn receive_message(&self) -> Result<(), String> {
        let mut incoming = self.incoming.lock().await;
        let message = incoming.message().await;
        let message = message.map_err(|status| reason(&status))?;
        let message = message.ok_or_else(|| "it has left the ring".to_owned())?;
        self.note(message.kind)?;
        self.changed.notify.notify_waiters();
        Ok(())
    }

    /// Records what a message contains: a piece, or the number of slots that the peer has freed.
    fn note(&self, message: Option<Kind>) -> Result<(), String> {
        let arrived = match (message, &self.shared) {
            (Some(Kind::Piece(piece)), _) => Arrived::Here(piece),
            (Some(Kind::Shared(length)), Some(_)) => Arrived::Shared(length as usize),
            (Some(Kind::Freed(count)), Some(shared)) => {
                let in_use = SLOTS.saturating_sub(shared.free.available_permits());
                if count as usize > in_use {
                    return Err("it frees more than it was sent".to_owned());
                }
                shared.free.add_permits(count as usize);
                return Ok(());
            }
            _ => return Err("it sent a message that is not due".to_owned()),
        };
        let added = self.arrived.lock().add(arrived);
        added.ok_or_else(|| "it sends more pieces than are due".to_owned())
    }

    /// Sends a message. Returns the reason if the link is broken.
    async fn tell(&self, message: Kind) -> Result<(), String> {
        if self.outgoing.send(Ok(message.into())).await.is_ok() {
            return Ok(());
        }
        // The peer may have said why.
        let told = async {
            loop {
                if let Err(reason) = self.receive_message().await {
                    return reason;
                }
            }
        };
        let told = timeout(TOLD, told).await;
        Err(told.unwrap_or_else(|_| "the connection has ended".to_owned()))
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

/// Returns the text of a status for people: the message, or the code if there is no message.
pub(super) fn reason(status: &Status) -> String {
    match status.message() {
        "" => status.code().to_string(),
        message => message.to_owned(),
    }
}
