//! Replacement of authority, certificates and token while a job trains, as in docs/operations.md.

use std::path::Path;
use std::time::Duration;

use tests::relay::{Relay, Weather};
use tests::{Cluster, Daemon, eventually};

use crate::program;
use crate::security::{borrowed, certs, shows};

/// A job that takes minutes with the brake on, with 300 ms a step, and seconds without.
const JOB: &str = r#"
epochs = 60
[model]
name = "odd"
[cluster]
ps = 2
workers = 2
"#;

/// A secure cluster that trains with the brake on.
struct Renewed {
    cluster: Cluster,
    certs: std::path::PathBuf,
    brake: std::path::PathBuf,
    dir: tempfile::TempDir,
}

impl Renewed {
    fn start(relay: &Relay) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [made, brake] = ["certs", "brake"].map(|name| dir.path().join(name));
        certs(&made);
        std::fs::write(&brake, "").unwrap();
        let arguments = as_arguments(&made, "coordinator");
        let arguments = arguments.each_ref().map(String::as_str);
        let mut cluster = Cluster::start_coordinator_with(program(), JOB, 0, &arguments);
        relay.lead_to(&cluster.coordinator.address());
        let environment = shows(&made, "ps");
        for name in ["ps-0", "ps-1"] {
            let server = cluster.member("ps-server", name, &[], &borrowed(&environment));
            cluster.ps.push(server);
        }
        let certs = made;
        let mut renewed = Self {
            cluster,
            certs,
            brake,
            dir,
        };
        renewed.add_worker(None);
        renewed.add_worker(Some(relay.address()));
        renewed
    }

    /// Starts a worker, which calls the coordinator at its address or at another one.
    fn add_worker(&mut self, at: Option<String>) {
        let mut environment = shows(&self.certs, "worker");
        let brake = self.brake.to_str().unwrap().to_owned();
        environment.push(("TEST_SLOW_WHILE", brake));
        let at = at.unwrap_or_else(|| self.cluster.coordinator.address());
        let name = format!("worker-{}", self.cluster.workers.len());
        let environment = borrowed(&environment);
        let worker = self
            .cluster
            .member_at(&at, "worker", &name, &[], &environment);
        self.cluster.workers.push(worker);
    }

    fn everybody(&self) -> impl Iterator<Item = &Daemon> {
        let Cluster { ps, workers, .. } = &self.cluster;
        std::iter::once(&self.cluster.coordinator)
            .chain(ps)
            .chain(workers)
    }

    /// Runs `flambeau certs`, and waits until the metrics of all processes have these values.
    fn step(&self, arguments: &[&str], shown: &[(&str, f64)]) {
        let dir = self.certs.to_str().unwrap();
        let output = program().run(&[&["certs", "--dir", dir][..], arguments].concat());
        assert!(output.status.success(), "{output:?}");
        for daemon in self.everybody() {
            eventually(|| {
                shown
                    .iter()
                    .all(|(name, value)| metric(daemon, name) == Some(*value))
            });
        }
    }

    /// Asks for the status with an operator's files. Returns the error if it is refused.
    fn status(&self, certs: &Path) -> Result<(), String> {
        let address = self.cluster.coordinator.address();
        let mut status = program().command(&["status", "--coordinator", &address]);
        let output = status.envs(shows(certs, "operator")).output().unwrap();
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    /// Returns the number of calls and connections that the coordinator and the servers have refused.
    fn refused(&self) -> f64 {
        let Cluster {
            ps, coordinator, ..
        } = &self.cluster;
        let refused = |daemon| {
            let reasons = ["certificate", "token"].map(|reason| {
                let name = format!("flambeau_refused_connections_total{{reason=\"{reason}\"}}");
                metric(daemon, &name).unwrap()
            });
            reasons.iter().sum::<f64>()
        };
        ps.iter().chain([coordinator]).map(refused).sum()
    }

    /// Returns the number of times that members have joined. A member that was evicted joins again.
    fn joined(&self) -> usize {
        let lines = self.cluster.run_dir().join("metrics.jsonl");
        let lines = std::fs::read_to_string(lines).unwrap();
        lines.matches("\"event\":\"joined\"").count()
    }
}

