//! Embedding tables: rows on the servers equal those of a single process, whatever dies, and bad rows change nothing.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use candle_core::Device;
use checkpoint::CheckpointError;
use model::registry::Registry;
use model::tables::SavedTables;
use shared_proto::blocks::BlockId;
use shared_proto::job::Job;
use shared_proto::table::SavedRows;
use tests::{Cluster, Daemon, eventually};
use worker::alone::local;

use crate::program;
use crate::weights::{difference, weights};

/// The rows of each table by id: values and optimizer state.
pub(crate) type AllRows = BTreeMap<String, BTreeMap<u64, Vec<f32>>>;

/// Writes ratings of items by users, which depend on both. Some users and items are much more frequent than others.
pub(crate) fn write_ratings(folder: &Path) {
    let mut text = "user,item,rating\n".to_owned();
    for sample in 0..2000u64 {
        let user = sample * sample % 389 % (sample % 40 + 1);
        let item = (sample * 7919) % 113;
        let rating = ((user * 31 + item * 17) % 10) as f64 / 10.0 - 0.45;
        writeln!(text, "u{user},i{item},{rating}").unwrap();
    }
    std::fs::write(folder.join("train.csv"), text).unwrap();
}

/// Returns a job with tables; `more` has its other settings.
pub(crate) fn job(data: &Path, more: &str) -> String {
    format!(
        r#"
seed = 5
{more}
[data]
kind = "csv"
dir = "{}"
label = "rating"
target = "number"
[data.columns]
user = {{ type = "category", buckets = 100000 }}
item = {{ type = "category", buckets = 100000 }}
[model]
name = "factors"
[optimizer]
name = "sgd"
learning_rate = 0.1
"#,
        data.display()
    )
}

/// Adds the parts of a job that recovers.
pub(crate) fn recovers(job: &str, mode: &str, ps: usize) -> String {
    format!(
        "{job}[strategy]\nmode = \"{mode}\"\n[cluster]\nps = {ps}\nworkers = 2\nlease_seconds = 2.0\n[checkpoint]\nevery_steps = 20\n"
    )
}

fn start(job: &str, ps: usize, milliseconds: &str) -> Cluster {
    let mut cluster = Cluster::start(program(), job, ps);
    for _ in 0..2 {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", milliseconds)]);
    }
    cluster
}

fn by_id(saved: &SavedRows) -> impl Iterator<Item = (u64, Vec<f32>)> {
    let ids: Vec<u64> = saved
        .ids
        .as_chunks::<8>()
        .0
        .iter()
        .map(|id| u64::from_le_bytes(*id))
        .collect();
    let numbers: Vec<f32> = saved
        .numbers
        .as_chunks::<4>()
        .0
        .iter()
        .map(|number| f32::from_le_bytes(*number))
        .collect();
    let width = numbers.len() / ids.len().max(1);
    let rows: Vec<Vec<f32>> = numbers.chunks(width.max(1)).map(<[f32]>::to_vec).collect();
    ids.into_iter().zip(rows)
}

pub(crate) fn of_local(saved: &SavedTables) -> AllRows {
    let table = |(name, buckets): (&String, &BTreeMap<u32, Vec<SavedRows>>)| {
        (
            name.clone(),
            buckets.values().flatten().flat_map(by_id).collect(),
        )
    };
    saved.iter().map(table).collect()
}

/// Reads the rows of a run's newest checkpoint.
pub(crate) fn of_run(run: &Path) -> AllRows {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let (store, manifest) = checkpoint::load(run.to_str().unwrap()).await.unwrap();
        let mut all = AllRows::new();
        let first = manifest.variables.len() as u32;
        let add = |id: BlockId, rows| {
            let table = &manifest.tables[(id.variable - first) as usize];
            all.entry(table.name.clone())
                .or_default()
                .extend(by_id(&rows));
            Ok::<_, CheckpointError>(())
        };
        let of_tables = |id: BlockId| id.variable >= first;
        let read = store.read_rows(&manifest, of_tables, add, |_| {});
        read.await.unwrap();
        all
    })
}

