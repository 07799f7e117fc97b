//! Reads of rows for online inference: rows and scores are those of a checkpoint, and bad reads say what is wrong.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::Device;
use flambeau::{App, Lookup, Scorer, Scoring, Security};
use model::registry::Registry;
use shared_proto::job::Job;
use tests::{Cluster, eventually, free_address};
use worker::alone::local;

use crate::program;
use crate::tables::{job, of_run, recovers, write_ratings};

/// Returns the ids of a table's rows in the newest checkpoint of a cluster.
fn ids_of(cluster: &Cluster, table: &str) -> Vec<u64> {
    of_run(&cluster.run_dir())[table].keys().copied().collect()
}

/// Reads rows by `flambeau table`: of each id its values, none without a row.
fn looked_up(cluster: &Cluster, table: &str, ids: &[u64]) -> Option<BTreeMap<u64, Vec<f32>>> {
    let coordinator = cluster.coordinator.address();
    let ids: Vec<String> = ids.iter().map(u64::to_string).collect();
    let mut arguments = vec![
        "table",
        table,
        "get",
        "--json",
        "--coordinator",
        &coordinator,
    ];
    arguments.extend(ids.iter().map(String::as_str));
    let read = program().run(&arguments);
    let read: serde_json::Value = serde_json::from_slice(&read.stdout).ok()?;
    let rows = read["rows"].as_array()?.iter();
    let rows = rows.filter(|row| row["present"] == true).map(|row| {
        let values = row["values"].as_array().unwrap().iter();
        let values = values.map(|value| value.as_f64().unwrap() as f32);
        (row["id"].as_u64().unwrap(), values.collect())
    });
    Some(rows.collect())
}

#[test]
fn rows_are_read_from_running_servers_as_a_checkpoint_has_them() {
    let dir = tempfile::tempdir().unwrap();
    write_ratings(dir.path());
    let job = recovers(&job(dir.path(), "batch_size = 16\nepochs = 3"), "async", 2);
    let lookups = [
        "--lookup-listen",
        "127.0.0.1:0",
        "--table-mebibytes",
        "0",
        "--hottest-ids",
        "100",
    ];
    let mut cluster = Cluster::start_servers_with(program(), &job, 2, &lookups);
    for _ in 0..2 {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "10")]);
    }
    eventually(|| cluster.status()["tables"][0]["rows"] == 113);
    eventually(|| looked_up(&cluster, "items", &[1]).is_some());
    for worker in &mut cluster.workers {
        worker.kill();
    }
    check_heat(&cluster);
    // A server that is told to stop saves its rows. Readers find it again at its new address.
    cluster.ps[1].terminate();
    cluster.ps[1].wait();
    cluster.restart_ps_with(1, &lookups);

    let ids = ids_of(&cluster, "items");
    let mut found = BTreeMap::new();
    eventually(|| {
        found = looked_up(&cluster, "items", &ids).unwrap_or_default();
        found.len() == 113
    });
    let run = cluster.run_dir();
    let weights = exported_weights(&cluster);
    let data = dir.path().join("train.csv");
    let scores = scores(&mut scorer(&cluster, &data, &weights));
    let absent = looked_up(&cluster, "items", &[u64::MAX]).unwrap();
    assert!(absent.is_empty() && cluster.status()["tables"][0]["rows"] == 113);
    cluster.ps[0].terminate();
    cluster.ps[0].wait();
    let saved = of_run(&cluster.run_dir());
    for (id, row) in &saved["items"] {
        assert_eq!(&found[id][..], &row[..found[id].len()]);
    }
    assert_eq!(saved["items"].len(), 113);
    // Rows on servers give the scores that rows of the checkpoint give.
    let (run, data) = (run.to_str().unwrap(), data.to_str().unwrap());
    let predicted = program().run(&["predict", run, "--data-dir", data]);
    let predicted = String::from_utf8(predicted.stdout).unwrap();
    let predicted: Vec<f32> = predicted
        .lines()
        .skip(1)
        .map(|line| line.parse().unwrap())
        .collect();
    assert_eq!(scores, predicted);
    assert_eq!(scores.len(), 2000);
}

/// Checks the heat of a table with 113 rows. The servers keep the counts of all ids.
fn check_heat(cluster: &Cluster) {
    let coordinator = cluster.coordinator.address();
    let heat = |more: &[&str]| {
        let arguments = ["table", "items", "heat", "--coordinator", &coordinator];
        let shown = program().run(&[&arguments[..], more].concat());
        assert!(shown.status.success(), "{shown:?}");
        String::from_utf8(shown.stdout).unwrap()
    };
    // The last pushes of the killed workers may still be applied.
    let mut shown = String::new();
    eventually(|| {
        let before = std::mem::replace(&mut shown, heat(&["--json", "-n", "1000"]));
        std::thread::sleep(std::time::Duration::from_millis(200));
        before == shown
    });
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let sum = |list: &str, field: &str| -> u64 {
        let entries = shown[list].as_array().unwrap().iter();
        entries.map(|entry| entry[field].as_u64().unwrap()).sum()
    };
    // No id is left out, so each count is exact.
    let updated = sum("servers", "updated_rows");
    assert!(updated > 113 && sum("servers", "read_rows") >= updated);
    for (list, field) in [("buckets", "updated_rows"), ("ids", "updates")] {
        assert_eq!(sum(list, field), updated, "{list}");
    }
    assert_eq!(sum("buckets", "rows"), 113);
    assert_eq!(shown["ids"].as_array().unwrap().len(), 113);
    assert_eq!(sum("ids", "error"), 0);
    // Several ids may have the most updates, in any order.
    let most = shown["ids"][0]["updates"].to_string();
    let text = heat(&["-n", "1"]);
    let last = text.trim_end().lines().last().unwrap();
    assert_eq!(last.split_whitespace().nth(1), Some(&*most), "{text}");
}

