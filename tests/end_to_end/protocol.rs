//! The promises of the protocol: a push counts once, and a bad message is refused by name and changes
//! nothing.

mod bad_messages;
mod bad_rows;

use std::time::Duration;

use shared_proto::blocks::{ShardMap, VariableKind};
use shared_proto::payload::{self, Dtype, Elements};
use shared_proto::protocol::MAX_MESSAGE_BYTES;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;
use shared_proto::wire::client_message::Kind;
use shared_proto::wire::server_message::Kind as Answer;
use tests::Cluster;
use tests::peer::{Peer, Session, variable};

use crate::program;

const BOUNDED: &str = r#"
name = "t"
[optimizer]
name = "sgd"
learning_rate = 1.0
[strategy]
mode = "bounded"
staleness = 2
[cluster]
ps = 1
workers = 1
"#;

/// A worker with a session, on a job with one variable of four zeros.
struct Scene {
    cluster: Cluster,
    peer: Peer,
    session: Session,
    map: ShardMap,
}

const W: wire::BlockId = wire::BlockId {
    variable: 0,
    index: 0,
};

impl Scene {
    async fn new() -> Self {
        let cluster = Cluster::start(program(), BOUNDED, 1);
        let mut peer = Peer::join(&cluster.coordinator.address(), "x").await;
        let map = peer.shard_map(&[variable("w", 4)]).await;
        peer.initialize(&map, 0.0).await;
        let session = peer.open(map.shards[0].server.address().unwrap()).await;
        let mut scene = Self {
            cluster,
            peer,
            session,
            map,
        };
        scene.weights().await;
        scene
    }

    async fn weights(&mut self) -> (Vec<f32>, u64) {
        let pull = self.peer.pull(0, &[W]);
        self.session.weights(pull).await.remove(0)
    }

