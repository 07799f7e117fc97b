//! Servers that are lost, servers that come back with or without their values, and checkpoints that cannot be loaded.

use shared_proto::blocks::ShardMap;

use super::*;
use crate::Record;
use crate::StoreTask;

/// The checkpoint, the shard and the steps of each return to a checkpoint.
type Restores = Vec<(u64, Option<usize>, u64)>;

impl Scene {
    fn map(&self) -> ShardMap {
        self.cluster.shard_map().unwrap().clone()
    }

    /// A server joins that still has the values of a shard in memory.
    fn join_with(&mut self, identity: &str, holding: wire::Holding) -> Task {
        let request = wire::RegisterRequest {
            identity: identity.to_owned(),
            address: format!("{identity}, moved"),
            holding: Some(holding),
            ..wire::RegisterRequest::default()
        };
        self.cluster.register(self.now, Role::Ps, request).unwrap()
    }

    /// The values that the first process of a shard's server has in memory.
    fn holding(&self, shard: u32) -> wire::Holding {
        wire::Holding {
            shard,
            source_epoch: self.map().shards[shard as usize].source.epoch.0,
            generation: 1,
        }
    }

    fn restores(&mut self) -> Restores {
        let records = self.cluster.take_records().into_iter();
        let restores = records.filter_map(|record| match record {
            Record::Restored {
                checkpoint,
                shard,
                steps,
                ..
            } => Some((checkpoint, shard, steps)),
            _ => None,
        });
        restores.collect()
    }

    fn leaves(&mut self, task: Task) {
        let leave = wire::LeaveRequest::default();
        self.cluster.leave(self.now, task, &leave);
    }

    fn restore_report(&self, shard: u32) -> wire::RestoreReport {
        wire::RestoreReport {
            shard,
            epoch: self.map().shards[shard as usize].source.epoch.0,
            ..wire::RestoreReport::default()
        }
    }

    fn is_loading(&self, shard: usize) -> bool {
        self.cluster
            .durable
            .checkpoints
            .loading
            .contains_key(&shard)
    }
}

#[test]
fn a_server_that_returns_with_its_values_goes_on_with_them() {
    for mode in [Mode::Sync, Mode::Bounded, Mode::Async] {
        let (mut scene, servers, worker) = Scene::before_the_first_in(mode, 2);
        scene.work(worker);
        scene.save(&servers, "");
        scene.finish(worker);
        scene.cluster.take_records();
        let before = scene.map();
        let sources_before = scene.sources();
        let again = scene.join_with("ps1", scene.holding(1));
        let map = scene.map();
        // Its place in the map is a new one, so all open new sessions with it.
        assert!(map.epoch > before.epoch);
        assert_eq!(scene.cluster.durable.servers(), [servers[0], again]);
        assert_eq!(scene.addresses(), ["ps0", "ps1, moved"]);
        // No value goes back.
        assert_eq!(scene.sources(), sources_before);
        assert!(!scene.is_loading(1));
        assert_eq!(scene.restores(), []);
        assert_eq!(scene.cluster.missing(), "");
        assert_eq!(scene.cluster.recoveries().map(|r| r.1).sum::<u64>(), 0);
        assert_eq!(scene.cluster.refresh_view().workers, [worker]);
        assert_eq!(scene.cluster.durable.done().0, 1);
    }
}

#[test]
fn a_server_returns_with_its_values_within_its_lease_or_after_it() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.work(worker);
    let held = scene.holding(0);
    scene.pass(11, &[worker]);
    let missing = scene.cluster.missing();
    let parts = ["shard 0 has no server", "ps-0", "nothing was heard"];
    assert!(parts.iter().all(|part| missing.contains(part)), "{missing}");
    let again = scene.join_with("ps0", held);
    assert_eq!(scene.cluster.durable.servers(), [again]);
    assert_ne!(again, servers[0]);
    assert!(!scene.is_loading(0));
    assert_eq!(scene.cluster.missing(), "");
}

