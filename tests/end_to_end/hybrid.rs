//! The strategy `hybrid`: dense variables on the workers of a ring, tables on servers.

use std::fmt::Write as _;
use std::path::Path;

use candle_core::Device;
use model::registry::Registry;
use shared_proto::job::Job;
use tests::{Cluster, eventually};
use worker::alone::local;

use crate::program;
use crate::rings::is_once;
use crate::tables::{self, of_local, of_run, row_difference};
use crate::weights::{difference, weights};

/// Returns the parts of a job that choose the strategy, with two servers.
fn hybrid(mode: &str, workers: usize) -> String {
    format!(
        "[strategy]\nname = \"hybrid\"\nmode = \"{mode}\"\n[cluster]\nps = 2\nworkers = {workers}\nlease_seconds = 2.0\n[checkpoint]\nevery_steps = 20\n"
    )
}

/// Starts a cluster of two servers and some workers. A step takes so many milliseconds.
fn start(job: &str, workers: usize, milliseconds: &str) -> Cluster {
    let mut cluster = Cluster::start(program(), job, 2);
    for _ in 0..workers {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", milliseconds)]);
    }
    cluster
}

/// Trains in sync mode with two workers, and in one process with twice the batch. Checks that dense variables and rows are equal.
fn check_equality(job: impl Fn(usize) -> String, strategy: &str, registry: &Registry) {
    let distributed = format!("{}{strategy}", job(16));
    let (summary, run) = start(&distributed, 2, "0").finish();
    assert_eq!(summary["steps"], 50);
    let run = run.path().join("run");
    let alone = Job::from_toml(&job(32)).unwrap();
    let path = run.join("alone.safetensors");
    let outcome = local::train(&alone, registry, &Device::Cpu, Some(&path)).unwrap();
    let dense = difference(&weights(&run.join("model.safetensors")), &weights(&path));
    let rows = row_difference(&of_run(&run), &of_local(&outcome.tables));
    assert!(
        dense < 1e-5 && rows < 1e-5,
        "{dense} in dense variables, {rows} in rows"
    );
    let loss = summary["test_loss"].as_f64().unwrap();
    assert!((loss - outcome.metrics["loss"]).abs() < 1e-5, "{loss}");
}

#[test]
fn two_workers_in_sync_mode_equal_one_process_with_twice_the_batch() {
    let dir = tempfile::tempdir().unwrap();
    tables::write_ratings(dir.path());
    let policy = "[[tables]]\ntables = \"users\"\noptimizer = { name = \"row-adagrad\", learning_rate = 0.3 }\n[[tables]]\ntables = \"items\"\noptimizer = { name = \"adam\", learning_rate = 0.01 }\n";
    let ratings = |batch| {
        let more = format!("batch_size = {batch}\nsteps = 50\nepochs = 5");
        format!("{}{policy}", tables::job(dir.path(), &more))
    };
    let registry = Registry::builtin().model::<tests::models::Factors>("factors");
    check_equality(ratings, &hybrid("sync", 2), &registry);

    check_equality(clicks, &hybrid("sync", 2), &Registry::builtin());
}

/// A job with generated clicks, without its strategy.
fn clicks(batch: usize) -> String {
    format!(
        "seed = 3\nbatch_size = {batch}\nsteps = 50\n[data]\nkind = \"clicks\"\n[data.options]\nsamples = 4000\nrows = 500\nfields = 5\n[model]\nname = \"deepfm\"\nembedding = 4\nhidden = [16]\n[optimizer]\nname = \"adam\"\n[[tables]]\ntables = \"*\"\noptimizer = {{ name = \"row-adagrad\", learning_rate = 0.1 }}\n"
    )
}

#[test]
fn gradients_in_several_buckets_beside_tables_equal_those_of_one_process() {
    // The layer has 33 * 16 weights, so it has a bucket of its own.
    let strategy = hybrid("sync", 2);
    let strategy = strategy.replace("[cluster]", "bucket_mebibytes = 0.001\n[cluster]");
    check_equality(clicks, &strategy, &Registry::builtin());
}

