//! Servers that are cut off, replaced or stopped while a job trains. At the end the weights and the reported losses
//! must account for all of the work.

use std::time::Duration;

use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;
use tests::relay::{Relay, Weather};
use tests::{Cluster, Daemon, eventually};

use crate::program;

const SAMPLES: usize = 1500;
const VARIABLES: usize = 4;
const EPOCHS: usize = 2;

/// Writes a data set with as many classes as samples, so that each sample has an element of its own in each
/// variable. Returns its path.
fn data(dir: &TempDir) -> String {
    let path = dir.path().join("visits.csv");
    let rows: String = (0..SAMPLES).map(|i| format!("{i},{i}\n")).collect();
    std::fs::write(&path, format!("x,class\n{rows}")).unwrap();
    path.display().to_string()
}

fn job(mode: &str, pipeline: u32, data: &str) -> String {
    let bound = if mode == "bounded" {
        "staleness = 2"
    } else {
        ""
    };
    format!(
        r#"
name = "visits"
epochs = {EPOCHS}
batch_size = 1
[data]
kind = "csv"
dir = "{data}"
label = "class"
target = "class"
[model]
name = "visits"
[optimizer]
name = "sgd"
learning_rate = 1.0
[strategy]
mode = "{mode}"
pipeline = {pipeline}
# The weights count the pushes.
correction = {{ enabled = false }}
{bound}
[cluster]
ps = 2
workers = 2
lease_seconds = 2.0
[checkpoint]
every_seconds = 0.5
"#
    )
}

/// Returns the weights in a file of safetensors, by variable.
fn weights(path: &std::path::Path) -> Vec<(String, Vec<f32>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<_> = file
        .tensors()
        .into_iter()
        .map(|(name, tensor)| {
            let values = tensor.data().chunks_exact(4);
            let values = values.map(|v| f32::from_le_bytes(v.try_into().unwrap()));
            (name, values.collect())
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Trains in a mode, calls `replace` on the server of a shard during the training, and compares the final weights
/// with the samples that were trained on. Returns the summary.
fn replaced(
    mode: &str,
    replace: impl FnOnce(&mut Cluster, &Relay, &mut Daemon) -> Option<Daemon>,
) -> Value {
    replaced_ahead(mode, 0, replace)
}

/// Replaces a process of a job with `strategy.pipeline = pipeline`. Checks that the final weights match the samples that were trained on.
/// Returns the summary.
fn replaced_ahead(
    mode: &str,
    pipeline: u32,
    replace: impl FnOnce(&mut Cluster, &Relay, &mut Daemon) -> Option<Daemon>,
) -> Value {
    let files = TempDir::new().unwrap();
    let mut cluster = Cluster::start(program(), &job(mode, pipeline, &data(&files)), 1);
    let relay = Relay::start(Weather {
        delay: Duration::ZERO,
        life: None,
        seed: 0,
    });
    relay.lead_to(&cluster.coordinator.address());
    let mut server = cluster.member_at(&relay.address(), "ps-server", "ps-1", &[], &[]);
    for _ in 0..2 {
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "8")]);
    }
    let trained = |cluster: &Cluster| cluster.status()["samples"].as_u64().unwrap();
    eventually(|| {
        trained(&cluster) > 500 && cluster.status()["checkpoint"]["number"].as_u64() > Some(0)
    });
    let another = replace(&mut cluster, &relay, &mut server);
    cluster.ps.extend(another);
    let (summary, dir) = cluster.finish();
    drop(server);

    accounts_for_all(mode, &summary, &dir);
    summary
}

/// Checks that the final weights, and the last checkpoint, have each sample that was trained on, except those reported as lost.
fn accounts_for_all(mode: &str, summary: &Value, dir: &TempDir) {
    let run = dir.path().join("run");
    let model = weights(&run.join("model.safetensors"));
    let exported = dir.path().join("exported.safetensors");
    let (run, exported) = (run.to_str().unwrap(), exported.to_str().unwrap());
    let export = ["checkpoint", "export", run, "--output", exported];
    let export = program().run(&export);
    assert!(export.status.success(), "{export:?}");
    let last = weights(std::path::Path::new(exported));
    assert_eq!(last, model, "{mode}: the last checkpoint is not the model");

    // Each visit is there, or was reported lost.
    assert_eq!(model.len(), VARIABLES);
    let visits: f32 = model.iter().flat_map(|(_, values)| values).sum();
    let trained = summary["samples"].as_u64().unwrap();
    let expected = trained * VARIABLES as u64 - summary["lost_updates"].as_u64().unwrap();
    if mode == "sync" {
        // A step is the mean of all workers' gradients. It is applied whole or not at all.
        let steps = summary["steps"].as_u64().unwrap();
        assert!(
            (visits - (steps * VARIABLES as u64) as f32).abs() < 0.01,
            "{visits}: {summary}"
        );
        assert_eq!(summary["lost_updates"], 0);
    } else {
        assert_eq!(visits, expected as f32, "{mode}: {summary}");
    }
}