/// Returns a model with these weights, and with rows on running servers.
fn scorer(cluster: &Cluster, data: &Path, weights: &Path) -> Scorer {
    let status = cluster.status();
    let shards = status["shards"].as_array().unwrap().iter();
    let address = |shard: &serde_json::Value| shard["lookup_address"].as_str().unwrap().to_owned();
    let scoring = Scoring {
        run_dir: cluster.run_dir(),
        data: Some(data.to_owned()),
        weights: weights.to_owned(),
        servers: shards.map(address).collect(),
        patience: std::time::Duration::from_secs(30),
        ..Scoring::default()
    };
    let app = App::new().model::<tests::models::Factors>("factors");
    app.scorer(&scoring).unwrap()
}

/// Returns the scores of all samples.
fn scores(scorer: &mut Scorer) -> Vec<f32> {
    let count = scorer.samples();
    let starts = (0..count).step_by(64);
    let scores = starts.flat_map(|start| scorer.scores(start..count.min(start + 64)).unwrap());
    scores.collect()
}

#[test]
fn scores_wait_for_a_server_that_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    write_ratings(dir.path());
    let job = recovers(&job(dir.path(), "batch_size = 16\nepochs = 30"), "async", 1);
    let address = free_address();
    let listen = ["--lookup-listen", &address];
    let mut cluster = Cluster::start_servers_with(program(), &job, 1, &listen);
    for _ in 0..2 {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "10")]);
    }
    eventually(|| cluster.status()["tables"][0]["rows"] == 113);
    for worker in &mut cluster.workers {
        worker.kill();
    }
    cluster.ps[0].terminate();
    cluster.ps[0].wait();
    cluster.restart_ps_with(0, &listen);
    let weights = exported_weights(&cluster);
    eventually(|| looked_up(&cluster, "items", &[1]).is_some());
    let data = dir.path().join("train.csv");
    let mut scorer = scorer(&cluster, &data, &weights);
    let before = scores(&mut scorer);
    cluster.ps[0].kill();
    cluster.restart_ps_with(0, &listen);
    assert_eq!(scores(&mut scorer), before);

    // More ids than fit into a request.
    let many: Vec<u64> = (0..150_000).collect();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let found = runtime.block_on(async {
        let patience = std::time::Duration::from_secs(30);
        let mut lookup = Lookup::new(&[address], &Security::default(), patience).unwrap();
        lookup.rows("items", &many).await.unwrap()
    });
    let rows = &of_run(&cluster.run_dir())["items"];
    let expected = many.iter().map(|id| rows.contains_key(id));
    assert!(found.present.into_iter().eq(expected));
}

/// Writes the weights of a cluster's newest checkpoint to where a finished run has them.
fn exported_weights(cluster: &Cluster) -> PathBuf {
    let run = cluster.run_dir();
    let weights = run.join("model.safetensors");
    let (from, to) = (run.to_str().unwrap(), weights.to_str().unwrap());
    let exported = program().run(&["checkpoint", "export", from, "--output", to]);
    assert!(exported.status.success(), "{exported:?}");
    // A run has its transforms once it is finished; those of another run with the same data are the same.
    let job = std::fs::read_to_string(run.join("job.toml")).unwrap();
    let job = Job {
        steps: Some(0),
        ..Job::parse(&job).unwrap()
    };
    let registry = Registry::builtin().model::<tests::models::Factors>("factors");
    let other = tempfile::tempdir().unwrap();
    let file = other.path().join("other.safetensors");
    local::train(&job, &registry, &Device::Cpu, Some(&file)).unwrap();
    let transforms = other.path().join("transforms.json");
    std::fs::copy(transforms, run.join("transforms.json")).unwrap();
    weights
}

#[test]
fn reads_of_rows_that_cannot_be_say_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    write_ratings(dir.path());
    let job = recovers(&job(dir.path(), "batch_size = 16\nepochs = 3"), "async", 1);
    let mut cluster = Cluster::start_with(program(), &job, 1, &[]);
    for _ in 0..2 {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "100")]);
    }
    let coordinator = cluster.coordinator.address();
    let get = |more: &[&str]| {
        let arguments = ["table", "goods", "get", "7", "--coordinator", &coordinator];
        let refused = program().run(&[&arguments[..], more].concat());
        assert!(!refused.status.success());
        String::from_utf8_lossy(&refused.stderr).into_owned()
    };
    eventually(|| cluster.status()["tables"][0]["rows"].as_u64() > Some(0));
    assert!(get(&[]).contains("--lookup-listen"));
    // A spare does not answer for the shard; the server that has it does.
    let listen = ["--lookup-listen", "127.0.0.1:0"];
    cluster.ps[0].kill();
    cluster.restart_ps_with(0, &listen);
    eventually(|| get(&[]).contains("no table \"goods\"; it has items, users"));
    // A port that does not answer is out of reach, not waited for without an end.
    let said = get(&["--servers", "127.0.0.1:1"]);
    let named = said.contains("the server at 127.0.0.1:1");
    assert!(said.contains("within 5 s") && named, "{said}");
}