/// Checks that there are the same rows, and returns the largest difference of their numbers.
pub(crate) fn row_difference(found: &AllRows, expected: &AllRows) -> f32 {
    assert!(found.keys().eq(expected.keys()));
    let mut largest = 0f32;
    for (found, expected) in found.values().zip(expected.values()) {
        assert!(found.keys().eq(expected.keys()), "other rows");
        for (found, expected) in found.values().zip(expected.values()) {
            for (found, expected) in found.iter().zip(expected) {
                largest = largest.max((found - expected).abs());
            }
        }
    }
    largest
}

#[test]
fn sync_with_two_workers_equals_one_process_with_twice_the_batch() {
    let dir = tempfile::tempdir().unwrap();
    write_ratings(dir.path());
    for policy in [
        "",
        "[[tables]]\ntables = \"users\"\noptimizer = { name = \"row-adagrad\", learning_rate = 0.3 }\nadmission = { sights = { count = 3, width = 4096 } }\neviction = { age = { updates = 20 }, search_interval = 3 }\n[[tables]]\ntables = \"items\"\noptimizer = { name = \"adam\", learning_rate = 0.01 }\neviction = { capacity = { rows = 60, order = \"rarest\" } }\n",
    ] {
        let distributed = job(dir.path(), "batch_size = 16\nsteps = 60\nepochs = 5");
        let distributed = recovers(&format!("{distributed}{policy}"), "sync", 2);
        let (summary, run) = start(&distributed, 2, "0").finish();
        assert_eq!(summary["steps"], 60);
        let run = run.path().join("run");

        let alone = job(dir.path(), "batch_size = 32\nsteps = 60\nepochs = 5");
        let alone = Job::from_toml(&format!("{alone}{policy}")).unwrap();
        let registry = Registry::builtin().model::<tests::models::Factors>("factors");
        let path = dir.path().join("alone.safetensors");
        let outcome = local::train(&alone, &registry, &Device::Cpu, Some(&path)).unwrap();
        let model = weights(&run.join("model.safetensors"));
        assert!(difference(&model, &weights(&path)) < 1e-5);
        let (found, expected) = (of_run(&run), of_local(&outcome.tables));
        let difference = row_difference(&found, &expected);
        assert!(difference < 1e-5, "{difference}");
        assert!(found["users"].len() > 10 && found["items"].len() > 20);
        let loss = summary["test_loss"].as_f64().unwrap();
        assert!((loss - outcome.metrics["loss"]).abs() < 1e-5, "{loss}");

        // Another process finds the same rows in the last checkpoint.
        let run = run.to_str().unwrap();
        let evaluated = program().run(&["eval", "--json", run]);
        let evaluated: serde_json::Value = serde_json::from_slice(&evaluated.stdout).unwrap();
        assert_eq!(evaluated["metrics"], summary["metrics"]);
        let predicted = program().run(&[
            "predict",
            run,
            "--data-dir",
            dir.path().join("train.csv").to_str().unwrap(),
        ]);
        assert!(predicted.status.success(), "{predicted:?}");
    }
}

/// Returns a job in sync mode with these policies, and the summary and the rows of a run that nothing disturbs.
fn undisturbed(folder: &Path, policy: &str) -> (String, serde_json::Value, AllRows) {
    write_ratings(folder);
    let job = job(folder, "batch_size = 16\nepochs = 2");
    let job = recovers(&format!("{job}{policy}"), "sync", 2);
    let (summary, run) = start(&job, 2, "0").finish();
    let rows = of_run(&run.path().join("run"));
    (job, summary, rows)
}

