//! `flambeau train` while processes of every role are killed, one after another.
//!
//! A longer run by hand is `FLAMBEAU_TEST_SLOW=1 FLAMBEAU_TEST_KILLS=200 FLAMBEAU_TEST_CHAOS_DATA=mnist
//! cargo test --workspace chaos -- --nocapture`, which prints the time in which each role came back.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tempfile::TempDir;
use tests::{children, eventually, exists, runs_slow_tests};

use crate::{data_set, program};

const ROLES: [&str; 3] = ["coordinator", "ps-server", "worker"];

/// After each kill the job must finish this many more steps before the next kill. In bounded and sync mode, a worker alone cannot get so far
/// ahead.
const MORE_STEPS: u64 = 40;

/// The default number of kills.
const KILLS: usize = 20;

/// A run of `flambeau train` that is being watched.
struct Run {
    child: Child,
    dir: TempDir,
}

/// A process of the run.
#[derive(Clone, Debug)]
struct Process {
    id: u32,
    role: &'static str,
    arguments: String,
}

impl Run {
    fn start(arguments: &[String]) -> Self {
        let dir = TempDir::new().unwrap();
        let run_dir = dir.path().join("run");
        let mut all: Vec<&str> = vec!["train", "--json", "--run-dir", run_dir.to_str().unwrap()];
        all.extend(arguments.iter().map(String::as_str));
        let mut command: Command = program().command(&all);
        let child = command
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(dir.path().join("said")).unwrap())
            .spawn()
            .unwrap();
        Self { child, dir }
    }

    fn processes(&self) -> Vec<Process> {
        let process = |id: u32| {
            let arguments = std::fs::read_to_string(format!("/proc/{id}/cmdline")).ok()?;
            let arguments = arguments.replace('\0', " ");
            let role = ROLES
                .into_iter()
                .find(|role| arguments.split(' ').nth(1) == Some(*role))?;
            Some(Process {
                id,
                role,
                arguments,
            })
        };
        children(self.child.id())
            .into_iter()
            .filter_map(process)
            .collect()
    }

    /// Returns the cluster's status; none while the coordinator does not answer.
    fn status(&self) -> Option<Value> {
        let processes = self.processes();
        let coordinator = processes.iter().find_map(|process| {
            let (_, rest) = process.arguments.split_once("--coordinator ")?;
            rest.split(' ').next()
        })?;
        let output = program().run(&["status", "--json", "--coordinator", coordinator]);
        serde_json::from_slice(&output.stdout).ok()
    }

    fn samples(&self) -> Option<u64> {
        self.status()?["samples"].as_u64()
    }

    fn ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end, which must be a success, and returns its result.
    fn finish(mut self) -> Value {
        let mut stdout = self.child.stdout.take().unwrap();
        let mut text = String::new();
        std::io::Read::read_to_string(&mut stdout, &mut text).unwrap();
        let status = self.child.wait().unwrap();
        let said = std::fs::read_to_string(self.dir.path().join("said")).unwrap();
        assert!(status.success(), "{status}: {said}");
        serde_json::from_str(&text).unwrap()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let logs = self.dir.path().join("run/logs");
            for entry in std::fs::read_dir(logs).into_iter().flatten().flatten() {
                let log = std::fs::read_to_string(entry.path()).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                let tail = lines[lines.len().saturating_sub(25)..].join("\n");
                eprintln!("---- {}\n{tail}", entry.path().display());
            }
        }
    }
}

fn accuracy(summary: &Value) -> f64 {
    summary["test_accuracy"].as_f64().unwrap()
}

fn kilobytes(process: &Process) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id));
    let status = status.unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.map_or(0, |number| number.parse().unwrap())
}

