//! The metrics of a running job, and its summary.

use super::*;
use crate::Record;

impl Scene {
    /// Finishes one step with a report that `tell` has completed.
    pub(super) fn finish_with(
        &mut self,
        task: Task,
        tell: impl FnOnce(&mut wire::FinishStepRequest),
    ) {
        let (split, clock) = self.split(task);
        let position = split.end.min(split.start + 5);
        let (origin, mut request) = self.step(task, clock.next(), split.id, position);
        tell(&mut request);
        self.cluster
            .finish_step(self.now, &origin, &request)
            .unwrap();
    }

    fn spend(&mut self, task: Task, [pull, compute, push, wait]: [f64; 4]) {
        self.finish_with(task, |request| {
            request.times = Some(wire::StepTimes {
                pull,
                compute,
                push,
                wait,
            });
        });
    }

    fn steps_records(&mut self) -> Vec<(f64, u64, u64, f64, f64, f64)> {
        let records = self.cluster.take_records().into_iter();
        let steps = records.filter_map(|record| match record {
            Record::Steps {
                seconds,
                steps,
                samples,
                epoch,
                loss,
                samples_per_second,
            } => Some((seconds, steps, samples, epoch, loss, samples_per_second)),
            _ => None,
        });
        steps.collect()
    }

    fn shard_report(&mut self, server: Task, report: wire::ShardReport) {
        self.cluster.report_shard(self.now, server, report);
    }
}

#[test]
fn every_log_every_steps_there_is_a_line_with_the_mean_loss_since_the_last() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.cluster.job.log_every = 2;
    for loss in [1.0, 3.0, 5.0, 9.0, 100.0] {
        scene.now += Duration::from_secs(1);
        scene.finish_with(tasks[0], |request| request.loss_sum = loss);
    }
    // Ten of forty samples are a quarter of an epoch. The fifth step is in no line yet.
    let expected = [(2.0, 2, 10, 0.25, 2.0, 5.0), (4.0, 4, 20, 0.5, 7.0, 5.0)];
    assert_eq!(scene.steps_records(), expected);
}

#[test]
fn a_call_that_finishes_several_steps_counts_them_all() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.cluster.job.log_every = 4;
    scene.cluster.job.cluster.workers = Some(1);
    for _ in 0..2 {
        let (split, clock) = scene.split(tasks[0]);
        let (_, mut request) = scene.step(tasks[0], clock, split.id, split.end);
        let steps = (split.end - split.start).div_ceil(5);
        let origin = scene.origin(tasks[0], Clock(clock.0 + steps));
        (request.steps, request.samples) = (steps, split.end - split.start);
        request.loss_sum = 3.0 * steps as f64;
        scene
            .cluster
            .finish_step(scene.now, &origin, &request)
            .unwrap();
    }
    assert_eq!(scene.cluster.durable.done(), (4, 20));
    let status = scene.cluster.status(scene.now);
    assert!(status.tasks.iter().any(|row| row.loss == 3.0));
    let lines = scene.steps_records();
    let told: Vec<_> = lines.iter().map(|line| (line.1, line.4)).collect();
    assert_eq!(told, [(4, 3.0)]);
}

#[test]
fn the_summary_has_the_last_evaluation_and_the_counts_of_all_shards() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(2);
    scene.work(worker);
    scene.join(Role::Worker, "idle");
    scene.now += Duration::from_secs(4);
    scene.finish(worker);
    scene.finish(worker);
    for (shard, updates) in [(0, 30), (1, 10)] {
        let report = wire::ShardReport {
            shard,
            updates,
            staleness_sum: 2 * updates + 20 * u64::from(shard),
            max_clock_lead: u64::from(7 - shard),
            corrected_steps: Some(wire::CorrectedSteps {
                number: updates,
                factor_sum: 6.0,
                synchronous_ratio_sum: 50.0,
            }),
            ..wire::ShardReport::default()
        };
        scene.shard_report(servers[shard as usize], report);
    }
    let summary = scene.cluster.summary(scene.now);
    assert_eq!((summary.test_loss, summary.test_accuracy), (None, None));
    assert_eq!(summary.model_sha256, "");
    for (data_epoch, loss) in [(0, 0.75), (1, 0.25)] {
        scene.cluster.add_evaluation(wire::EvaluationReport {
            data_epoch,
            metrics: [
                ("loss".to_owned(), loss),
                ("accuracy".to_owned(), 1.0 - loss),
            ]
            .into(),
            model_sha256: vec![0x0f, data_epoch as u8].into(),
            ..wire::EvaluationReport::default()
        });
    }
    // The time after the last step does not slow the training down.
    scene.now += Duration::from_secs(6);
    let summary = scene.cluster.summary(scene.now);
    assert_eq!((summary.mode.as_str(), summary.staleness), ("async", None));
    assert_eq!((summary.ps, summary.workers), (2, 1));
    assert_eq!((summary.epochs, summary.job_epochs), (1, 2));
    assert_eq!((summary.steps, summary.samples), (2, 10));
    assert_eq!((summary.seconds, summary.samples_per_second), (10.0, 2.5));
    assert_eq!(summary.test_loss, Some(0.25));
    assert_eq!(summary.test_accuracy, Some(0.75));
    let metrics =
        [("accuracy", 0.75), ("loss", 0.25)].map(|(name, value)| (name.to_owned(), value));
    assert_eq!(summary.metrics, metrics.into());
    assert_eq!(summary.max_clock_lead, 7);
    assert_eq!(summary.mean_gradient_staleness, 2.5);
    assert_eq!(summary.mean_step_factor, Some(0.3));
    assert_eq!(summary.mean_synchronous_ratio, Some(2.5));
    // Only a job that is done has a model.
    assert_eq!(summary.model_sha256, "");
    scene.cluster.end_well(scene.now);
    assert_eq!(scene.cluster.summary(scene.now).model_sha256, "0f01");
}

