//! The training modes: the waits between workers, and the meaning of sync.

use std::collections::BTreeMap;
use std::time::Duration;

use candle_core::Device;
use model::registry::Registry;
use shared_proto::job::Job;
use tests::relay::{Relay, Weather};
use tests::{Cluster, eventually};
use worker::alone::local;

use crate::program;
use crate::ring_operations::metric;
use crate::weights::{difference, largest, weights};

/// Trains on two servers with so many workers. Returns the summary, and the folder of the run.
fn train(job: &str, workers: usize) -> (serde_json::Value, tempfile::TempDir) {
    let mut cluster = Cluster::start(program(), job, 2);
    for _ in 0..workers {
        cluster.add_worker(&[]);
    }
    cluster.finish()
}

#[test]
fn sync_with_four_workers_equals_one_process_with_four_times_the_batch() {
    const JOB: &str =
        "epochs = 9\nsteps = 50\nseed = 7\n[optimizer]\nname = \"sgd\"\nlearning_rate = 0.2\n";
    equals_one_process("batch_size = 16\n", JOB);
    // Four batches of four make a step of 16.
    equals_one_process("batch_size = 4\naccumulate = 4\n", JOB);
}

/// Compares four workers in sync mode with one process with batches of 64 samples.
fn equals_one_process(batch: &str, common: &str) {
    let given =
        format!("{batch}{common}[strategy]\nmode = \"sync\"\n[cluster]\nps = 2\nworkers = 4\n");
    let (summary, dir) = train(&given, 4);
    assert_eq!(summary["steps"], 50);
    let distributed = weights(&dir.path().join("run/model.safetensors"));

    let job = Job::from_toml(&format!("batch_size = 64\n{common}")).unwrap();
    let alone = dir.path().join("alone.safetensors");
    let outcome = local::train(&job, &Registry::builtin(), &Device::Cpu, Some(&alone)).unwrap();
    assert_eq!(outcome.steps, 50);
    // 50 steps are more than two epochs: their short tails are among them.
    assert_eq!(summary["samples"], outcome.samples);

    let alone = weights(&alone);
    let difference = difference(&distributed, &alone);
    assert!(difference < 1e-5, "{difference}");
    let moved = alone.values().map(largest).fold(0.0, f32::max);
    assert!(moved > 0.1, "nothing was trained");
}

/// The average is computed here from the weights after each step of a single process.
#[test]
fn the_moving_average_of_the_weights_is_what_is_evaluated_saved_and_exported() {
    const JOB: &str = "epochs = 1\nseed = 7\n[optimizer]\nname = \"sgd\"\nlearning_rate = 0.5\n";
    let given = format!(
        "batch_size = 32\nsteps = 6\nema_decay = 0.75\n{JOB}[strategy]\nmode = \"sync\"\n[cluster]\nps = 2\nworkers = 2\n"
    );
    let (summary, dir) = train(&given, 2);
    let run = dir.path().join("run");
    let saved = weights(&run.join("model.safetensors"));

    let mut averages = BTreeMap::new();
    let mut last = BTreeMap::new();
    for steps in 1..=6 {
        let job = Job::from_toml(&format!("batch_size = 64\nsteps = {steps}\n{JOB}")).unwrap();
        let path = dir.path().join("alone.safetensors");
        local::train(&job, &Registry::builtin(), &Device::Cpu, Some(&path)).unwrap();
        last = weights(&path);
        for (name, weight) in &last {
            let average = averages.remove(name).unwrap_or_else(|| weight.clone());
            let moved = ((average * 0.75).unwrap() + (weight * 0.25).unwrap()).unwrap();
            averages.insert(name.clone(), moved);
        }
    }
    assert!(difference(&saved, &averages) < 1e-5);
    assert!(
        difference(&last, &averages) > 0.01,
        "the average is the weights"
    );

    let run = run.to_str().unwrap();
    let exported = dir.path().join("exported.safetensors");
    let file = exported.to_str().unwrap();
    for (averages, expected) in [(true, &saved), (false, &last)] {
        let export = ["checkpoint", "export", run, "--force", "--output", file];
        let arguments: Vec<_> = export
            .into_iter()
            .chain(averages.then_some("--averages"))
            .collect();
        assert!(program().run(&arguments).status.success());
        assert!(
            difference(&weights(&exported), expected) < 1e-5,
            "{averages}"
        );
    }
    let output = program().run(&["eval", "--json", run]);
    let evaluated: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(evaluated["metrics"], summary["metrics"]);
}

