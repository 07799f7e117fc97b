//! Workers that cannot work.

use super::*;
use shared_proto::wire::WorkerFailure;

impl Scene {
    fn cannot_work(&mut self, task: Task) {
        let request = wire::LeaveRequest {
            error: "/data has no train-images".to_owned(),
            failure: WorkerFailure::Data.into(),
            ..wire::LeaveRequest::default()
        };
        self.cluster.leave(self.now, task, &request);
    }

    fn live_on(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            for task in self.servers_and_workers() {
                self.cluster.heartbeat(self.now, task);
            }
            self.cluster.tick(self.now);
        }
    }

    fn servers_and_workers(&self) -> Vec<Task> {
        let live = self
            .cluster
            .durable
            .members
            .values()
            .filter(|m| m.is_alive());
        live.map(|m| m.task).collect()
    }

    fn task_status(&self, task: Task) -> wire::TaskStatus {
        let status = self.cluster.status(self.now);
        let mut tasks = status.tasks.into_iter();
        let id = Some(wire::Task::from(task));
        tasks
            .find(|t| t.task.as_ref().and_then(|t| t.task) == id)
            .unwrap()
    }
}

#[test]
fn a_worker_that_cannot_work_leaves_alone_and_its_data_is_done_by_others() {
    for mode in [Mode::Sync, Mode::Bounded, Mode::Async] {
        let (mut scene, tasks) = Scene::training(mode, 2);
        scene.split(tasks[1]);
        scene.cannot_work(tasks[1]);
        assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Training);
        assert_eq!(scene.cluster.workers_unable(scene.now), 1);
        let status = scene.task_status(tasks[1]);
        assert_eq!(status.failure(), WorkerFailure::Data);
        assert!(status.trouble.contains("train-images"), "{status:?}");
        let mut done = 0;
        while let (Work::Split(_), _) = scene.work(tasks[0]) {
            scene.finish(tasks[0]);
            done += 1;
            assert!(done < 100);
        }
        assert_eq!(
            scene.cluster.durable.done().1,
            SAMPLES,
            "one epoch, {mode:?}"
        );

        // After a restart with its data, it is a worker like any other.
        let again = scene.join(Role::Worker, "w1");
        scene.variables(again);
        scene.work(again);
        assert_eq!(scene.cluster.workers_unable(scene.now), 0);
        assert_eq!(scene.task_status(again).trouble, "");
    }
}

#[test]
fn a_job_fails_once_no_worker_could_work_for_the_stall_time() {
    let mut scene = Scene::new(Mode::Bounded, Some(1), 2);
    scene.join(Role::Ps, "ps");
    for name in ["w0", "w1"] {
        let task = scene.join(Role::Worker, name);
        scene.cannot_work(task);
    }
    scene.live_on(50);
    // One tries again in vain. That does not restart the stall time-out.
    let again = scene.join(Role::Worker, "w1");
    scene.cannot_work(again);
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Starting);
    // A third may be reading its data.
    let third = scene.join(Role::Worker, "w2");
    scene.live_on(30);
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Starting);
    scene.cannot_work(third);
    scene.live_on(1);
    assert!(scene.cluster.failed_without_members());
    let error = scene.cluster.status(scene.now).error;
    assert!(
        error.contains("worker-0: /data has no train-images"),
        "{error}"
    );
}

#[test]
fn a_job_with_a_worker_that_can_work_does_not_fail() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 2);
    scene.cannot_work(tasks[1]);
    scene.live_on(30);
    scene.finish(tasks[0]);
    scene.live_on(45);
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Training);
    // A worker that was removed for good drops out of the alarm.
    assert_eq!(scene.cluster.workers_unable(scene.now), 0);
}

#[test]
fn a_failed_job_is_taken_up_again() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.finish(tasks[0]);
    let server = scene.servers_and_workers()[0];
    assert_eq!(server.id.role, Role::Ps);
    scene.cannot_work(tasks[0]);
    scene.live_on(61);
    assert!(scene.cluster.failed_without_members());
    let leave = wire::LeaveRequest::default();
    scene.cluster.leave(scene.now, server, &leave);
    let done = scene.cluster.durable.done();

    scene.cluster = scene.resumed().with_checkpoints(
        super::super::CheckpointPlace {
            location: "here".to_owned(),
            run_id: "p".to_owned(),
        },
        0,
    );
    assert!(scene.cluster.failed_without_members());
    scene.cluster.resume_failed(scene.now);
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Training);
    assert_eq!(scene.cluster.durable.done(), done);
    let missing = scene.cluster.missing();
    assert!(missing.contains("shard 0 has no server"), "{missing}");
    scene.join(Role::Ps, "ps");
    assert_eq!(scene.cluster.durable.orphans().count(), 0);
}

