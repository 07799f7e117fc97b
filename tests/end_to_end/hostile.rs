//! Workers of the job that try to fill a server's memory. The server holds little, and the other workers continue.

use std::time::{Duration, Instant};

use network::security::Security;
use shared_proto::blocks::ShardMap;
use shared_proto::ids::Role;
use shared_proto::payload;
use shared_proto::refusal::Reason;
use shared_proto::wire;
use shared_proto::wire::client_message::Kind;
use shared_proto::wire::parameter_server_client::ParameterServerClient;
use shared_proto::wire::server_message::Kind as Answer;
use tests::peer::{Peer, Session, variable};
use tests::{Cluster, PATIENCE};
use tokio::time::timeout;
use tonic::Code;

use crate::program;

/// A job in which no worker may be ahead.
const JOB: &str = r#"
name = "t"
[optimizer]
name = "sgd"
learning_rate = 1.0
[strategy]
mode = "bounded"
# The weights count the pushes.
correction = { enabled = false }
staleness = 0
[cluster]
ps = 1
workers = 1
lease_seconds = 300.0
"#;

/// The most memory of a server with one small block at any time, in MiB: 25 for itself, and 16 for each of
/// a few sessions that end while the next one begins.
const MOST_MEMORY: u64 = 128;

/// The longest wait for the refusal of a message. A server that takes the message does not answer at first.
const REFUSED_WITHIN: Duration = Duration::from_secs(30);

/// Less than the wait of a session for a view.
const SESSION_WAITS: Duration = Duration::from_secs(8);

const W: wire::BlockId = wire::BlockId {
    variable: 0,
    index: 0,
};

/// A cluster with a hostile worker and an honest one.
struct Scene {
    cluster: Cluster,
    hostile: Peer,
    honest: Peer,
    map: ShardMap,
}

impl Scene {
    async fn new() -> Self {
        let cluster = Cluster::start(program(), JOB, 1);
        let coordinator = cluster.coordinator.address();
        let mut hostile = Peer::join(&coordinator, "hostile").await;
        let mut honest = Peer::join(&coordinator, "honest").await;
        let map = hostile.shard_map(&[variable("w", 4)]).await;
        honest.shard_map(&[variable("w", 4)]).await;
        hostile.initialize(&map, 0.0).await;
        let mut scene = Self {
            cluster,
            hostile,
            honest,
            map,
        };
        scene.is_well(0).await;
        scene
    }

    async fn session(&self) -> Session {
        self.hostile
            .open(self.map.shards[0].server.address().unwrap())
            .await
    }

    /// Checks that the weights have `pushes` pushes, that the honest worker can push once more, and that the
    /// server holds little.
    async fn is_well(&mut self, pushes: u16) {
        let mut session = self
            .honest
            .open(self.map.shards[0].server.address().unwrap())
            .await;
        let pull = self.honest.pull(0, &[W]);
        let weights = session.weights(pull).await.remove(0);
        assert_eq!(weights, (vec![-f32::from(pushes); 4], u64::from(pushes)));
        let push = self.honest.push(0, &[(W, vec![1.0; 4])]);
        let answer = session.ask(Kind::Push(push)).await;
        assert!(matches!(answer, Answer::Acknowledged(_)), "{answer:?}");
        let memory = self.cluster.ps[0].peak_memory();
        assert!(memory < MOST_MEMORY, "the server has had {memory} MiB");
    }

    /// Returns the number of the server's sessions.
    fn sessions(&self) -> f64 {
        let metrics = self.cluster.ps[0].http("/metrics");
        let of = |line: &str| line.strip_prefix("flambeau_ps_sessions ")?.parse().ok();
        metrics.lines().find_map(of).unwrap_or(0.0)
    }

    /// Returns a pull of the next step's weights, which must wait.
    fn early_pull(&mut self, blocks: Vec<wire::WantedBlock>) -> Kind {
        Kind::Pull(wire::Pull {
            origin: Some(self.hostile.next(1)),
            blocks,
            ..wire::Pull::default()
        })
    }
}