/// The checkpoint has the newest weights, and `model.safetensors` those that the last evaluation measured.
#[test]
fn a_model_of_bounded_mode_is_the_mean_of_its_last_weights_as_evaluated() {
    const JOB: &str = "epochs = 3\nseed = 7\n[model]\nname = \"normal\"\n[optimizer]\nname = \"sgd\"\nlearning_rate = 0.5\n";
    for (workers, settings, is_mean) in [
        (2, "", true),
        (2, "correction = { average = 0.0 }", false),
        (2, "correction = { enabled = false }", false),
        (1, "", false),
    ] {
        let given = format!(
            "batch_size = 32\n{JOB}[strategy]\n{settings}\n[cluster]\nps = 2\nworkers = {workers}\n"
        );
        let (summary, dir) = train(&given, workers);
        let run = dir.path().join("run");
        let saved = weights(&run.join("model.safetensors"));
        let exported = dir.path().join("exported.safetensors");
        let (run, file) = (run.to_str().unwrap(), exported.to_str().unwrap());
        let export = program().run(&["checkpoint", "export", run, "--output", file]);
        assert!(export.status.success());
        let moved = |part: &str| {
            let only = |all: BTreeMap<String, candle_core::Tensor>| -> BTreeMap<_, _> {
                all.into_iter()
                    .filter(|(name, _)| name.contains(part))
                    .collect()
            };
            difference(&only(saved.clone()), &only(weights(&exported)))
        };
        // Weights, and what batch normalisation has measured with them.
        for part in ["weight", "running_mean"] {
            assert_eq!(moved(part) > 1e-4, is_mean, "{settings} {part}");
        }
        let output = program().run(&["eval", "--json", run]);
        let evaluated: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(evaluated["metrics"], summary["metrics"], "{settings}");
    }
}

#[test]
fn averaged_variables_are_the_mean_over_workers_and_frozen_ones_stay() {
    const JOB: &str = "epochs = 2\nsteps = 30\nseed = 7\n[model]\nname = \"normal\"\n[optimizer]\nname = \"sgd\"\n[[groups]]\nvariables = \"*.bias\"\nfrozen = true\n";
    // Neither kind has a moving average, so evaluations use their values.
    let given = format!(
        "batch_size = 32\nema_decay = 0.5\n{JOB}[strategy]\nmode = \"sync\"\n[cluster]\nps = 2\nworkers = 2\n"
    );
    let (_, dir) = train(&given, 2);
    let distributed = weights(&dir.path().join("run/model.safetensors"));

    let job = Job::from_toml(&format!("batch_size = 64\n{JOB}")).unwrap();
    let alone = dir.path().join("alone.safetensors");
    let registry = Registry::builtin().model::<tests::models::Normal>("normal");
    local::train(&job, &registry, &Device::Cpu, Some(&alone)).unwrap();
    let alone = weights(&alone);
    // The inputs are normalised, so the running mean depends on them alone. A frozen variable depends on the seed.
    for name in ["norm.running_mean", "norm.bias", "line.bias"] {
        let difference = (&distributed[name] - &alone[name]).unwrap();
        let difference = difference.abs().unwrap().max(0).unwrap();
        let difference = difference.to_scalar::<f32>().unwrap();
        assert!(difference < 1e-4, "{name} differs by {difference}");
    }
    let sum = |name: &str| {
        let sum = distributed[name].abs().unwrap().sum_all().unwrap();
        sum.to_scalar::<f32>().unwrap()
    };
    assert!(sum("norm.running_mean") > 1.0 && sum("line.bias") > 0.1);
}

