//! The stream to one shard. When it breaks, the session opens it again and sends the unanswered requests again, in
//! order. The server recognises those that it has already taken.

mod driver;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod reconcile;

use std::collections::BTreeMap;
use std::sync::Arc;

use network::stream::Sender;
use parking_lot::Mutex;
use shared_proto::ids::{Epoch, Task};
use shared_proto::task;
use shared_proto::wire::client_message::Kind as ClientKind;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use driver::Driver;

use crate::answers::Answer;
use crate::connection::encode;
use crate::error::ClientError;
use crate::losses::{Lost, PushLedger};
use crate::target::Target;

/// The most unanswered requests: with blocks of 1 MiB, enough to push and pull a shard of 32 GiB. A server bounds
/// the waiting pulls of a session by the same number, and by their bytes.
const MOST_IN_FLIGHT: usize = 65_536;

/// The newest epoch that a session has reconciled in, or the error that has ended the session.
pub(crate) type Reconciliation = Result<Epoch, ClientError>;

/// An unanswered message, and the receiver of its answer. The message is encoded anew for each stream, because it
/// contains the stream's epoch.
struct Request {
    message: ClientKind,
    reply: oneshot::Sender<Result<Answer, ClientError>>,
    _permit: OwnedSemaphorePermit,
}

/// The pending answer to a request.
pub(crate) struct Reply {
    pub(crate) shard: u32,
    receiver: oneshot::Receiver<Result<Answer, ClientError>>,
}

impl Reply {
    /// Waits for the answer. This method is cancel-safe. Once it has returned, it must not be called again.
    pub(crate) async fn answer(&mut self) -> Result<Answer, ClientError> {
        (&mut self.receiver)
            .await
            .unwrap_or(Err(ClientError::Closed(self.shard)))
    }
}

/// The worker's end of a session. It writes to the stream; a separate task reads.
pub(crate) struct Session {
    shard: u32,
    state: Arc<Mutex<State>>,
    permits: Arc<Semaphore>,
    reconciled: watch::Receiver<Reconciliation>,
    /// Ends the reading task.
    _open: DropGuard,
}

/// The state that the writing and the reading end share.
#[derive(Default)]
struct State {
    /// The unanswered requests by sequence, which is the order of sending.
    in_flight: BTreeMap<u64, Request>,
    /// The stream, once all unanswered requests have been sent again on it.
    outgoing: Option<(Epoch, Sender)>,
    acknowledged: PushLedger,
    /// The number of outcomes that this stream has asked for and not received.
    open_questions: usize,
    /// The acknowledged updates that the restored shard lacks, according to the answers to `AskOutcome` so far, and that are
    /// not yet reported to the coordinator.
    lost: Option<Lost>,
    /// The number of reports of losses that the coordinator has not taken yet.
    reports: usize,
    /// The newest epoch that the session has reached. The session reconciles there once all losses are reported.
    reached: Epoch,
    /// The error that has ended the session.
    closed: Option<ClientError>,
}

impl Session {
    /// Opens a session, which connects in the background. The session sends the tasks that its pulls wait for to
    /// `tell`.
    pub(crate) fn open(target: Target, tell: watch::Sender<Vec<Task>>) -> Self {
        let shard = target.shard;
        let state = Arc::<Mutex<State>>::default();
        let (reconcile, reconciled) = watch::channel(Ok(Epoch(0)));
        let driver = Driver {
            target,
            tell,
            state: Arc::clone(&state),
            reconcile: Arc::new(reconcile),
            answered: Notify::new(),
        };
        let closed = CancellationToken::new();
        task::spawn_until(closed.clone(), driver.run());
        Self {
            shard,
            state,
            permits: Arc::new(Semaphore::new(MOST_IN_FLIGHT)),
            reconciled,
            _open: closed.drop_guard(),
        }
    }

    /// Returns a watch on the newest epoch that this session has reconciled in: it has had a stream to the
    /// shard's server of that epoch, and this worker's losses by earlier moves are reported.
    pub(crate) fn reconciled(&self) -> watch::Receiver<Reconciliation> {
        self.reconciled.clone()
    }

    /// Sends a message. Waits only while many others are unanswered or wait for the transport.
    pub(crate) async fn send(&self, sequence: u64, kind: ClientKind) -> Reply {
        let (reply, receiver) = oneshot::channel();
        let answer = Reply {
            shard: self.shard,
            receiver,
        };
        let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await else {
            return answer;
        };
        let outgoing = {
            let mut state = self.state.lock();
            if let Some(error) = &state.closed {
                let _ = reply.send(Err(error.clone()));
                return answer;
            }
            let request = Request {
                message: kind.clone(),
                reply,
                _permit: permit,
            };
            state.in_flight.insert(sequence, request);
            state.outgoing.clone()
        };
        // If there is no stream, or the stream breaks, the next stream sends the message.
        if let Some((epoch, outgoing)) = outgoing {
            let _ = outgoing.send(Ok(encode(kind, epoch))).await;
        }
        answer
    }
}
