//! A worker made by hand. It speaks the protocol message by message, and can send messages that no real worker
//! sends.

use std::time::{Duration, Instant};

use network::security::Security;
use shared_proto::blocks::ShardMap;
use shared_proto::ids::Role;
use shared_proto::payload;
use shared_proto::protocol;
use shared_proto::refusal::Reason;
use shared_proto::wire::client_message::Kind as Outgoing;
use shared_proto::wire::coordinator_client::CoordinatorClient;
use shared_proto::wire::parameter_server_client::ParameterServerClient;
use shared_proto::wire::server_message::Kind as Incoming;
use shared_proto::wire::{self, client_message};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// The time in which a server must learn from the coordinator what the peer already knows.
const PATIENCE: Duration = Duration::from_secs(5);

/// A registered worker.
#[derive(Clone)]
pub struct Peer {
    /// The coordinator.
    pub coordinator: CoordinatorClient<Channel>,
    /// The origin of its messages.
    pub origin: wire::Origin,
    /// The tables of its model.
    pub tables: Vec<wire::Table>,
    /// The newest view that it knows.
    pub view: u64,
    /// Sync mode: the receipts of its gradient, for the next step that it finishes.
    pub receipts: Vec<wire::ShardReceipt>,
}

/// A session with a shard.
pub struct Session {
    outgoing: mpsc::Sender<wire::ClientMessage>,
    incoming: Streaming<wire::ServerMessage>,
}

/// Returns a variable of a peer's model, of one dimension.
pub fn variable(name: &str, elements: u64) -> wire::Variable {
    wire::Variable {
        name: name.to_owned(),
        shape: vec![elements],
        ..wire::Variable::default()
    }
}

impl Peer {
    /// Registers as a worker.
    pub async fn join(coordinator: &str, identity: &str) -> Self {
        Self::join_as(coordinator, wire::Role::Worker, identity).await
    }

    /// Registers as a process of this role.
    pub async fn join_as(coordinator: &str, role: wire::Role, identity: &str) -> Self {
        let channel = Security::default()
            .endpoint(coordinator, Role::Coordinator)
            .unwrap()
            .connect()
            .await
            .unwrap();
        let mut coordinator = CoordinatorClient::new(channel);
        let reply = coordinator
            .register(wire::RegisterRequest {
                protocol_version: protocol::PROTOCOL_VERSION,
                role: role.into(),
                identity: identity.to_owned(),
                address: match role {
                    // Port 9 belongs to the discard protocol; no process listens there.
                    wire::Role::Ps => "127.0.0.1:9".to_owned(),
                    _ => String::new(),
                },
                ..wire::RegisterRequest::default()
            })
            .await
            .unwrap()
            .into_inner();
        Self {
            coordinator,
            origin: wire::Origin {
                job: reply.job,
                task: reply.task,
                ..wire::Origin::default()
            },
            tables: Vec::new(),
            view: reply.view,
            receipts: Vec::new(),
        }
    }

    /// Registers variables, whatever the outcome.
    pub async fn register_variables(
        &mut self,
        variables: Vec<wire::Variable>,
    ) -> Result<wire::RegisterVariablesReply, Status> {
        let request = wire::RegisterVariablesRequest {
            origin: Some(self.origin.clone()),
            variables,
            training_samples: 1000,
            evaluation_samples: 10,
            tables: self.tables.clone(),
            ..Default::default()
        };
        let reply = self
            .coordinator
            .register_variables(request)
            .await?
            .into_inner();
        self.view = reply.view;
        self.origin.epoch = reply.shard_map.as_ref().map_or(0, |map| map.epoch);
        Ok(reply)
    }

    /// Registers variables until there is a shard map.
    pub async fn shard_map(&mut self, variables: &[wire::Variable]) -> ShardMap {
        loop {
            let reply = self.register_variables(variables.to_vec()).await.unwrap();
            if let Some(map) = reply.shard_map {
                return ShardMap::try_from(map).unwrap();
            }
        }
    }

    /// Returns the next message's origin.
    pub fn next(&mut self, clock: u64) -> wire::Origin {
        self.origin.sequence += 1;
        self.origin.clock = clock;
        self.origin.clone()
    }

    /// Opens a session with a shard, whatever the outcome.
    pub async fn try_open(&self, address: &str, hello: wire::Hello) -> Result<Session, Status> {
        let channel = Security::default()
            .endpoint(address, Role::Ps)
            .unwrap()
            .connect()
            .await
            .unwrap();
        let (outgoing, stream) = mpsc::channel(16);
        let mut client = ParameterServerClient::new(channel);
        let first = Outgoing::Hello(hello);
        let _ = outgoing
            .send(wire::ClientMessage { kind: Some(first) })
            .await;
        let mut incoming = client
            .session(ReceiverStream::new(stream))
            .await?
            .into_inner();
        let welcome = incoming.message().await?.unwrap();
        assert!(
            matches!(welcome.kind, Some(Incoming::Welcome(_))),
            "{welcome:?}"
        );
        Ok(Session { outgoing, incoming })
    }

    /// Returns the first message of a session.
    pub fn hello(&self) -> wire::Hello {
        wire::Hello {
            protocol_version: protocol::PROTOCOL_VERSION,
            origin: Some(self.origin.clone()),
            view: self.view,
        }
    }

