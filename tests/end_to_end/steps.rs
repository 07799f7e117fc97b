//! Steps of sync mode and initial values, message by message, with workers that stop in between.

use std::time::Duration;

use daemon::membership::{Coordinator, Membership, Registration};
use network::security::Security;
use shared_proto::blocks::{BlockId, ShardMap};
use shared_proto::ids::{Clock, Epoch, Role};
use shared_proto::wire;
use shared_proto::wire::client_message::Kind;
use shared_proto::wire::lease_work_reply::Work;
use shared_proto::wire::server_message::Kind as Answer;
use tests::peer::{Peer, variable};
use tests::{Cluster, eventually};

use crate::program;

/// A job in sync mode with two shards of one block each and a short lease, but long enough for all
/// calls of a test on a loaded machine.
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
lease_seconds = 3.0
"#;

/// Pushes the gradient of step 0 to these blocks, and keeps the receipts.
async fn stage(peer: &mut Peer, map: &ShardMap, blocks: &[(BlockId, u32)], gradient: f32) {
    for (id, shard) in blocks {
        let mut session = peer
            .open(map.shards[*shard as usize].server.address().unwrap())
            .await;
        let push = peer.push(0, &[((*id).into(), vec![gradient; 3])]);
        let answer = session.ask(Kind::Push(push)).await;
        let Answer::Acknowledged(acknowledged) = answer else {
            panic!("{answer:?}")
        };
        peer.receipts.push(wire::ShardReceipt {
            shard: *shard,
            receipt: acknowledged.receipt,
        });
    }
}

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
            stage(peer, &map, &blocks[..reach], gradient).await;
        }
        if finished {
            dies.finish(&other).await.unwrap();
        }
        // `dies` falls silent, and its lease ends. `stays` finishes and keeps its lease.
        stays.finish(&split).await.unwrap();
        let mut pulled = Vec::new();
        for (id, shard) in &blocks {
            let mut session = stays
                .open(map.shards[*shard as usize].server.address().unwrap())
                .await;
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
        // The weights have the mean of 1 and 3, or 1 alone, once.
        assert_eq!(pulled, [(vec![expected; 3], 1), (vec![expected; 3], 1)]);
    }
}