#[test]
fn an_old_trouble_does_not_fail_a_job_that_has_lost_its_workers_for_another_reason() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    scene.cannot_work(tasks[1]);
    scene.live_on(100);
    scene.work(tasks[0]);
    // The other worker is gone as well, long after that.
    scene
        .cluster
        .leave(scene.now, tasks[0], &wire::LeaveRequest::default());
    scene.live_on(100);
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Training);
    // A worker that cannot work joins. From now on that is the reason why no worker is there.
    let worker = scene.join(Role::Worker, "w9");
    scene.cannot_work(worker);
    // It has time to try again, though no worker was there for long before it came.
    scene.live_on(1);
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Training);
    scene.live_on(100);
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Failed);
    let error = scene.cluster.refresh_view().error.clone();
    assert!(!error.contains("worker-1"), "{error}");
}

#[test]
fn a_failure_of_a_kind_that_is_not_known_here_is_the_workers_own() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    let request = wire::LeaveRequest {
        error: "something new".to_owned(),
        failure: 99,
        ..wire::LeaveRequest::default()
    };
    scene.cluster.leave(scene.now, tasks[1], &request);
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Training);
    assert_eq!(scene.cluster.workers_unable(scene.now), 1);
}

#[test]
fn troubles_outlive_a_coordinator() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    scene.cannot_work(tasks[1]);
    scene.restart();
    let status = scene.task_status(tasks[1]);
    assert!(status.trouble.contains("train-images"), "{status:?}");
    assert_eq!(status.failure(), WorkerFailure::Data);
    assert_eq!(scene.cluster.workers_unable(scene.now), 1);
}

#[test]
fn a_pause_of_the_coordinator_does_not_shorten_the_time_to_try_again() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.cannot_work(tasks[0]);
    scene.live_on(50);
    scene.now += Duration::from_secs(3600);
    scene.cluster.tick(scene.now);
    assert_eq!(scene.cluster.workers_unable(scene.now), 1);
    scene.live_on(9);
    assert!(!scene.cluster.ended());
    scene.live_on(2);
    assert!(scene.cluster.failed_without_members());
}

#[test]
fn the_newest_troubles_are_kept_and_all_are_counted() {
    let (mut scene, _) = Scene::training(Mode::Async, 1);
    for index in 0..300usize {
        let task = scene.join(Role::Worker, &format!("broken-{index}"));
        scene.now += Duration::from_millis(1);
        scene.cannot_work(task);
        let kept = (index + 1).min(256);
        assert_eq!(scene.cluster.workers_unable(scene.now), kept);
    }
    let counts: Vec<_> = scene.cluster.worker_failures().collect();
    assert_eq!(counts, [(&"data".to_owned(), 300)]);
}

#[test]
fn an_error_names_three_workers_and_counts_the_others() {
    for (workers, more) in [(3, None), (4, Some("and 1 more")), (5, Some("and 2 more"))] {
        let mut scene = Scene::new(Mode::Async, Some(1), workers);
        scene.join(Role::Ps, "ps");
        for index in 0..workers {
            let task = scene.join(Role::Worker, &format!("w{index}"));
            scene.cannot_work(task);
        }
        scene.live_on(62);
        let error = scene.cluster.status(scene.now).error;
        assert!(error.contains("worker-2: /data"), "{error}");
        assert!(!error.contains("worker-3"), "{error}");
        assert_eq!(error.contains("more"), more.is_some(), "{error}");
        assert!(more.is_none_or(|more| error.ends_with(more)), "{error}");
    }
}

#[test]
fn only_a_job_that_failed_for_want_of_workers_says_so() {
    let (mut scene, _) = Scene::training(Mode::Async, 1);
    assert!(!scene.cluster.failed_without_members());
    assert_eq!(scene.cluster.how_it_ended(), "well");
    scene.cluster.fail(scene.now, "no power".to_owned());
    assert!(!scene.cluster.failed_without_members());
    assert_eq!(scene.cluster.how_it_ended(), "no power");
}