#[test]
fn batches_are_normalised_together_beside_tables() {
    let dir = tempfile::tempdir().unwrap();
    tables::write_ratings(dir.path());
    let job = |batch| {
        let more = format!("batch_size = {batch}\nsteps = 50\nepochs = 5");
        tables::job(dir.path(), &more).replace("\"factors\"", "\"normal-factors\"")
    };
    let strategy = hybrid("sync", 2);
    let strategy = strategy.replace("[cluster]", "batch_norm = \"synchronised\"\n[cluster]");
    let registry = Registry::builtin().model::<tests::models::NormalFactors>("normal-factors");
    check_equality(job, &strategy, &registry);
}

/// Returns a job in which each sample has a class and a row of its own.
fn visits(folder: &Path, samples: usize) -> String {
    let mut text = "label,id,x\n".to_owned();
    for sample in 0..samples {
        writeln!(text, "{sample},{sample},0.5").unwrap();
    }
    std::fs::write(folder.join("train.csv"), &text).unwrap();
    std::fs::write(folder.join("test.csv"), &text).unwrap();
    format!(
        "epochs = 1\nbatch_size = 1\n[data]\nkind = \"csv\"\ndir = {folder:?}\nlabel = \"label\"\ntarget = \"class\"\n[data.columns]\nid = {{ type = \"id\", hash = false }}\n[model]\nname = \"row-visits\"\n[optimizer]\nname = \"sgd\"\nlearning_rate = 1.0\n"
    )
}

/// Returns how often each sample has been visited: in the dense variable, and in its row.
fn visited(run: &Path, samples: usize) -> Vec<(f32, f32)> {
    let dense = weights(&run.join("model.safetensors"))["dense"].to_vec1::<f32>();
    let dense = dense.unwrap();
    let rows = of_run(run);
    let row = |sample: usize| rows["rows"].get(&(sample as u64)).map_or(0.0, |row| row[0]);
    (0..samples)
        .map(|sample| (dense[sample], row(sample)))
        .collect()
}

const SAMPLES: usize = 400;

fn samples(cluster: &Cluster) -> u64 {
    cluster.status()["samples"].as_u64().unwrap()
}

/// Kills and restarts workers, servers and the coordinator while two workers train. Returns the folder of the run.
fn disturbed(mode: &str) -> tempfile::TempDir {
    let data = tempfile::tempdir().unwrap();
    let job = format!("{}{}", visits(data.path(), SAMPLES), hybrid(mode, 2));
    let slow = [("TEST_STEP_MILLISECONDS", "20")];
    let mut cluster = start(&job, 2, "20");
    eventually(|| samples(&cluster) > 60);
    cluster.workers[1].kill();
    cluster.restart_worker(1, &slow);
    eventually(|| samples(&cluster) > 120);
    cluster.ps[0].kill();
    cluster.restart_ps(0);
    eventually(|| samples(&cluster) > 180);
    cluster.coordinator.kill();
    cluster.restart_coordinator();
    cluster.workers[0].kill();
    cluster.restart_worker(0, &slow);
    eventually(|| samples(&cluster) > 240);
    // All workers at once: the job goes back to a checkpoint.
    for worker in 0..2 {
        cluster.workers[worker].kill();
    }
    for worker in 0..2 {
        cluster.restart_worker(worker, &slow);
    }
    eventually(|| samples(&cluster) > 280);
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["samples"], SAMPLES, "{summary}");
    dir
}

#[test]
fn in_sync_mode_each_sample_counts_once_in_dense_variables_and_rows_whoever_dies() {
    let dir = disturbed("sync");
    for (sample, (dense, row)) in visited(&dir.path().join("run"), SAMPLES)
        .into_iter()
        .enumerate()
    {
        assert!(is_once(dense), "sample {sample}: {dense}");
        assert!(
            (dense - row).abs() < 1e-6,
            "sample {sample}: {dense} in dense variables, {row} in rows"
        );
    }
}

#[test]
fn in_async_mode_dense_variables_count_each_sample_once_whoever_dies() {
    let dir = disturbed("async");
    let visits = visited(&dir.path().join("run"), SAMPLES);
    for (sample, (dense, _)) in visits.iter().enumerate() {
        assert!(is_once(*dense), "sample {sample}: {dense}");
    }
    // A server that is killed loses updates, and an abandoned step repeats its rows; both are few.
    let (lost, repeated) = (
        visits.iter().filter(|(_, row)| *row < 1.0).count(),
        visits.iter().filter(|(_, row)| *row > 1.0).count(),
    );
    assert!(
        lost < SAMPLES / 4 && repeated <= 16,
        "{lost} lost, {repeated} repeated"
    );
}

