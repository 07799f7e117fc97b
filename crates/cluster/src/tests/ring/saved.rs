//! Cases with checkpoints.

use super::*;

impl Rings {
    /// A worker reports that it cannot load a checkpoint.
    fn cannot_load(&mut self, task: Task, ring: u64, failure: wire::RestoreFailure) {
        let report = wire::RestoreReport {
            epoch: ring,
            error: "its file is damaged".to_owned(),
            failure: failure.into(),
            ..wire::RestoreReport::default()
        };
        let now = self.scene.now;
        self.scene.cluster.shard_restored(now, task, &report);
    }
}

#[test]
fn training_begins_with_a_checkpoint_and_ends_with_one() {
    let mut rings = Rings::with_checkpoints(2);
    rings.finish();
    let (first, last) = (&rings.whole[&0], rings.whole.values().last().unwrap());
    assert!(first.is_empty());
    assert_eq!(Some(last), rings.workers[0].values.as_ref());
    assert!(
        rings.whole.len() >= 3,
        "and others between: {:?}",
        rings.whole.keys()
    );
}

#[test]
fn steps_wait_for_the_copy_and_not_for_the_writer() {
    let mut rings = Rings::with_checkpoints(2);
    let mut turns = [1, 0].into_iter().cycle();
    let number = loop {
        rings.step(&[turns.next().unwrap()], true);
        if let Some(order) = rings.scene.cluster.refresh_view().checkpoint {
            break order.number;
        }
    };
    assert!(
        !rings.copies.contains_key(&number),
        "it is ordered, not copied"
    );
    assert!(matches!(rings.work(1), Work::Idle(_)));
    assert!(
        matches!(rings.work(0), Work::Shared { .. }),
        "it copies first"
    );
    assert!(matches!(rings.work(1), Work::Shared { .. }));
    let steps = rings.workers[0].values.clone();
    rings.step(&rings.all(), true);
    assert!(rings.write(true));
    assert_eq!(rings.whole.get(&number), steps.as_ref());
    rings.finish();
}

#[test]
fn members_that_share_the_optimizer_state_help_the_writer_until_it_has_its_copy() {
    let mut rings = Rings::with_checkpoints(2);
    rings.scene.cluster.job.strategy.optimizer_copies = Some(1);
    let mut turns = [1, 0].into_iter().cycle();
    let number = loop {
        rings.step(&[turns.next().unwrap()], true);
        if let Some(order) = rings.scene.cluster.refresh_view().checkpoint {
            break order.number;
        }
    };
    let ask = |rings: &mut Rings, worker: usize, copied| {
        let origin = rings.origin(worker);
        let scene = &mut rings.scene;
        scene.cluster.lease_work(scene.now, &origin, copied).0
    };
    let copies = |work: &Work, helper: bool| match work {
        Work::CopyValues {
            number: of, helps, ..
        } => (*of, *helps) == (number, helper),
        _ => false,
    };
    let (writer, helper) = (ask(&mut rings, 0, None), ask(&mut rings, 1, None));
    assert!(copies(&writer, false) && copies(&helper, true));
    // It has handed its part over, and waits.
    assert!(matches!(ask(&mut rings, 1, Some(number)), Work::Idle(_)));
    // Another ring begins before the writer has told that it has its copy.
    rings.ask(1, None).unwrap();
    assert_eq!(ask(&mut rings, 0, Some(number)), Work::Regroup);
    rings.join_all();
    assert!(matches!(ask(&mut rings, 0, None), Work::Shared { .. }));
    assert!(matches!(ask(&mut rings, 1, None), Work::Shared { .. }));
}

#[test]
fn a_checkpoint_goes_with_its_writer() {
    let mut rings = Rings::with_checkpoints(3);
    while rings.scene.cluster.refresh_view().checkpoint.is_none() {
        rings.step(&rings.all(), true);
    }
    rings.work(0);
    let before = rings.scene.cluster.refresh_view().checkpoint.unwrap();
    // Another member dies: the copy stays good.
    rings.kill(2);
    rings.join_all();
    assert_eq!(
        rings
            .scene
            .cluster
            .refresh_view()
            .checkpoint
            .unwrap()
            .number,
        before.number
    );
    rings.kill(0);
    rings.join_all();
    let after = rings.scene.cluster.refresh_view().checkpoint;
    assert!(after.is_none_or(|order| order.number > before.number));
    rings.finish();
}

#[test]
fn when_all_have_died_the_newest_checkpoint_is_loaded() {
    let mut rings = Rings::with_checkpoints(2);
    while rings.whole.len() < 2 {
        rings.step(&rings.all(), true);
        rings.write(true);
    }
    rings.step(&rings.all(), true);
    let (number, saved) = rings.whole.last_key_value().unwrap();
    let (number, saved) = (*number, saved.clone());
    assert!(!saved.is_empty() && rings.workers[0].values.as_ref().unwrap().len() > saved.len());
    // One that was evicted, and comes back later, has steps that are dropped.
    rings.evict(0);
    rings.replace_all(1);
    let ring = rings.form();
    assert_eq!(ring.checkpoint.as_ref().unwrap().number, number);
    assert_eq!(rings.scene.cluster.durable.done().0 as usize, saved.len());
    let missing = rings.scene.cluster.missing();
    assert!(missing.contains("a worker is loading"), "{missing}");
    rings.take(&ring, &rings.all());
    rings.enter(&ring);
    assert_eq!(rings.workers[0].values.as_ref(), Some(&saved));
    rings.come_back();
    rings.join_all();
    rings.finish();
}

