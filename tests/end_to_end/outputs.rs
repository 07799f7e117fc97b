//! Logs and results that have no reader, or no room.

use std::fs::File;
use std::process::{Child, Stdio};

use serde_json::Value;
use tests::{PATIENCE, eventually, free_address};

use crate::program;

/// Where the log of a process goes.
fn full_disk() -> Stdio {
    File::options()
        .write(true)
        .open("/dev/full")
        .unwrap()
        .into()
}

/// A pipe whose reading end is closed.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn wait(child: &mut Child) -> bool {
    let mut status = None;
    eventually(|| {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap().success()
}

#[test]
fn a_log_that_cannot_be_written_costs_lines_and_not_the_job() {
    for log in [full_disk, closed_pipe] {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let (address, metrics) = (free_address(), free_address());
        let start = |arguments: &[&str]| {
            let mut command = program().command(arguments);
            command.stdin(Stdio::null()).stdout(log()).stderr(log());
            command.spawn().unwrap()
        };
        let run_dir = run.to_str().unwrap();
        let mut coordinator = start(&[
            "coordinator",
            "--listen",
            &address,
            "--metrics-listen",
            &metrics,
            "--run-dir",
            run_dir,
            "--set",
            "cluster.ps=1",
            "--set",
            "cluster.workers=1",
            "--epochs",
            "2",
        ]);
        let mut server = start(&["ps-server", "--coordinator", &address]);
        let lost = || {
            let answer = tests::http_get(&metrics, "/metrics").unwrap_or_default();
            let mut lines = answer.lines();
            lines.any(|line| {
                line.starts_with("flambeau_log_lines_lost_total ") && !line.ends_with(" 0")
            })
        };
        eventually(lost);
        let mut worker = start(&["worker", "--coordinator", &address, "--run-dir", run_dir]);
        for process in [&mut coordinator, &mut server, &mut worker] {
            assert!(wait(process), "after {PATIENCE:?}");
        }
        let summary = std::fs::read_to_string(run.join("summary.json")).unwrap();
        let summary: Value = serde_json::from_str(&summary).unwrap();
        assert_eq!(summary["samples"], 2 * 1437);
    }
}

#[test]
fn a_result_without_a_reader_ends_a_command_quietly_and_one_without_room_with_an_error() {
    for (stdout, is_right, says) in [
        (closed_pipe(), true, ""),
        (full_disk(), false, "cannot write to stdout"),
    ] {
        let mut command = program().command(&["job", "init", "-"]);
        let output = command.stdout(stdout).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.success(), is_right, "{error}");
        assert!(
            error.contains(says) && says.is_empty() == error.is_empty(),
            "{error}"
        );
    }
}