#[test]
fn a_job_that_failed_before_its_training_began_is_taken_up_before_it() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    scene.join(Role::Ps, "ps");
    let worker = scene.join(Role::Worker, "w");
    scene.cannot_work(worker);
    scene.live_on(62);
    assert!(scene.cluster.failed_without_members());
    scene.cluster.resume_failed(scene.now);
    assert_eq!(scene.cluster.durable.outcome.phase, JobPhase::Starting);
    assert_eq!(scene.cluster.seconds(scene.now), 0.0);
}

#[test]
fn while_the_last_checkpoint_is_written_no_worker_is_needed() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    for epoch in 0..2 {
        while let (Work::Split(_), _) = scene.work(worker) {
            scene.finish(worker);
        }
        scene.report(worker, epoch).unwrap();
    }
    scene.cannot_work(worker);
    for turn in 0..8 {
        let report = wire::ShardReport {
            checkpoint_bytes: turn + 1,
            ..wire::ShardReport::default()
        };
        scene.cluster.report_shard(scene.now, servers[0], report);
        scene.live_on(10);
    }
    assert!(!scene.cluster.ended());
    scene.write(&servers, "");
    assert_eq!(scene.cluster.durable.outcome.phase, JobPhase::Done);
}

#[test]
fn a_submitted_job_whose_servers_cannot_see_its_checkpoints_fails_after_a_minute() {
    for (turn, seconds, fails) in [
        (Turn::Submitted, 40, false),
        (Turn::Submitted, 70, true),
        (Turn::First, 590, false),
    ] {
        let mut scene = Scene::new(Mode::Bounded, Some(1), 2);
        let cluster = std::mem::replace(&mut scene.cluster, Cluster::new(Job::default()));
        scene.cluster = cluster.in_turn(turn);
        scene.cluster.job.cluster.stall_seconds = 600.0;
        let worker = scene.join(Role::Worker, "w0");
        scene.variables(worker);
        scene.join(Role::Worker, "w1");
        // It tries again and again, as a server that waits for jobs does.
        for _ in 0..seconds / 10 {
            let server = scene.join(Role::Ps, "ps");
            let request = wire::LeaveRequest {
                error: "the checkpoints cannot be seen".to_owned(),
                failure: WorkerFailure::Checkpoints.into(),
                ..wire::LeaveRequest::default()
            };
            scene.cluster.leave(scene.now, server, &request);
            assert_eq!(scene.cluster.workers_unable(scene.now), 0);
            scene.live_on(10);
        }
        let status = scene.cluster.status(scene.now);
        let told = match fails {
            true => &status.error,
            false => &status.waiting_for,
        };
        assert!(
            told.contains("ps-0: the checkpoints cannot be seen"),
            "{turn:?}: {status:?}"
        );
        assert_eq!(scene.cluster.ended(), fails, "{turn:?} after {seconds} s");
        if !fails {
            // With a server that serves, nothing is told any more.
            let server = scene.join(Role::Ps, "ps");
            scene.cluster.durable.unable.can_work(server.id);
            assert!(!scene.cluster.missing().contains("cannot be seen"));
            scene.live_on(100);
            assert!(!scene.cluster.ended());
        }
    }
}

#[test]
fn an_old_trouble_of_a_server_does_not_fail_a_job_that_loses_another_one() {
    let (mut scene, _) = Scene::training(Mode::Bounded, 1);
    let cluster = std::mem::replace(&mut scene.cluster, Cluster::new(Job::default()));
    let place = super::super::CheckpointPlace {
        location: "here".to_owned(),
        run_id: "p".to_owned(),
    };
    scene.cluster = cluster.with_checkpoints(place, 0).in_turn(Turn::Submitted);
    scene.cluster.job.cluster.stall_seconds = 600.0;
    let spare = scene.join(Role::Ps, "spare");
    let request = wire::LeaveRequest {
        error: "the checkpoints cannot be seen".to_owned(),
        failure: WorkerFailure::Checkpoints.into(),
        ..wire::LeaveRequest::default()
    };
    scene.cluster.leave(scene.now, spare, &request);
    scene.live_on(200);
    let server = scene.servers_and_workers()[0];
    assert_eq!(server.id.role, Role::Ps);
    let gone = wire::LeaveRequest::default();
    scene.cluster.leave(scene.now, server, &gone);
    assert_eq!(scene.cluster.durable.orphans().count(), 1);
    scene.live_on(100);
    assert!(!scene.cluster.ended(), "{}", scene.cluster.how_it_ended());
}