/// Cuts the connection between a server and the coordinator, while there is a spare.
fn cut_off(mode: &str) {
    let summary = replaced(mode, |cluster, relay, _| {
        let spare = cluster.member("ps-server", "spare", &[], &[]);
        relay.fall_silent();
        eventually(|| cluster.status()["shards"][1]["server"] == "ps-2");
        Some(spare)
    });
    println!("{mode}: {summary}");
}

#[test]
fn a_server_that_is_cut_off_is_not_used_any_more_in_async_mode() {
    cut_off("async");
}

#[test]
fn a_server_that_is_cut_off_is_not_used_any_more_in_bounded_mode() {
    cut_off("bounded");
}

#[test]
fn a_server_that_is_cut_off_is_not_used_any_more_in_sync_mode() {
    cut_off("sync");
}

/// A second server starts under the identity of the first one, which does not learn of it.
#[test]
fn a_server_whose_identity_is_taken_elsewhere_is_not_used_any_more() {
    let summary = replaced("async", |cluster, relay, _| {
        relay.fall_silent();
        Some(cluster.member("ps-server", "ps-1", &[], &[]))
    });
    println!("{summary}");
}

/// A rolling upgrade: a server is told to stop, and another process takes its place.
fn stopped(mode: &str) {
    let summary = replaced(mode, |cluster, _, server| {
        server.terminate();
        assert!(server.wait().success(), "{}", server.log());
        Some(cluster.member("ps-server", "ps-1", &[], &[]))
    });
    assert_eq!(summary["lost_updates"], 0, "{mode}: {summary}");
}

#[test]
fn a_server_that_is_stopped_and_started_again_loses_nothing() {
    stopped("async");
    stopped("bounded");
}

#[test]
fn the_same_in_sync_mode() {
    stopped("sync");
}

/// The updates of the servers are those that the workers have pushed, less those that were reported lost.
#[test]
fn a_server_that_dies_while_workers_compute_ahead_loses_what_is_reported() {
    for mode in ["bounded", "async"] {
        let summary = replaced_ahead(mode, 1, |cluster, _, server| {
            server.kill();
            Some(cluster.member("ps-server", "ps-1", &[], &[]))
        });
        assert_eq!(summary["pipeline"], 1, "{mode}: {summary}");
        let trained = summary["samples"].as_u64().unwrap();
        // A fifth of the samples is held out.
        assert_eq!(
            trained,
            (SAMPLES / 5 * 4 * EPOCHS) as u64,
            "{mode}: {summary}"
        );
    }
}

#[test]
fn a_server_that_stops_while_workers_compute_ahead_loses_nothing() {
    let summary = replaced_ahead("bounded", 1, |cluster, _, server| {
        server.terminate();
        assert!(server.wait().success(), "{}", server.log());
        Some(cluster.member("ps-server", "ps-1", &[], &[]))
    });
    assert_eq!(summary["lost_updates"], 0, "{summary}");
}

/// The connection to the coordinator is cut for longer than the lease, and no other server takes the shard.
#[test]
fn a_server_that_was_cut_off_comes_back_with_its_values() {
    for mode in ["async", "sync"] {
        let summary = replaced(mode, |cluster, relay, server| {
            relay.fall_silent();
            let waits_for = || cluster.status()["waiting_for"].to_string();
            eventually(|| waits_for().contains("has no server"));
            relay.speak_again();
            eventually(|| server.log().contains("registering again"));
            None
        });
        assert_eq!(summary["lost_updates"], 0, "{mode}: {summary}");
    }
}

/// The coordinator is killed and starts again without its run directory, so the job begins anew. The servers and workers have never stopped.
#[test]
fn a_run_that_begins_anew_has_nothing_of_the_run_before() {
    for (mode, in_ring) in [("async", false), ("sync", false), ("sync", true)] {
        let files = TempDir::new().unwrap();
        let mut job = job(mode, 0, &data(&files));
        if in_ring {
            job = job.replace(
                "mode = \"sync\"\npipeline = 0",
                "name = \"multi-worker-mirrored\"",
            );
            job = job.replace("ps = 2\n", "");
        }
        let mut cluster = Cluster::start(program(), &job, if in_ring { 0 } else { 2 });
        for _ in 0..2 {
            cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "4")]);
        }
        eventually(|| cluster.status()["samples"].as_u64().unwrap() > 500);
        cluster.coordinator.kill();
        // It is moved and not deleted, because servers may still write into it.
        let before = cluster.run_dir().with_extension("before");
        std::fs::rename(cluster.run_dir(), before).unwrap();
        cluster.restart_coordinator();
        let (summary, dir) = cluster.finish();
        accounts_for_all(mode, &summary, &dir);
        assert_eq!(summary["lost_updates"], 0, "{mode}: {summary}");
    }
}
