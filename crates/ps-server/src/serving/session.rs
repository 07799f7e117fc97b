//! A worker's session: reads its messages in order, hands them to the shard, and sends the answers. Pulls that
//! must wait are kept until a view lets them through.

mod waiting;

use std::sync::Arc;
use std::time::Duration;

use network::stream::{Incoming, Sender};
use shared_proto::ids::{Clock, Origin, Task, TaskId};
use shared_proto::protocol::{MAX_MESSAGE_BYTES, PROTOCOL_VERSION};
use shared_proto::quiet::Quiet;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::staleness::lead;
use shared_proto::wire;
use shared_proto::wire::client_message::Kind as ClientKind;
use shared_proto::wire::server_message::Kind as ServerKind;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use waiting::Waiting;

use super::limits::{self, Entrance};
use crate::shard::gate::Gate;
use crate::shard::{Followed, Shard};

/// The time after which a session tells the worker which tasks a pull waits for.
const QUIET: Duration = Duration::from_millis(100);

/// The longest time that a session waits for Hello, and then for its shard to catch up with the view that Hello names.
const CATCH_UP: Duration = Duration::from_secs(10);

/// One worker's stream.
pub(crate) struct Session {
    shard: Arc<Shard>,
    followed: watch::Receiver<Followed>,
    answers: Sender,
    waiting: Vec<Waiting>,
    /// The number of bytes that all waiting pulls take.
    waiting_cost: usize,
    /// The tasks that the newest waiting pull waits for.
    waiting_on: Arc<[Task]>,
    entrance: Entrance,
    /// The name of the other end, for the log.
    peer: String,
    /// The task that Hello named.
    task: Option<TaskId>,
}

/// The reason why a session ends before the worker ends it.
enum SessionEnd {
    /// The worker is gone.
    Gone,
    /// The worker gets this status.
    Status(Status),
}

impl Session {
    pub(crate) fn new(shard: Arc<Shard>, answers: Sender, entrance: Entrance) -> Self {
        Self {
            followed: shard.subscribe(),
            shard,
            answers,
            waiting: Vec::new(),
            waiting_cost: 0,
            waiting_on: Arc::default(),
            entrance,
            peer: "a peer that has not said hello".to_owned(),
            task: None,
        }
    }

    /// Serves the worker until either side ends the session.
    pub(crate) async fn serve(
        mut self,
        mut incoming: Incoming<wire::ClientMessage>,
        shutdown: CancellationToken,
    ) {
        self.shard.counters.sessions.increment(1.0);
        let served = tokio::select! {
            biased;
            end = self.exchange(&mut incoming) => end,
            () = shutdown.cancelled() => SessionEnd::Status(Status::unavailable("the server is shutting down; connect again")),
        };
        self.shard.counters.sessions.decrement(1.0);
        if let SessionEnd::Status(status) = served {
            tracing::debug!(peer = %self.peer, %status, "a session has ended");
            // A worker that no longer reads does not get the status.
            let _ = timeout(QUIET, self.answers.send(Err(status))).await;
        }
    }

    async fn exchange(&mut self, incoming: &mut Incoming<wire::ClientMessage>) -> SessionEnd {
        incoming.bound(limits::HELLO);
        let (epoch_over, replaced) = match self.greet(incoming).await {
            Ok(until) => until,
            Err(end) => return end,
        };
        incoming.bound(limits::of_messages(self.shard.followed().store.as_ref()));
        tokio::select! {
            biased;
            end = self.answer_all(incoming) => end,
            () = epoch_over.cancelled() => SessionEnd::Status(Status::unavailable(
                "the shard map has changed; fetch it and connect again",
            )),
            () = replaced.cancelled() => SessionEnd::Status(Status::unavailable(
                "the worker has opened another session, or is not in the view any more",
            )),
        }
    }

    async fn answer_all(&mut self, incoming: &mut Incoming<wire::ClientMessage>) -> SessionEnd {
        loop {
            let tell = self.waiting.iter().filter_map(|w| w.tell).min();
            let handled = tokio::select! {
                biased;
                message = incoming.message() => match message {
                    Ok(Some(message)) => self.handle(message).await,
                    Ok(None) => return SessionEnd::Gone,
                    Err(status) => return self.broken(status),
                },
                changed = self.followed.changed(), if !self.waiting.is_empty() => match changed {
                    Ok(()) => self.retry_waiting().await,
                    Err(_) => return SessionEnd::Gone,
                },
                () = sleep_until(tell.unwrap_or_else(Instant::now)), if tell.is_some() => self.tell().await,
            };
            if let Err(end) = handled {
                return end;
            }
        }
    }