    async fn refused(&mut self, push: wire::Push) -> (Reason, String) {
        self.session.refused(Kind::Push(push)).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_sent_twice_is_applied_once() {
    let mut scene = Scene::new().await;
    let push = scene.peer.push(0, &[(W, vec![1.0; 4])]);
    let later = scene.peer.push(0, &[(W, vec![2.0; 4])]);
    for push in [&push, &push, &later] {
        let answer = scene.session.ask(Kind::Push(push.clone())).await;
        let Answer::Acknowledged(acknowledged) = answer else {
            panic!("{answer:?}")
        };
        assert_eq!(acknowledged.level(), wire::AcknowledgementLevel::Applied);
        assert_eq!(acknowledged.blocks.len(), 1);
    }
    // Over another stream too, and though a later one has been applied since.
    scene.session = scene
        .peer
        .open(scene.map.shards[0].server.address().unwrap())
        .await;
    for push in [push, later] {
        let answer = scene.session.ask(Kind::Push(push)).await;
        assert!(matches!(answer, Answer::Acknowledged(_)), "{answer:?}");
    }
    assert_eq!(scene.weights().await, (vec![-3.0; 4], 2));
    let metrics = scene.cluster.ps[0].http("/metrics");
    assert!(
        metrics.contains("flambeau_ps_duplicates_total 3"),
        "{metrics}"
    );
}

/// A push is refused for a reason that may pass, later ones are applied, and the first is sent again under
/// its old number. It was never applied, so it must not be acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_was_not_applied_is_never_acknowledged() {
    let mut scene = Scene::new().await;
    let mut refused = scene.peer.push(0, &[(W, vec![1.0; 4])]);
    let good = refused.origin.clone().unwrap();
    refused.origin.as_mut().unwrap().epoch += 1;
    assert_eq!(scene.refused(refused.clone()).await.0, Reason::StaleEpoch);
    let mut last = 0;
    for _ in 0..2 {
        let push = scene.peer.push(0, &[(W, vec![1.0; 4])]);
        last = push.origin.as_ref().unwrap().sequence;
        let answer = scene.session.ask(Kind::Push(push)).await;
        assert!(matches!(answer, Answer::Acknowledged(_)), "{answer:?}");
    }
    refused.origin = Some(good);
    assert_eq!(scene.refused(refused.clone()).await.0, Reason::OutOfOrder);
    // A push without a number, or with an old number, is not acknowledged either.
    for sequence in [0, 1] {
        refused.origin.as_mut().unwrap().sequence = sequence;
        let (reason, _) = scene.refused(refused.clone()).await;
        let expected = [Reason::OutOfOrder, Reason::Malformed];
        assert!(expected.contains(&reason), "{sequence}: {reason:?}");
    }
    let weights = scene.weights().await;
    assert_eq!(weights, (vec![-2.0; 4], 2), "after push {last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_not_changed_is_not_sent_again() {
    let mut scene = Scene::new().await;
    let mut pull = scene.peer.pull(0, &[W]);
    pull.blocks[0].epoch = scene.map.epoch.0;
    let answer = scene.session.ask(Kind::Pull(pull.clone())).await;
    let Answer::Weights(weights) = answer else {
        panic!("{answer:?}")
    };
    assert!(
        weights.blocks.is_empty() && weights.unchanged == [W],
        "{weights:?}"
    );
    let push = scene.peer.push(0, &[(W, vec![1.0; 4])]);
    scene.session.ask(Kind::Push(push)).await;
    let answer = scene.session.ask(Kind::Pull(pull)).await;
    let Answer::Weights(weights) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(weights.blocks.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_over_the_limit_ends_the_session_and_changes_nothing() {
    let mut scene = Scene::new().await;
    let mut push = scene.peer.push(0, &[(W, vec![1.0; 4])]);
    let huge = vec![1.0; MAX_MESSAGE_BYTES / 4 + 1];
    push.gradients.push(wire::Gradient {
        block: Some(W),
        based_on_version: 0,
        payload: Some(payload::dense(payload::to_bytes(&huge))),
    });
    scene.session.send(Kind::Push(push)).await;
    let ended = scene.session.receive().await.unwrap_err();
    let refusal = Refusal::from_status(&ended).unwrap();
    assert_eq!(refusal.reason, Reason::Oversized);
    assert!(refusal.message.contains("worker-0"), "{refusal}");
    scene.session = scene
        .peer
        .open(scene.map.shards[0].server.address().unwrap())
        .await;
    assert_eq!(scene.weights().await, (vec![0.0; 4], 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_another_version_job_or_life_are_refused() {
    let scene = Scene::new().await;
    type Change = fn(&mut wire::Hello);
    let changes: [(Change, Reason, &str); 3] = [
        (
            |h| h.protocol_version = 99,
            Reason::WrongProtocolVersion,
            "version 99",
        ),
        (
            |h| h.origin.as_mut().unwrap().job = "other".into(),
            Reason::ForeignJob,
            "\"other\"",
        ),
        (
            |h| h.origin.as_mut().unwrap().task.as_mut().unwrap().generation = 0,
            Reason::Superseded,
            "generation 0",
        ),
    ];
    for (change, reason, named) in changes {
        let mut hello = scene.peer.hello();
        change(&mut hello);
        let Err(status) = scene
            .peer
            .try_open(scene.map.shards[0].server.address().unwrap(), hello)
            .await
        else {
            panic!("it was let in");
        };
        let refusal = Refusal::from_status(&status).unwrap();
        assert_eq!(refusal.reason, reason, "{refusal}");
        assert!(refusal.message.contains(named), "{refusal}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_coordinator_refuses_by_name_too() {
    let scene = Scene::new().await;
    let address = scene.cluster.coordinator.address();
    let mut other = Peer::join(&address, "y").await;
    let different = other
        .register_variables(vec![variable("w", 5)])
        .await
        .unwrap_err();
    let refusal = Refusal::from_status(&different).unwrap();
    assert_eq!(refusal.reason, Reason::VariablesDiffer);
    assert!(
        refusal.message.contains("\"w\"") && refusal.message.contains("[5]"),
        "{refusal}"
    );

    let version = wire::RegisterRequest {
        protocol_version: 99,
        role: wire::Role::Worker.into(),
        identity: "z".into(),
        ..wire::RegisterRequest::default()
    };
    let status = other.coordinator.register(version).await.unwrap_err();
    let refusal = Refusal::from_status(&status).unwrap();
    assert_eq!(refusal.reason, Reason::WrongProtocolVersion);

    let mut foreign = scene.peer.origin.clone();
    foreign.job = "other".into();
    let beat = wire::HeartbeatRequest {
        origin: Some(foreign),
    };
    let status = other.coordinator.heartbeat(beat).await.unwrap_err();
    assert_eq!(
        Refusal::from_status(&status).unwrap().reason,
        Reason::ForeignJob
    );
    let metrics = scene.cluster.coordinator.http("/metrics");
    assert!(
        metrics.contains("flambeau_coordinator_refused_total{reason=\"foreign_job\"} 1"),
        "{metrics}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_travel_as_the_worker_wants_them() {
    let mut scene = Scene::new().await;
    let values = [1.0, 2.5, -3.0, 1.0 + 1.0 / 1024.0];
    for (dtype, rounded) in [(Dtype::Bf16, 1.0), (Dtype::F16, values[3])] {
        let before = scene.weights().await.0;
        let mut push = scene.peer.push(0, &[(W, vec![0.0; 4])]);
        let values = Elements::new(payload::to_bytes(&values), dtype);
        push.gradients[0].payload = Some(values.into());
        let answer = scene.session.ask(Kind::Push(push)).await;
        assert!(matches!(answer, Answer::Acknowledged(_)), "{answer:?}");
        let moved = [1.0, 2.5, -3.0, rounded];
        let expected: Vec<f32> = before.iter().zip(moved).map(|(w, g)| w - g).collect();
        assert_eq!(scene.weights().await.0, expected);

        let mut pull = scene.peer.pull(0, &[W]);
        pull.dtype = dtype.into();
        let Answer::Weights(weights) = scene.session.ask(Kind::Pull(pull)).await else {
            panic!("no weights came")
        };
        let payload = weights.blocks[0].payload.as_ref();
        let values = Elements::read(payload, VariableKind::Trained, 4).unwrap();
        assert_eq!(values.bytes(), 8);
        let mut numbers = [0.0; 4];
        values.copy_to(&mut numbers);
        for (number, expected) in numbers.iter().zip(expected) {
            let digits = if dtype == Dtype::F16 { 2048.0 } else { 256.0 };
            assert!((number - expected).abs() <= expected.abs() / digits);
        }
    }
    let mut pull = scene.peer.pull(0, &[W]);
    pull.dtype = 77;
    let (reason, message) = scene.session.refused(Kind::Pull(pull)).await;
    assert!(
        reason == Reason::WrongDtype && message.contains("77"),
        "{message}"
    );

    // The values are within the range of f32, but not of f16.
    let large = scene.peer.push(0, &[(W, vec![-1e6; 4])]);
    scene.session.ask(Kind::Push(large)).await;
    let mut pull = scene.peer.pull(0, &[W]);
    pull.dtype = Dtype::F16.into();
    let (reason, message) = scene.session.refused(Kind::Pull(pull)).await;
    assert!(
        reason == Reason::NonFinite && message.contains("65504"),
        "{message}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_does_not_read_is_held_back() {
    // Each answer is another version of a block of almost 1 MiB, so answers share no memory.
    const ELEMENTS: usize = 250_000;
    const PAIRS: usize = 400;
    let cluster = Cluster::start(program(), BOUNDED, 1);
    let mut peer = Peer::join(&cluster.coordinator.address(), "x").await;
    let map = peer.shard_map(&[variable("w", ELEMENTS as u64)]).await;
    peer.initialize(&map, 0.0).await;
    let mut session = peer.open(map.shards[0].server.address().unwrap()).await;
    let resident = || {
        let metrics = cluster.ps[0].http("/metrics");
        let line = metrics
            .lines()
            .find_map(|l| l.strip_prefix("process_resident_memory_bytes "));
        line.unwrap().parse::<f64>().unwrap() / f64::from(1 << 20)
    };
    let before = resident();
    let mut unanswered = 0;
    'held_back: for _ in 0..PAIRS {
        let push = peer.push(0, &[(W, vec![1.0; ELEMENTS])]);
        let pull = peer.pull(0, &[W]);
        for message in [Kind::Push(push), Kind::Pull(pull)] {
            let sent = tokio::time::timeout(Duration::from_secs(2), session.send(message)).await;
            if sent.is_err() {
                break 'held_back;
            }
            unanswered += 1;
        }
    }
    assert!(unanswered < PAIRS, "nothing holds it back");
    let grown = resident() - before;
    assert!(grown < 64.0, "the server has grown by {grown} MiB");
    // The server does not need much memory for many answers of a few bytes either.
    let mut other = Peer::join(&cluster.coordinator.address(), "y").await;
    other.shard_map(&[variable("w", ELEMENTS as u64)]).await;
    let mut silent = other.open(map.shards[0].server.address().unwrap()).await;
    for _ in 0..20_000 {
        let unknown = other.pull(
            0,
            &[wire::BlockId {
                variable: 7,
                index: 0,
            }],
        );
        let sent = tokio::time::timeout(Duration::from_secs(2), silent.send(Kind::Pull(unknown)));
        if sent.await.is_err() {
            break;
        }
    }
    assert!(silent.receive().await.is_ok());
    let grown = resident() - before;
    assert!(grown < 64.0, "the server has grown by {grown} MiB");
    // A worker that reads again gets everything.
    for _ in 0..unanswered {
        let answer = session.receive().await.unwrap();
        let good = matches!(answer, Answer::Acknowledged(_) | Answer::Weights(_));
        assert!(
            good || matches!(&answer, Answer::Refused(r) if r.reason() == Reason::NotInitialized),
            "{answer:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_no_protocol_do_no_harm() {
    use tokio::io::AsyncWriteExt;
    let mut scene = Scene::new().await;
    for address in [
        scene.map.shards[0].server.address().unwrap().to_owned(),
        scene.cluster.coordinator.address(),
    ] {
        for garbage in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            &[0xff; 4096],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff",
        ] {
            let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
            let _ = stream.write_all(garbage).await;
        }
    }
    assert_eq!(scene.weights().await, (vec![0.0; 4], 0));
}