    /// Opens a session with a shard.
    pub async fn open(&self, address: &str) -> Session {
        self.try_open(address, self.hello()).await.unwrap()
    }

    /// Returns a push of these gradients, one for each block.
    pub fn push(&mut self, clock: u64, gradients: &[(wire::BlockId, Vec<f32>)]) -> wire::Push {
        wire::Push {
            origin: Some(self.next(clock)),
            gradients: gradients
                .iter()
                .map(|(block, values)| wire::Gradient {
                    block: Some(*block),
                    based_on_version: 0,
                    payload: Some(payload::dense(payload::to_bytes(values))),
                })
                .collect(),
        }
    }

    /// Returns a pull of blocks of which the peer has no version.
    pub fn pull(&mut self, clock: u64, blocks: &[wire::BlockId]) -> wire::Pull {
        wire::Pull {
            origin: Some(self.next(clock)),
            blocks: blocks
                .iter()
                .map(|block| wire::WantedBlock {
                    block: Some(*block),
                    ..wire::WantedBlock::default()
                })
                .collect(),
            ..wire::Pull::default()
        }
    }

    /// Sends initial values for a whole shard map and finishes the initialisation.
    pub async fn initialize(&mut self, map: &ShardMap, value: f32) {
        for (id, shard) in map.blocks() {
            // The rows of tables need no initial values.
            let Ok(range) = map.range(id) else { continue };
            let values = vec![value; range.len()];
            let mut session = self
                .open(map.shards[shard as usize].server.address().unwrap())
                .await;
            let initialize = wire::Initialize {
                origin: Some(self.next(0)),
                blocks: vec![wire::BlockPayload {
                    block: Some(id.into()),
                    payload: Some(payload::dense(payload::to_bytes(&values))),
                }],
            };
            let answer = session.ask(Outgoing::Initialize(initialize)).await;
            assert!(matches!(answer, Incoming::Acknowledged(_)), "{answer:?}");
        }
        let request = wire::FinishInitializationRequest {
            origin: Some(self.origin.clone()),
        };
        self.coordinator
            .finish_initialization(request)
            .await
            .unwrap();
    }

    /// Asks for work until there is some.
    pub async fn work(&mut self) -> wire::Split {
        loop {
            let request = wire::LeaseWorkRequest {
                origin: Some(self.origin.clone()),
                copied: None,
            };
            let reply = self
                .coordinator
                .lease_work(request)
                .await
                .unwrap()
                .into_inner();
            if let Some(wire::lease_work_reply::Work::Split(split)) = reply.work {
                self.origin.clock = reply.clock;
                return split;
            }
        }
    }

    /// Reports that a whole split was done in one step.
    pub async fn finish(&mut self, split: &wire::Split) -> Result<(), Status> {
        let clock = self.origin.clock + 1;
        let request = wire::FinishStepRequest {
            origin: Some(self.next(clock)),
            split: split.id,
            position: split.end,
            steps: 1,
            samples: split.end - split.start,
            receipts: std::mem::take(&mut self.receipts),
            ..wire::FinishStepRequest::default()
        };
        self.coordinator.finish_step(request).await.map(|_| ())
    }
}

impl Session {
    /// Sends a message.
    pub async fn send(&self, kind: client_message::Kind) {
        let message = wire::ClientMessage { kind: Some(kind) };
        self.outgoing.send(message).await.unwrap();
    }

    /// Returns the next answer, or the status with which the stream ended.
    pub async fn receive(&mut self) -> Result<Incoming, Status> {
        let message = self.incoming.message().await?;
        let message = message.ok_or_else(|| Status::unknown("the stream has ended"))?;
        Ok(message.kind.unwrap())
    }

    /// Sends a message and waits for its answer.
    pub async fn ask(&mut self, kind: client_message::Kind) -> Incoming {
        self.send(kind).await;
        self.receive().await.unwrap()
    }

    /// Sends a message that must be refused.
    pub async fn refused(&mut self, kind: client_message::Kind) -> (Reason, String) {
        match self.ask(kind).await {
            Incoming::Refused(refused) => (refused.reason(), refused.message),
            other => panic!("it was not refused: {other:?}"),
        }
    }

    /// Pulls blocks and waits for their values and versions, in the requested order. Asks again while the server does
    /// not know yet that there are values.
    pub async fn weights(&mut self, pull: wire::Pull) -> Vec<(Vec<f32>, u64)> {
        let begin = Instant::now();
        loop {
            let mut answer = self.ask(Outgoing::Pull(pull.clone())).await;
            while let Incoming::Waiting(_) = answer {
                answer = self.receive().await.unwrap();
            }
            match answer {
                Incoming::Weights(weights) => return weights.blocks.iter().map(values).collect(),
                Incoming::Refused(refused)
                    if refused.reason() == Reason::NotInitialized && begin.elapsed() < PATIENCE =>
                {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                other => panic!("no weights came: {other:?}"),
            }
        }
    }
}

/// Returns the values and the version of a pulled block.
pub fn values(block: &wire::BlockWeights) -> (Vec<f32>, u64) {
    let payload = block.payload.as_ref().unwrap();
    let Some(wire::payload::Values::Dense(bytes)) = &payload.values else {
        panic!("no dense values")
    };
    let values = payload::elements(bytes).iter().map(|v| v.get()).collect();
    (values, block.version.unwrap().version)
}