#[test]
fn values_that_may_not_be_those_of_the_map_are_loaded_anew() {
    let wrong: [fn(&mut wire::Holding); 3] = [
        |holding| holding.shard = 1,
        |holding| holding.source_epoch += 1,
        |holding| holding.generation += 1,
    ];
    for make_wrong in wrong {
        let (mut scene, _, _) = Scene::with_checkpoints(2);
        scene.cluster.take_records();
        let mut holding = scene.holding(0);
        make_wrong(&mut holding);
        scene.join_with("ps0", holding);
        assert!(scene.is_loading(0) && !scene.is_loading(1), "{holding:?}");
        assert_eq!(scene.restores(), [(0, Some(0), 0)]);
    }
    // A server that was told to load values may not have done so.
    let (mut scene, _, _) = Scene::with_checkpoints(1);
    let loading = scene.join(Role::Ps, "ps0");
    let holding = wire::Holding {
        generation: loading.generation.0,
        ..scene.holding(0)
    };
    scene.join_with("ps0", holding);
    assert!(scene.is_loading(0));
}

#[test]
fn another_server_cannot_bring_the_values_of_a_shard() {
    let (mut scene, servers, _) = Scene::with_checkpoints(1);
    let held = scene.holding(0);
    scene.leaves(servers[0]);
    scene.join_with("other", held);
    assert!(scene.is_loading(0));
    // The shard is the other's now, also when the first server returns.
    let other = scene.cluster.durable.servers()[0];
    scene.join_with("ps0", held);
    assert_eq!(scene.cluster.durable.servers(), [other]);
}

#[test]
fn the_loss_of_a_server_makes_a_new_map_and_ends_the_checkpoint_in_progress() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    scene.finish(worker);
    scene.pass(31, &[servers[0], servers[1], worker]);
    assert!(scene.cluster.refresh_view().checkpoint.is_some());
    let before = scene.map();
    scene.leaves(servers[1]);
    let map = scene.map();
    assert_eq!(map.epoch, before.epoch.next());
    assert_eq!(scene.addresses(), ["ps0", ""]);
    assert_eq!(scene.cluster.refresh_view().checkpoint, None);
    assert!(scene.cluster.missing().contains("shard 1 has no server"));
    // Files of the checkpoint are swept away.
    assert!(scene.cluster.take_sweep(scene.now).unwrap().is_given_up(1));
}

#[test]
fn a_server_that_returns_ends_the_checkpoint_in_progress() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.finish(worker);
    scene.pass(31, &[servers[0], worker]);
    assert!(scene.cluster.refresh_view().checkpoint.is_some());
    scene.join_with("ps0", scene.holding(0));
    assert_eq!(scene.cluster.refresh_view().checkpoint, None);
}

#[test]
fn in_async_mode_one_shard_goes_back_and_the_training_goes_on() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    scene.finish(worker);
    scene.cluster.take_records();
    let before = scene.map();
    let again = scene.join(Role::Ps, "ps1");
    let map = scene.map();
    let source = Source {
        epoch: map.epoch,
        checkpoint: Some(("here".to_owned(), 0)),
        run: String::new(),
    };
    assert_eq!(scene.sources(), [before.shards[0].source.clone(), source]);
    assert_eq!(scene.cluster.durable.servers(), [servers[0], again]);
    assert_eq!(scene.restores(), [(0, Some(1), 1)]);
    assert_eq!(scene.cluster.refresh_view().workers, [worker]);
    assert_eq!(scene.cluster.durable.done(), (1, 5));
}

