//! `Trainer::on_cluster`: a program trains on a coordinator and servers that run already, and brings the workers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use flambeau::settings::{Best, Plateau, StrategyName};
use flambeau::{Error, RunningCluster, SecurityFiles, Trainer, on_evaluation};
use serde_json::Value;
use tests::{Cluster, Daemon};

use crate::fit::{JOB, Worse, job, points};
use crate::program;
use crate::security::{certs, shows};
use crate::weights::{difference, weights};

/// Starts a long-lived cluster of stock processes without a job: a coordinator, two servers and some workers.
fn start(workers: usize) -> Cluster {
    let mut cluster = Cluster::start_coordinator_with(program(), "", 0, &["--no-job"]);
    for name in ["ps-0", "ps-1"] {
        let server = cluster.member("ps-server", name, &[], &[]);
        cluster.ps.push(server);
    }
    for number in 0..workers {
        let worker = cluster.member("worker", &format!("stock-{number}"), &[], &[]);
        cluster.workers.push(worker);
    }
    cluster
}

fn at(cluster: &Cluster) -> RunningCluster {
    RunningCluster::at(cluster.coordinator.address())
}

/// Returns the states of the cluster's jobs, in the order of their ids.
fn states(cluster: &Cluster) -> Vec<String> {
    let address = cluster.coordinator.address();
    let output = program().run(&["jobs", "--json", "--coordinator", &address]);
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let jobs = listed["jobs"].as_array().unwrap().iter();
    jobs.map(|job| job["state"].as_str().unwrap().to_owned())
        .collect()
}

/// Returns a trainer of a model and data that stock processes do not know.
fn own(epochs: u32) -> Trainer {
    let mut job = job(JOB);
    job.epochs = epochs;
    Trainer::new(job)
        .model::<Worse>()
        .in_memory(points(256).unwrap(), points(64).unwrap())
}

#[test]
fn a_program_trains_its_own_model_on_stock_coordinator_and_servers() {
    let mut alone = own(3);
    let expected = alone.fit().unwrap();
    let expected_weights = weights(&alone.weights().unwrap());

    let cluster = start(0);
    // One job after the other on the same processes, with values as the local run has them.
    for _ in 0..2 {
        let mut trainer = own(3)
            .on_cluster(at(&cluster).bring_workers(2))
            .callback(Best::default())
            .callback(Plateau::default());
        let history = trainer.fit().unwrap();
        let found = weights(&trainer.weights().unwrap());
        assert!(difference(&found, &expected_weights) < 1e-5);
        assert_eq!(history.steps, expected.steps);
        assert_eq!(history.progress.len(), expected.progress.len());
        for (found, expected) in history.epochs.iter().zip(&expected.epochs) {
            assert_eq!(found.number, expected.number);
            assert!((found.metrics["rmse"] - expected.metrics["rmse"]).abs() < 1e-5);
        }
        assert_eq!(history.epochs.len(), 3);
        let rmse = history.last("rmse").unwrap();
        assert!((trainer.evaluate().unwrap()["rmse"] - rmse).abs() < 1e-6);
        assert!(trainer.best().unwrap().evaluate().unwrap()["rmse"] <= rmse + 1e-6);
        assert_eq!(trainer.predict_held_out().unwrap().len(), 64);
    }
    assert_eq!(states(&cluster), ["done", "done"]);
}

#[test]
fn rows_of_tables_are_read_from_the_checkpoints_of_the_cluster() {
    let cluster = start(0);
    let text = "epochs = 1\n[data]\nkind = \"clicks\"\n[data.options]\nsamples = 4000\nrows = 200\n[model]\nname = \"deepfm\"\nembedding = 4\nhidden = [8]\n[cluster]\nps = 2\n[strategy]\nmode = \"sync\"\n";
    let mut first = Trainer::new(job(text)).on_cluster(at(&cluster).bring_workers(2));
    let history = first.fit().unwrap();
    let auc = history.last("auc").unwrap();
    assert!((first.evaluate().unwrap()["auc"] - auc).abs() < 1e-6);
    // Another job goes on from there.
    let kept = std::fs::read_to_string(history.run_dir.join("job.toml")).unwrap();
    let kept = job(&kept).checkpoint.location.unwrap();
    let mut longer = job(text);
    longer.epochs = 2;
    let second = Trainer::new(longer).restore(kept);
    let history = second.on_cluster(at(&cluster).bring_workers(2)).fit();
    let numbers: Vec<u32> = history.unwrap().epochs.iter().map(|e| e.number).collect();
    assert_eq!(numbers, [2]);
}