#[test]
fn a_worker_that_dies_takes_nothing_back() {
    let data = tempfile::tempdir().unwrap();
    for mode in ["sync", "async"] {
        let job = format!("{}{}", visits(data.path(), SAMPLES), hybrid(mode, 3));
        let slow = [("TEST_STEP_MILLISECONDS", "10")];
        let mut cluster = start(&job, 3, "10");
        for worker in [2, 0] {
            let before = samples(&cluster);
            eventually(|| samples(&cluster) > before + 60);
            cluster.workers[worker].kill();
            cluster.restart_worker(worker, &slow);
        }
        let (summary, dir) = cluster.finish();
        assert_eq!(summary["samples"], SAMPLES, "{summary}");
        let run = dir.path().join("run");
        let events = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        assert!(!events.contains("\"restored\""), "{events}");
        for (sample, (dense, row)) in visited(&run, SAMPLES).into_iter().enumerate() {
            assert!(is_once(dense), "sample {sample}: {dense}");
            let same = (dense - row).abs() < 1e-6;
            assert!(
                same || mode == "async" && row >= 1.0,
                "sample {sample}: {dense} and {row}"
            );
        }
    }
}

#[test]
fn rows_train_in_each_mode() {
    let dir = tempfile::tempdir().unwrap();
    tables::write_ratings(dir.path());
    for mode in ["bounded", "async"] {
        let job = tables::job(dir.path(), "batch_size = 16\nepochs = 3\nema_decay = 0.9");
        let (summary, run) = start(&format!("{job}{}", hybrid(mode, 3)), 3, "2").finish();
        assert_eq!(summary["samples"], 3 * 1600, "{summary}");
        assert_eq!(summary["lost_updates"].as_u64().unwrap_or(0), 0);
        assert_eq!(of_run(&run.path().join("run"))["items"].len(), 113);
        assert!(summary["test_loss"].as_f64().unwrap() < 0.09, "{summary}");
    }
}

#[test]
fn a_job_with_tables_moves_between_strategies_by_its_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    tables::write_ratings(dir.path());
    let settings = |steps: usize| {
        let more = format!("batch_size = 16\nepochs = 5\nsteps = {steps}");
        tables::job(dir.path(), &more)
    };
    let served = |steps| tables::recovers(&settings(steps), "sync", 2);
    let hybrid = |steps| format!("{}{}", settings(steps), hybrid("sync", 2));
    let train = |job: &str, from: Option<&Path>| {
        let restore = from.map(|from| ["--restore", from.to_str().unwrap()]);
        let restore = restore.as_ref().map_or(&[][..], |arguments| arguments);
        let mut cluster = Cluster::start_coordinator_with(program(), job, 2, restore);
        for _ in 0..2 {
            cluster.add_worker(&[]);
        }
        cluster.finish().1
    };
    let whole = train(&served(60), None);
    let whole = whole.path().join("run");
    for (name, first, second) in [
        ("served to hybrid", served(33), hybrid(60)),
        ("hybrid to served", hybrid(33), served(60)),
        ("hybrid to hybrid", hybrid(33), hybrid(60)),
    ] {
        let before = train(&first, None);
        let after = train(&second, Some(&before.path().join("run")));
        let run = after.path().join("run");
        let model = |run: &Path| weights(&run.join("model.safetensors"));
        let dense = difference(&model(&run), &model(&whole));
        assert!(dense < 1e-5, "{name}: {dense}");
        let rows = row_difference(&of_run(&run), &of_run(&whole));
        assert!(rows < 1e-5, "{name}: {rows}");
    }
}

#[test]
fn a_model_without_tables_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let arguments = [
        "train",
        "--strategy",
        "hybrid",
        "--run-dir",
        run.to_str().unwrap(),
    ];
    let output = program().run(&arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success()
            && said.contains("the model has no tables, so `strategy.name = \"hybrid\"`"),
        "{said}"
    );
}