/// Trains a few epochs with three workers, one of which takes five times as long for a step.
fn with_a_slow_worker(strategy: &str) -> (serde_json::Value, String) {
    let job = format!(
        "batch_size = 16\nsteps = 90\n[model]\nname = \"odd\"\n[strategy]\n{strategy}\n[cluster]\nps = 2\nworkers = 3\n"
    );
    let mut cluster = Cluster::start(program(), &job, 2);
    for milliseconds in ["40", "40", "200"] {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", milliseconds)]);
    }
    let mut waits = String::new();
    tests::eventually(|| {
        let output = program().run(&["status", "--coordinator", &cluster.coordinator.address()]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        for line in text.lines().filter(|line| line.contains(" waits for ")) {
            waits += line;
            waits += "\n";
        }
        text.contains("90 steps") || !output.status.success()
    });
    let logs: String = cluster.workers.iter().map(tests::Daemon::log).collect();
    let (summary, _dir) = cluster.finish();
    (summary, waits + &logs)
}

#[test]
fn no_worker_leads_by_more_than_the_bound_and_those_who_wait_say_for_whom() {
    let (summary, said) = with_a_slow_worker("mode = \"bounded\"\nstaleness = 2");
    assert_eq!(summary["max_clock_lead"], 2, "{summary}");
    assert!(said.contains("worker-0 waits for worker-2"), "{said}");
    assert!(
        said.contains("held back: waiting for others on=\"worker-2\""),
        "{said}"
    );
}

#[test]
fn servers_hold_a_worker_that_computes_ahead_to_the_bound() {
    let (summary, said) = with_a_slow_worker("mode = \"bounded\"\nstaleness = 2\npipeline = 1");
    assert_eq!(summary["max_clock_lead"], 2, "{summary}");
    assert_eq!(summary["pipeline"], 1, "{summary}");
    assert!(said.contains("worker-0 waits for worker-2"), "{said}");
}

/// The weights of a worker that trains alone lack its own newest update, and no other.
#[test]
fn the_staleness_of_a_worker_that_computes_ahead_is_measured() {
    for (pipeline, expected) in [(0, 0.0..0.01), (1, 0.5..1.0)] {
        let job = format!(
            "epochs = 2\n[model]\nname = \"odd\"\n[strategy]\npipeline = {pipeline}\n[cluster]\nps = 2\nworkers = 1\n"
        );
        let mut cluster = Cluster::start(program(), &job, 2);
        // The weights of the next step arrive within this time.
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "30")]);
        let (summary, dir) = cluster.finish();
        let staleness = summary["mean_gradient_staleness"].as_f64().unwrap();
        assert!(expected.contains(&staleness), "{pipeline}: {summary}");
        assert_eq!(summary["samples"], 2 * 1437);
        let run = std::fs::read_to_string(dir.path().join("run/summary.json")).unwrap();
        assert!(run.contains("\"pipeline\""), "{run}");
    }
}

/// Trains for several leases, in steps that each take a small part of one.
#[test]
fn reports_of_steps_renew_the_lease_in_place_of_heartbeats() {
    let job = "batch_size = 16\nsteps = 90\n[model]\nname = \"odd\"\n[cluster]\nps = 1\nworkers = 1\nlease_seconds = 1\n";
    let mut cluster = Cluster::start(program(), job, 1);
    cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "40")]);
    tests::eventually(|| {
        let output = program().run(&["status", "--coordinator", &cluster.coordinator.address()]);
        let text = String::from_utf8_lossy(&output.stdout);
        text.contains("90 steps") || !output.status.success()
    });
    let log = cluster.workers[0].log();
    let (summary, _dir) = cluster.finish();
    assert_eq!(summary["steps"], 90);
    assert!(log.contains("registered"), "{log}");
    assert!(!log.contains("registering again"), "{log}");
}

