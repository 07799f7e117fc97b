//! A network that is slow and breaks: each byte takes 20 ms each way, connections are cut at random.

use std::time::Duration;

use serde_json::Value;
use tests::relay::{Relay, Weather};
use tests::{Cluster, Daemon};

use super::program;

const DELAY: Duration = Duration::from_millis(20);

/// What the digits' test samples reach without a network between.
const ACCURACY: f64 = 0.95;

/// A run with a relay before the coordinator and before each server.
struct Distant {
    summary: Value,
    cuts: usize,
}

fn train(job: &str, (servers, workers): (usize, usize), weather: Weather) -> Distant {
    let relays: Vec<Relay> = (0..=servers as u64)
        .map(|index| {
            Relay::start(Weather {
                seed: weather.seed + index,
                ..weather
            })
        })
        .collect();
    let mut cluster = Cluster::start(program(), job, 0);
    let coordinator = relays[0].address();
    relays[0].lead_to(&cluster.coordinator.address());
    let dir = tempfile::tempdir().unwrap();
    let member = |role, identity: String, more: &[&str]| {
        let mut arguments = vec![role, "--identity", &identity, "--coordinator", &coordinator];
        arguments.extend(more);
        let log = dir.path().join(format!("{identity}.log"));
        Daemon::start(&program(), log, &arguments, &[])
    };
    for (index, relay) in relays.iter().skip(1).enumerate() {
        let more = ["--advertise", &relay.address()];
        let server = member("ps-server", format!("ps-{index}"), &more);
        relay.lead_to(&server.address());
        cluster.ps.push(server);
    }
    for index in 0..workers {
        let worker = member("worker", format!("worker-{index}"), &[]);
        cluster.workers.push(worker);
    }
    let (summary, _dir) = cluster.finish();
    Distant {
        summary,
        cuts: relays.iter().map(Relay::cuts).sum(),
    }
}

fn job(mode: &str, epochs: u32) -> String {
    format!(
        "epochs = {epochs}\n[cluster]\nps = 2\nworkers = 2\n[strategy]\n{mode}\n[optimizer]\nname = \"adam\"\nlearning_rate = 0.003\n"
    )
}

fn trains_as_well(mode: &str, seed: u64) {
    let weather = Weather {
        delay: DELAY,
        life: Some(Duration::from_secs(3)),
        seed,
    };
    let run = train(&job(mode, 12), (2, 2), weather);
    let accuracy = run.summary["test_accuracy"].as_f64().unwrap();
    assert!(accuracy >= ACCURACY, "{mode}: {}", run.summary);
    assert!(run.cuts >= 3, "{mode}: only {} cuts", run.cuts);
    assert_eq!(run.summary["lost_updates"], 0, "{mode}: {}", run.summary);
}

#[test]
fn far_away_and_cut_off_again_and_again_it_trains_as_well() {
    trains_as_well("mode = \"bounded\"\nstaleness = 4", 1);
}

#[test]
fn the_same_in_sync_mode() {
    trains_as_well("mode = \"sync\"", 2);
}

/// The table of docs/operations.md.
#[test]
#[ignore = "a measurement"]
fn what_delay_costs() {
    let near = Weather {
        delay: Duration::ZERO,
        life: None,
        seed: 1,
    };
    let far = Weather {
        delay: DELAY,
        ..near
    };
    println!("| mode | workers | samples/s near | 20 ms each way | share |");
    println!("| --- | --- | --- | --- | --- |");
    for (name, mode) in [
        ("sync", "mode = \"sync\""),
        ("bounded, 0", "mode = \"bounded\"\nstaleness = 0"),
        ("bounded, 4", "mode = \"bounded\"\nstaleness = 4"),
        ("async", "mode = \"async\""),
    ] {
        for workers in [2, 8] {
            let job = job(mode, 20).replace("workers = 2", &format!("workers = {workers}"));
            let speed = |weather| {
                let run = train(&job, (2, workers), weather);
                run.summary["samples_per_second"].as_f64().unwrap()
            };
            let (near, far) = (speed(near), speed(far));
            let share = far / near;
            println!("| {name} | {workers} | {near:.0} | {far:.0} | {share:.2} |");
        }
    }
}
