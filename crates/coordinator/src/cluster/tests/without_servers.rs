//! Jobs of strategies without servers. There is no such strategy yet, so these jobs have 0 servers, which a job file may
//! not say.

use super::*;

#[test]
fn a_job_without_servers_trains_to_its_end_and_has_no_shard_map() {
    for mode in [Mode::Async, Mode::Bounded, Mode::Sync] {
        let mut scene = Scene::new(mode, Some(0), 2);
        let workers = [0, 1].map(|index| scene.join(Role::Worker, &format!("w{index}")));
        assert_eq!(scene.variables(workers[0]), Initialization::Yours);
        assert!(matches!(
            scene.variables(workers[1]),
            Initialization::Pending(_)
        ));
        scene.cluster.finish_initialization(workers[0]).unwrap();
        assert_eq!(scene.variables(workers[1]), Initialization::Done);
        assert!(scene.cluster.shard_map().is_err());
        assert_eq!(scene.cluster.missing(), "0 of 2 workers are ready");

        let mut evaluated = Vec::new();
        for _ in 0..100 {
            for task in workers {
                match scene.work(task).0 {
                    Work::Split(_) => drop(scene.finish(task)),
                    Work::Evaluate { data_epoch, .. } => {
                        evaluated.push(data_epoch);
                        scene.report(task, data_epoch).unwrap();
                    }
                    Work::Idle(_) | Work::Done => {}
                }
            }
            scene.pass(1, &workers);
        }
        // In sync mode, the two workers share a step.
        let steps = if mode == Mode::Sync { 8 } else { 16 };
        assert_eq!(scene.cluster.done(), (steps, 2 * SAMPLES), "{mode:?}");
        assert_eq!(evaluated, [0, 1]);
        assert_eq!(scene.cluster.durable.outcome.phase, JobPhase::Done);
    }
}