#[test]
fn brought_workers_of_a_ring_listen_on_the_interface_that_is_named() {
    let cluster = start(0);
    let mut ring = job(JOB);
    ring.strategy.name = StrategyName::MultiWorkerMirrored;
    ring.epochs = 100_000;
    // Ports that are listened on at 127.0.0.7, as the kernel has them.
    let listening = || {
        let sockets = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        let sockets = sockets.lines().filter(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            fields[1].starts_with("0700007F:") && fields[3] == "0A"
        });
        sockets.count()
    };
    let seen = Arc::new(AtomicUsize::new(0));
    let seeing = Arc::clone(&seen);
    let look = on_evaluation(move |_, control| {
        seeing.fetch_max(listening(), Ordering::Relaxed);
        control.stop("seen");
    });
    let workers = at(&cluster).bring_workers(2).listen([127, 0, 0, 7].into());
    let mut trainer = Trainer::new(ring)
        .model::<Worse>()
        .in_memory(points(256).unwrap(), points(64).unwrap())
        .on_cluster(workers)
        .callback(look);
    assert!(!trainer.fit().unwrap().epochs.is_empty());
    assert_eq!(seen.load(Ordering::Relaxed), 2);
}

#[test]
fn a_callback_ends_a_job_of_a_cluster_and_a_panic_cancels_it() {
    let cluster = start(0);
    let stop = on_evaluation(|epoch, control| {
        if epoch.number == 2 {
            control.stop("that is enough");
        }
    });
    let mut trainer = own(100_000)
        .on_cluster(at(&cluster).bring_workers(2))
        .callback(stop);
    let history = trainer.fit().unwrap();
    assert_eq!(history.stopped.as_deref(), Some("that is enough"));
    let last = history.last("rmse").unwrap();
    assert!((trainer.evaluate().unwrap()["rmse"] - last).abs() < 1e-6);

    let panics = on_evaluation(|_, _| panic!("a fault of the callback"));
    let mut trainer = own(100_000)
        .on_cluster(at(&cluster).bring_workers(2))
        .callback(panics);
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| trainer.fit())).unwrap_err();
    tests::eventually(|| states(&cluster) == ["cancelled", "cancelled"]);
    // The cluster takes the next job.
    let mut next = own(1).on_cluster(at(&cluster).bring_workers(2));
    assert_eq!(next.fit().unwrap().epochs.len(), 1);
}

#[test]
fn workers_of_the_cluster_train_what_they_know_and_say_what_they_do_not() {
    let cluster = start(1);
    let mut known = job(JOB);
    (known.epochs, known.cluster.workers) = (1, Some(1));
    let mut trainer = Trainer::new(known).on_cluster(at(&cluster));
    let history = trainer.fit().unwrap();
    assert_eq!(history.epochs.len(), 1);

    let mut unknown = own(1).on_cluster(at(&cluster));
    let error = unknown.fit().unwrap_err();
    assert!(matches!(error, Error::NoWorkerCan { .. }), "{error}");
    let said = error.to_string();
    assert!(
        said.contains("own-data") || said.contains("Worse"),
        "{said}"
    );
    assert!(said.contains("bring_workers"), "{said}");
    tests::eventually(|| states(&cluster).last().unwrap() != "running");

    // With workers that know it, the job does not need those of the cluster.
    let mut brought = own(1).on_cluster(at(&cluster).bring_workers(2));
    assert_eq!(brought.fit().unwrap().epochs.len(), 1);
}

#[test]
fn ctrl_c_cancels_a_job_in_good_order_if_the_program_wants_it() {
    let cluster = start(0);
    let (see, seen) = std::sync::mpsc::sync_channel(1);
    let sees = on_evaluation(move |_, _| {
        let _ = see.try_send(());
    });
    let joined = at(&cluster).bring_workers(2).cancel_on_ctrl_c();
    let mut trainer = own(100_000).on_cluster(joined).callback(sees);
    let history = std::thread::scope(|scope| {
        let fitting = scope.spawn(|| trainer.fit());
        // From then on the signal does not end the process of the test.
        seen.recv().unwrap();
        let this = std::process::id().to_string();
        let sent = std::process::Command::new("kill")
            .args(["-INT", &this])
            .status();
        assert!(sent.unwrap().success());
        fitting.join().unwrap()
    });
    let history = history.unwrap();
    assert!(history.stopped.is_some() && history.epochs.len() < 100_000);
    assert_eq!(states(&cluster), ["cancelled"]);
    let rmse = trainer.evaluate().unwrap()["rmse"];
    assert!((rmse - history.last("rmse").unwrap()).abs() < 1e-6);
}

