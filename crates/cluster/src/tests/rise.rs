//! Warnings when the training loss rises.

use super::*;
use crate::record::Record;
use shared_proto::job::Evaluations;

impl Scene {
    /// Finishes a step of each of these losses. The workers take turns.
    fn lose(&mut self, workers: &[Task], losses: impl IntoIterator<Item = f64>) {
        for (loss, worker) in losses.into_iter().zip(workers.iter().cycle()) {
            self.finish_with(*worker, |request| request.loss_sum = loss);
        }
    }

    /// Returns the warnings that were recorded since the last call.
    fn loss_warnings(&mut self) -> Vec<String> {
        let records = self.cluster.take_records().into_iter();
        let warnings = records.filter_map(|record| match record {
            Record::LossRose { warning, .. } => Some(warning),
            _ => None,
        });
        warnings.collect()
    }

    /// Lets the data last for many steps, without evaluations in between.
    fn last_long(&mut self) {
        self.cluster.job.epochs = 100;
        self.cluster.job.evaluations = Evaluations::Last;
    }

    /// Begins a job in this mode, with one server and data for many steps.
    fn long(mode: Mode, workers: u32, corrects: bool) -> (Self, Vec<Task>) {
        let mut scene = Self::new(mode, Some(1), workers);
        scene.last_long();
        scene.cluster.job.strategy.correction.enabled = corrects;
        let tasks = scene.begin();
        (scene, tasks)
    }
}

#[test]
fn a_loss_that_explodes_is_a_warning_that_says_what_to_change() {
    for (mode, workers, corrects, advice) in [
        (Mode::Async, 2, true, "use fewer workers"),
        (Mode::Async, 2, false, "strategy.correction.enabled"),
        (Mode::Async, 1, true, "clip_norm"),
        (Mode::Bounded, 2, true, "train in sync mode"),
    ] {
        let (mut scene, tasks) = Scene::long(mode, workers, corrects);
        scene.lose(&tasks, [1.0; 4]);
        scene.lose(&tasks, [500.0; 7]);
        assert_eq!(scene.loss_warnings(), [""; 0]);
        scene.lose(&tasks, [500.0; 100]);
        let warnings = scene.loss_warnings();
        let [warning] = warnings.as_slice() else {
            panic!("{mode:?}, {workers} workers: {warnings:?}");
        };
        assert!(
            warning.contains("from 1.000e0 to 5.000e2") && warning.contains(advice),
            "{warning}"
        );
        assert_eq!(&scene.cluster.status(scene.now).loss_warning, warning);
        assert_eq!(&scene.cluster.summary(scene.now).loss_warning, warning);
    }
}

#[test]
fn the_loss_of_a_step_is_that_of_its_gradients() {
    let (mut scene, tasks) = Scene::long(Mode::Async, 2, true);
    // Steps that are left out report no loss: with them, the first losses would be nothing.
    for task in tasks.iter().cycle().take(10) {
        scene.finish_with(*task, |request| {
            (request.loss_sum, request.skipped) = (0.0, 1)
        });
    }
    scene.lose(&tasks, [1.0; 4]);
    scene.lose(&tasks, [20.0; 400]);
    assert_eq!(scene.loss_warnings().len(), 1);
}

#[test]
fn a_restarted_coordinator_does_not_take_the_middle_for_the_beginning() {
    for (restarts, warnings) in [(false, 1), (true, 0)] {
        let (mut scene, tasks) = Scene::long(Mode::Async, 2, true);
        scene.lose(&tasks, [0.9; 2]);
        if restarts {
            let job = scene.cluster.job().clone();
            scene.cluster = Cluster::resume(job, scene.read_back(), scene.now);
        }
        scene.lose(&tasks, [1.0; 4]);
        scene.lose(&tasks, [20.0; 400]);
        assert_eq!(scene.loss_warnings().len(), warnings, "{restarts}");
    }
}

#[test]
fn a_training_that_goes_back_to_a_checkpoint_has_no_warning_of_before() {
    let (mut scene, servers, worker) = Scene::with_checkpoints(1);
    scene.last_long();
    scene.work(worker);
    scene.lose(&[worker], [1.0; 4]);
    scene.lose(&[worker], [500.0; 8]);
    assert_eq!(scene.loss_warnings().len(), 1);
    let spare = scene.join(Role::Ps, "spare");
    scene.pass(11, &[worker, spare]);
    assert_ne!(
        scene.cluster.durable.servers(),
        servers,
        "the shard has moved"
    );
    assert_eq!(scene.cluster.status(scene.now).loss_warning, "");
}
