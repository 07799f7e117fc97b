//! What an operator sees of a ring: its status, its metrics, the devices of a machine.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tests::{Cluster, Daemon, eventually};

use crate::program;

const RING: &str = "[strategy]\nname = \"multi-worker-mirrored\"\n";

/// Settings of workers that take long for a step.
const SLOW: [(&str, &str); 1] = [("TEST_STEP_MILLISECONDS", "30")];

/// Returns the value of the first series that begins like this, labels included.
pub(crate) fn metric(daemon: &Daemon, series: &str) -> f64 {
    let text = daemon.http("/metrics");
    let line = text.lines().find(|line| line.starts_with(series));
    let line = line.unwrap_or_else(|| panic!("{series} is not in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Checks that docs/metrics.md has each metric of a process.
pub(crate) fn check_metrics_are_documented(daemon: &Daemon) {
    let documented = include_str!("../../docs/metrics.md");
    let text = daemon.http("/metrics");
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    for name in types.filter_map(|line| line.split(' ').next()) {
        assert!(
            documented.contains(name),
            "{name} is not in docs/metrics.md"
        );
    }
}

#[test]
fn a_ring_shows_its_metrics_and_all_are_documented() {
    let job = format!("epochs = 3\n{RING}[cluster]\nworkers = 2\n");
    let mut cluster = Cluster::start_with(program(), &job, 0, &["--after-job", "wait"]);
    for _ in 0..2 {
        cluster.add_worker(&[("FLAMBEAU_AFTER_JOB", "wait")]);
    }
    eventually(|| cluster.status()["phase"] == "done");
    let steps = cluster.status()["steps"].as_f64().unwrap();
    let [first, second] = [&cluster.workers[0], &cluster.workers[1]];
    let sum = |name| metric(first, name) + metric(second, name);
    let sent = sum("flambeau_worker_ring_sent_bytes_total");
    assert_eq!(sent, sum("flambeau_worker_ring_received_bytes_total"));
    assert!(sent > 0.0);
    for worker in [first, second] {
        let made = metric(worker, "flambeau_worker_all_reduce_seconds_count");
        assert_eq!(made, steps, "an all-reduce in each step");
        assert_eq!(metric(worker, "flambeau_worker_rings_total"), 1.0);
        for reason in ["link", "over", "replica"] {
            let series = format!("flambeau_worker_abandoned_steps_total{{reason=\"{reason}\"}}");
            assert_eq!(metric(worker, &series), 0.0);
        }
    }
    // The coordinator shows them again every few moments.
    eventually(|| metric(&cluster.coordinator, "flambeau_coordinator_steps") == steps);
    assert!(metric(&cluster.coordinator, "flambeau_coordinator_ring ") >= 1.0);
    for daemon in [&cluster.coordinator, first, second] {
        check_metrics_are_documented(daemon);
    }
    let everybody = std::iter::once(&cluster.coordinator).chain(&cluster.workers);
    everybody.for_each(Daemon::terminate);
    cluster.finish();
}

#[test]
fn a_server_that_is_there_anyway_stays_idle_until_the_job_ends() {
    let job = format!("epochs = 3\n{RING}[cluster]\nworkers = 2\n");
    let mut cluster = Cluster::start(program(), &job, 1);
    for _ in 0..2 {
        cluster.add_worker(&[]);
    }
    let (summary, _) = cluster.finish();
    assert_eq!(
        (&summary["ps"], &summary["samples"]),
        (&0.into(), &(3 * 1437).into())
    );
}

/// Returns the members of the ring for which others wait: rank, task and seconds.
pub(crate) fn waited_for(status: &Value) -> Vec<(u64, String, f64)> {
    let members = status["ring"]["members"].as_array().unwrap().iter();
    let waited = members.filter_map(|member| {
        let seconds = member["waited_for_seconds"].as_f64()?;
        let task = member["task"].as_str()?.to_owned();
        Some((member["rank"].as_u64()?, task, seconds))
    });
    waited.collect()
}

/// Stops a worker, waits until the status says that others wait for one, and checks that it names the stopped one alone. Then continues
/// it, and waits until steps are made.
pub(crate) fn is_named_while_it_is_stopped(cluster: &Cluster, worker: &Daemon) {
    let process = Pid::from_raw(worker.process() as i32).unwrap();
    kill_process(process, Signal::STOP).unwrap();
    let mut found = Vec::new();
    eventually(|| {
        found = waited_for(&cluster.status());
        found.iter().any(|(.., seconds)| *seconds > 1.5)
    });
    kill_process(process, Signal::CONT).unwrap();
    let ranks: Vec<u64> = found.iter().map(|(rank, ..)| *rank).collect();
    assert_eq!(ranks, [rank(worker)], "{found:?}");
    let steps = || cluster.status()["steps"].as_u64().unwrap();
    let before = steps();
    eventually(|| steps() > before + 5);
}

/// Returns a worker's rank in its newest ring, according to its log.
pub(crate) fn rank(worker: &Daemon) -> u64 {
    let log = worker.log();
    let rank = log.rsplit(" rank=").next().unwrap();
    rank.split_whitespace().next().unwrap().parse().unwrap()
}

/// Starts three slow workers that form a ring.
fn three_slow_workers() -> Cluster {
    let job = format!("epochs = 20\n[model]\nname = \"odd\"\n{RING}[cluster]\nworkers = 3\n");
    let mut cluster = Cluster::start(program(), &job, 0);
    for _ in 0..3 {
        cluster.add_worker(&SLOW);
    }
    eventually(|| cluster.status()["steps"].as_u64().unwrap() > 5);
    cluster
}

#[test]
fn the_status_names_a_worker_that_holds_up_the_ring() {
    let mut cluster = three_slow_workers();
    assert_eq!(cluster.status()["strategy"], "multi-worker-mirrored");
    let process = Pid::from_raw(cluster.workers[1].process() as i32).unwrap();
    kill_process(process, Signal::STOP).unwrap();
    let mut found = Vec::new();
    eventually(|| {
        found = waited_for(&cluster.status());
        found.iter().any(|(.., seconds)| *seconds > 2.0)
    });
    let [(slow_rank, task, _)] = &found[..] else {
        panic!("others wait for one worker, not for {found:?}");
    };
    assert_eq!(*slow_rank, rank(&cluster.workers[1]));
    let text = program().run(&["status", "--coordinator", &cluster.coordinator.address()]);
    let text = String::from_utf8(text.stdout).unwrap();
    let said = format!("the others have waited for {task} for ");
    assert!(text.contains(&said), "{text}");
    // Workers repeat the report of a wait, so a coordinator that has restarted learns of it before the lease of the stopped worker ends.
    cluster.coordinator.kill();
    cluster.restart_coordinator();
    let found_again = || {
        waited_for(&cluster.status())
            .into_iter()
            .map(|(rank, ..)| rank)
    };
    eventually(|| found_again().eq([*slow_rank]));
    kill_process(process, Signal::CONT).unwrap();
    eventually(|| waited_for(&cluster.status()).is_empty());
    cluster.finish();
}

#[test]
fn a_ring_that_loses_a_member_is_counted_by_cause() {
    let mut cluster = three_slow_workers();
    let members = |ring: &Value| ring["members"].as_array().unwrap().len();
    let before = cluster.status()["ring"].clone();
    assert_eq!((&before["stage"], members(&before)), (&"settled".into(), 3));
    cluster.workers[2].kill();
    eventually(|| {
        let ring = &cluster.status()["ring"];
        ring["stage"] == "settled" && members(ring) == 2
    });
    let after = cluster.status()["ring"].clone();
    assert!(after["number"].as_u64() > before["number"].as_u64());
    let broken = after["broken"].as_object().unwrap();
    let by_loss = broken
        .keys()
        .any(|cause| cause == "link" || cause == "gone");
    assert!(by_loss, "{after}");
    let coordinator = &cluster.coordinator;
    eventually(|| metric(coordinator, "flambeau_coordinator_ring_members") == 2.0);
    eventually(|| metric(coordinator, "flambeau_coordinator_ring_form_seconds_count") == 1.0);
    cluster.restart_worker(2, &SLOW);
    let (summary, _) = cluster.finish();
    assert_eq!(summary["samples"], 20 * 1437);
}

#[test]
fn four_processes_are_measured() {
    let arguments = [
        "--json",
        "--ranks",
        "2,4",
        "--size",
        "16384",
        "--seconds",
        "0.1",
    ];
    let output = program().run(&[&["bench", "allreduce"][..], &arguments].concat());
    assert!(output.status.success(), "{output:?}");
    let figures: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = figures["rows"].as_array().unwrap();
    let ranks: Vec<_> = rows
        .iter()
        .map(|row| row["ranks"].as_u64().unwrap())
        .collect();
    assert_eq!(ranks, [2, 4]);
    for row in rows {
        assert_eq!(row["bytes"], 16384);
        assert!(row["milliseconds"].as_f64().unwrap() > 0.0);
        assert!(row["share_of_machine_bandwidth"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn the_devices_of_a_machine_are_listed() {
    let output = program().run(&["devices", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let cpu = &found["devices"][0];
    assert_eq!(cpu["device"], "cpu");
    assert!(cpu["cores"].as_u64() >= Some(1) && cpu["threads"].as_u64() >= Some(1));
    let table = program().run(&["devices"]);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("compute threads"), "{table}");
    let mut command = program().command(&["devices", "--json"]);
    let output = command.env("RAYON_NUM_THREADS", "3").output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["devices"][0]["threads"], 3);
}