#[test]
fn a_checkpoint_that_cannot_be_loaded_gives_way_to_an_earlier_one() {
    let mut rings = Rings::with_checkpoints(2);
    let first = rings
        .scene
        .cluster
        .durable
        .checkpoints
        .newest
        .clone()
        .unwrap();
    while rings.whole.len() < 2 {
        rings.step(&rings.all(), true);
        rings.write(true);
    }
    rings.replace_all(2);
    let ring = rings.form();
    let source = rings.workers[ring.source as usize].task;
    let other = rings.workers[1 - ring.source as usize].task;
    rings.cannot_load(other, ring.number, wire::RestoreFailure::Unusable);
    rings.cannot_load(source, ring.number, wire::RestoreFailure::Unavailable);
    assert!(
        rings.scene.cluster.take_store_task().is_none(),
        "the store may answer later"
    );
    rings.cannot_load(source, ring.number, wire::RestoreFailure::Unusable);
    let Some(StoreTask::FindBefore(damaged)) = rings.scene.cluster.take_store_task() else {
        panic!("no older checkpoint is asked for");
    };
    assert_eq!(
        Some(damaged.number),
        ring.checkpoint.map(|from| from.number)
    );
    let now = rings.scene.now;
    rings.scene.cluster.older_found(now, &damaged, Ok(first));
    let ring = rings.form();
    assert_eq!(
        (ring.checkpoint.as_ref().unwrap().number, ring.clock),
        (0, 0)
    );
    rings.take(&ring, &rings.all());
    rings.enter(&ring);
    rings.finish();
}

/// The ring waits for a worker that has stopped, and the one that was loading the values is gone.
#[test]
fn a_worker_that_does_not_join_is_evicted_though_the_loader_has_died() {
    let mut rings = Rings::with_checkpoints(2);
    rings.replace_all(2);
    let ring = rings.form();
    rings.kill(ring.source as usize);
    let stopped = rings.workers[0].task;
    let newcomer = rings.start();
    rings.ask(newcomer, None).unwrap();
    let newcomer = rings.workers[newcomer].task;
    rings.scene.pass(62, &[stopped, newcomer]);
    let alive = |task: Task| {
        rings
            .scene
            .cluster
            .durable
            .member(task.id)
            .unwrap()
            .is_alive()
    };
    assert_eq!((alive(stopped), alive(newcomer)), (false, true));
}

#[test]
fn a_coordinator_resumes_while_a_worker_loads_the_values() {
    let mut rings = Rings::with_checkpoints(2);
    rings.replace_all(2);
    let ring = rings.form();
    assert!(ring.checkpoint.is_some());
    rings.resume();
    rings.take(&ring, &rings.all());
    rings.enter(&ring);
    rings.finish();
}

#[test]
fn a_failed_job_resumes_after_its_workers_have_left() {
    let mut rings = Rings::with_checkpoints(2);
    rings.step(&rings.all(), true);
    let alive: Vec<Task> = rings.workers.iter().map(|worker| worker.task).collect();
    rings.scene.pass(1, &alive);
    let now = rings.scene.now;
    rings
        .scene
        .cluster
        .fail(now, "a gradient is NaN".to_owned());
    while !rings.workers.is_empty() {
        rings.kill(0);
    }
    rings.resume();
    rings.scene.cluster.resume_failed(rings.scene.now);
    rings.start();
    rings.start();
    rings.join_all();
    rings.finish();
}

#[test]
fn a_checkpoint_goes_with_the_values_that_it_was_ordered_for() {
    let mut rings = Rings::with_checkpoints(2);
    rings.scene.cluster.job.strategy.optimizer_copies = Some(1);
    let mut turns = [1, 0].into_iter().cycle();
    let ordered = loop {
        rings.step(&[turns.next().unwrap()], true);
        if let Some(order) = rings.scene.cluster.refresh_view().checkpoint {
            break order.number;
        }
    };
    // No member has some of the slots any more, so all forget their values.
    for worker in &mut rings.workers {
        (worker.values, worker.clock) = (None, Clock(0));
    }
    rings.join_all();
    assert_eq!(rings.workers[0].values.as_ref(), Some(&rings.whole[&0]));
    let order = rings.scene.cluster.refresh_view().checkpoint;
    assert!(order.is_none_or(|order| order.number > ordered));
    while rings.whole.len() < 3 {
        rings.step(&rings.all(), true);
        rings.write(true);
    }
    rings.finish();
}