#[test]
fn killed_again_and_again_the_job_finishes_as_well() {
    if !runs_slow_tests("a job of which each role is killed again and again") {
        return;
    }
    let told = |name: &str| std::env::var(name).ok();
    let kills = told("FLAMBEAU_TEST_KILLS").map_or(KILLS, |number| number.parse().unwrap());
    let seed = told("FLAMBEAU_TEST_SEED").map_or_else(rand::random, |seed| seed.parse().unwrap());
    let mode = told("FLAMBEAU_TEST_CHAOS_MODE").unwrap_or_else(|| "bounded".to_owned());
    println!("seed {seed}: {kills} kills, {mode}");
    let mnist = told("FLAMBEAU_TEST_CHAOS_DATA").and_then(|name| data_set(&name));
    let mut arguments: Vec<String> = match &mnist {
        Some(folder) => vec![
            "--data=mnist".to_owned(),
            format!("--data-dir={}", folder.display()),
        ],
        None => Vec::new(),
    };
    let batch: u64 = if mnist.is_some() { 32 } else { 4 };
    arguments.push(format!("--batch-size={batch}"));
    arguments.extend(
        [
            &format!("--mode={mode}"),
            "--ps=2",
            "--workers=2",
            "--lease-seconds=2",
            "--set=checkpoint.every_seconds=1",
        ]
        .map(str::to_owned),
    );
    // Long enough for the kills. The expected accuracy is that of undisturbed runs.
    let epochs = match mnist {
        Some(_) => 3 + 3 * kills as u32 / 10,
        None => 60 + 5 * kills as u32,
    };
    arguments.push(format!("--epochs={epochs}"));
    // The accuracy of undisturbed runs may be known already.
    let undisturbed: f64 = match told("FLAMBEAU_TEST_UNDISTURBED") {
        Some(known) => known.parse().unwrap(),
        None => {
            let runs = (0..3).map(|_| accuracy(&Run::start(&arguments).finish()));
            runs.sum::<f64>() / 3.0
        }
    };
    println!("undisturbed: {undisturbed:.4}");

    let mut run = Run::start(&arguments);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut back = BTreeMap::<&str, Vec<Duration>>::new();
    let mut memory = Vec::new();
    let mut killed = Vec::new();
    eventually(|| run.samples() > Some(0));
    while killed.len() < kills && !run.ended() {
        std::thread::sleep(Duration::from_millis(rng.random_range(300..1500)));
        let processes = run.processes();
        memory.push(processes.iter().map(kilobytes).sum::<u64>());
        let role = *ROLES.choose(&mut rng).unwrap();
        let of_role: Vec<&Process> = processes.iter().filter(|p| p.role == role).collect();
        let Some(victim) = of_role.choose(&mut rng) else {
            continue;
        };
        let pid = rustix::process::Pid::from_raw(victim.id as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        killed.push(victim.id);
        let at = Instant::now();
        // Waits until another process has replaced it, and then for more steps than one worker can finish while the other is stopped.
        let replaced = |run: &Run| {
            let processes = run.processes();
            let others = processes.iter().filter(|p| p.id != victim.id);
            others.filter(|p| p.role == role).count() == of_role.len()
        };
        eventually(|| replaced(&run) || run.ended());
        let mut since = None;
        eventually(|| {
            let samples = run.samples();
            since = since.or(samples);
            samples > since.map(|since| since + MORE_STEPS * batch) || run.ended()
        });
        back.entry(role).or_default().push(at.elapsed());
    }
    let all: Vec<u32> = run.processes().iter().map(|process| process.id).collect();
    let summary = run.finish();
    eventually(|| !all.iter().chain(&killed).any(|id| exists(*id)));

    for (role, times) in &mut back {
        times.sort();
        let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
        println!(
            "{role}: {} kills, training again after {median:.2?} (median), {longest:.2?} (longest)",
            times.len()
        );
    }
    let thirds = |part: usize| {
        let third = (memory.len() / 3).max(1);
        memory.iter().skip(part * third).take(third).sum::<u64>() / third as u64 / 1024
    };
    println!(
        "memory of all processes, MiB: {} in the first third, {} in the last",
        thirds(0),
        thirds(2)
    );
    assert!(thirds(2) <= thirds(0) + thirds(0) / 4, "memory grows");
    println!(
        "accuracy {:.4}, undisturbed {undisturbed:.4}; {summary}",
        accuracy(&summary)
    );
    assert_eq!(killed.len(), kills, "the job has ended before all kills");
    // The digits have 360 test samples: undisturbed runs differ by more than half a point.
    let tolerance = if mnist.is_some() { 0.005 } else { 0.015 };
    assert!((accuracy(&summary) - undisturbed).abs() <= tolerance);
}