    /// Exchanges Hello and Welcome. Returns a token that is cancelled when the epoch is over, and one that
    /// is cancelled when another session replaces this one.
    async fn greet(
        &mut self,
        incoming: &mut Incoming<wire::ClientMessage>,
    ) -> Result<(CancellationToken, CancellationToken), SessionEnd> {
        let first = match timeout(CATCH_UP, incoming.message()).await {
            Ok(Ok(Some(message))) => message,
            Ok(Ok(None)) => return Err(SessionEnd::Gone),
            Ok(Err(status)) => return Err(self.broken(status)),
            Err(_) => {
                return Err(SessionEnd::Status(Status::deadline_exceeded(
                    "no hello came",
                )));
            }
        };
        let refuse = |shard: &Shard, refusal: Refusal| {
            shard.counters.refused(&refusal);
            tracing::warn!(reason = refusal.label(), "refused a session: {refusal}");
            SessionEnd::Status(refusal.into())
        };
        let hello = read_hello(first).map_err(|r| refuse(&self.shard, r))?;
        let origin = Origin::read(hello.origin.as_ref(), "Hello");
        let origin = origin.map_err(|r| refuse(&self.shard, r))?;
        self.peer = origin.task.to_string();
        self.task = Some(origin.task.id);
        let caught_up = |followed: &Followed| {
            followed.view.number.0 >= hello.view && followed.epoch() >= origin.epoch
        };
        // The view that the worker knows is still on its way to this server, or the shard's values are
        // still being loaded.
        let caught_up = tokio::select! {
            biased;
            caught_up = timeout(CATCH_UP, self.followed.wait_for(caught_up)) => caught_up,
            // Without this branch a session would outlive its connection, which no longer counts towards the limits.
            () = self.answers.closed() => return Err(SessionEnd::Gone),
        };
        if !matches!(caught_up, Ok(Ok(_))) {
            let behind = "this server has not caught up with the coordinator; connect again";
            return Err(SessionEnd::Status(Status::unavailable(behind)));
        }
        drop(caught_up);
        self.check_lease()?;
        let followed = self.followed.borrow_and_update().clone();
        let welcome = self.welcome(&origin, &followed);
        let welcome = welcome.map_err(|r| refuse(&self.shard, r))?;
        let replaced = self.entrance.admit(origin.task, &followed.view);
        let replaced = replaced.map_err(SessionEnd::Status)?;
        self.answer(ServerKind::Welcome(welcome)).await?;
        Ok((followed.epoch_over, replaced))
    }

    fn welcome(&self, origin: &Origin, followed: &Followed) -> Result<wire::Welcome, Refusal> {
        self.shard.gate.member(origin, &followed.view)?;
        let shard = followed.shard().ok_or_else(|| {
            Refusal::new(
                Reason::StaleEpoch,
                "this server holds no shard; fetch the shard map and go where it points",
            )
        })?;
        Gate::epoch(origin, followed.epoch())?;
        tracing::info!(peer = %self.peer, generation = origin.task.generation.0, "a session has begun");
        Ok(wire::Welcome {
            protocol_version: PROTOCOL_VERSION,
            shard,
            epoch: followed.epoch().0,
            max_message_bytes: MAX_MESSAGE_BYTES as u64,
        })
    }

    /// Checks that this server may answer for its shard: it is not about to stop, and its lease has not expired.
    fn check_lease(&self) -> Result<(), SessionEnd> {
        let followed = self.followed.borrow();
        if followed.closed {
            return Err(SessionEnd::Status(Status::unavailable(
                "this server is about to stop; connect again, to where the shard map says",
            )));
        }
        if !followed.lease.is_over() {
            return Ok(());
        }
        Err(SessionEnd::Status(Status::unavailable(
            "this server has not reached the coordinator for the length of its lease; its shard may live elsewhere, so fetch the shard map and connect again",
        )))
    }