/// Sends a message that ends the session. Returns the status.
async fn ended_by(mut session: Session, kind: Kind) -> (Code, String) {
    session.send(kind).await;
    loop {
        match timeout(PATIENCE, session.receive()).await {
            Ok(Ok(Answer::Waiting(_))) => {}
            Ok(Ok(other)) => panic!("the session goes on with {other:?}"),
            Err(_) => panic!("the session goes on"),
            Ok(Err(status)) => return (status.code(), status.message().to_owned()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pulls_of_many_empty_parts_take_no_memory() {
    let mut scene = Scene::new().await;
    // If the server held them, it would have 16 MiB of each.
    for _ in 0..12 {
        let mut session = scene.session().await;
        let pull = scene.early_pull(vec![wire::WantedBlock::default(); 1_000_000]);
        session.send(pull).await;
        match timeout(REFUSED_WITHIN, session.receive()).await {
            Ok(Err(status)) => {
                assert_eq!(status.code(), Code::OutOfRange, "{status}");
                assert!(status.message().contains("parts"), "{status}");
            }
            other => panic!("the server has taken the message: {other:?}"),
        }
    }
    scene.is_well(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pulls_that_wait_are_counted_by_what_they_hold() {
    let mut scene = Scene::new().await;
    let mut session = scene.session().await;
    // There are more pulls than there is room for, though far fewer than may wait for a large shard.
    for _ in 0..4000 {
        let known = vec![wire::WantedBlock::default(); 12];
        session.send(scene.early_pull(known)).await;
    }
    // The pulls before the first refusal wait.
    let refused = loop {
        match timeout(PATIENCE, session.receive()).await {
            Ok(Ok(Answer::Refused(refused))) => break refused,
            Ok(Ok(Answer::Waiting(_))) => {}
            other => panic!("nothing was refused: {other:?}"),
        }
    };
    assert_eq!(refused.reason(), Reason::TooManyRequests, "{refused:?}");
    scene.is_well(1).await;
    drop(session);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_named_once_in_every_message() {
    let cluster = Cluster::start(program(), JOB, 1);
    let mut peer = Peer::join(&cluster.coordinator.address(), "x").await;
    let map = peer.shard_map(&[variable("w", 4)]).await;
    let mut session = peer.open(map.shards[0].server.address().unwrap()).await;
    let part = wire::BlockPayload {
        block: Some(W),
        payload: Some(payload::dense(payload::to_bytes(&[0.0; 4]))),
    };
    let initialize = wire::Initialize {
        origin: Some(peer.next(0)),
        blocks: vec![part.clone(), part],
    };
    let twice = |(reason, message): (Reason, String)| {
        assert_eq!(reason, Reason::Malformed, "{message}");
        assert!(message.contains("is named twice"), "{message}");
    };
    twice(session.refused(Kind::Initialize(initialize)).await);
    peer.initialize(&map, 0.0).await;
    let mut session = peer.open(map.shards[0].server.address().unwrap()).await;
    let pull = peer.pull(0, &[W]);
    session.weights(pull).await;
    let ask = wire::AskOutcome {
        origin: Some(peer.next(0)),
        blocks: vec![W, W],
    };
    twice(session.refused(Kind::AskOutcome(ask)).await);
    let ask = wire::AskOutcome {
        origin: Some(peer.next(0)),
        blocks: vec![W; 300_000],
    };
    let (code, why) = ended_by(session, Kind::AskOutcome(ask)).await;
    assert_eq!(code, Code::OutOfRange, "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_has_one_session_and_a_connection_few_streams() {
    let mut scene = Scene::new().await;
    let mut first = scene.session().await;
    let mut second = scene.session().await;
    let ended = first.receive().await.unwrap_err();
    assert_eq!(ended.code(), Code::Unavailable, "{ended}");
    let pull = scene.hostile.pull(0, &[W]);
    second.weights(pull).await;

    // The connection lets only a few silent streams begin.
    let endpoint =
        Security::default().endpoint(scene.map.shards[0].server.address().unwrap(), Role::Ps);
    let client = ParameterServerClient::new(endpoint.unwrap().connect().await.unwrap());
    let open = |_| {
        let mut client = client.clone();
        tokio::spawn(async move { client.session(tokio_stream::pending()).await })
    };
    let silent: Vec<_> = (0..100).map(open).collect();
    tests::eventually(|| scene.sessions() >= 4.0);
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(scene.sessions() < 8.0);
    }
    scene.is_well(1).await;
    silent.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_whose_callers_are_gone_end() {
    let mut scene = Scene::new().await;
    // On a busy machine the session may begin too late.
    let ended = (0..5).any(|_| the_session_of_an_aborted_call_ends_early(&scene));
    assert!(ended, "the sessions ended by themselves");
    scene.is_well(1).await;
}

/// Opens a session that waits for a view that is still far away, and aborts the call. Returns whether the session has ended before its wait
/// was over.
fn the_session_of_an_aborted_call_ends_early(scene: &Scene) -> bool {
    tests::eventually(|| scene.sessions() < 1.0);
    let begin = Instant::now();
    let hello = wire::Hello {
        view: u64::MAX,
        ..scene.hostile.hello()
    };
    let (peer, address) = (
        scene.hostile.clone(),
        scene.map.shards[0].server.address().unwrap().to_owned(),
    );
    let call = tokio::spawn(async move { peer.try_open(&address, hello).await });
    tests::eventually(|| scene.sessions() >= 1.0 || call.is_finished());
    call.abort();
    tests::eventually(|| scene.sessions() < 1.0);
    begin.elapsed() < SESSION_WAITS
}
