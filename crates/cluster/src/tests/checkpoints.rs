//! Scenarios with checkpoints: written, tried again, damaged.

use super::*;
use crate::checkpoints::Stage;
use crate::{CheckpointPlace, StoreTask};

pub(super) fn place() -> CheckpointPlace {
    CheckpointPlace {
        location: "here".to_owned(),
        run_id: String::new(),
    }
}

impl Scene {
    /// A scene with servers, a worker that trains, and checkpoints, of which the first is written.
    pub(super) fn with_checkpoints(servers: u32) -> (Self, Vec<Task>, Task) {
        let (mut scene, servers, worker) = Self::before_the_first(servers);
        scene.save(&servers, "");
        (scene, servers, worker)
    }

    /// A scene with servers, a worker and checkpoints, before the first is written.
    fn before_the_first(servers: u32) -> (Self, Vec<Task>, Task) {
        Self::before_the_first_in(Mode::Async, servers)
    }

    /// A scene in this mode, with servers, a worker and checkpoints, before the first is written.
    pub(super) fn before_the_first_in(mode: Mode, servers: u32) -> (Self, Vec<Task>, Task) {
        let mut scene = Self::new(mode, Some(servers), 1);
        scene.cluster = scene.cluster.with_checkpoints(place(), 0);
        let servers: Vec<Task> = (0..servers)
            .map(|index| scene.join(Role::Ps, &format!("ps{index}")))
            .collect();
        let worker = scene.join(Role::Worker, "w");
        assert_eq!(scene.variables(worker), Initialization::Yours);
        scene.cluster.finish_initialization(worker).unwrap();
        scene.cluster.tick(scene.now);
        (scene, servers, worker)
    }

    /// All shards report the ordered checkpoint. Shard 0 reports the error, if there is one.
    pub(super) fn save(&mut self, servers: &[Task], error: &str) {
        self.write(servers, error);
        // A server that comes later must not write it again.
        assert_eq!(self.cluster.refresh_view().checkpoint, None);
    }

    /// All shards report the ordered checkpoint, after which another may be ordered at once. Shard 0 reports the error,
    /// if there is one.
    pub(super) fn write(&mut self, servers: &[Task], error: &str) {
        let order = self.cluster.refresh_view().checkpoint.unwrap();
        for (shard, server) in (0..).zip(servers) {
            let report = wire::CheckpointReport {
                number: order.number,
                shard,
                error: if shard == 0 { error } else { "" }.to_owned(),
                ..wire::CheckpointReport::default()
            };
            self.cluster.shard_saved(self.now, *server, report);
        }
        if let Some(StoreTask::Write(manifest, _)) = self.cluster.take_store_task() {
            let number = manifest.number;
            assert!(self.cluster.manifest_written(self.now, number, Ok(())));
        }
    }

    /// A server reports the outcome of loading its shard.
    fn restored(&mut self, server: Task, shard: u32, error: &str) {
        self.failed(server, shard, error, wire::RestoreFailure::Unusable);
    }

    /// A server has loaded shard 0.
    pub(super) fn restored_without_losses(&mut self, server: Task) {
        self.restored(server, 0, "");
    }

    fn failed(&mut self, server: Task, shard: u32, error: &str, failure: wire::RestoreFailure) {
        let map = self.cluster.shard_map().unwrap();
        let report = wire::RestoreReport {
            shard,
            epoch: map.shards[shard as usize].source.epoch.0,
            error: error.to_owned(),
            failure: failure.into(),
            ..wire::RestoreReport::default()
        };
        self.cluster.shard_restored(self.now, server, &report);
    }

    /// Another coordinator resumes from this one's state.
    pub(super) fn restart(&mut self) {
        self.cluster = self.resumed().with_checkpoints(place(), 0);
    }
}

