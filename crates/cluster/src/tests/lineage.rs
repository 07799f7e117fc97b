//! Manifests, jobs that begin with a checkpoint, and the checkpoints that they may go back to.

use checkpoint::Manifest;

use super::*;
use crate::{CheckpointPlace, SavedProgress, StoreTask};

fn of_run(run_id: &str) -> CheckpointPlace {
    CheckpointPlace {
        location: "here".to_owned(),
        run_id: run_id.to_owned(),
    }
}

fn file(name: &str) -> wire::CheckpointFile {
    wire::CheckpointFile {
        name: name.to_owned(),
        bytes: 7,
        sha256: "ab".to_owned(),
        blocks: vec![wire::BlockRange {
            variable: 0,
            first: 1,
            last: 2,
        }],
        changes: Vec::new(),
    }
}

/// The manifest of checkpoint 1 of run "first", after two steps of one worker, with two servers.
fn manifest() -> Manifest {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    scene.cluster.saving.place = Some(of_run("first"));
    scene.finish(worker);
    scene.finish(worker);
    scene.pass(31, &[servers[0], servers[1], worker]);
    let order = scene.cluster.refresh_view().checkpoint.unwrap();
    for (shard, name) in [(1, "b"), (0, "a")] {
        let report = wire::CheckpointReport {
            number: order.number,
            shard,
            files: vec![file(name)],
            ..wire::CheckpointReport::default()
        };
        let server = servers[shard as usize];
        scene.cluster.shard_saved(scene.now, server, report);
    }
    match scene.cluster.take_store_task() {
        Some(StoreTask::Write(manifest, _)) => *manifest,
        other => panic!("{other:?}"),
    }
}

fn progress(manifest: &Manifest) -> SavedProgress {
    serde_json::from_value(manifest.progress.clone()).unwrap()
}

/// A job of another run that begins with the checkpoint.
fn begun_with(manifest: &Manifest) -> Scene {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    scene.cluster = scene.cluster.with_checkpoints(of_run("second"), 2);
    scene
        .cluster
        .start_from("there".to_owned(), manifest, progress(manifest));
    scene
}

#[test]
fn a_manifest_says_where_the_training_stood_and_what_lies_where() {
    let manifest = manifest();
    assert_eq!((manifest.number, manifest.run.as_str()), (1, "first"));
    assert_eq!((manifest.steps, manifest.samples), (2, 10));
    assert_eq!((manifest.clock, manifest.epoch), (2, 1));
    let slots = manifest.variables.iter().map(|variable| variable.slots);
    assert_eq!((manifest.shards, slots.max()), (2, Some(2)));
    assert_eq!(manifest.mode, "async");
    let files: Vec<_> = manifest.files.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(files, ["a", "b"]);
    let blocks = &manifest.files[0].blocks[0];
    assert_eq!((blocks.variable, blocks.first, blocks.last), (0, 1, 2));
    assert_eq!(progress(&manifest).clock, Clock(2));
}

#[test]
fn a_job_that_begins_with_a_checkpoint_goes_on_where_that_stood() {
    let manifest = manifest();
    let mut scene = begun_with(&manifest);
    assert_eq!(scene.cluster.run_id(), "second");
    let server = scene.join(Role::Ps, "ps");
    let worker = scene.join(Role::Worker, "w");
    // The marks in the blocks are those of generation 1.
    assert_eq!((server.generation.0, worker.generation.0), (2, 2));
    assert_eq!(scene.variables(worker), Initialization::Done);
    let source = &scene.cluster.shard_map().unwrap().shards[0].source;
    assert_eq!(source.checkpoint, Some(("there".to_owned(), 1)));
    assert_eq!(source.run, "first");
    assert_eq!(scene.cluster.durable.done(), (2, 10));
    assert!(scene.cluster.missing().contains("is loading"));
    scene.restored_without_losses(server);
    scene.work(worker);
    scene.cluster.tick(scene.now);
    // Training begins once this run has written a checkpoint of its own.
    let order = scene.cluster.refresh_view().checkpoint;
    assert_eq!(order.map(|order| order.number), Some(2));
    scene.write(&[server], "");
    let (split, clock) = scene.split(worker);
    assert_eq!((split.start, clock), (10, Clock(2)));
    // The rate is that of this run.
    scene.now += Duration::from_secs(1);
    scene.finish(worker);
    let summary = scene.cluster.summary(scene.now);
    assert_eq!((summary.samples, summary.samples_per_second), (15, 5.0));
}

#[test]
fn a_worker_with_another_model_or_other_data_than_the_checkpoint_is_refused() {
    let mut scene = begun_with(&manifest());
    scene.join(Role::Ps, "ps");
    let worker = scene.join(Role::Worker, "w");
    let model = |names: &[&str]| -> Vec<VariableSpec> {
        let spec = |name: &&str| VariableSpec {
            name: (*name).to_owned(),
            shape: vec![4],
            ..VariableSpec::default()
        };
        names.iter().map(spec).collect()
    };
    for (names, samples, reason) in [
        (&["w"][..], SAMPLES + 1, Reason::DataDiffers),
        (&["v"], SAMPLES, Reason::VariablesDiffer),
        (&["w", "x"], SAMPLES, Reason::VariablesDiffer),
    ] {
        let data = data(samples, 7);
        let cluster = &mut scene.cluster;
        let refused = cluster.register_variables(scene.now, worker, model(names), data);
        assert_eq!(refused.unwrap_err().reason, reason, "{names:?}");
    }
    assert_eq!(scene.variables(worker), Initialization::Done);
}

#[test]
fn a_job_goes_back_only_to_checkpoints_that_its_training_went_through() {
    let first = manifest();
    let lineage = begun_with(&first).cluster.lineage();
    let with = |number, run: &str| Manifest {
        number,
        run: run.to_owned(),
        ..first.clone()
    };
    for (location, manifest, had) in [
        // The job's own checkpoints, at any location.
        ("here", with(7, "second"), true),
        // The checkpoint that the job began with, and those before it.
        ("there", with(1, "first"), true),
        ("there", with(0, "first"), true),
        // The earlier run continued after it.
        ("there", with(2, "first"), false),
        // A run of that name elsewhere, and another one there.
        ("here", with(1, "first"), false),
        ("there", with(1, "third"), false),
        // Earlier releases name no run.
        ("there", with(9, ""), true),
    ] {
        let run = &manifest.run;
        assert_eq!(lineage.has(location, &manifest), had, "{location}, {run:?}");
    }
    // A job that began with no checkpoint has those of its run alone.
    let scene = Scene::new(Mode::Async, Some(1), 1);
    let cluster = scene.cluster.with_checkpoints(of_run("second"), 0);
    assert!(cluster.lineage().has("here", &with(3, "second")));
    assert!(!cluster.lineage().has("here", &with(0, "first")));
}