#[test]
fn in_sync_mode_all_shards_and_the_training_go_back() {
    let (mut scene, servers, worker) = Scene::before_the_first_in(Mode::Sync, 2);
    scene.work(worker);
    scene.save(&servers, "");
    let first = scene.split(worker);
    scene.finish(worker);
    scene.cluster.take_records();
    scene.join(Role::Ps, "ps1");
    let map = scene.map();
    for (shard, source) in scene.sources().iter().enumerate() {
        assert_eq!(source.epoch, map.epoch);
        assert_eq!(source.checkpoint, Some(("here".to_owned(), 0)));
        assert!(scene.is_loading(shard));
    }
    assert_eq!(scene.restores(), [(0, None, 0)]);
    assert_eq!(scene.cluster.durable.done(), (0, 0));
    let view = scene.cluster.refresh_view();
    assert_eq!((view.min_clock, view.workers.len()), (Clock(0), 0));
    // The worker registers again, and does the same data again.
    let again = scene.join(Role::Worker, "w");
    scene.variables(again);
    let (split, clock) = scene.split(again);
    assert_eq!(
        (split.start, split.end, clock),
        (first.0.start, first.0.end, first.1)
    );
}

#[test]
fn before_the_first_checkpoint_the_initial_values_are_sent_once_more() {
    let (mut scene, _, worker) = Scene::before_the_first_in(Mode::Async, 2);
    scene.join(Role::Ps, "ps1");
    let map = scene.map();
    for source in &scene.sources() {
        assert_eq!((source.epoch, &source.checkpoint), (map.epoch, &None));
    }
    let view = scene.cluster.refresh_view();
    assert!(!view.initialized && view.workers.is_empty());
    let refused = scene.cluster.finish_initialization(worker).is_err();
    assert!(!refused, "the answer to the first call may have been lost");
    let again = scene.join(Role::Worker, "w");
    assert_eq!(scene.variables(again), Initialization::Yours);
    scene.cluster.finish_initialization(again).unwrap();
    assert!(scene.cluster.refresh_view().initialized);
}

#[test]
fn only_the_server_of_a_shard_reports_its_values_and_only_those_of_the_map() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    scene.work(worker);
    let again = scene.join(Role::Ps, "ps1");
    let report = scene.restore_report(1);
    let older = wire::RestoreReport {
        epoch: report.epoch - 1,
        ..report.clone()
    };
    let beyond = wire::RestoreReport {
        shard: 2,
        ..report.clone()
    };
    for (task, wrong) in [(servers[0], &report), (again, &older), (again, &beyond)] {
        scene.cluster.shard_restored(scene.now, task, wrong);
        assert!(scene.is_loading(1), "{task}: {wrong:?}");
    }
    scene.cluster.take_records();
    scene.cluster.shard_restored(scene.now, again, &report);
    assert!(!scene.is_loading(1));
    let records = scene.cluster.take_records();
    assert!(matches!(records[..], [Record::Loaded { shard: 1, .. }]));
    assert_eq!(scene.cluster.missing(), "");
}

#[test]
fn a_checkpoint_that_no_server_can_load_and_that_has_none_before_it_ends_the_job() {
    for mode in [Mode::Sync, Mode::Async] {
        let (mut scene, servers, worker) = Scene::before_the_first_in(mode, 1);
        scene.work(worker);
        scene.save(&servers, "");
        let again = scene.join(Role::Ps, "ps0");
        let damaged = wire::RestoreReport {
            error: "its file is damaged".to_owned(),
            failure: wire::RestoreFailure::Unusable.into(),
            ..scene.restore_report(0)
        };
        scene.cluster.shard_restored(scene.now, again, &damaged);
        let Some(StoreTask::FindBefore(kept)) = scene.cluster.take_store_task() else {
            panic!("no older checkpoint is asked for");
        };
        let none = || Err("there is none before it".to_owned());
        scene.cluster.older_found(scene.now, &kept, none());
        let error = scene.cluster.status(scene.now).error;
        assert_eq!(
            error,
            "checkpoint 0 cannot be loaded, and there is none before it"
        );
        // An answer that comes when the job is over changes nothing.
        let before = scene.map();
        let late = Ok((*kept).clone());
        scene.cluster.older_found(scene.now, &kept, late);
        assert_eq!(scene.map(), before);
    }
}

