//! The status of a job for people and dashboards.

use super::*;

impl Scene {
    fn row(&self, task: Task) -> wire::TaskStatus {
        let rows = self.cluster.status(self.now).tasks.into_iter();
        let id = Some(wire::Task::from(task));
        let mut rows = rows.filter(|row| row.task.as_ref().and_then(|t| t.task) == id);
        rows.next().unwrap()
    }

    fn activity(&self, task: Task) -> String {
        self.row(task).activity
    }
}

#[test]
fn each_task_says_what_it_does() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 3);
    let [ahead, behind, leaver] = [tasks[0], tasks[1], tasks[2]];
    scene.work(behind);
    let server = scene.server();
    let newcomer = scene.join(Role::Worker, "new");
    assert_eq!(scene.activity(server), "serving");
    assert_eq!(scene.activity(newcomer), "idle");
    scene
        .cluster
        .leave(scene.now, leaver, &wire::LeaveRequest::default());
    assert_eq!(scene.activity(leaver), "gone");
    assert!(!scene.row(leaver).alive && scene.row(ahead).alive);

    // At staleness 1 a worker that is one step ahead continues, and one that is two steps ahead waits.
    scene.finish(ahead);
    assert_eq!(scene.activity(ahead), "training");
    scene.finish(ahead);
    assert_eq!(scene.activity(behind), "training");
    let row = scene.row(ahead);
    assert_eq!(
        (row.activity.as_str(), row.clock, row.lead),
        ("waiting", 2, 2)
    );
    assert_eq!(row.waiting_on, [behind.into()]);
    assert!(scene.row(behind).waiting_on.is_empty());
    // The worker's own report is preferred.
    scene
        .cluster
        .waiting(scene.now, ahead, vec![newcomer.into()]);
    assert_eq!(scene.row(ahead).waiting_on, [newcomer.into()]);
}

#[test]
fn a_worker_that_evaluates_has_no_lead() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 2);
    while !matches!(scene.work(tasks[0]).0, Work::Evaluate { .. }) {
        for task in &tasks {
            if let (Work::Split(_), _) = scene.work(*task) {
                scene.finish(*task);
            }
        }
    }
    assert_eq!(scene.activity(tasks[0]), "evaluating");
    assert_ne!(scene.activity(tasks[1]), "evaluating");
    assert_eq!(scene.row(tasks[0]).lead, 0);
}

#[test]
fn a_task_tells_its_pace_its_loss_and_when_it_was_heard_last() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    let finishes_after = |scene: &mut Scene, seconds, loss_sum| {
        let (split, clock) = scene.split(tasks[0]);
        scene.now += Duration::from_secs(seconds);
        let end = split.start + 5;
        let (origin, mut request) = scene.step(tasks[0], clock.next(), split.id, end);
        request.loss_sum = loss_sum;
        let finished = scene.cluster.finish_step(scene.now, &origin, &request);
        finished.unwrap();
    };
    finishes_after(&mut scene, 2, 0.75);
    scene.cluster.heartbeat(scene.now, tasks[0]);
    scene.now += Duration::from_secs(3);
    let row = scene.row(tasks[0]);
    assert_eq!((row.heartbeat_age, row.samples, row.loss), (3.0, 5, 0.75));
    assert_eq!(row.samples_per_second, 2.5);
    // The pace follows slowly: 5 samples in 4 s are 1.25 a second, of which a fifth counts.
    finishes_after(&mut scene, 4, 0.5);
    assert_eq!(scene.row(tasks[0]).samples_per_second, 2.25);
}

#[test]
fn members_that_have_left_are_not_live() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 3);
    scene
        .cluster
        .leave(scene.now, tasks[1], &wire::LeaveRequest::default());
    let live = [Role::Ps, Role::Worker].map(|role| scene.cluster.live_tasks(role));
    assert_eq!(live, [1, 2]);
}

