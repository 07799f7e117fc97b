//! The stream to one shard. It is opened again when it breaks; all that was not answered is sent
//! again, in order, and the server knows what it has taken already.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use shared_proto::ids::{Origin, Task, ViewNumber};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::transport::{self, CALL_TIMEOUT, MAX_MESSAGE_BYTES, PROTOCOL_VERSION};
use shared_proto::wire;
use shared_proto::wire::client_message::Kind as Outgoing;
use shared_proto::wire::parameter_server_client::ParameterServerClient;
use shared_proto::wire::server_message::Kind as Incoming;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::error::{PsError, refusal_of};

/// Messages that may wait between the session and the transport.
const OUTGOING: usize = 4;

/// Requests that may wait between the worker and the session.
const REQUESTS: usize = 64;

/// How long to wait before asking again for what is not initialised yet.
const NOT_YET: Duration = Duration::from_millis(20);

/// What a shard answers to one request.
#[derive(Debug)]
pub(crate) enum Answer {
    Acknowledged(wire::Acknowledged),
    Weights(wire::Weights),
}

/// A message to send, and where its answer goes.
struct Request {
    sequence: u64,
    message: wire::ClientMessage,
    reply: oneshot::Sender<Result<Answer, PsError>>,
}

/// A request's answer, to come.
pub(crate) struct Reply {
    shard: u32,
    receiver: oneshot::Receiver<Result<Answer, PsError>>,
}

impl Reply {
    pub(crate) async fn answer(self) -> Result<Answer, PsError> {
        self.receiver
            .await
            .unwrap_or(Err(PsError::Closed(self.shard)))
    }
}

/// How to reach a shard, and as whom.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) shard: u32,
    pub(crate) address: String,
    pub(crate) origin: Origin,
    pub(crate) view: ViewNumber,
    pub(crate) patience: Duration,
}

/// The worker's end of a session.
pub(crate) struct Session {
    shard: u32,
    requests: mpsc::Sender<Request>,
}

impl Session {
    /// Opens a session; connects in the background. Tells whom this worker's pulls wait for.
    pub(crate) fn open(target: Target, tell: watch::Sender<Vec<Task>>) -> Self {
        let (requests, queue) = mpsc::channel(REQUESTS);
        let shard = target.shard;
        let driver = Driver {
            target,
            queue,
            tell,
            in_flight: BTreeMap::new(),
            unsent: VecDeque::new(),
        };
        tokio::spawn(driver.run());
        Self { shard, requests }
    }

    /// Hands over a message. Waits only while many others are on their way.
    pub(crate) async fn send(&self, sequence: u64, kind: Outgoing) -> Reply {
        let (reply, receiver) = oneshot::channel();
        let request = Request {
            sequence,
            message: wire::ClientMessage { kind: Some(kind) },
            reply,
        };
        // If the session is closed, the reply says so.
        let _ = self.requests.send(request).await;
        Reply {
            shard: self.shard,
            receiver,
        }
    }
}

/// Owns the stream.
struct Driver {
    target: Target,
    queue: mpsc::Receiver<Request>,
    tell: watch::Sender<Vec<Task>>,
    /// Not answered, by sequence, which is the order of sending.
    in_flight: BTreeMap<u64, Request>,
    /// Sequences of those that have not been given to the present stream.
    unsent: VecDeque<u64>,
}

/// How a stream ended.
enum End {
    /// The worker has closed the session.
    Closed,
    /// It may be opened again.
    Broken(String),
    /// It may not.
    Fatal(PsError),
}

type Sender = mpsc::Sender<wire::ClientMessage>;

impl Driver {
    async fn run(mut self) {
        let mut last_heard = Instant::now();
        let mut delays = backoff().build();
        loop {
            let reason = match self.connect().await {
                Ok((outgoing, incoming)) => {
                    delays = backoff().build();
                    let end = self.exchange(outgoing, incoming).await;
                    last_heard = Instant::now();
                    match end {
                        End::Closed => return,
                        End::Fatal(error) => return self.fail(&error),
                        End::Broken(reason) => reason,
                    }
                }
                Err(End::Fatal(error)) => return self.fail(&error),
                Err(End::Closed) => return,
                Err(End::Broken(reason)) => reason,
            };
            let Target {
                shard,
                address,
                patience,
                ..
            } = &self.target;
            if last_heard.elapsed() < NOT_YET {
                tracing::warn!(shard, %address, reason, "lost the session with a shard; connecting again");
            } else {
                tracing::debug!(shard, %address, reason, "the shard cannot be reached yet");
            }
            if last_heard.elapsed() > *patience || self.queue.is_closed() {
                let error = PsError::Unreachable {
                    shard: *shard,
                    address: address.clone(),
                    patience: *patience,
                    reason,
                };
                return self.fail(&error);
            }
            sleep(delays.next().unwrap_or(MOST_DELAY)).await;
        }
    }