/// A worker reports its part of a step as finished, although it has pushed nothing, or to one shard alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_finishes_without_a_push_is_evicted_alone() {
    for reached in [0, 1] {
        let mut cluster = Cluster::start(program(), SYNC, 2);
        let address = cluster.coordinator.address();
        let variables = [variable("a", 3), variable("b", 3)];
        let (mut good, mut bad) = (
            Peer::join(&address, "x").await,
            Peer::join(&address, "y").await,
        );
        let map = good.shard_map(&variables).await;
        good.initialize(&map, 0.0).await;
        bad.shard_map(&variables).await;
        let blocks: Vec<_> = map.blocks().collect();
        let (split, other) = tokio::join!(good.work(), bad.work());
        for (peer, reached) in [(&mut good, 2), (&mut bad, reached)] {
            stage(peer, &map, &blocks[..reached], 1.0).await;
        }
        let refused = bad.finish(&other).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("receipt"), "{refused}");
        let beat = wire::HeartbeatRequest {
            origin: Some(bad.origin.clone()),
        };
        let fenced = bad.coordinator.heartbeat(beat).await.unwrap_err();
        assert_eq!(fenced.code(), tonic::Code::Aborted, "{fenced}");

        // The other worker's step is committed without it, and both servers live.
        good.finish(&split).await.unwrap();
        for (id, shard) in &blocks {
            let mut session = good
                .open(map.shards[*shard as usize].server.address().unwrap())
                .await;
            let pull = good.pull(1, &[(*id).into()]);
            assert_eq!(session.weights(pull).await, [(vec![-1.0; 3], 1)]);
        }
        for server in &mut cluster.ps {
            assert!(server.http("/healthz").contains("200 OK"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_initialisers_successor_starts_over() {
    let cluster = Cluster::start(program(), &SYNC.replace("workers = 2", "workers = 1"), 2);
    let address = cluster.coordinator.address();
    let variables = [variable("a", 3), variable("b", 3)];
    let mut first = Peer::join(&address, "x").await;
    let map = first.shard_map(&variables).await;
    // The worker sends half of the values, and dies. Another process with its identity takes its place.
    let (id, shard) = map.blocks().next().unwrap();
    let mut session = first
        .open(map.shards[shard as usize].server.address().unwrap())
        .await;
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
    let mut session = second
        .open(map.shards[shard as usize].server.address().unwrap())
        .await;
    let pull = second.pull(0, &[id.into()]);
    let (reason, _) = session.refused(Kind::Pull(pull)).await;
    assert_eq!(reason, shared_proto::refusal::Reason::NotInitialized);

    second.initialize(&map, 5.0).await;
    for (id, shard) in map.blocks() {
        let mut session = second
            .open(map.shards[shard as usize].server.address().unwrap())
            .await;
        let pull = second.pull(0, &[id.into()]);
        assert_eq!(session.weights(pull).await, [(vec![5.0; 3], 0)]);
    }
    // All processes refuse the first worker.
    let refused =
        first
            .coordinator
            .finish_initialization(shared_proto::wire::FinishInitializationRequest {
                origin: Some(first.origin.clone()),
            });
    assert_eq!(refused.await.unwrap_err().code(), tonic::Code::Aborted);
}

/// After a server was replaced, the coordinator refuses a report of the earlier epoch that asked for no reply. The worker sends its next
/// report, in the new epoch, before it learns of the refusal.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_report_is_repeated_in_the_epoch_of_the_next_one() {
    let job = SYNC.replace("sync", "async").replace("= 3.0", "= 600.0");
    // Training begins with the only worker that asks for work.
    let job = job.replace("workers = 2", "workers = 1");
    let mut cluster = Cluster::start(program(), &job, 2);
    let address = cluster.coordinator.address();
    let variables = [variable("a", 3), variable("b", 3)];
    let mut peer = Peer::join(&address, "x").await;
    let registration = Registration {
        role: Role::Worker,
        identity: "y".to_owned(),
        address: String::new(),
        metrics_address: String::new(),
        holding: None,
        capacity_bytes: 0,
    };
    let coordinator = Coordinator::at(&address, Duration::from_secs(30), Security::default());
    let worker = Membership::join(coordinator.unwrap(), registration).await;
    let worker = worker.unwrap();
    let map = peer.shard_map(&variables).await;
    let registered = wire::RegisterVariablesRequest {
        origin: Some(worker.next_origin().into()),
        variables: variables.to_vec(),
        training_samples: 1000,
        evaluation_samples: 10,
        ..Default::default()
    };
    let registered = worker.coordinator.register_variables(registered).await;
    registered.unwrap();
    peer.initialize(&map, 0.0).await;
    // A server that is replaced begins with a checkpoint.
    eventually(|| cluster.status()["checkpoint"]["number"].is_u64());

    let leased = async {
        loop {
            let leased = worker.coordinator.lease_work(worker.next_origin(), None);
            if let Some(Work::Split(split)) = leased.await.unwrap().work {
                return split;
            }
        }
    };
    let split = tokio::time::timeout(Duration::from_secs(60), leased);
    let split = split.await.unwrap();
    let mut reports = worker.step_reports();
    let report = |step: u64, epoch| wire::FinishStepRequest {
        origin: Some(worker.sender().next_origin(epoch, Clock(step)).into()),
        split: split.id,
        position: split.start + 4 * step,
        steps: 1,
        samples: 4,
        pushes: step,
        ..Default::default()
    };
    let before = map.epoch;
    let reply = reports.report(report(1, before), true).await;
    assert!(reply.unwrap().is_some());
    cluster.ps[0].kill();
    cluster.restart_ps(0);
    eventually(|| cluster.status()["epoch"].as_u64() > Some(before.0));
    let after = Epoch(cluster.status()["epoch"].as_u64().unwrap());
    let reply = reports.report(report(2, before), false).await;
    assert!(
        reply.unwrap().is_none(),
        "report 2 must be sent without a reply"
    );
    let reply = reports.report(report(3, after), true).await;
    assert_eq!(reply.unwrap().unwrap().epoch, after.0);
    assert_eq!(cluster.status()["steps"], 3);
}