#[test]
fn in_sync_mode_rows_are_the_same_whatever_dies() {
    let dir = tempfile::tempdir().unwrap();
    let policy = "optimizer = { name = \"row-adagrad\", learning_rate = 0.3 }\nadmission = { sights = { count = 2, width = 4096 } }\neviction = { age = { updates = 15 }, search_interval = 4 }\n";
    // Values of 16 bits are rounded by chance, which is the same after a restore.
    let policy = &format!(
        "[[tables]]\ntables = \"users\"\nstorage = \"bf16\"\n{policy}[[tables]]\ntables = \"*\"\n{policy}"
    );
    let (job, expected, expected_rows) = undisturbed(dir.path(), policy);

    let mut cluster = start(&job, 2, "30");
    let samples = |cluster: &Cluster| cluster.status()["samples"].as_u64().unwrap();
    eventually(|| samples(&cluster) > 700);
    cluster.ps[1].kill();
    cluster.restart_ps(1);
    eventually(|| samples(&cluster) > 1200);
    cluster.coordinator.kill();
    cluster.restart_coordinator();
    cluster.workers[0].kill();
    cluster.restart_worker(0, &[("TEST_STEP_MILLISECONDS", "30")]);
    eventually(|| samples(&cluster) > 1800);
    for server in [0, 1] {
        cluster.ps[server].kill();
    }
    for server in [0, 1] {
        cluster.restart_ps(server);
    }
    let (summary, run) = cluster.finish();
    assert_eq!(summary["samples"], expected["samples"]);
    // The killed worker's samples come in other steps, so only the rows that there are can be compared.
    let rows = of_run(&run.path().join("run"));
    assert!(rows["users"].len().abs_diff(expected_rows["users"].len()) <= 10);

    // Without a killed worker, all is equal, bit for bit.
    let mut cluster = start(&job, 2, "30");
    eventually(|| samples(&cluster) > 900);
    cluster.ps[0].kill();
    cluster.restart_ps(0);
    eventually(|| samples(&cluster) > 2000);
    cluster.ps[1].kill();
    cluster.restart_ps(1);
    let (summary, run) = cluster.finish();
    assert_eq!(summary["metrics"], expected["metrics"]);
    let rows = of_run(&run.path().join("run"));
    assert_eq!(row_difference(&rows, &expected_rows), 0.0);
}

#[test]
fn a_table_goes_on_from_a_checkpoint_on_other_shards() {
    let dir = tempfile::tempdir().unwrap();
    write_ratings(dir.path());
    let settings = job(dir.path(), "batch_size = 16\nepochs = 2");
    let (_, whole) = start(&recovers(&settings, "sync", 2), 2, "0").finish();
    let expected = of_run(&whole.path().join("run"));
    let half = job(dir.path(), "steps = 40\nbatch_size = 16\nepochs = 2");
    let (_, first) = start(&recovers(&half, "sync", 2), 2, "0").finish();
    let run = first.path().join("run");
    let restore = ["--restore", run.to_str().unwrap()];
    let three = recovers(&settings, "sync", 3);
    let mut cluster = Cluster::start_coordinator_with(program(), &three, 3, &restore);
    for _ in 0..2 {
        cluster.add_worker(&[]);
    }
    let (_, last) = cluster.finish();
    let rows = of_run(&last.path().join("run"));
    assert_eq!(row_difference(&rows, &expected), 0.0, "bit for bit");
}

#[test]
fn rows_train_in_the_other_modes_and_outlive_their_servers() {
    let dir = tempfile::tempdir().unwrap();
    write_ratings(dir.path());
    for mode in ["bounded", "async"] {
        let job = recovers(&job(dir.path(), "batch_size = 16\nepochs = 3"), mode, 2);
        let mut cluster = start(&job, 2, "10");
        eventually(|| cluster.status()["samples"].as_u64() > Some(1500));
        eventually(|| {
            let items = &cluster.status()["tables"][0];
            items["table"] == "items" && items["rows"] == 113 && items["created"] == 113
        });
        cluster.ps[0].kill();
        cluster.restart_ps(0);
        let (summary, run) = cluster.finish();
        assert_eq!(summary["samples"], 3 * 1600, "{summary}");
        let rows = of_run(&run.path().join("run"));
        // Each id of the training data has a row.
        assert!(rows["items"].len() == 113, "{}", rows["items"].len());
        let metrics = summary["test_loss"].as_f64().unwrap();
        assert!(metrics < 0.09, "{summary}");
    }
}