    /// Opens a stream and greets.
    async fn connect(&mut self) -> Result<(Sender, Streaming<wire::ServerMessage>), End> {
        let broken = |error: &dyn std::fmt::Display| End::Broken(error.to_string());
        let endpoint = transport::endpoint(&self.target.address).map_err(|e| broken(&e))?;
        let channel = endpoint.connect().await.map_err(|e| broken(&e))?;
        let mut client =
            ParameterServerClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let (outgoing, stream) = mpsc::channel(OUTGOING);
        let hello = Outgoing::Hello(wire::Hello {
            protocol_version: PROTOCOL_VERSION,
            origin: Some(self.target.origin.clone().into()),
            view: self.target.view.0,
        });
        // The channel is new and empty, so this does not wait.
        let _ = outgoing
            .send(wire::ClientMessage { kind: Some(hello) })
            .await;
        let greeted = async {
            let mut incoming = client
                .session(ReceiverStream::new(stream))
                .await?
                .into_inner();
            Ok::<_, Status>((incoming.message().await?, incoming))
        };
        match timeout(2 * CALL_TIMEOUT, greeted).await {
            Ok(Ok((Some(first), incoming))) => match first.kind {
                Some(Incoming::Welcome(_)) => {
                    self.unsent = self.in_flight.keys().copied().collect();
                    Ok((outgoing, incoming))
                }
                _ => Err(End::Broken("it did not say welcome".to_owned())),
            },
            Ok(Ok((None, _))) => Err(End::Broken("it closed the stream".to_owned())),
            Ok(Err(status)) => Err(end_of(&status)),
            Err(_) => Err(End::Broken("it did not answer the hello".to_owned())),
        }
    }

    /// Sends and receives until the stream ends. Reading goes on while writing waits.
    async fn exchange(
        &mut self,
        outgoing: Sender,
        mut incoming: Streaming<wire::ServerMessage>,
    ) -> End {
        loop {
            tokio::select! {
                permit = outgoing.reserve(), if !self.unsent.is_empty() => match permit {
                    Ok(permit) => {
                        let request = self.unsent.pop_front().and_then(|s| self.in_flight.get(&s));
                        if let Some(request) = request {
                            permit.send(request.message.clone());
                        }
                    }
                    Err(_) => return End::Broken("the stream has ended".to_owned()),
                },
                request = self.queue.recv(), if self.unsent.len() < REQUESTS => match request {
                    Some(request) => {
                        self.unsent.push_back(request.sequence);
                        self.in_flight.insert(request.sequence, request);
                    }
                    None => return End::Closed,
                },
                message = incoming.message() => match message {
                    Ok(Some(message)) => {
                        if let Err(end) = self.answered(message).await {
                            return end;
                        }
                    }
                    Ok(None) => return End::Broken("it closed the stream".to_owned()),
                    Err(status) => return end_of(&status),
                },
            }
        }
    }

    async fn answered(&mut self, message: wire::ServerMessage) -> Result<(), End> {
        match message.kind {
            Some(Incoming::Acknowledged(a)) => {
                self.resolve(a.sequence, Ok(Answer::Acknowledged(a)));
            }
            Some(Incoming::Weights(weights)) => {
                self.tell
                    .send_if_modified(|on| !std::mem::take(on).is_empty());
                self.resolve(weights.request, Ok(Answer::Weights(weights)));
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
                    // The initialiser is at work: ask again in a moment.
                    Reason::NotInitialized if self.in_flight.contains_key(&refused.sequence) => {
                        sleep(NOT_YET).await;
                        self.unsent.push_back(refused.sequence);
                    }
                    _ => self.resolve(refused.sequence, Err(refusal.into())),
                }
            }
            Some(Incoming::Welcome(_)) | None => {
                return Err(End::Broken("it sent what is no answer".to_owned()));
            }
        }
        Ok(())
    }

    fn resolve(&mut self, sequence: u64, answer: Result<Answer, PsError>) {
        if let Some(request) = self.in_flight.remove(&sequence) {
            // Whoever does not wait for the answer does not need it.
            let _ = request.reply.send(answer);
        }
    }

    fn fail(mut self, error: &PsError) {
        self.queue.close();
        for (_, request) in std::mem::take(&mut self.in_flight) {
            let _ = request.reply.send(Err(error.clone()));
        }
        while let Ok(request) = self.queue.try_recv() {
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

fn end_of(status: &Status) -> End {
    match refusal_of(status) {
        Some(refusal) => End::Fatal(refusal.into()),
        None => End::Broken(status.message().to_owned()),
    }
}