#[test]
fn in_sync_mode_the_whole_job_goes_back_to_the_checkpoint_before_a_damaged_one() {
    let (mut scene, servers, worker) = Scene::before_the_first_in(Mode::Sync, 1);
    scene.work(worker);
    scene.save(&servers, "");
    let first = scene.cluster.durable.checkpoints.newest.clone().unwrap();
    scene.finish(worker);
    scene.pass(31, &[servers[0], worker]);
    scene.finish(worker);
    scene.write(&servers, "");
    let newest = scene.cluster.durable.checkpoints.newest.clone().unwrap();
    assert_eq!(newest.number, 1);
    scene.join(Role::Ps, "ps0");
    let steps = scene.cluster.durable.done().0;
    assert!(steps > 0);
    scene.cluster.take_records();
    let before = scene.map().epoch;
    scene.cluster.older_found(scene.now, &newest, Ok(first));
    assert_eq!(scene.restores(), [(0, None, 0)]);
    assert_eq!(scene.cluster.durable.done().0, 0);
    let map = scene.map();
    assert_eq!(map.epoch, before.next());
    assert_eq!(
        map.shards[0].source.checkpoint,
        Some(("here".to_owned(), 0))
    );
    assert_eq!(
        scene
            .cluster
            .durable
            .checkpoints
            .newest
            .as_ref()
            .unwrap()
            .number,
        0
    );
}

#[test]
fn a_job_with_a_budget_of_steps_that_goes_back_does_only_what_is_left_of_it() {
    let (mut scene, servers, worker) = Scene::before_the_first_in(Mode::Sync, 1);
    scene.cluster.job.steps = Some(3);
    let samples = scene.cluster.durable.training_samples();
    scene.cluster.durable.training.ledger =
        Some(crate::ledger::Ledger::new(samples, 2, 5, Some(3), true));
    scene.work(worker);
    scene.save(&servers, "");
    scene.finish(worker);
    scene.join(Role::Ps, "ps0");
    let report = scene.restore_report(0);
    let server = scene.cluster.durable.servers()[0];
    scene.cluster.shard_restored(scene.now, server, &report);
    let worker = scene.join(Role::Worker, "w");
    scene.variables(worker);
    let mut steps = 0;
    while let (Work::Split(_), _) = scene.work(worker) {
        scene.finish(worker);
        steps += 1;
    }
    assert_eq!((steps, scene.cluster.durable.done().0), (3, 3));
}

#[test]
fn without_checkpoints_a_server_that_restarts_without_its_values_ends_the_job() {
    let (mut scene, _) = Scene::training(Mode::Async, 1);
    scene.join(Role::Ps, "ps");
    let error = scene.cluster.status(scene.now).error;
    let parts = ["ps-0", "shard 0", "there are no checkpoints"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    // With its values it continues.
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.join_with("ps", scene.holding(0));
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Training);
    scene.finish(tasks[0]);
}

#[test]
fn a_step_waits_for_the_workers_that_were_evicted_for_a_lease_also_after_a_restart() {
    for restarts in [false, true] {
        let (mut scene, tasks) = Scene::training(Mode::Sync, 2);
        scene.cluster.saving.place = Some(super::checkpoints::place());
        let server = scene.server();
        scene.finish(tasks[0]);
        scene.finish(tasks[1]);
        scene.write(&[server], "");
        let server = scene.join(Role::Ps, "ps");
        scene.restored_without_losses(server);
        if restarts {
            scene.restart();
        }
        let first = scene.join(Role::Worker, "w0");
        scene.variables(first);
        scene.pass(9, &[server, first]);
        let (work, _) = scene.work(first);
        let waits = matches!(&work, Work::Idle(why) if why.contains("worker-1 is given time"));
        assert!(waits, "{work:?}");
        scene.pass(1, &[server, first]);
        assert!(
            scene.cluster.durable.training.step.is_some(),
            "the step is planned at once"
        );
        scene.split(first);
    }
}

#[test]
fn a_server_that_is_gone_fails_the_job() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.pass(11, &tasks);
    let view = scene.cluster.refresh_view();
    assert_eq!(view.phase, JobPhase::Failed);
    assert!(
        view.error.contains("ps-0") && view.error.contains("shard 0"),
        "{}",
        view.error
    );
}