#[test]
fn a_damaged_checkpoint_takes_back_only_those_that_cannot_load_it() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    let first = scene.cluster.durable.checkpoints.newest.clone().unwrap();
    scene.finish(worker);
    let everybody = [servers[0], servers[1], worker];
    scene.pass(31, &everybody);
    scene.save(&servers, "");

    let again = scene.join(Role::Ps, "ps1");
    scene.restored(again, 1, "");
    let other = scene.join(Role::Ps, "ps0");
    scene.restored(other, 0, "its file is damaged");
    let Some(StoreTask::FindBefore(damaged)) = scene.cluster.take_store_task() else {
        panic!("no older checkpoint is asked for");
    };
    assert_eq!(damaged.number, 1);
    let well = scene.cluster.shard_map().unwrap().shards[1].source.clone();
    scene.cluster.older_found(scene.now, &damaged, Ok(first));
    let sources = scene.sources();
    assert_eq!(sources[1], well);
    assert_eq!(sources[0].checkpoint, Some(("here".to_owned(), 0)));
    assert!(scene.cluster.missing().contains("shard 0 is loading"));
    // None is ordered while one is being loaded.
    scene.finish(worker);
    scene.pass(31, &[again, other, worker]);
    assert_eq!(scene.cluster.refresh_view().checkpoint, None);
    scene.restored(other, 0, "");
    scene.pass(1, &[again, other, worker]);
    assert_eq!(scene.cluster.refresh_view().checkpoint.unwrap().number, 2);
}

#[test]
fn a_restarted_coordinator_knows_who_is_loading() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    let first = scene.cluster.durable.checkpoints.newest.clone().unwrap();
    scene.finish(worker);
    scene.pass(31, &[servers[0], servers[1], worker]);
    scene.save(&servers, "");
    let again = [scene.join(Role::Ps, "ps0"), scene.join(Role::Ps, "ps1")];
    scene.restart();
    assert!(scene.cluster.missing().contains("shard 0 is loading"));

    let before = scene.cluster.shard_map().unwrap().shards[1].source.epoch;
    scene.restored(again[0], 0, "its file is damaged");
    let Some(StoreTask::FindBefore(damaged)) = scene.cluster.take_store_task() else {
        panic!("no older checkpoint is asked for");
    };
    scene.cluster.older_found(scene.now, &damaged, Ok(first));
    // Both go back to the one before. A late report of the damaged one by the other changes nothing.
    for source in &scene.sources() {
        assert_eq!(source.checkpoint, Some(("here".to_owned(), 0)));
    }
    let late = wire::RestoreReport {
        shard: 1,
        epoch: before.0,
        error: "its file is damaged".to_owned(),
        ..wire::RestoreReport::default()
    };
    scene.cluster.shard_restored(scene.now, again[1], &late);
    assert!(scene.cluster.take_store_task().is_none());
    scene.restored(again[0], 0, "");
    scene.restored(again[1], 1, "");
    scene.restart();
    assert!(!scene.cluster.missing().contains("loading"));
}

#[test]
fn a_store_that_gives_nothing_is_waited_for_and_named() {
    use wire::RestoreFailure::{Denied, Unavailable};
    let (mut scene, _, _) = Scene::with_checkpoints(1);
    let again = scene.join(Role::Ps, "ps0");
    for (failure, why) in [(Unavailable, "no answer"), (Denied, "AccessDenied")] {
        scene.failed(again, 0, why, failure);
        assert!(scene.cluster.take_store_task().is_none());
        let missing = scene.cluster.missing();
        assert!(
            missing.contains("shard 0 cannot load") && missing.contains(why),
            "{missing}"
        );
    }
    scene.restored(again, 0, "");
    scene.failed(again, 0, "late", Unavailable);
    assert!(!scene.cluster.missing().contains("shard 0"));
    let again = scene.join(Role::Ps, "ps0");
    // A job that is to begin with a checkpoint, and may not read it.
    scene.cluster.durable.checkpoints.stage = Stage::First;
    scene.failed(again, 0, "no answer", Unavailable);
    assert!(!scene.cluster.ended());
    scene.failed(again, 0, "AccessDenied", Denied);
    assert_eq!(scene.cluster.durable.outcome.phase, JobPhase::Failed);
    assert_eq!(scene.cluster.missing(), "");
    let summary = scene.cluster.summary(scene.now);
    assert!(summary.error.contains("AccessDenied"), "{}", summary.error);
}

