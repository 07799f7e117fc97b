//! Processes that die, and what of their work counts.

use shared_proto::wire::client_message::Kind;
use shared_proto::wire::server_message::Kind as Answer;
use tests::peer::{Peer, variable};
use tests::{Cluster, eventually};

use crate::program;

/// Two shards, a block on each; sync mode, a short lease.
const SYNC: &str = r#"
name = "t"
batch_size = 4
[optimizer]
name = "sgd"
learning_rate = 1.0
[strategy]
mode = "sync"
[cluster]
ps = 2
workers = 2
lease_seconds = 1.0
"#;

/// A worker stages its gradient and dies: before it has reached every shard, after that, or after
/// the coordinator knows. In the first two cases it counts on no shard, in the last on both.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_in_a_sync_step_counts_on_all_shards_or_on_none() {
    for (shards_reached, finished, expected) in
        [(1, false, -1.0), (2, false, -1.0), (2, true, -2.0)]
    {
        let cluster = Cluster::start(program(), SYNC, 2);
        let address = cluster.coordinator.address();
        let variables = [variable("a", 3), variable("b", 3)];
        let (mut stays, mut dies) = (
            Peer::join(&address, "x").await,
            Peer::join(&address, "y").await,
        );
        let map = stays.shard_map(&variables).await;
        stays.initialize(&map, 0.0).await;
        dies.shard_map(&variables).await;
        let blocks: Vec<_> = map.blocks().collect();
        assert_eq!(
            blocks.iter().map(|(_, shard)| shard).sum::<u32>(),
            1,
            "one block on each shard"
        );

        // Both take part in step 0.
        let (split, other) = tokio::join!(stays.work(), dies.work());
        for (peer, gradient, reach) in [(&mut stays, 1.0, 2), (&mut dies, 3.0, shards_reached)] {
            for (id, shard) in &blocks[..reach] {
                let mut session = peer.open(&map.addresses[*shard as usize]).await;
                let push = peer.push(0, &[((*id).into(), vec![gradient; 3])]);
                let answer = session.ask(Kind::Push(push)).await;
                assert!(matches!(answer, Answer::Acknowledged(_)), "{answer:?}");
            }
        }
        if finished {
            dies.finish(&other).await.unwrap();
        }
        // It says nothing any more, and its lease ends. The other finishes and keeps its own.
        stays.finish(&split).await.unwrap();
        let mut pulled = Vec::new();
        for (id, shard) in &blocks {
            let mut session = stays.open(&map.addresses[*shard as usize]).await;
            let pull = stays.pull(1, &[(*id).into()]);
            session.send(Kind::Pull(pull)).await;
            loop {
                let beat = shared_proto::wire::HeartbeatRequest {
                    origin: Some(stays.origin.clone()),
                };
                stays.coordinator.heartbeat(beat).await.unwrap();
                let answer =
                    tokio::time::timeout(std::time::Duration::from_millis(200), session.receive());
                match answer.await {
                    Ok(Ok(Answer::Weights(weights))) => {
                        pulled.push(tests::peer::values(&weights.blocks[0]));
                        break;
                    }
                    Ok(Ok(Answer::Waiting(_))) | Err(_) => {}
                    Ok(other) => panic!("{other:?}"),
                }
            }
        }
        // The mean of 1 and 3, or 1 alone; once.
        assert_eq!(pulled, [(vec![expected; 3], 1), (vec![expected; 3], 1)]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_initialisers_successor_starts_over() {
    let cluster = Cluster::start(program(), &SYNC.replace("workers = 2", "workers = 1"), 2);
    let address = cluster.coordinator.address();
    let variables = [variable("a", 3), variable("b", 3)];
    let mut first = Peer::join(&address, "x").await;
    let map = first.shard_map(&variables).await;
    // It sends half of the values, and dies. A process of its identity takes its place.
    let (id, shard) = map.blocks().next().unwrap();
    let mut session = first.open(&map.addresses[shard as usize]).await;
    let initialize = shared_proto::wire::Initialize {
        origin: Some(first.next(0)),
        blocks: vec![shared_proto::wire::BlockPayload {
            block: Some(id.into()),
            payload: Some(shared_proto::payload::dense(
                shared_proto::payload::to_bytes(&[9.0; 3]),
            )),
        }],
    };
    session.ask(Kind::Initialize(initialize)).await;
    let mut second = Peer::join(&address, "x").await;
    assert_eq!(second.origin.task.unwrap().generation, 2);
    second.shard_map(&variables).await;

    // Nothing is handed out until the coordinator has marked the values as complete.
    let mut session = second.open(&map.addresses[shard as usize]).await;
    let pull = second.pull(0, &[id.into()]);
    let (reason, _) = session.refused(Kind::Pull(pull)).await;
    assert_eq!(reason, shared_proto::refusal::Reason::NotInitialized);

    second.initialize(&map, 5.0).await;
    for (id, shard) in map.blocks() {
        let mut session = second.open(&map.addresses[shard as usize]).await;
        let pull = second.pull(0, &[id.into()]);
        assert_eq!(session.weights(pull).await, [(vec![5.0; 3], 0)]);
    }
    // The first is fenced everywhere.
    let refused =
        first
            .coordinator
            .finish_initialization(shared_proto::wire::FinishInitializationRequest {
                origin: Some(first.origin.clone()),
            });
    assert_eq!(refused.await.unwrap_err().code(), tonic::Code::Aborted);
}

#[test]
fn a_worker_killed_while_training_loses_no_data() {
    let job = "epochs = 3\n[model]\nname = \"odd\"\n[cluster]\nps = 2\nworkers = 2\nlease_seconds = 1.0\n";
    let mut cluster = Cluster::start(program(), job, 2);
    for _ in 0..3 {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "20")]);
    }
    eventually(|| cluster.status()["samples"].as_u64().unwrap() > 500);
    cluster.workers[2].kill();
    let mut dead = cluster.workers.pop().unwrap();
    assert!(!dead.wait().success());
    let (summary, dir) = cluster.finish();
    // What it had not told the coordinator of was done again by the others.
    assert_eq!(summary["samples"], 3 * 1437);
    let metrics = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert!(
        metrics.contains("\"event\":\"left\"") && metrics.contains("worker-2"),
        "{metrics}"
    );
}

#[test]
fn a_server_that_dies_ends_the_job_with_its_name() {
    let job = "epochs = 10000\n[model]\nname = \"odd\"\n[cluster]\nps = 2\nworkers = 1\nlease_seconds = 1.0\n";
    let mut cluster = Cluster::start(program(), job, 2);
    cluster.add_worker(&[]);
    eventually(|| cluster.status()["samples"].as_u64().unwrap() > 500);
    cluster.ps[1].kill();
    for daemon in [
        &mut cluster.coordinator,
        &mut cluster.ps[0],
        &mut cluster.workers[0],
    ] {
        assert!(!daemon.wait().success(), "{}", daemon.log());
        assert!(
            daemon.log().contains("the server of shard 1, is gone"),
            "{}",
            daemon.log()
        );
    }
}

#[test]
fn sigterm_ends_each_daemon_well() {
    let job = "epochs = 10000\n[model]\nname = \"odd\"\n[cluster]\nps = 1\nworkers = 1\n";
    let mut cluster = Cluster::start(program(), job, 1);
    cluster.add_worker(&[]);
    cluster.add_worker(&[]);
    eventually(|| cluster.status()["samples"].as_u64().unwrap() > 500);
    for daemon in [&mut cluster.workers[0], &mut cluster.coordinator] {
        daemon.terminate();
        assert!(daemon.wait().success(), "{}", daemon.log());
    }
}
