//! Calls about jobs that are refused, or that come twice.

use std::time::Duration;

use daemon::membership::{Coordinator, MembershipError};
use network::security::Security;
use shared_proto::wire::SubmitJobRequest;
use tests::Cluster;

use super::{about_jobs, digits, ended, jobs, submit_to};
use crate::program;

fn said(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Starts a coordinator that only waits.
fn waits() -> Cluster {
    Cluster::start_coordinator_with(program(), "", 0, &["--no-job"])
}

#[test]
fn what_is_no_job_is_not_queued() {
    let cluster = waits();
    let dir = tempfile::tempdir().unwrap();
    for (text, named) in [
        ("epochs = 0", "epochs"),
        ("epochs = \"many\"", "epochs"),
        ("no_such_setting = 1", "no_such_setting"),
        ("\u{0}garbage [", "job"),
    ] {
        let file = dir.path().join("job.toml");
        std::fs::write(&file, text).unwrap();
        let output = about_jobs(&cluster, &["submit", file.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(said(&output).contains(named), "{text}: {}", said(&output));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let address = cluster.coordinator.address();
        let coordinator =
            Coordinator::at(&address, Duration::from_secs(5), Security::default()).unwrap();
        let request = |job_toml: &str, submission| SubmitJobRequest {
            job_toml: job_toml.to_owned(),
            submission,
            restore: String::new(),
        };
        for (request, named) in [
            (request("epochs = 0", 1), "epochs"),
            (request("]]", 1), "not valid"),
            (request("run_dir = \"/elsewhere\"", 1), "run_dir"),
            (request("", 0), "submission 0"),
            (request(&"#".repeat(1 << 20), 1), "at the most"),
        ] {
            let refused = coordinator.submit_job(request).await.unwrap_err();
            assert!(matches!(refused, MembershipError::Refused(_)), "{refused}");
            assert!(refused.to_string().contains(named), "{refused}");
        }
        assert!(coordinator.list_jobs(None).await.unwrap().is_empty());
        // A name that leads elsewhere does not.
        let sly = coordinator
            .submit_job(request("name = \"../../x/..\"", 7))
            .await
            .unwrap();
        let folder = cluster.run_dir().join("runs");
        assert_eq!(
            std::path::Path::new(&sly.run_dir).parent(),
            Some(folder.as_path())
        );
        // A call whose answer was lost is made again.
        let again = coordinator
            .submit_job(request("name = \"../../x/..\"", 7))
            .await
            .unwrap();
        assert_eq!((again.id, &again.run_dir), (sly.id, &sly.run_dir));
        // Several at once get ids of their own.
        let many = (10..30).map(|number| coordinator.submit_job(request("", number)));
        let many = futures_util::future::join_all(many).await;
        let mut ids: Vec<u64> = many.into_iter().map(|reply| reply.unwrap().id).collect();
        ids.sort_unstable();
        assert_eq!(ids, (sly.id + 1..=sly.id + 20).collect::<Vec<_>>());
        let long = coordinator.submit_job(request(&format!("name = \"{}\"", "x".repeat(300)), 8));
        let refused = long.await.unwrap_err().to_string();
        assert!(
            refused.contains("the job's `name` has 300 bytes"),
            "{refused}"
        );
        // A list comes in pages.
        for number in 100..320 {
            coordinator.submit_job(request("", number)).await.unwrap();
        }
        let listed = coordinator.list_jobs(None).await.unwrap();
        let listed: Vec<u64> = listed.iter().map(|job| job.id).collect();
        assert_eq!(listed, (1..=sly.id + 240).collect::<Vec<_>>());
    });
    for arguments in [["cancel", "9999"], ["jobs", "9999"]] {
        let output = about_jobs(&cluster, &arguments);
        assert_eq!(output.status.code(), Some(1));
        assert!(
            said(&output).contains("there is no job 9999"),
            "{}",
            said(&output)
        );
    }
}

#[test]
fn a_coordinator_of_one_job_takes_no_others() {
    let cluster = Cluster::start(program(), "", 0);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("job.toml");
    std::fs::write(&file, "").unwrap();
    let file = file.to_str().unwrap();
    for arguments in [&["submit", file][..], &["jobs"], &["cancel", "1"]] {
        let output = about_jobs(&cluster, arguments);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains("--no-job"), "{}", said(&output));
    }
}

#[test]
fn a_submission_to_a_coordinator_that_is_away_says_so() {
    let mut cluster = waits();
    // No other test listens on this loopback address. The coordinator's own port may be another test's, once it is free.
    let address = cluster.coordinator.address();
    let address = address.replace("127.0.0.1", "127.254.0.1");
    cluster.coordinator.kill();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("job.toml");
    std::fs::write(&file, "").unwrap();
    let output = program().run(&[
        "submit",
        file.to_str().unwrap(),
        "--coordinator",
        &address,
        "--patience-seconds",
        "1",
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said(&output).contains("could not be reached"),
        "{}",
        said(&output)
    );
    cluster.restart_coordinator_with(&["--no-job"]);
    assert!(jobs(&cluster).is_empty());
}

#[test]
fn a_job_that_waits_for_workers_is_cancelled_and_waited_for() {
    let mut cluster = waits();
    let address = cluster.coordinator.address();
    let waiting = {
        let (address, job) = (address.clone(), digits("alone", "mlp", 1));
        std::thread::spawn(move || submit_to(&address, &job, &["--wait"]))
    };
    tests::eventually(|| {
        jobs(&cluster)
            .first()
            .is_some_and(|job| job["state"] == "running")
    });
    assert!(about_jobs(&cluster, &["cancel", "1"]).status.success());
    let job = waiting.join().unwrap();
    assert_eq!(job["state"], "cancelled", "{job}");
    let error = job["error"].as_str().unwrap();
    // The call may come sooner.
    let beginning = error.contains("while the coordinator began it");
    assert!(
        beginning || error.contains("before its training began"),
        "{job}"
    );
    // Cancelling what has ended changes nothing.
    assert!(about_jobs(&cluster, &["cancel", "1"]).status.success());
    let at_once = about_jobs(&cluster, &["cancel", "1", "--now"]);
    assert!(at_once.status.success());
    assert_eq!(ended(&cluster, 1), job);

    // The next one, with workers and servers, is followed to its end.
    for (role, name) in [("ps-server", "p"), ("worker", "a")] {
        let member = cluster.member(role, name, &[], &[]);
        cluster.workers.push(member);
    }
    let small = "name = \"small\"\nepochs = 1\n[cluster]\nps = 1\nworkers = 1\n";
    let job = submit_to(&address, small, &["--wait"]);
    assert_eq!(
        (&job["state"], &job["id"]),
        (&"done".into(), &2.into()),
        "{job}"
    );
}
