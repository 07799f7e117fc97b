//! The driver of a session: opens its streams, sends the unanswered requests again, and reads the answers.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use metrics::counter;
use network::stream::{Incoming, Sender};
use parking_lot::Mutex;
use shared_proto::blocks::ShardMap;
use shared_proto::ids::{Clock, Epoch, Task};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::task;
use shared_proto::wire;
use shared_proto::wire::client_message::Kind as ClientKind;
use shared_proto::wire::server_message::Kind as ServerKind;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};

use super::{Reconciliation, State};
use crate::answers::Answer;
use crate::connection::{StreamEnd, encode, end_of, open};
use crate::error::ClientError;
use crate::target::Target;

/// The time for which a shard is unreachable before the session logs a warning.
const ALARM: Duration = Duration::from_secs(1);

/// The pause before a request for values that are not initialised yet is sent again.
const NOT_YET: Duration = Duration::from_millis(20);

/// Opens streams and reads from them.
pub(super) struct Driver {
    pub(super) target: Target,
    pub(super) tell: watch::Sender<Vec<Task>>,
    pub(super) state: Arc<Mutex<State>>,
    pub(super) reconcile: Arc<watch::Sender<Reconciliation>>,
    /// Notified when all outcomes that a stream has asked for have come.
    pub(super) answered: Notify,
}

impl Driver {
    pub(super) async fn run(mut self) {
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
                    let restored = restored && !planted!(ReconcilesUnasked);
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
                let server = placed.map(|placed| placed.server.task());
                self.tell.send_replace(server.into_iter().collect());
            } else {
                tracing::debug!(shard, reason, "the session with a shard has ended");
            }
            if last_heard.elapsed() > patience {
                let address = placed
                    .and_then(|placed| placed.server.address())
                    .unwrap_or_default()
                    .to_owned();
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

    /// Sends the unanswered requests again, and reads until the stream ends. Returns the end of the stream, and whether
    /// there was any answer. `restored` is true if the shard has loaded other values since this worker pushed to it.
    async fn exchange(
        &self,
        map: &ShardMap,
        restored: bool,
        outgoing: Sender,
        mut incoming: Incoming<wire::ServerMessage>,
    ) -> (StreamEnd, bool) {
        let mut heard = false;
        // Set before anything is read: if the stream ends at once, the next one must ask.
        let ask = match restored {
            true => self.state.lock().acknowledged.to_ask(),
            false => Vec::new(),
        };
        self.state.lock().open_questions = ask.len();
        if ask.is_empty() {
            self.reconcile_in(map.epoch);
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
                        if let Err(end) = self.take_answer(message, map.epoch) {
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
            let ask = ClientKind::AskOutcome(wire::AskOutcome {
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

    pub(super) fn take_answer(
        &self,
        message: wire::ServerMessage,
        epoch: Epoch,
    ) -> Result<(), StreamEnd> {
        match message.kind {
            Some(ServerKind::Acknowledged(a)) => {
                self.resolve(a.sequence, Ok(Answer::Acknowledged(a)))?;
            }
            Some(ServerKind::Weights(weights)) => {
                self.tell
                    .send_if_modified(|on| !std::mem::take(on).is_empty());
                self.resolve(weights.request, Ok(Answer::Weights(weights)))?;
            }
            Some(ServerKind::Waiting(waiting)) => {
                let on: Vec<Task> = waiting
                    .on
                    .iter()
                    .filter_map(|t| t.try_into().ok())
                    .collect();
                self.tell.send_replace(on);
            }
            Some(ServerKind::Refused(refused)) => {
                let refusal = Refusal::new(refused.reason(), refused.message);
                match refusal.reason {
                    // The next stream sends it again, to the server of the newer map.
                    Reason::StaleEpoch => return Err(StreamEnd::Outdated(refusal.message)),
                    // Only questions about outcomes have no number. The next stream asks again.
                    _ if refused.sequence == 0 => return Err(StreamEnd::Broken(refusal.message)),
                    Reason::NotInitialized => self.ask_again_later(refused.sequence),
                    _ => self.resolve(refused.sequence, Err(refusal.into()))?,
                }
            }
            Some(ServerKind::Outcome(outcome)) => self.compare(&outcome, epoch),
            Some(ServerKind::Welcome(_)) | None => {
                return Err(StreamEnd::Broken("it sent what is no answer".to_owned()));
            }
        }
        Ok(())
    }

    /// Sends a request again after [`NOT_YET`], because the initialiser is at work.
    fn ask_again_later(&self, sequence: u64) {
        let state = Arc::clone(&self.state);
        task::spawn(async move {
            loop {
                sleep(NOT_YET).await;
                let (message, outgoing) = {
                    let state = state.lock();
                    let request = state.in_flight.get(&sequence);
                    (request.map(|r| r.message.clone()), state.outgoing.clone())
                };
                let Some(message) = message else { return };
                // Without an open stream, the next one may have passed this request already.
                if let Some((epoch, outgoing)) = outgoing {
                    let _ = outgoing.send(Ok(encode(message, epoch))).await;
                    return;
                }
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
            if let (Some(ClientKind::Push(push)), Ok(Answer::Acknowledged(taken))) =
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

    pub(super) fn fail(&self, error: &ClientError) {
        let mut state = self.state.lock();
        state.closed = Some(error.clone());
        drop(self.reconcile.send_replace(Err(error.clone())));
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