fn as_arguments(certs: &Path, role: &str) -> [String; 8] {
    let file = |name| certs.join(role).join(name).display().to_string();
    [
        "--tls-ca".to_owned(),
        file("ca.crt"),
        "--tls-cert".to_owned(),
        file("tls.crt"),
        "--tls-key".to_owned(),
        file("tls.key"),
        "--token-file".to_owned(),
        file("token"),
    ]
}

fn metric(daemon: &Daemon, name: &str) -> Option<f64> {
    let metrics = daemon.http("/metrics");
    let value = metrics.lines().find_map(|line| line.strip_prefix(name));
    value.map(|value| value.trim().parse().unwrap())
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(std::fs::copy(entry.path(), to).unwrap()),
        }
    }
}

#[test]
fn everything_is_replaced_while_a_secure_job_trains_and_nothing_is_lost() {
    // One worker makes new connections to the coordinator all the time.
    let relay = Relay::start(Weather {
        delay: Duration::ZERO,
        life: Some(Duration::from_secs(1)),
        seed: 7,
    });
    let mut scene = Renewed::start(&relay);
    let steps = "flambeau_worker_steps_total";
    for worker in &scene.cluster.workers {
        eventually(|| metric(worker, steps).is_some_and(|steps| steps > 0.0));
    }
    let old = scene.dir.path().join("old");
    copy(&scene.certs, &old);
    let (authorities, tokens) = ("flambeau_trusted_authorities", "flambeau_accepted_tokens");
    let expires = "flambeau_certificate_expires_timestamp_seconds";
    let before = metric(&scene.cluster.coordinator, expires).unwrap();

    let both = [(authorities, 2.0), (tokens, 2.0)];
    scene.step(&["--add", "authority", "--add", "token"], &both);
    // An operator with only the old files is still accepted.
    scene.status(&old).unwrap();
    scene.step(&["--renew", "--days", "90"], &both);
    for daemon in scene.everybody() {
        eventually(|| metric(daemon, expires).is_some_and(|expires| expires < before));
    }
    scene.step(&["--drop-old"], &[(authorities, 1.0), (tokens, 1.0)]);
    scene.status(&scene.certs).unwrap();
    let cuts = relay.cuts();
    eventually(|| relay.cuts() > cuts + 1);

    assert_eq!(scene.refused(), 0.0);
    scene.add_worker(None);
    let newest = scene.cluster.workers.last().unwrap();
    eventually(|| metric(newest, steps).is_some_and(|steps| steps > 0.0));
    // Neither the old authority's certificates are accepted, nor the old token.
    let said = scene.status(&old).unwrap_err();
    assert!(said.contains("do not trust each other"), "{said}");
    let mixed = scene.dir.path().join("mixed");
    copy(&scene.certs, &mixed);
    for file in ["tls.crt", "tls.key"] {
        std::fs::copy(
            old.join("operator").join(file),
            mixed.join("operator").join(file),
        )
        .unwrap();
    }
    let said = scene.status(&mixed).unwrap_err();
    assert!(said.contains("do not trust each other"), "{said}");
    let token = mixed.join("operator/token");
    copy(&scene.certs, &mixed);
    std::fs::copy(old.join("operator/token"), token).unwrap();
    let said = scene.status(&mixed).unwrap_err();
    assert!(said.contains("token is wrong"), "{said}");

    assert_eq!(scene.joined(), 5, "somebody has had to join again");
    std::fs::remove_file(&scene.brake).unwrap();
    let (summary, _dir) = scene.cluster.finish();
    assert_eq!(summary["lost_updates"], 0, "{summary}");
    assert!(
        summary["test_accuracy"].as_f64().unwrap() > 0.85,
        "{summary}"
    );
}
