//! Single cases.

use super::*;

#[test]
fn rows_and_values_have_each_sample_once() {
    for workers in [1, 2, 3] {
        let mut hybrid = Hybrid::new(workers);
        hybrid.finish();
    }
}

#[test]
fn a_step_that_one_has_made_is_committed_with_the_rows_of_a_dead_worker() {
    let mut hybrid = Hybrid::new(3);
    // The second has the sum, and no report arrives.
    hybrid.step(&[false, true, false], false);
    hybrid.kill(0);
    hybrid.join_all();
    assert_eq!(hybrid.scene.cluster.durable.done(), (1, 3 * BATCH));
    let rows = &hybrid.servers[0].as_ref().unwrap().rows;
    assert_eq!(counts(rows).len() as u64, 3 * BATCH);
    hybrid.finish();
}

#[test]
fn a_gradient_that_was_left_out_does_not_count_though_its_report_is_lost() {
    let mut hybrid = Hybrid::new(3);
    hybrid.step(&[false, true, false], false);
    let left_out = hybrid.workers[0].task;
    hybrid.workers[0].skipped = Some(Clock(0));
    hybrid.kill(2);
    hybrid.join_all();
    let commit = hybrid.scene.cluster.refresh_view().commit.clone().unwrap();
    let contributors: Vec<Task> = commit.contributors.iter().map(|(task, _)| *task).collect();
    assert_eq!((commit.step, contributors.len()), (Clock(0), 2));
    assert!(!contributors.contains(&left_out));
}

#[test]
fn rows_of_an_abandoned_step_are_staged_again() {
    let mut hybrid = Hybrid::new(3);
    hybrid.stage(&[true, true, false]);
    hybrid.kill(2);
    hybrid.join_all();
    assert_eq!(hybrid.scene.cluster.durable.done(), (0, 0));
    hybrid.finish();
}

#[test]
fn all_go_back_with_a_server() {
    let mut hybrid = Hybrid::new(2);
    for _ in 0..3 {
        hybrid.step(&[true], true);
        hybrid.write();
    }
    hybrid.step(&[true], true);
    hybrid.kill_server(1);
    assert!(hybrid.ask(0).is_none(), "no ring without the server");
    hybrid.start_server(1);
    hybrid.join_all();
    hybrid.finish();
}

#[test]
fn a_report_without_receipts_does_not_count() {
    let mut hybrid = Hybrid::new(2);
    let (split, _) = hybrid.stage(&[true]).unwrap();
    hybrid.workers[0].clock = Clock(1);
    let origin = hybrid.origin(0);
    let request = wire::FinishStepRequest {
        split,
        steps: 1,
        samples: BATCH,
        ..wire::FinishStepRequest::default()
    };
    let cluster = &mut hybrid.scene.cluster;
    let refused = cluster.finish_step(hybrid.scene.now, &origin, &request);
    let refused = refused.unwrap_err();
    assert!(
        refused.message.contains("without the receipt of shard 0"),
        "{refused}"
    );
    let evicted = hybrid.workers[0].task;
    assert!(!cluster.durable.member(evicted.id).unwrap().is_alive());
}

#[test]
fn an_evaluation_of_an_earlier_ring_does_not_count() {
    let mut hybrid = Hybrid::new(2);
    let outdated = hybrid.origin(0);
    hybrid.start();
    hybrid.join_all();
    let report = wire::EvaluationReport {
        metrics: [("loss".to_owned(), 0.5)].into(),
        ..wire::EvaluationReport::default()
    };
    for (origin, counts) in [(outdated, false), (hybrid.origin(0), true)] {
        let Scene { cluster, now, .. } = &mut hybrid.scene;
        cluster.durable.evaluations.at_work = Some(Evaluation {
            data_epoch: 0,
            task: origin.task,
            last: false,
        });
        let counted = cluster.evaluated(*now, &origin, report.clone());
        assert_eq!(counted, Ok(counts));
        let kept = &cluster.durable.evaluations;
        assert_eq!(kept.done.len(), usize::from(counts));
        assert!(kept.at_work.is_none());
    }
}

#[test]
fn a_process_in_the_place_of_the_last_one_with_values_is_not_evicted_with_the_others() {
    let mut hybrid = Hybrid::new(1);
    hybrid.step(&[true], true);
    hybrid.write();
    hybrid.start();
    assert!(hybrid.ask(1).is_none(), "the first one has not joined");
    // The other worker has no values, so the job goes back to its checkpoint.
    let name = hybrid.workers[0].name.clone();
    let task = hybrid.register(&name);
    let is_alive = |task: Task| hybrid.scene.cluster.durable.members[&task.id].is_alive();
    assert!(is_alive(task));
    assert!(!is_alive(hybrid.workers[1].task));
    let first = &mut hybrid.workers[0];
    (first.task, first.ring, first.values) = (task, Epoch(0), None);
    hybrid.join_all();
    hybrid.finish();
}