/// The worker's connections to the coordinator break again and again, while several of its reports are under way or have no reply.
#[test]
fn each_step_is_counted_once_though_the_connections_of_reports_break() {
    let job = "batch_size = 16\nepochs = 1\n[data]\nkind = \"random\"\noptions = { samples = 20000 }\n[cluster]\nps = 1\nworkers = 1\n[strategy]\nmode = \"async\"\n";
    let relay = Relay::start(Weather {
        delay: Duration::from_millis(30),
        life: Some(Duration::from_millis(700)),
        seed: 1,
    });
    let cluster = Cluster::start(program(), job, 1);
    relay.lead_to(&cluster.coordinator.address());
    let mut worker = cluster.member_at(&relay.address(), "worker", "worker-0", &[], &[]);
    // That of the server, and each new one of the worker, on which it only reports steps.
    let members = "flambeau_connections{port=\"coordinator\",standing=\"member\"}";
    eventually(|| relay.cuts() >= 1);
    let mut sightings = [0, 0];
    eventually(|| {
        let both = metric(&cluster.coordinator, members) > 1.0;
        sightings[usize::from(both)] += 1;
        relay.cuts() >= 3
    });
    assert!(sightings[1] > sightings[0], "{sightings:?}");
    let ended = worker.wait();
    assert!(ended.success(), "{}", worker.log());
    let (summary, _dir) = cluster.finish();
    assert_eq!(summary["steps"], 1250, "{summary}");
    assert_eq!(summary["samples"], 20_000, "{summary}");
    assert!(relay.cuts() >= 3, "only {} cuts", relay.cuts());
}

#[test]
fn without_a_bound_the_same_run_exceeds_it() {
    let (summary, said) = with_a_slow_worker("mode = \"async\"");
    assert!(summary["max_clock_lead"].as_u64().unwrap() > 2, "{summary}");
    assert!(!said.contains(" waits for "), "{said}");
}

/// With this rate and so many workers, a training in which gradients are applied as if they were new ends at chance.
#[test]
fn eight_workers_with_momentum_learn_in_bounded_mode() {
    const JOB: &str = r#"
epochs = 15
batch_size = 32
seed = 1
[model]
name = "mlp"
hidden = [64]
[optimizer]
name = "momentum"
learning_rate = 0.05
[cluster]
ps = 2
workers = 8
"#;
    let (summary, _dir) = train(JOB, 8);
    let accuracy = summary["metrics"]["accuracy"].as_f64();
    assert!(accuracy.unwrap() > 0.85, "{summary}");
}

#[test]
fn in_sync_mode_the_mean_over_all_workers_is_limited() {
    let trained = |limit: &str, batch: u32, workers: usize| {
        let job = format!(
            "epochs = 2\nbatch_size = {batch}\n{limit}\n[model]\nhidden = [16]\n[optimizer]\nname = \"sgd\"\n[strategy]\nmode = \"sync\"\n[cluster]\nps = 2\nworkers = {workers}\n"
        );
        let (_, dir) = train(&job, workers);
        weights(&dir.path().join("run/model.safetensors"))
    };
    let unlimited = trained("", 100, 1);
    for limit in [
        "clip_norm = 0.3",
        "clip_value = 0.01",
        "clip_norm = 0.2\nclip_value = 0.02",
    ] {
        let (one, two) = (trained(limit, 100, 1), trained(limit, 50, 2));
        let apart = difference(&two, &one);
        assert!(apart < 1e-5, "{limit}: {apart}");
        assert!(
            difference(&one, &unlimited) > 1e-3,
            "{limit} limits nothing"
        );
    }
}
