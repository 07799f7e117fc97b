//! Weights that are NaN or infinite, data that differs, models that are not written.

use super::*;
use shared_proto::job::NonFinite;

#[test]
fn an_update_that_makes_weights_infinite_ends_the_job_unless_it_is_to_go_on() {
    for (setting, phase) in [
        (NonFinite::Fail, JobPhase::Failed),
        (NonFinite::Skip, JobPhase::Training),
    ] {
        let (mut scene, _) = Scene::training(Mode::Async, 1);
        scene.cluster.job.non_finite = setting;
        let server = scene.server();
        let report = wire::ShardReport {
            non_finite: "fc.weight".to_owned(),
            ..wire::ShardReport::default()
        };
        scene.cluster.report_shard(scene.now, server, report);
        let view = scene.cluster.refresh_view();
        assert_eq!(view.phase, phase, "{setting:?}");
        let named = view.error.contains("fc.weight") && view.error.contains("ps-0");
        assert_eq!(named, phase == JobPhase::Failed, "{}", view.error);
        let shards = scene.cluster.status(scene.now).shards;
        let told = shards[0]
            .report
            .as_ref()
            .map(|report| report.non_finite.as_str());
        assert_eq!(told, Some("fc.weight"));
    }
}

#[test]
fn workers_with_as_many_samples_and_others_are_told_apart() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    scene.join(Role::Ps, "ps");
    let mut registers = |identity: &str, digest: u8| {
        let task = scene.join(Role::Worker, identity);
        let specs = vec![VariableSpec {
            name: "w".to_owned(),
            shape: vec![4],
            ..VariableSpec::default()
        }];
        let data = WorkerData {
            // 0: this worker states no digest.
            digest: match digest {
                0 => Vec::new(),
                digest => vec![digest; 32],
            },
            ..data(SAMPLES, 7)
        };
        let cluster = &mut scene.cluster;
        let registered = cluster.register_variables(scene.now, task, specs, data);
        registered.map(drop).map_err(|refusal| {
            assert!(refusal.message.contains("digest"), "{refusal}");
            refusal.reason
        })
    };
    // The first digest that a worker states decides.
    assert_eq!(registers("a", 0), Ok(()));
    assert_eq!(registers("b", 1), Ok(()));
    assert_eq!(registers("c", 2), Err(Reason::DataDiffers));
    assert_eq!(registers("d", 0), Ok(()));
    assert_eq!(registers("e", 1), Ok(()));
}

#[test]
fn a_job_with_a_run_directory_does_not_end_without_its_model() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 1);
    scene.cluster.job.run_dir = Some("/run".into());
    let worker = tasks[0];
    loop {
        match scene.work(worker).0 {
            Work::Split(_) => drop(scene.finish(worker)),
            Work::Evaluate {
                data_epoch: epoch,
                save_model: false,
                ..
            } => scene.report(worker, epoch).unwrap(),
            Work::Evaluate {
                data_epoch: epoch,
                save_model: true,
                ..
            } => {
                let refused = scene.report(worker, epoch).unwrap_err();
                assert_eq!(refused.reason, Reason::Malformed);
                assert!(refused.message.contains("model.safetensors"), "{refused}");
                // The evaluation is still its own.
                let report = wire::EvaluationReport {
                    data_epoch: epoch,
                    metrics: [("loss".to_owned(), 0.5)].into(),
                    model_sha256: vec![0xab; 32].into(),
                    ..wire::EvaluationReport::default()
                };
                let origin = scene.origin(worker, Clock(0));
                scene.cluster.evaluated(scene.now, &origin, report).unwrap();
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(scene.cluster.refresh_view().phase, JobPhase::Done);
    assert_eq!(
        scene.cluster.summary(scene.now).model_sha256,
        "ab".repeat(32)
    );
}
