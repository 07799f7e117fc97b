//! The stream to one shard. When it breaks, the session opens it again and sends the unanswered requests again, in
//! order. The server recognises those that it has already taken.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod settling;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use metrics::counter;
use parking_lot::Mutex;
use shared_proto::blocks::ShardMap;
use shared_proto::ids::{Clock, Epoch, Origin, Task, ViewNumber};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::stream::{Incoming as Messages, Sender};
use shared_proto::transport::Network;
use shared_proto::wire;
use shared_proto::wire::client_message::Kind as Outgoing;
use shared_proto::wire::server_message::Kind as Incoming;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::answers::Answer;
use crate::connection::{StreamEnd, encode, end_of, open};
use crate::error::ClientError;
use crate::losses::{Acknowledged, Loss, Lost};
use crate::maps::Maps;

/// The most unanswered requests: with blocks of 1 MiB, enough to push and pull a shard of 32 GiB. A server bounds
/// the waiting pulls of a session by the same number, and by their bytes.
const MOST_IN_FLIGHT: usize = 65_536;

/// The time for which a shard is unreachable before the session logs a warning.
const ALARM: Duration = Duration::from_secs(1);

/// The pause before a request for values that are not initialised yet is sent again.
const NOT_YET: Duration = Duration::from_millis(20);

/// The newest epoch that a session has settled in, or the error that has ended the session.
pub(crate) type Settling = Result<Epoch, ClientError>;

/// An unanswered message, and the receiver of its answer. The message is encoded anew for each stream, because it
/// contains the stream's epoch.
struct Request {
    message: Outgoing,
    reply: oneshot::Sender<Result<Answer, ClientError>>,
    _permit: OwnedSemaphorePermit,
}

/// The pending answer to a request.
pub(crate) struct Reply {
    pub(crate) shard: u32,
    receiver: oneshot::Receiver<Result<Answer, ClientError>>,
}

impl Reply {
    pub(crate) async fn answer(self) -> Result<Answer, ClientError> {
        self.receiver
            .await
            .unwrap_or(Err(ClientError::Closed(self.shard)))
    }
}

/// A shard, and the settings of the session with it.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) shard: u32,
    pub(crate) maps: Maps,
    pub(crate) network: Arc<dyn Network>,
    pub(crate) losses: mpsc::Sender<Loss>,
    pub(crate) origin: Origin,
    pub(crate) view: ViewNumber,
    pub(crate) patience: Duration,
}

/// The worker's end of a session. It writes to the stream; a separate task reads.
pub(crate) struct Session {
    shard: u32,
    state: Arc<Mutex<State>>,
    permits: Arc<Semaphore>,
    settled: watch::Receiver<Settling>,
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
    acknowledged: Acknowledged,
    /// The number of outcomes that this stream has asked for and not received.
    open_questions: usize,
    /// Losses that the outcomes so far have shown, and that are not reported yet.
    lost: Option<Lost>,
    /// The number of reports of losses that the coordinator has not taken yet.
    reports: usize,
    /// The newest epoch that the session has reached. The session settles there once all losses are reported.
    reached: Epoch,
    /// The error that has ended the session.
    closed: Option<ClientError>,
}

impl Session {
    /// Opens a session, which connects in the background. `tell` gets the tasks that its pulls wait for.
    pub(crate) fn open(target: Target, tell: watch::Sender<Vec<Task>>) -> Self {
        let shard = target.shard;
        let state = Arc::<Mutex<State>>::default();
        let (settle, settled) = watch::channel(Ok(Epoch(0)));
        let driver = Driver {
            target,
            tell,
            state: Arc::clone(&state),
            settle: Arc::new(settle),
            answered: Notify::new(),
        };
        let closed = CancellationToken::new();
        let until = closed.clone();
        tokio::spawn(async move { until.run_until_cancelled(driver.run()).await });
        Self {
            shard,
            state,
            permits: Arc::new(Semaphore::new(MOST_IN_FLIGHT)),
            settled,
            _open: closed.drop_guard(),
        }
    }

    /// Returns a watch on the newest epoch that this session has settled in: it has had a stream to the
    /// shard's server of that epoch, and this worker's losses by earlier moves are reported.
    pub(crate) fn settled(&self) -> watch::Receiver<Settling> {
        self.settled.clone()
    }