#[test]
fn rows_on_disk_are_those_that_memory_would_have_also_after_kills() {
    let dir = tempfile::tempdir().unwrap();
    let policy = "[[tables]]\ntables = \"*\"\noptimizer = { name = \"row-adagrad\", learning_rate = 0.3 }\neviction = { age = { updates = 15 }, search_interval = 4 }\n";
    let (job, expected, expected_rows) = undisturbed(dir.path(), policy);

    // Each row goes to disk when its update is over.
    let folder = dir.path().to_str().unwrap();
    let no_memory = ["--table-mebibytes", "0", "--table-folder", folder];
    let mut cluster = Cluster::start_servers_with(program(), &job, 2, &no_memory);
    for _ in 0..2 {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "30")]);
    }
    let samples = |cluster: &Cluster| cluster.status()["samples"].as_u64().unwrap();
    eventually(|| samples(&cluster) > 900);
    eventually(|| cluster.status()["tables"][0]["on_disk"].as_u64() > Some(0));
    cluster.ps[0].kill();
    cluster.restart_ps_with(0, &no_memory);
    eventually(|| samples(&cluster) > 2000);
    // The next server has memory for all rows.
    cluster.ps[1].kill();
    cluster.restart_ps(1);
    let (summary, run) = cluster.finish();
    assert_eq!(summary["metrics"], expected["metrics"]);
    let rows = of_run(&run.path().join("run"));
    assert_eq!(row_difference(&rows, &expected_rows), 0.0, "bit for bit");
    let names = std::fs::read_dir(dir.path()).unwrap();
    assert_eq!(names.count(), 1, "rows are in files without names");
}

/// Empties the files in which a server has rows.
fn lose_rows(server: &Daemon, folder: &str) {
    let files = format!("/proc/{}/fd", server.process());
    let mut lost = 0;
    for file in std::fs::read_dir(files).unwrap() {
        let path = file.unwrap().path();
        let target = std::fs::read_link(&path).unwrap_or_default();
        let target = target.to_string_lossy().into_owned();
        if target.starts_with(folder) && target.ends_with("(deleted)") {
            let file = std::fs::OpenOptions::new().write(true).open(&path);
            file.unwrap().set_len(0).unwrap();
            lost += 1;
        }
    }
    assert!(lost > 0, "the server has no rows on disk");
}

#[test]
fn a_server_whose_rows_cannot_be_read_ends_and_its_shard_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    write_ratings(dir.path());
    let folder = dir.path().to_str().unwrap();
    let no_memory = ["--table-mebibytes", "0", "--table-folder", folder];
    for mode in ["async", "sync"] {
        let job = recovers(&job(dir.path(), "batch_size = 16\nepochs = 2"), mode, 2);
        let (expected, whole) = start(&job, 2, "0").finish();
        let mut cluster = Cluster::start_servers_with(program(), &job, 2, &no_memory);
        for _ in 0..2 {
            cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "20")]);
        }
        eventually(|| cluster.status()["samples"].as_u64() > Some(900));
        eventually(|| cluster.status()["tables"][0]["on_disk"].as_u64() > Some(0));
        lose_rows(&cluster.ps[0], folder);
        let status = cluster.ps[0].wait();
        assert!(!status.success(), "{mode}: {status}");
        let log = cluster.ps[0].log();
        assert!(log.contains("rows on disk cannot be read"), "{mode}: {log}");
        cluster.restart_ps_with(0, &no_memory);
        let (summary, run) = cluster.finish();
        let rows = of_run(&run.path().join("run"));
        assert_eq!(rows["items"].len(), 113, "{mode}");
        if mode == "sync" {
            assert_eq!(summary["metrics"], expected["metrics"]);
            let expected = of_run(&whole.path().join("run"));
            assert_eq!(row_difference(&rows, &expected), 0.0, "bit for bit");
        }
    }
}

#[test]
fn a_folder_that_takes_no_rows_is_refused_at_once() {
    let arguments = [
        "--table-mebibytes",
        "1",
        "--table-folder",
        "/no/such/folder",
    ];
    let refused = program().run(&[&["ps-server"][..], &arguments[..]].concat());
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr);
    let expected = "cannot write rows to /no/such/folder";
    assert!(
        said.contains(expected) && said.contains("--table-folder"),
        "{said}"
    );
}