#[test]
fn the_summary_names_the_bound_of_each_mode() {
    for (mode, name, staleness) in [
        (Mode::Sync, "sync", Some(0)),
        (Mode::Bounded, "bounded", Some(1)),
        (Mode::Async, "async", None),
    ] {
        let (scene, _) = Scene::training(mode, 1);
        let summary = scene.cluster.summary(scene.now);
        assert_eq!(
            (summary.mode.as_str(), summary.staleness),
            (name, staleness)
        );
        let status = scene.cluster.status(scene.now);
        assert_eq!((status.mode.as_str(), status.staleness), (name, staleness));
    }
}

#[test]
fn the_time_of_all_workers_is_shared_among_what_they_did() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    let shares = |scene: &Scene| -> Vec<f64> {
        let times = scene.cluster.summary(scene.now).times;
        ["pull", "compute", "push", "wait"]
            .map(|part| times[&format!("share_{part}")])
            .to_vec()
    };
    assert_eq!(shares(&scene), [0.0; 4], "before the first step");
    scene.spend(tasks[0], [1.0, 2.0, 0.0, 1.0]);
    scene.spend(tasks[1], [1.0, 2.0, 1.0, 0.0]);
    assert_eq!(shares(&scene), [0.25, 0.5, 0.125, 0.125]);
    // One leaves, and so many after it that it is no longer tracked. Its time counts all the same.
    let leave = wire::LeaveRequest::default();
    scene.cluster.leave(scene.now, tasks[1], &leave);
    for index in 0..100 {
        scene.now += Duration::from_millis(1);
        let task = scene.join(Role::Worker, &format!("passing-{index}"));
        scene.cluster.leave(scene.now, task, &leave);
    }
    assert!(!scene.cluster.durable.members.contains_key(&tasks[1].id));
    assert_eq!(shares(&scene), [0.25, 0.5, 0.125, 0.125]);
    assert_eq!(scene.cluster.summary(scene.now).workers, 2);
}

#[test]
fn the_rate_is_that_of_the_samples_of_this_run() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    // No time has passed since the beginning.
    scene.finish(tasks[0]);
    assert_eq!(scene.cluster.summary(scene.now).samples_per_second, 0.0);
    scene.now += Duration::from_secs(2);
    scene.finish(tasks[0]);
    assert_eq!(scene.cluster.summary(scene.now).samples_per_second, 5.0);
    // The first step came with the checkpoint that the run began with.
    scene.cluster.durable.training.earlier_samples = 5;
    assert_eq!(scene.cluster.summary(scene.now).samples_per_second, 2.5);
}

#[test]
fn the_last_reports_are_awaited_of_the_servers_that_live_and_have_a_shard() {
    let (mut scene, servers, _) = Scene::with_checkpoints(2);
    let spare = scene.join(Role::Ps, "spare");
    let report = |shard, last| wire::ShardReport {
        shard,
        last,
        ..wire::ShardReport::default()
    };
    scene.shard_report(servers[0], report(0, true));
    // A report on a shard that its sender does not hold is not counted.
    scene.shard_report(spare, report(1, true));
    assert!(!scene.cluster.all_shards_reported());
    scene.shard_report(servers[1], report(1, false));
    assert!(!scene.cluster.all_shards_reported());
    scene.shard_report(servers[1], report(1, true));
    assert!(scene.cluster.all_shards_reported());

    // A server that has died reports nothing more.
    let (mut scene, servers, _) = Scene::with_checkpoints(2);
    scene.shard_report(servers[0], report(0, true));
    scene
        .cluster
        .leave(scene.now, servers[1], &wire::LeaveRequest::default());
    assert!(scene.cluster.all_shards_reported());
}

#[test]
fn a_report_of_a_shard_that_the_sender_does_not_have_changes_nothing() {
    let (mut scene, servers, _) = Scene::with_checkpoints(2);
    for (server, shard) in [(servers[0], 1), (servers[1], 0), (servers[1], 2)] {
        let report = wire::ShardReport {
            shard,
            updates: 9,
            non_finite: "w".to_owned(),
            ..wire::ShardReport::default()
        };
        scene.shard_report(server, report);
    }
    assert!(!scene.cluster.ended());
    let shards = scene.cluster.status(scene.now).shards;
    assert!(shards.iter().all(|shard| shard.report.is_none()));
}

#[test]
fn the_job_is_over_once_all_have_left() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let server = scene.server();
    for task in [tasks[0], server] {
        assert!(scene.cluster.durable.anyone_there());
        scene
            .cluster
            .leave(scene.now, task, &wire::LeaveRequest::default());
    }
    assert!(!scene.cluster.durable.anyone_there());
}

#[test]
fn the_last_line_tells_when_and_why_the_job_has_ended() {
    let (mut scene, _) = Scene::training(Mode::Async, 1);
    scene.now += Duration::from_secs(3);
    scene.cluster.fail(scene.now, "no power".to_owned());
    scene.cluster.fail(scene.now, "no light".to_owned());
    let ends = scene.cluster.take_records().into_iter();
    let ends = ends.filter_map(|record| match record {
        Record::Ended { seconds, error } => Some((seconds, error)),
        _ => None,
    });
    assert_eq!(ends.collect::<Vec<_>>(), [(3.0, "no power".to_owned())]);
}
