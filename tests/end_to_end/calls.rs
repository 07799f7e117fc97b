//! Calls that the coordinator refuses: those of another role, and those with long strings.

use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;
use shared_proto::wire::client_message::Kind;
use shared_proto::wire::server_message::Kind as Answer;
use tests::Cluster;
use tests::peer::{Peer, variable};

use crate::program;

/// Starts a cluster with a server and a hand-made worker. The model has its initial values.
async fn begun() -> (Cluster, Peer) {
    begun_with("").await
}

/// Starts a cluster as [`begun`] does, with more settings of the job.
async fn begun_with(settings: &str) -> (Cluster, Peer) {
    let job = format!("name = \"t\"\n[cluster]\nps = 1\nworkers = 1\n{settings}");
    let cluster = Cluster::start(program(), &job, 1);
    let mut worker = Peer::join(&cluster.coordinator.address(), "x").await;
    let map = worker.shard_map(&[variable("w", 4)]).await;
    worker.initialize(&map, 0.0).await;
    (cluster, worker)
}

/// Returns the coordinator's refusal of a call.
fn refusal_of<T: std::fmt::Debug>(answer: Result<T, tonic::Status>) -> Refusal {
    let status = answer.expect_err("it was not refused");
    Refusal::from_status(&status).unwrap_or_else(|| panic!("{status}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_of_another_role_is_refused_and_changes_nothing() {
    use shared_proto::wire::report_request::Report;
    let (cluster, mut worker) = begun().await;
    let address = cluster.coordinator.address();
    let mut server = Peer::join_as(&address, wire::Role::Ps, "spare").await;
    let asked = server.coordinator.lease_work(wire::LeaseWorkRequest {
        origin: Some(server.origin.clone()),
        copied: None,
    });
    let refusal = refusal_of(asked.await);
    assert_eq!(refusal.reason, Reason::Malformed);
    assert!(
        refusal.message.contains("LeaseWork") && refusal.message.contains("ps-1"),
        "{refusal}"
    );
    let registered = server.register_variables(vec![variable("w", 4)]).await;
    assert_eq!(refusal_of(registered).reason, Reason::Malformed);
    let finished = wire::FinishStepRequest {
        origin: Some(server.origin.clone()),
        ..wire::FinishStepRequest::default()
    };
    let finished = server.coordinator.finish_step(finished).await;
    assert_eq!(refusal_of(finished).reason, Reason::Malformed);

    let from_worker = [
        Report::Shard(wire::ShardReport {
            updates: u64::MAX,
            ..wire::ShardReport::default()
        }),
        Report::Checkpoint(wire::CheckpointReport::default()),
        Report::Restore(wire::RestoreReport::default()),
    ];
    let from_server = [
        Report::Evaluation(wire::EvaluationReport::default()),
        Report::Wait(wire::WaitReport::default()),
        Report::Lost(wire::LostReport {
            updates: 7,
            ..wire::LostReport::default()
        }),
    ];
    let reports = from_worker.map(|report| (&worker, report));
    let others = from_server.map(|report| (&server, report));
    for (peer, report) in reports.into_iter().chain(others) {
        let request = wire::ReportRequest {
            origin: Some(peer.origin.clone()),
            report: Some(report),
        };
        let told = peer.coordinator.clone().report(request).await;
        assert_eq!(refusal_of(told).reason, Reason::Malformed);
    }
    let status = cluster.status();
    assert_eq!(status["lost_updates"], 0, "{status}");
    assert_eq!(status["shards"][0]["updates"], 0, "{status}");
    // The worker continues to work.
    worker.work().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_strings_are_refused_or_cut() {
    let (cluster, worker) = begun().await;
    let mut coordinator = worker.coordinator.clone();
    let long = "x".repeat(3 << 20);
    let registered = coordinator.register(wire::RegisterRequest {
        protocol_version: shared_proto::protocol::PROTOCOL_VERSION,
        role: wire::Role::Worker.into(),
        identity: long.clone(),
        ..wire::RegisterRequest::default()
    });
    let refusal = refusal_of(registered.await);
    assert_eq!(refusal.reason, Reason::Oversized);
    assert!(refusal.message.contains("identity"), "{refusal}");

    let mut foreign = worker.origin.clone();
    foreign.job = long.clone();
    let origin = Some(foreign);
    let beat = coordinator.heartbeat(wire::HeartbeatRequest { origin });
    let refusal = refusal_of(beat.await);
    assert_eq!(refusal.reason, Reason::ForeignJob);
    assert!(refusal.message.len() < 5000, "{}", refusal.message.len());
    assert!(refusal.message.contains("give it another"), "{refusal}");

    let metrics = std::iter::once((long.clone(), 0.5)).collect();
    let report = wire::ReportRequest {
        origin: Some(worker.origin.clone()),
        report: Some(wire::report_request::Report::Evaluation(
            wire::EvaluationReport {
                metrics,
                ..wire::EvaluationReport::default()
            },
        )),
    };
    let refusal = refusal_of(coordinator.report(report).await);
    assert_eq!(refusal.reason, Reason::Oversized);
    let log = cluster.coordinator.log();
    let longest = log.lines().map(str::len).max();
    assert!(longest < Some(10_000), "{longest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_that_lead_nowhere_are_refused() {
    let (cluster, worker) = begun().await;
    let mut coordinator = worker.coordinator.clone();
    for (role, address, metrics_address) in [
        (wire::Role::Ps, "", ""),
        (wire::Role::Ps, "nonsense", ""),
        (wire::Role::Ps, "host\u{1b}[2J:7001", ""),
        (wire::Role::Ps, "unix:", ""),
        (wire::Role::Ps, "host:7001", "host"),
        (wire::Role::Worker, "", "host:0"),
    ] {
        let registered = coordinator.register(wire::RegisterRequest {
            protocol_version: shared_proto::protocol::PROTOCOL_VERSION,
            role: role.into(),
            identity: "y".to_owned(),
            address: address.to_owned(),
            metrics_address: metrics_address.to_owned(),
            ..wire::RegisterRequest::default()
        });
        let refusal = refusal_of(registered.await);
        assert_eq!(
            refusal.reason,
            Reason::Malformed,
            "{address:?} {metrics_address:?}"
        );
        assert!(refusal.message.contains("host:port"), "{refusal}");
    }
    assert_eq!(cluster.status()["tasks"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finite_gradient_that_makes_weights_infinite_ends_the_job_with_the_variable() {
    for mode in ["async", "sync"] {
        let settings = format!(
            "[strategy]\nmode = \"{mode}\"\n[optimizer]\nname = \"sgd\"\nlearning_rate = 10.0\n"
        );
        let (mut cluster, mut worker) = begun_with(&settings).await;
        let split = worker.work().await;
        let server = cluster.ps[0].address();
        let mut session = worker.open(&server).await;
        let block = wire::BlockId::default();
        let push = worker.push(0, &[(block, vec![3e38; 4])]);
        let Answer::Acknowledged(acknowledged) = session.ask(Kind::Push(push)).await else {
            panic!("a finite gradient is taken");
        };
        worker.receipts = vec![wire::ShardReceipt {
            shard: 0,
            receipt: acknowledged.receipt,
        }];
        // In sync mode the step is committed now; in async mode the job may have ended before.
        let _ = worker.finish(&split).await;
        for daemon in [&mut cluster.coordinator, &mut cluster.ps[0]] {
            assert!(!daemon.wait().success(), "{mode}: {}", daemon.log());
            let log = daemon.log();
            assert!(
                log.contains("values of variable \"w\" on ps-0"),
                "{mode}: {log}"
            );
        }
    }
}