    async fn handle(&mut self, message: wire::ClientMessage) -> Result<(), SessionEnd> {
        self.check_lease()?;
        let origin = message.kind.as_ref().and_then(origin_of);
        let sender = origin.and_then(|origin| Task::try_from(origin.task.as_ref()?).ok());
        if let Some(sender) = sender.filter(|sender| Some(sender.id) != self.task) {
            let other = Refusal::new(
                Reason::Malformed,
                format!(
                    "a message of {sender} came in the session of {}; each task has a session of its own",
                    self.peer
                ),
            );
            return self.refuse(sequence(origin), other).await;
        }
        match message.kind {
            Some(ClientKind::Push(push)) => {
                let sequence = sequence(push.origin.as_ref());
                match self.shard.push(push) {
                    Ok(taken) => self.answer(ServerKind::Acknowledged(taken)).await,
                    Err(refusal) => self.refuse(sequence, refusal).await,
                }
            }
            Some(ClientKind::Pull(pull)) => match Origin::read(pull.origin.as_ref(), "Pull") {
                Ok(origin) => self.pull(pull, origin).await,
                Err(refusal) => self.refuse(sequence(pull.origin.as_ref()), refusal).await,
            },
            Some(ClientKind::Initialize(initialize)) => {
                let sequence = sequence(initialize.origin.as_ref());
                match self.shard.initialize(initialize) {
                    Ok(taken) => self.answer(ServerKind::Acknowledged(taken)).await,
                    Err(refusal) => self.refuse(sequence, refusal).await,
                }
            }
            Some(ClientKind::AskOutcome(ask)) => match self.shard.outcome(&ask) {
                Ok(outcome) => self.answer(ServerKind::Outcome(outcome)).await,
                Err(refusal) => self.refuse(sequence(ask.origin.as_ref()), refusal).await,
            },
            Some(ClientKind::Hello(hello)) => {
                let again = Refusal::new(Reason::Malformed, "Hello came a second time");
                self.refuse(sequence(hello.origin.as_ref()), again).await
            }
            None => {
                let empty = Refusal::new(
                    Reason::Malformed,
                    "a message of no kind that this server knows",
                );
                self.refuse(0, empty).await
            }
        }
    }

    /// Answers a pull for the step at `clock`, which has waited for the time `waited`.
    async fn send_weights(
        &mut self,
        mut weights: wire::Weights,
        clock: Clock,
        waited: Duration,
    ) -> Result<(), SessionEnd> {
        weights.waited = waited.as_secs_f64();
        let lead = lead(clock, Clock(weights.min_clock));
        self.shard.counters.pulled(waited, lead);
        self.answer(ServerKind::Weights(weights)).await
    }

    async fn refuse(&mut self, sequence: u64, refusal: Refusal) -> Result<(), SessionEnd> {
        self.log_refused(&refusal);
        self.answer(ServerKind::Refused(wire::Refused {
            sequence,
            code: refusal.code() as u32,
            reason: refusal.reason.into(),
            message: refusal.message,
        }))
        .await
    }

    /// Counts a refusal, and logs it unless there are many.
    fn log_refused(&self, refusal: &Refusal) {
        static LOG: Quiet = Quiet::new();
        self.shard.counters.refused(refusal);
        if let Some(left_out) = LOG.admit() {
            tracing::warn!(peer = %self.peer, reason = refusal.label(), left_out, "refused: {refusal}");
        }
    }

    async fn answer(&mut self, kind: ServerKind) -> Result<(), SessionEnd> {
        let sent = self.answers.send(Ok(kind.into())).await;
        sent.map_err(|_| SessionEnd::Gone)
    }

    /// Returns the reason for the end of a session whose stream broke or had bytes that are no valid message.
    fn broken(&self, status: Status) -> SessionEnd {
        let refusal = match status.code() {
            Code::OutOfRange => Refusal::new(
                Reason::Oversized,
                format!(
                    "{} sent a message larger than this server takes: {}; cut it into smaller ones, of {MAX_MESSAGE_BYTES} bytes at the most",
                    self.peer,
                    status.message()
                ),
            ),
            Code::Internal | Code::InvalidArgument => Refusal::new(
                Reason::Malformed,
                format!(
                    "{} sent what is no message: {}",
                    self.peer,
                    status.message()
                ),
            ),
            _ => return SessionEnd::Gone,
        };
        self.log_refused(&refusal);
        SessionEnd::Status(refusal.into())
    }
}

fn read_hello(first: wire::ClientMessage) -> Result<wire::Hello, Refusal> {
    let Some(ClientKind::Hello(hello)) = first.kind else {
        return Err(Refusal::new(
            Reason::Malformed,
            "a session begins with Hello; something else came first",
        ));
    };
    if hello.protocol_version != PROTOCOL_VERSION {
        return Err(Refusal::new(
            Reason::WrongProtocolVersion,
            format!(
                "the client speaks protocol version {}, this server {PROTOCOL_VERSION}; use the same release everywhere",
                hello.protocol_version
            ),
        ));
    }
    Ok(hello)
}

fn origin_of(kind: &ClientKind) -> Option<&wire::Origin> {
    match kind {
        ClientKind::Hello(hello) => hello.origin.as_ref(),
        ClientKind::Initialize(initialize) => initialize.origin.as_ref(),
        ClientKind::Push(push) => push.origin.as_ref(),
        ClientKind::Pull(pull) => pull.origin.as_ref(),
        ClientKind::AskOutcome(ask) => ask.origin.as_ref(),
    }
}

fn sequence(origin: Option<&wire::Origin>) -> u64 {
    origin.map_or(0, |origin| origin.sequence)
}
