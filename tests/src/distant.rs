//! A cluster with long delays between its roles.

use serde_json::Value;

use crate::relay::{Relay, Weather};
use crate::{Cluster, Daemon, Program};

/// A run with a relay before the coordinator and before each server.
pub struct Distant {
    /// The summary of the job.
    pub summary: Value,
    /// The number of connections that were cut.
    pub cuts: usize,
}

/// Trains with so many servers and workers, each far from all others.
pub fn train(
    program: &Program,
    job: &str,
    (servers, workers): (usize, usize),
    weather: Weather,
) -> Distant {
    let relays: Vec<Relay> = (0..=servers as u64)
        .map(|index| {
            Relay::start(Weather {
                seed: weather.seed + index,
                ..weather
            })
        })
        .collect();
    let mut cluster = Cluster::start(program.clone(), job, 0);
    let coordinator = relays[0].address();
    relays[0].lead_to(&cluster.coordinator.address());
    let dir = tempfile::tempdir().unwrap();
    let member = |role, identity: String, more: &[&str]| {
        let mut arguments = vec![role, "--identity", &identity, "--coordinator", &coordinator];
        arguments.extend(more);
        let log = dir.path().join(format!("{identity}.log"));
        Daemon::start(program, log, &arguments, &[])
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

/// Returns a job on the digits, in a mode given as lines of the job file.
pub fn job(mode: &str, epochs: u32) -> String {
    format!(
        "epochs = {epochs}\n[cluster]\nps = 2\nworkers = 2\n[strategy]\n{mode}\n[optimizer]\nname = \"adam\"\nlearning_rate = 0.003\n"
    )
}