#[test]
fn a_submitted_job_that_no_worker_can_work_on_fails_after_a_minute() {
    for (turn, seconds) in [(Turn::Submitted, 70), (Turn::First, 590)] {
        let (mut scene, tasks) = Scene::training(Mode::Bounded, 1);
        let cluster = std::mem::replace(&mut scene.cluster, Cluster::new(Job::default()));
        scene.cluster = cluster.in_turn(turn);
        scene.cluster.job.cluster.stall_seconds = 600.0;
        scene.cannot_work(tasks[0]);
        scene.live_on(seconds);
        let view = scene.cluster.refresh_view();
        let fails = turn == Turn::Submitted;
        let (ended, error) = (view.phase == JobPhase::Failed, &view.error);
        assert_eq!(ended, fails, "{turn:?}: {error}");
        assert_eq!(error.contains("submit the job again"), fails, "{error}");
    }
}

#[test]
fn a_job_that_waits_for_members_fails_after_the_stall_time_out() {
    for turn in [Turn::Submitted, Turn::First, Turn::Alone] {
        let mut scene = Scene::new(Mode::Bounded, Some(1), 2);
        let cluster = std::mem::replace(&mut scene.cluster, Cluster::new(Job::default()));
        scene.cluster = cluster.in_turn(turn);
        scene.cluster.job.cluster.stall_seconds = 60.0;
        scene.join(Role::Worker, "w0");
        scene.live_on(50);
        assert!(!scene.cluster.ended());
        scene.live_on(20);
        let error = scene.cluster.how_it_ended().to_owned();
        for part in [
            "1 of 2 workers",
            "0 of 1 parameter servers",
            "cluster.stall_seconds",
        ] {
            assert!(error.contains(part), "{turn:?}: {error}");
        }
        // The next start of a coordinator resumes it.
        assert!(scene.cluster.failed_without_members());
    }
}

#[test]
fn of_jobs_at_work_only_submitted_ones_fail_for_lack_of_members() {
    for turn in [Turn::Submitted, Turn::First, Turn::Alone] {
        let (mut scene, tasks) = Scene::training(Mode::Bounded, 1);
        let cluster = std::mem::replace(&mut scene.cluster, Cluster::new(Job::default()));
        scene.cluster = cluster.in_turn(turn);
        scene.cluster.job.cluster.stall_seconds = 60.0;
        let gone = wire::LeaveRequest::default();
        scene.cluster.leave(scene.now, tasks[0], &gone);
        scene.live_on(50);
        assert!(!scene.cluster.ended(), "{}", scene.cluster.how_it_ended());
        scene.live_on(20);
        assert_eq!(scene.cluster.ended(), turn == Turn::Submitted);
    }
}

#[test]
fn a_submitted_job_whose_model_no_worker_can_build_fails_within_seconds() {
    for (failure, fails) in [(WorkerFailure::Model, true), (WorkerFailure::Data, false)] {
        let mut scene = Scene::new(Mode::Bounded, Some(1), 2);
        let cluster = std::mem::replace(&mut scene.cluster, Cluster::new(Job::default()));
        scene.cluster = cluster.in_turn(Turn::Submitted);
        scene.cluster.job.cluster.stall_seconds = 600.0;
        let workers = ["w0", "w1"].map(|name| scene.join(Role::Worker, name));
        for (number, worker) in workers.into_iter().enumerate() {
            let request = wire::LeaveRequest {
                error: "there is no such model".to_owned(),
                failure: failure.into(),
                ..wire::LeaveRequest::default()
            };
            scene.cluster.leave(scene.now, worker, &request);
            // The other one may know the model.
            scene.live_on(4 + 4 * number as u64);
            assert_eq!(scene.cluster.ended(), fails && number == 1);
        }
        let error = scene.cluster.how_it_ended();
        assert_eq!(error.contains("no such model"), fails, "{error}");
    }
}
