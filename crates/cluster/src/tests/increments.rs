//! Incremental checkpoints: what they build on, and reports about them that make no sense.

use std::collections::BTreeSet;

use shared_proto::blocks::PlacedTable;
use shared_proto::table::TableSpec;

use super::*;
use crate::StoreTask;

fn buckets(first: u32, last: u32) -> wire::BlockRange {
    wire::BlockRange {
        variable: 1,
        first,
        last,
    }
}

/// A scene with one server, a worker that trains, and a table of two buckets beside the variable. Checkpoint 1, the first
/// with the table, is ordered.
fn with_a_table(increments: u32) -> (Scene, Task, Task) {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.cluster.job.checkpoint.increments = increments;
    let variables = scene.cluster.durable.variables.as_mut().unwrap();
    let map = variables.map.as_mut().unwrap();
    assert_eq!(map.variables.len(), 1);
    let spec = TableSpec {
        name: "item".to_owned(),
        dimension: 2,
        buckets: 2,
        ..TableSpec::default()
    };
    variables.model.tables.push(spec.clone());
    let shards = vec![0, 0];
    map.tables.push(PlacedTable { spec, shards });
    step(&mut scene, servers[0], worker);
    (scene, servers[0], worker)
}

/// The server reports the checkpoint that is ordered, with changes of these buckets. Returns what the checkpoint was to
/// build on, and the earlier checkpoints that its manifest names; `None` if no manifest is to be written.
fn save(
    scene: &mut Scene,
    server: Task,
    changes: Vec<wire::BlockRange>,
) -> (Option<u64>, Option<BTreeSet<u64>>) {
    let order = scene.cluster.refresh_view().checkpoint.unwrap();
    let report = wire::CheckpointReport {
        number: order.number,
        files: vec![wire::CheckpointFile {
            name: "a".to_owned(),
            blocks: vec![buckets(0, 1)],
            changes,
            ..wire::CheckpointFile::default()
        }],
        ..wire::CheckpointReport::default()
    };
    scene.cluster.shard_saved(scene.now, server, report);
    let Some(StoreTask::Write(manifest, _)) = scene.cluster.take_store_task() else {
        return (order.base, None);
    };
    let written = scene
        .cluster
        .manifest_written(scene.now, manifest.number, Ok(()));
    assert!(written);
    (order.base, Some(manifest.builds_on()))
}

/// A step, and then the time until the next checkpoint.
fn step(scene: &mut Scene, server: Task, worker: Task) {
    scene.finish(worker);
    scene.pass(31, &[server, worker]);
}

#[test]
fn after_so_many_incremental_checkpoints_comes_a_full_one() {
    for (increments, expected) in [
        (2, vec![None, Some(1), Some(2), None, Some(4)]),
        (0, vec![None; 3]),
    ] {
        let (mut scene, server, worker) = with_a_table(increments);
        for (number, expected) in (1u64..).zip(expected) {
            let changes = expected.map(|_| buckets(0, 1));
            let (base, builds_on) = save(&mut scene, server, changes.into_iter().collect());
            assert_eq!(base, expected, "checkpoint {number}");
            let all: BTreeSet<u64> = match expected {
                Some(base) => ((base - 1) / 3 * 3 + 1..number).collect(),
                None => BTreeSet::new(),
            };
            assert_eq!(builds_on, Some(all), "checkpoint {number}");
            step(&mut scene, server, worker);
        }
    }
}

#[test]
fn a_restarted_coordinator_orders_a_full_checkpoint() {
    let (mut scene, server, worker) = with_a_table(8);
    save(&mut scene, server, Vec::new());
    step(&mut scene, server, worker);
    assert_eq!(save(&mut scene, server, vec![buckets(0, 0)]).0, Some(1));
    scene.restart();
    step(&mut scene, server, worker);
    assert_eq!(save(&mut scene, server, Vec::new()).0, None);
}

/// A range of all numbers is not looked at one by one.
#[test]
fn changes_of_buckets_that_are_not_there_make_no_checkpoint() {
    for wrong in [
        vec![buckets(0, u32::MAX)],
        vec![buckets(1, 0)],
        vec![buckets(0, 1), buckets(1, 1)],
        vec![wire::BlockRange {
            variable: 0,
            ..buckets(0, 0)
        }],
    ] {
        let (mut scene, server, worker) = with_a_table(8);
        save(&mut scene, server, Vec::new());
        step(&mut scene, server, worker);
        assert_eq!(save(&mut scene, server, wrong), (Some(1), None));
        let error = scene.cluster.status(scene.now).checkpoint_error;
        assert!(error.contains("make no checkpoint"), "{error}");
    }
}