    /// Sends a message. Waits only while many others are unanswered or wait for the transport.
    pub(crate) async fn send(&self, sequence: u64, kind: Outgoing) -> Reply {
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

/// Opens streams and reads from them.
struct Driver {
    target: Target,
    tell: watch::Sender<Vec<Task>>,
    state: Arc<Mutex<State>>,
    settle: Arc<watch::Sender<Settling>>,
    /// Notified when all outcomes that a stream has asked for have come.
    answered: Notify,
}

impl Driver {
    async fn run(mut self) {
        let mut last_heard = Instant::now();
        let mut delays = backoff().build();
        let mut alarmed = false;
        // The epoch in which the values were loaded that this worker has pushed to.
        let mut values_of = None;
        let reconnections = counter!("flambeau_worker_reconnections_total");
        let mut connected = false;
        loop {
            let map = self.target.maps.newest();
            let placed = map.shards.get(self.target.shard as usize);
            let (reason, has_server) = match open(&self.target, &map).await {
                Ok((outgoing, incoming)) => {
                    reconnections.increment(u64::from(std::mem::replace(&mut connected, true)));
                    let loaded = placed.map(|placed| placed.source.epoch);
                    let restored = values_of.is_some() && values_of != loaded;
                    let restored = restored && !planted!(SettlesUnasked);
                    let ended = self.exchange(&map, restored, outgoing, incoming);
                    let (end, heard) = ended.await;
                    // If some questions were not answered, the next stream asks again.
                    if !restored || self.state.lock().open_questions == 0 {
                        values_of = loaded;
                    }
                    if heard {
                        last_heard = Instant::now();
                        delays = backoff().build();
                        alarmed = false;
                    }
                    match end {
                        StreamEnd::Fatal(error) => return self.fail(&error),
                        StreamEnd::Broken(reason) | StreamEnd::Outdated(reason) => (reason, true),
                    }
                }
                Err(StreamEnd::Fatal(error)) => return self.fail(&error),
                Err(StreamEnd::Broken(reason)) => (reason, true),
                Err(StreamEnd::Outdated(reason)) => (reason, false),
            };
            let Target {
                shard, patience, ..
            } = self.target;
            if !has_server {
                // The coordinator knows that the shard has no server; patience is for other failures.
                last_heard = last_heard.max(Instant::now() - ALARM);
            }
            // Servers end their sessions at the job's end, before workers know of it. This is no reason for a warning.
            if last_heard.elapsed() >= ALARM && !std::mem::replace(&mut alarmed, true) {
                tracing::warn!(shard, reason, "a shard cannot be reached; trying on");
                let server = placed.map(|placed| placed.server);
                self.tell.send_replace(server.into_iter().collect());
            } else {
                tracing::debug!(shard, reason, "the session with a shard has ended");
            }
            if last_heard.elapsed() > patience {
                let address = placed.map_or_else(String::new, |placed| placed.address.clone());
                let error = ClientError::Unreachable {
                    shard,
                    address,
                    patience,
                    reason,
                };
                return self.fail(&error);
            }
            self.target.maps.ask_beyond(&map);
            let delay = delays.next().unwrap_or(MOST_DELAY);
            tokio::select! {
                biased;
                () = self.target.maps.beyond(&map) => delays = backoff().build(),
                () = sleep(delay) => {}
            }
        }
    }

    /// Sends the unanswered requests again, and reads until the stream ends. Returns the end of the stream, and
    /// whether there was any answer. `restored`: the shard's values are not those that this worker has
    /// pushed to.
    async fn exchange(
        &self,
        map: &ShardMap,
        restored: bool,
        outgoing: Sender,
        mut incoming: Messages<wire::ServerMessage>,
    ) -> (StreamEnd, bool) {
        let mut heard = false;
        // Set before anything is read: if the stream ends at once, the next one must ask.
        let ask = match restored {
            true => self.state.lock().acknowledged.to_ask(),
            false => Vec::new(),
        };
        self.state.lock().open_questions = ask.len();
        if ask.is_empty() {
            self.settle_in(map.epoch);
        }
        let mut newest = self.target.maps.clone();
        let mut newer_map = std::pin::pin!(newest.beyond(map));
        let mut sent_again = std::pin::pin!(self.send_again(map.epoch, ask, outgoing));
        let mut all_sent = false;
        let end = loop {
            tokio::select! {
                biased;
                message = incoming.message() => match message {
                    Ok(Some(message)) => {
                        heard = true;
                        if let Err(end) = self.answered(message, map.epoch) {
                            break end;
                        }
                    }
                    Ok(None) => break StreamEnd::Broken("it closed the stream".to_owned()),
                    Err(status) => break end_of(&status),
                },
                // The server of this stream may have been replaced without knowing it.
                () = &mut newer_map, if !planted!(NeverReplaced) => break StreamEnd::Outdated("there is a newer shard map".to_owned()),
                () = &mut sent_again, if !all_sent => all_sent = true,
            }
        };
        self.state.lock().outgoing = None;
        (end, heard)
    }

    /// Asks which pushes these blocks have taken, and waits for the outcomes, which must not count the pushes that are
    /// sent again. Then sends the requests in flight in order, and admits new messages.
    async fn send_again(&self, epoch: Epoch, ask: Vec<Vec<wire::BlockId>>, outgoing: Sender) {
        for blocks in ask {
            let ask = Outgoing::AskOutcome(wire::AskOutcome {
                origin: Some(self.target.origin.clone().into()),
                blocks,
            });
            if outgoing.send(Ok(encode(ask, epoch))).await.is_err() {
                return;
            }
        }
        while self.state.lock().open_questions > 0 {
            self.answered.notified().await;
        }
        let mut last = if planted!(SentOnce) { u64::MAX - 1 } else { 0 };
        loop {
            let next = {
                let mut state = self.state.lock();
                let mut rest = state.in_flight.range(last + 1..);
                match rest.next() {
                    Some((sequence, request)) => (*sequence, request.message.clone()),
                    None => {
                        state.outgoing = Some((epoch, outgoing));
                        return;
                    }
                }
            };
            last = next.0;
            if outgoing.send(Ok(encode(next.1, epoch))).await.is_err() {
                return;
            }
        }
    }

    fn answered(&self, message: wire::ServerMessage, epoch: Epoch) -> Result<(), StreamEnd> {
        match message.kind {
            Some(Incoming::Acknowledged(a)) => {
                self.resolve(a.sequence, Ok(Answer::Acknowledged(a)))?;
            }
            Some(Incoming::Weights(weights)) => {
                self.tell
                    .send_if_modified(|on| !std::mem::take(on).is_empty());
                self.resolve(weights.request, Ok(Answer::Weights(weights)))?;
            }
            Some(Incoming::Waiting(waiting)) => {
                let on: Vec<Task> = waiting
                    .on
                    .iter()
                    .filter_map(|t| t.try_into().ok())
                    .collect();
                self.tell.send_replace(on);
            }
            Some(Incoming::Refused(refused)) => {
                let refusal = Refusal::new(refused.reason(), refused.message);
                match refusal.reason {
                    Reason::NotInitialized => self.ask_again_later(refused.sequence),
                    // The next stream sends it again, to the server of the newer map.
                    Reason::StaleEpoch => return Err(StreamEnd::Outdated(refusal.message)),
                    // Only questions about outcomes have no number. The next stream asks again.
                    _ if refused.sequence == 0 => return Err(StreamEnd::Broken(refusal.message)),
                    _ => self.resolve(refused.sequence, Err(refusal.into()))?,
                }
            }
            Some(Incoming::Outcome(outcome)) => self.compare(&outcome, epoch),
            Some(Incoming::Welcome(_)) | None => {
                return Err(StreamEnd::Broken("it sent what is no answer".to_owned()));
            }
        }
        Ok(())
    }

    /// Sends a request again after [`NOT_YET`], because the initialiser is at work.
    fn ask_again_later(&self, sequence: u64) {
        let state = Arc::clone(&self.state);
        tokio::spawn(async move {
            sleep(NOT_YET).await;
            let (message, outgoing) = {
                let state = state.lock();
                let request = state.in_flight.get(&sequence);
                (request.map(|r| r.message.clone()), state.outgoing.clone())
            };
            if let (Some(message), Some((epoch, outgoing))) = (message, outgoing) {
                let _ = outgoing.send(Ok(encode(message, epoch))).await;
            }
        });
    }

    /// Hands an answer to the caller that waits for it.
    ///
    /// # Errors
    /// If the answer does not fit the request, which then stays unanswered.
    fn resolve(&self, sequence: u64, answer: Result<Answer, ClientError>) -> Result<(), StreamEnd> {
        let request = {
            let mut state = self.state.lock();
            if let (Some(request), Ok(answer)) = (state.in_flight.get(&sequence), &answer)
                && let Some(what) = answer.misfit(&request.message)
            {
                let shard = self.target.shard;
                return Err(StreamEnd::Fatal(ClientError::WrongAnswer { shard, what }));
            }
            let request = state.in_flight.remove(&sequence);
            if let (Some(Outgoing::Push(push)), Ok(Answer::Acknowledged(taken))) =
                (request.as_ref().map(|request| &request.message), &answer)
                && taken.level() == wire::AcknowledgementLevel::Applied
            {
                let clock = push.origin.as_ref().map_or(0, |origin| origin.clock);
                state.acknowledged.note(Clock(clock), &taken.blocks);
            }
            request
        };
        if let Some(request) = request {
            // A caller that no longer waits does not need the answer.
            let _ = request.reply.send(answer);
        }
        Ok(())
    }

    fn fail(&self, error: &ClientError) {
        let mut state = self.state.lock();
        state.closed = Some(error.clone());
        drop(self.settle.send_replace(Err(error.clone())));
        for (_, request) in std::mem::take(&mut state.in_flight) {
            let _ = request.reply.send(Err(error.clone()));
        }
    }
}

const MOST_DELAY: Duration = Duration::from_secs(2);

fn backoff() -> ExponentialBuilder {
    ExponentialBuilder::default()
        .with_jitter()
        .with_min_delay(Duration::from_millis(20))
        .with_max_delay(MOST_DELAY)
        .without_max_times()
}