#[test]
fn a_job_goes_on_when_the_coordinator_is_killed_and_started_again() {
    let mut expected = own(100);
    expected.fit().unwrap();
    let mut cluster = start(0);
    let (see, seen) = std::sync::mpsc::sync_channel(1);
    let sees = on_evaluation(move |_, _| {
        let _ = see.try_send(());
    });
    let mut slow = own(100);
    let address = cluster.coordinator.address();
    let joined = RunningCluster::at(&address).bring_workers(2);
    slow = slow.on_cluster(joined).callback(sees);
    let history = std::thread::scope(|scope| {
        let fitting = scope.spawn(|| slow.fit());
        seen.recv().unwrap();
        cluster.coordinator.kill();
        cluster.restart_coordinator_with(&["--no-job"]);
        fitting.join().unwrap()
    });
    assert_eq!(history.unwrap().epochs.len(), 100);
    let [found, expected] = [&slow, &expected].map(|trainer| weights(&trainer.weights().unwrap()));
    assert!(difference(&found, &expected) < 1e-5);
}

#[test]
fn a_cluster_that_is_not_there_or_lacks_members_says_what_to_do() {
    let soon = Duration::from_secs(5);
    let nowhere = RunningCluster::at(tests::free_address()).patience(soon);
    let error = own(1).on_cluster(nowhere).fit().unwrap_err().to_string();
    assert!(error.contains("could not be reached"), "{error}");
    assert!(error.contains("--no-job"), "{error}");

    // A coordinator of one job takes no other.
    let busy = Cluster::start(program(), JOB, 1);
    let error = own(1).on_cluster(at(&busy).patience(soon)).fit();
    let error = error.unwrap_err().to_string();
    assert!(error.contains("--no-job"), "{error}");

    let without_workers = start(0);
    let error = own(1).on_cluster(at(&without_workers).patience(soon)).fit();
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("no worker") && error.contains("bring"),
        "{error}"
    );

    let bare = Cluster::start_coordinator_with(program(), "", 0, &["--no-job"]);
    let joined = at(&bare).patience(soon).bring_workers(2);
    let error = own(1).on_cluster(joined).fit().unwrap_err().to_string();
    assert!(error.contains("no parameter server"), "{error}");
}

#[test]
fn a_program_with_certificates_and_the_token_joins_a_secured_cluster() {
    let dir = tempfile::tempdir().unwrap();
    certs(dir.path());
    let borrow = |env: &[(&'static str, String)]| -> Vec<(&'static str, String)> { env.to_vec() };
    let start = |role: &str, arguments: &[&str]| {
        let env = borrow(&shows(dir.path(), role));
        let env: Vec<(&str, &str)> = env
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        Daemon::start(
            &program(),
            dir.path().join(format!("{role}.log")),
            arguments,
            &env,
        )
    };
    let run = dir.path().join("run");
    let arguments = [
        "coordinator",
        "--no-job",
        "--listen",
        "127.0.0.1:0",
        "--run-dir",
        run.to_str().unwrap(),
    ];
    let coordinator = start("coordinator", &arguments);
    let address = coordinator.address();
    let _server = start("ps", &["ps-server", "--coordinator", &address]);

    let file = |name: &str| Some(dir.path().join("worker").join(name));
    let files = SecurityFiles {
        authority: file("ca.crt"),
        certificate: file("tls.crt"),
        key: file("tls.key"),
        token: file("token"),
        ..SecurityFiles::default()
    };
    let trained = |cluster: RunningCluster| {
        let mut job = job(JOB);
        (job.epochs, job.cluster.ps) = (1, Some(1));
        let trainer = Trainer::new(job).model::<Worse>();
        trainer.on_cluster(cluster.bring_workers(2)).fit()
    };
    let history = trained(RunningCluster::at(&address).security(files.clone())).unwrap();
    assert_eq!(history.epochs.len(), 1);

    let mut other = files;
    let wrong = dir.path().join("wrong");
    std::fs::write(&wrong, "another token").unwrap();
    other.token = Some(wrong);
    let impatient = RunningCluster::at(&address).patience(Duration::from_secs(5));
    let error = trained(impatient.clone().security(other)).unwrap_err();
    assert!(error.to_string().contains("token"), "{error}");
    assert!(trained(impatient).is_err());
    assert!(Path::new(&run).exists());
}