#[test]
fn one_that_failed_is_tried_again_soon() {
    let (mut scene, servers, worker) = Scene::before_the_first(1);
    scene.work(worker);
    scene.save(&servers, "no room");
    let missing = scene.cluster.missing();
    assert!(
        missing.contains("first checkpoint could not be written (shard 0: no room)"),
        "{missing}"
    );
    scene.pass(6, &[servers[0], worker]);
    scene.save(&servers, "");
    assert_eq!(scene.cluster.missing(), "");
    scene.finish(worker);
    scene.pass(31, &[servers[0], worker]);
    scene.save(&servers, "no room");
    scene.pass(6, &[servers[0], worker]);
    scene.save(&servers, "");
    assert_eq!(scene.cluster.fault_counts().failed_checkpoints, 2);
}

#[test]
fn the_last_checkpoint_is_tried_again_for_a_while() {
    // The attempts continue for sixty seconds.
    for (failures, written) in [(2, true), (usize::MAX, false)] {
        let (mut scene, servers, worker) = Scene::with_checkpoints(1);
        while scene.cluster.refresh_view().checkpoint.is_none() {
            match scene.work(worker).0 {
                Work::Split(_) => drop(scene.finish(worker)),
                Work::Evaluate {
                    data_epoch: epoch, ..
                } => scene.report(worker, epoch).unwrap(),
                other => assert!(matches!(other, Work::Idle(_) | Work::Done)),
            }
            scene.cluster.tick(scene.now);
        }
        let (begin, mut failed) = (scene.now, 0);
        while failed < failures && scene.cluster.durable.outcome.phase == JobPhase::Training {
            assert!(scene.cluster.missing().contains("shard 0 is writing"));
            scene.save(&servers, "no room");
            failed += 1;
            while scene.cluster.refresh_view().checkpoint.is_none() && !scene.cluster.ended() {
                scene.pass(1, &[servers[0], worker]);
            }
        }
        if written {
            scene.save(&servers, "");
        } else {
            assert!((4..=12).contains(&failed), "{failed} tries");
            let took = scene.now.duration_since(begin).as_secs();
            assert!((59..=61).contains(&took), "{took} s");
        }
        assert_eq!(scene.cluster.durable.outcome.phase, JobPhase::Done);
        let newest = scene.cluster.durable.checkpoints.newest.clone().unwrap();
        assert_eq!(newest.number > 0, written);
        let unsaved = scene.cluster.summary(scene.now).unsaved;
        assert_eq!(unsaved.contains("no room"), !written, "{unsaved}");
    }
}

#[test]
fn a_checkpoint_is_given_up_once_nothing_of_it_is_written() {
    for writes in [false, true] {
        let (mut scene, servers, worker) = Scene::with_checkpoints(1);
        scene.finish(worker);
        scene.pass(31, &[servers[0], worker]);
        assert_eq!(scene.cluster.refresh_view().checkpoint.unwrap().number, 1);
        for turn in 0..7 {
            let report = wire::ShardReport {
                checkpoint_bytes: if writes { turn + 1 } else { 1 },
                ..wire::ShardReport::default()
            };
            scene.cluster.report_shard(scene.now, servers[0], report);
            scene.pass(10, &[servers[0], worker]);
            scene.finish(worker);
        }
        let (failed, number) = if writes { (0, 1) } else { (1, 2) };
        assert_eq!(scene.cluster.fault_counts().failed_checkpoints, failed);
        let order = scene.cluster.refresh_view().checkpoint.unwrap();
        assert_eq!(order.number, number);
    }
}

