//! The day of an operator: a cluster is started for jobs to come, people submit right and wrong ones, processes die and are upgraded.

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::Value;
use tests::{Daemon, Program, eventually};

use crate::program;

/// A cluster of which the operator gives each process only what the documents ask for.
struct Cluster {
    program: Program,
    dir: tempfile::TempDir,
    address: String,
    coordinator: Daemon,
    /// With their names.
    members: Vec<(String, Daemon)>,
}

impl Cluster {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = program();
        std::fs::create_dir(dir.path().join("data")).unwrap();
        let coordinator = coordinator(&program, dir.path(), "127.0.0.1:0");
        let mut cluster = Self {
            address: coordinator.address(),
            program,
            dir,
            coordinator,
            members: Vec::new(),
        };
        for name in ["ps-0", "ps-1", "worker-0", "worker-1"] {
            let member = cluster.member(name);
            cluster.members.push((name.to_owned(), member));
        }
        cluster
    }

    fn member(&self, name: &str) -> Daemon {
        let data = self.dir.path().join("data");
        let role = match name.starts_with("ps") {
            true => "ps-server",
            false => "worker",
        };
        let mut arguments = vec![role, "--identity", name, "--coordinator", &self.address];
        if role == "worker" {
            arguments.extend(["--allow-location", data.to_str().unwrap()]);
        }
        let log = self.dir.path().join(format!("{name}.log"));
        let slowly = [("TEST_STEP_MILLISECONDS", "20")];
        Daemon::start(&self.program, log, &arguments, &slowly)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut all = arguments.to_vec();
        all.extend(["--coordinator", &self.address]);
        self.program.run(&all)
    }

    /// Writes a job file and returns its path.
    fn job(&self, name: &str, text: &str) -> String {
        let file = self.dir.path().join(format!("{name}.toml"));
        std::fs::write(&file, format!("name = \"{name}\"\n{text}")).unwrap();
        file.to_str().unwrap().to_owned()
    }

    fn status(&self) -> Value {
        let output = self.run(&["status", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns the activities of all members that are there.
    fn activities(&self) -> Vec<String> {
        let status = self.status();
        let tasks = status["tasks"].as_array().unwrap().iter();
        let there = tasks.filter(|task| task["alive"] == true);
        there
            .map(|task| task["activity"].as_str().unwrap().to_owned())
            .collect()
    }

    fn jobs(&self) -> Vec<Value> {
        let output = self.run(&["jobs", "--json"]);
        let listed: Value = serde_json::from_slice(&output.stdout).unwrap();
        listed["jobs"].as_array().unwrap().clone()
    }
}

/// Starts the coordinator without a job file: it waits for jobs.
fn coordinator(program: &Program, dir: &Path, listen: &str) -> Daemon {
    let run = dir.join("cluster");
    let arguments = [
        "coordinator",
        "--after-job",
        "wait",
        "--listen",
        listen,
        "--run-dir",
        run.to_str().unwrap(),
        "--ps",
        "2",
        "--workers",
        "2",
    ];
    Daemon::start(program, dir.join("coordinator.log"), &arguments, &[])
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn an_operators_day() {
    let mut cluster = Cluster::start();
    // Morning: there is no job, and the members are there.
    eventually(|| cluster.activities() == ["waiting for a job"; 4]);
    assert_eq!(cluster.status()["phase"], "idle");
    let shown = text(&cluster.run(&["status"]).stdout);
    for part in ["no job", "flambeau submit", "ps ", "worker "] {
        assert!(shown.contains(part), "{part:?} is not in {shown}");
    }

    // A job that would write outside the cluster's folder is refused at once.
    let outside = cluster.job("outside", "[checkpoint]\nlocation = \"../..\"\n");
    let refused = cluster.run(&["submit", &outside]);
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stderr);
    for part in ["checkpoint.location", "../..", "--allow-location"] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    let good = cluster.job(
        "good",
        "epochs = 12\n[model]\nname = \"odd\"\n[checkpoint]\nevery_steps = 20\n",
    );
    let elsewhere = cluster.run(&["submit", &good, "--restore", "s3://bucket/run"]);
    assert!(
        text(&elsewhere.stderr).contains("`restore`"),
        "{elsewhere:?}"
    );
    assert!(cluster.jobs().is_empty());

    // Two jobs are wrong in different ways, and wait for each other no longer than they must.
    let no_model = cluster.job("no-model", "[model]\nname = \"no-such-model\"\n");
    let secrets = "[data]\nkind = \"csv\"\ndir = \"/etc\"\nlabel = \"x\"\n[cluster]\nlease_seconds = 2.0\nstall_seconds = 4.0\n";
    let no_data = cluster.job("no-data", secrets);
    let began = Instant::now();
    let waited = cluster.run(&["submit", &no_model, "--wait"]);
    assert_eq!(waited.status.code(), Some(1));
    assert!(text(&waited.stderr).contains("no-such-model"), "{waited:?}");
    // Far below the minute for which a job waits for workers that may come to work.
    assert!(
        began.elapsed() < Duration::from_secs(45),
        "{:?}",
        began.elapsed()
    );
    let ids = [&no_data, &good].map(|file| {
        let output = cluster.run(&["submit", file, "--json"]);
        let submitted: Value = serde_json::from_slice(&output.stdout).unwrap();
        submitted["id"].as_u64().unwrap()
    });
    assert_eq!(ids, [2, 3]);
    eventually(|| cluster.jobs()[1]["state"] == "failed");
    let shown = text(&cluster.run(&["jobs"]).stdout);
    for part in ["`data.dir` is /etc", "--allow-location", "no-such-model"] {
        assert!(shown.contains(part), "{part:?} is not in {shown}");
    }

    // Noon: a server and a worker die while the good one trains, and are started again.
    let samples = |cluster: &Cluster| cluster.jobs()[2]["samples"].as_u64().unwrap();
    eventually(|| samples(&cluster) > 500);
    for dead in [1, 3] {
        cluster.members[dead].1.kill();
    }
    let what_waits = |cluster: &Cluster| text(&cluster.run(&["jobs"]).stdout);
    eventually(|| what_waits(&cluster).contains("has no server"));
    for dead in [1, 3] {
        let member = cluster.member(&cluster.members[dead].0.clone());
        cluster.members[dead].1 = member;
    }
    // Afternoon: a rolling upgrade, the coordinator first.
    let mut before = samples(&cluster);
    eventually(|| samples(&cluster) > before);
    cluster.coordinator.terminate();
    assert!(cluster.coordinator.wait().success());
    cluster.coordinator = coordinator(&cluster.program, cluster.dir.path(), &cluster.address);
    for member in 0..4 {
        before = samples(&cluster);
        cluster.members[member].1.terminate();
        let name = cluster.members[member].0.clone();
        assert!(cluster.members[member].1.wait().success(), "{name}");
        cluster.members[member].1 = cluster.member(&name);
        eventually(|| cluster.jobs()[2]["state"] == "done" || samples(&cluster) > before);
    }
    eventually(|| cluster.jobs()[2]["state"] == "done");
    assert_eq!(samples(&cluster), 12 * 1437);

    // Evening: all wait again, without being told to, and end as they are told.
    eventually(|| cluster.activities().len() == 4);
    for (name, member) in &mut cluster.members {
        assert!(
            !member
                .http("/metrics")
                .contains("flambeau_worker_samples_per_second 1")
        );
        member.terminate();
        assert!(member.wait().success(), "{name}: {}", member.log());
    }
    cluster.coordinator.terminate();
    assert!(cluster.coordinator.wait().success());
}
