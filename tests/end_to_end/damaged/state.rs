//! The state of a coordinator.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tests::{Cluster, Daemon, eventually, free_address};

use super::{contents, damage, damages, put_back};
use crate::program;

fn job(mode: &str) -> String {
    format!(
        r#"
epochs = 100000
[model]
name = "odd"
[strategy]
mode = "{mode}"
[cluster]
ps = 1
workers = 1
lease_seconds = 2.0
[checkpoint]
every_steps = 40
"#
    )
}

fn files(run: &Path) -> Vec<PathBuf> {
    ["", ".0", ".1"]
        .map(|end| run.join(format!("coordinator.state{end}")))
        .to_vec()
}

/// Returns how far the job has come, as a coordinator says; its error if it refuses to start.
fn progress(run: &Path, file: &Path, address: &str) -> Result<String, String> {
    let (run, file) = (run.to_str().unwrap(), file.to_str().unwrap());
    let arguments = ["coordinator", file, "--listen", address, "--run-dir", run];
    let mut coordinator = program().command(&arguments);
    let coordinator = coordinator.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut coordinator = coordinator.spawn().unwrap();
    let began = Instant::now();
    let answer = loop {
        if coordinator.try_wait().unwrap().is_some() {
            let output = coordinator.wait_with_output().unwrap();
            assert!(!output.status.success());
            return Err(String::from_utf8(output.stderr).unwrap());
        }
        let status = ["status", "--json", "--coordinator", address];
        let status = program().run(&status);
        if status.status.success() {
            break status.stdout;
        }
        assert!(began.elapsed() < tests::PATIENCE, "{status:?}");
        std::thread::sleep(Duration::from_millis(20));
    };
    coordinator.kill().unwrap();
    coordinator.wait().unwrap();
    let status: serde_json::Value = serde_json::from_slice(&answer).unwrap();
    Ok(format!(
        "{} {} {}",
        status["steps"], status["samples"], status["checkpoint"]["number"]
    ))
}

#[test]
fn a_damaged_state_is_refused_or_whole_and_the_checkpoints_lead_on() {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let (mut refused, mut whole) = (0, 0);
    for mode in ["sync", "async"] {
        let mut cluster = Cluster::start(program(), &job(mode), 1);
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "2")]);
        let run = cluster.run_dir();
        let steps = |cluster: &Cluster| cluster.status()["steps"].as_u64().unwrap_or(0);
        eventually(|| steps(&cluster) > 30);
        let older = contents(&files(&run));
        eventually(|| steps(&cluster) > 150);
        cluster.coordinator.kill();
        cluster.ps.clear();
        cluster.workers.clear();
        let confirmed = contents(&files(&run));
        let file = run.parent().unwrap().join("given.toml");
        let address = free_address();
        let expected = progress(&run, &file, &address).unwrap();
        let mut last = String::new();
        for _ in 0..damages(12) {
            put_back(&confirmed);
            let (path, older) = &older[rng.random_range(0..older.len())];
            let what = damage(path, older.as_deref(), &mut rng);
            match progress(&run, &file, &address) {
                Ok(found) => {
                    whole += 1;
                    assert_eq!(found, expected, "{mode}, {what}");
                }
                Err(error) => {
                    refused += 1;
                    assert!(
                        error.contains("coordinator.state"),
                        "{mode}, {what}: {error}"
                    );
                    assert!(error.contains("--restore"), "{mode}, {what}: {error}");
                    last = error;
                }
            }
        }
        // All three files are an older copy: a checkpoint has been written since.
        put_back(&older);
        let error = progress(&run, &file, &address).unwrap_err();
        assert!(error.contains("older copy"), "{mode}: {error}");
        println!("{mode}: {last}");
        // The way that the message gives.
        let next = run.with_file_name("next");
        let arguments = [
            "coordinator",
            file.to_str().unwrap(),
            "--restore",
            run.to_str().unwrap(),
            "--run-dir",
            next.to_str().unwrap(),
            "--listen",
            "127.0.0.1:0",
        ];
        let log = run.with_file_name("next.log");
        let coordinator = Daemon::start(&program(), log, &arguments, &[]);
        let address = coordinator.address();
        let member = |role: &str| {
            let arguments = [role, "--identity", role, "--coordinator", &address];
            Daemon::start(&program(), run.with_file_name(role), &arguments, &[])
        };
        let _members = [member("ps-server"), member("worker")];
        eventually(|| {
            let status = program().run(&["status", "--json", "--coordinator", &address]);
            let status = serde_json::from_slice::<serde_json::Value>(&status.stdout);
            status.is_ok_and(|status| status["steps"].as_u64() > Some(160))
        });
    }
    assert!(refused > 0 && whole > 0, "{refused} {whole}");
}

/// The state of an earlier release, and a file that is no state.
#[test]
fn a_state_that_is_none_is_refused_with_its_name() {
    let dir = tempfile::tempdir().unwrap();
    for (name, says) in [
        ("coordinator.redb", "an earlier release"),
        ("coordinator.state.0", "not written by Flambeau"),
    ] {
        let run = dir.path().join(name.replace('.', "-"));
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join(name), "no state").unwrap();
        let run = run.to_str().unwrap();
        let output = Command::new(&program().0)
            .args(["coordinator", "--listen", "127.0.0.1:0", "--run-dir", run])
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{error}");
        assert!(error.contains(name) && error.contains(says), "{error}");
    }
}