#[test]
fn one_that_fails_again_and_again_is_tried_ever_more_rarely_and_swept_away() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    // The files of an earlier coordinator are swept.
    let sweep = scene.cluster.take_sweep(scene.now).unwrap();
    assert!(!sweep.is_given_up(1));
    scene.finish(worker);
    let mut waits = Vec::new();
    for failure in 1..=12u64 {
        let mut waited = 0;
        while scene.cluster.refresh_view().checkpoint.is_none() {
            scene.pass(1, &[servers[0], worker]);
            waited += 1;
        }
        waits.push(waited);
        // The checkpoint in progress is not swept; those before it are.
        let under_way = scene.cluster.take_sweep(scene.now);
        assert!(under_way.is_none_or(|sweep| !sweep.is_given_up(failure)));
        let number = scene.cluster.refresh_view().checkpoint.unwrap().number;
        assert_eq!(number, failure);
        scene.save(&servers, "no room");
        let sweep = scene.cluster.take_sweep(scene.now).unwrap();
        assert!(sweep.is_given_up(failure) && !sweep.is_given_up(failure + 1));
        assert_eq!(scene.cluster.take_sweep(scene.now), None);
        // A server may have finished a file since.
        let later = scene.now + Duration::from_secs(11);
        assert!(scene.cluster.take_sweep(later).is_some());
    }
    for (i, wait) in waits[1..].iter().enumerate() {
        let longest = (5u64 << i).min(300);
        assert!(
            (longest / 2..=longest + 1).contains(wait),
            "wait {i}: {waits:?}"
        );
    }
    // After a success the waits begin anew.
    while scene.cluster.refresh_view().checkpoint.is_none() {
        scene.pass(1, &[servers[0], worker]);
    }
    scene.save(&servers, "");
    assert_eq!(scene.cluster.checkpoint_error(scene.now), "");
}

#[test]
fn a_full_store_is_named() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.finish(worker);
    scene.pass(31, &[servers[0], worker]);
    let number = scene.cluster.refresh_view().checkpoint.unwrap().number;
    let report = wire::CheckpointReport {
        number,
        error: "/data/x: no room".to_owned(),
        store_full: true,
        ..wire::CheckpointReport::default()
    };
    scene.cluster.shard_saved(scene.now, servers[0], report);
    let status = scene.cluster.status(scene.now);
    assert!(status.checkpoint_store_full);
    let error = status.checkpoint_error;
    for part in [
        "store of checkpoints is full",
        "shard 0: /data/x",
        "once",
        "tried again in ",
    ] {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
    scene.pass(6, &[servers[0], worker]);
    scene.save(&servers, "");
    let status = scene.cluster.status(scene.now);
    assert!(!status.checkpoint_store_full && status.checkpoint_error.is_empty());
}

#[test]
fn a_run_that_was_taken_over_writes_no_more_and_says_so() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.finish(worker);
    scene.pass(31, &[servers[0], worker]);
    assert!(scene.cluster.refresh_view().checkpoint.is_some());
    scene
        .cluster
        .taken_over(scene.now, "another run is at work at here: run 7");
    assert_eq!(scene.cluster.refresh_view().checkpoint, None);
    assert_eq!(scene.cluster.durable.outcome.phase, JobPhase::Failed);
    assert!(scene.cluster.summary(scene.now).error.contains("run 7"));
    assert!(scene.cluster.take_store_task().is_none());
    assert!(scene.cluster.take_sweep(scene.now).is_none());
}

#[test]
fn a_checkpoint_is_due_after_a_time_or_a_number_of_steps_but_only_if_steps_were_made() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.cluster.job.checkpoint.every_steps = Some(3);
    scene.work(worker);
    scene.pass(100, &[servers[0], worker]);
    assert_eq!(scene.cluster.refresh_view().checkpoint, None);
    // The time is long over.
    scene.finish(worker);
    scene.pass(1, &[servers[0], worker]);
    assert_eq!(scene.cluster.refresh_view().checkpoint.unwrap().number, 1);
    scene.save(&servers, "");
    for due in [false, false, true] {
        scene.finish(worker);
        scene.pass(1, &[servers[0], worker]);
        assert_eq!(scene.cluster.refresh_view().checkpoint.is_some(), due);
    }
}