#[test]
fn the_job_ends_with_its_epochs_or_its_budget_of_steps_whichever_is_first() {
    for (mode, workers, steps, samples) in [
        (Mode::Async, 2, None, 2 * SAMPLES),
        (Mode::Async, 2, Some(3), 15),
        // In sync mode each worker has a batch of each step.
        (Mode::Sync, 2, Some(3), 30),
        (Mode::Sync, 2, Some(1000), 2 * SAMPLES),
    ] {
        let (mut scene, _) = Scene::training(mode, workers);
        scene.cluster.job.steps = steps;
        assert_eq!(
            scene.cluster.total_samples(),
            samples,
            "{mode:?}, {steps:?}"
        );
        assert_eq!(scene.cluster.status(scene.now).total_samples, samples);
    }
}

#[test]
fn leads_are_told_of_the_workers_and_of_no_server() {
    let (mut scene, tasks) = Scene::training(Mode::Bounded, 3);
    let idle = scene.join(Role::Worker, "idle");
    scene.work(tasks[1]);
    scene.finish(tasks[0]);
    scene.finish(tasks[0]);
    scene
        .cluster
        .leave(scene.now, tasks[2], &wire::LeaveRequest::default());
    let leads: Vec<_> = scene.cluster.leads().collect();
    let expected = [
        (tasks[0].id, Some(2)),
        (tasks[1].id, Some(0)),
        (tasks[2].id, None),
        (idle.id, Some(0)),
    ];
    assert_eq!(leads, expected);
}

#[test]
fn the_newest_evaluation_is_told_by_name() {
    let (mut scene, _) = Scene::training(Mode::Async, 1);
    assert_eq!(scene.cluster.newest_evaluation().count(), 0);
    for loss in [0.75, 0.5] {
        scene.cluster.add_evaluation(wire::EvaluationReport {
            metrics: [("loss".to_owned(), loss)].into(),
            ..wire::EvaluationReport::default()
        });
    }
    let newest: Vec<_> = scene.cluster.newest_evaluation().collect();
    assert_eq!(newest, [("loss", 0.5)]);
    assert_eq!(scene.cluster.status(scene.now).evaluations.len(), 2);
}

#[test]
fn shards_are_told_with_their_servers_and_those_without_one_are_counted() {
    let (mut scene, servers, _) = Scene::with_checkpoints(2);
    let report = wire::ShardReport {
        shard: 1,
        updates: 4,
        ..wire::ShardReport::default()
    };
    scene.cluster.report_shard(scene.now, servers[1], report);
    let told: Vec<_> = scene.cluster.status(scene.now).shards;
    let told: Vec<_> = told
        .into_iter()
        .map(|shard| (shard.server, shard.report.map(|report| report.updates)))
        .collect();
    let expected = [
        (Some(servers[0].into()), None),
        (Some(servers[1].into()), Some(4)),
    ];
    assert_eq!(told, expected);

    assert_eq!(scene.cluster.shards_without_server(), 0);
    scene
        .cluster
        .leave(scene.now, servers[1], &wire::LeaveRequest::default());
    assert_eq!(scene.cluster.shards_without_server(), 1);
}

#[test]
fn losses_and_checkpoints_are_in_the_status() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.finish(worker);
    let origin = scene.origin(worker, Clock(1));
    let report = wire::LostReport {
        updates: 2,
        ..wire::LostReport::default()
    };
    scene.cluster.lost(scene.now, &origin, &report).unwrap();
    scene.pass(31, &[servers[0], worker]);
    scene.save(&servers, "");
    scene.pass(4, &[servers[0], worker]);
    let status = scene.cluster.status(scene.now);
    assert_eq!(status.lost_updates, 2);
    assert_eq!(scene.cluster.lost_updates(), 2);
    let checkpoint = status.checkpoint.unwrap();
    assert_eq!((checkpoint.number, checkpoint.clock), (1, 1));
    // It was begun once thirty seconds had passed since the one before.
    assert!((4.0..=6.0).contains(&checkpoint.age), "{}", checkpoint.age);
}