#[test]
fn a_restart_before_training_orders_no_other_checkpoint() {
    let (mut scene, servers, _) = Scene::with_checkpoints(1);
    scene.restart();
    scene.pass(2, &servers);
    assert_eq!(scene.cluster.durable.outcome.phase, JobPhase::Starting);
    assert_eq!(scene.cluster.refresh_view().checkpoint, None);
}

#[test]
fn while_none_fails_nothing_is_swept() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    // The sweep of the start.
    assert!(scene.cluster.take_sweep(scene.now).is_some());
    scene.finish(worker);
    scene.pass(31, &[servers[0], worker]);
    assert!(scene.cluster.refresh_view().checkpoint.is_some());
    assert_eq!(scene.cluster.take_sweep(scene.now), None);
}

#[test]
fn a_manifest_that_nobody_waits_for_does_not_count() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.finish(worker);
    scene.pass(31, &[servers[0], worker]);
    for number in [0, 2] {
        assert!(!scene.cluster.manifest_written(scene.now, number, Ok(())));
    }
    assert!(scene.cluster.refresh_view().checkpoint.is_some());
    scene.cluster.fail(scene.now, "no power".to_owned());
    assert!(!scene.cluster.manifest_written(scene.now, 1, Ok(())));
    let newest = scene.cluster.durable.checkpoints.newest.clone().unwrap();
    assert_eq!(newest.number, 0);
}

#[test]
fn a_stop_of_the_coordinator_itself_gives_no_checkpoint_up() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.finish(worker);
    scene.pass(31, &[servers[0], worker]);
    scene.now += Duration::from_secs(3600);
    scene.pass(1, &[servers[0], worker]);
    assert_eq!(scene.cluster.fault_counts().failed_checkpoints, 0);
    assert_eq!(scene.cluster.refresh_view().checkpoint.unwrap().number, 1);
    // After the pause, the shards have as long as before.
    scene.pass(61, &[servers[0], worker]);
    assert_eq!(scene.cluster.fault_counts().failed_checkpoints, 1);
}

#[test]
fn in_sync_mode_a_worker_that_waits_for_a_checkpoint_is_not_blamed_and_one_that_does_nothing_is() {
    for writes in [true, false] {
        let (mut scene, servers, worker) = Scene::before_the_first_in(Mode::Sync, 1);
        scene.work(worker);
        scene.save(&servers, "");
        scene.finish(worker);
        scene.split(worker);
        let everybody = [servers[0], worker];
        if writes {
            scene.pass(31, &everybody);
            scene.finish(worker);
            assert!(scene.cluster.refresh_view().checkpoint.is_some());
        }
        for turn in 0..8 {
            let report = wire::ShardReport {
                checkpoint_bytes: turn + 1,
                ..wire::ShardReport::default()
            };
            scene.cluster.report_shard(scene.now, servers[0], report);
            scene.pass(10, &everybody);
        }
        let lost = scene.cluster.fault_counts().lost_workers;
        assert_eq!(lost, u64::from(!writes), "writes: {writes}");
    }
}

#[test]
fn the_shards_have_the_whole_stall_time_to_write_some_of_a_checkpoint() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.finish(worker);
    while scene.cluster.refresh_view().checkpoint.is_none() {
        scene.pass(1, &[servers[0], worker]);
    }
    scene.pass(60, &[servers[0], worker]);
    assert_eq!(scene.cluster.fault_counts().failed_checkpoints, 0);
    scene.pass(1, &[servers[0], worker]);
    assert_eq!(scene.cluster.fault_counts().failed_checkpoints, 1);
}
