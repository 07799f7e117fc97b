//! Valid and invalid strategies.

use super::*;
use crate::job::Job;

#[test]
fn the_mode_follows_from_the_name() {
    let mirrored = Job::default()
        .with("strategy.name=multi-worker-mirrored")
        .unwrap();
    assert_eq!(mirrored.strategy.mode, Mode::Sync);
    assert_eq!(Job::from_toml(&mirrored.to_toml()).unwrap(), mirrored);
    let error = mirrored
        .with("strategy.mode=async")
        .unwrap()
        .validate()
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "job setting `strategy.mode` is \"async\", but must be \"sync\", or absent, for strategies without parameter servers"
    );
    let bounded = Job::default().with("strategy.mode=sync").unwrap();
    assert_eq!(bounded.strategy.mode, Mode::Sync);
}

#[test]
fn batch_norm_is_synchronised_where_replicas_compute_together() {
    let job = |name: &str| {
        Job::from_toml(&format!(
            "[strategy]\nname = \"{name}\"\nbatch_norm = \"synchronised\""
        ))
    };
    for name in ["mirrored", "central-storage", "multi-worker-mirrored"] {
        let job = job(name).unwrap();
        assert_eq!(job.strategy.batch_norm, BatchNorm::Synchronised);
        assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
    }
    for (name, why) in [
        ("parameter-server", "its workers have no links"),
        ("one-device", "its only replica has all samples"),
        ("model-parallel", "its stages compute one micro-batch"),
    ] {
        let error = job(name).unwrap_err().to_string();
        let start = format!(
            "job setting `strategy.batch_norm` is \"synchronised\", but it does not count with `strategy.name` \"{name}\"; {why}"
        );
        assert!(error.starts_with(&start), "{error}");
    }
}

#[test]
fn the_place_where_devices_add_up_is_a_choice_where_each_has_the_whole_model() {
    for place in ["host", "nccl"] {
        let job = |name: &str| {
            let strategy = format!("name = \"{name}\"\ncross_device = \"{place}\"");
            Job::from_toml(&format!("[strategy]\n{strategy}"))
        };
        for name in ["mirrored", "multi-worker-mirrored", "hybrid"] {
            let job = job(name).unwrap();
            assert_eq!(job.strategy.cross_device.unwrap().name(), place);
            assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
        }
        let error = job("central-storage").unwrap_err().to_string();
        let start = format!(
            "job setting `strategy.cross_device` is \"{place}\", but it does not count with `strategy.name` \"central-storage\""
        );
        assert!(error.starts_with(&start), "{error}");
    }
}

#[test]
fn workers_whose_gpus_add_up_exchange_whole_gradients_of_f32() {
    let job = |name: &str, place: &str, setting: &str| {
        let strategy = format!("name = \"{name}\"\ncross_device = \"{place}\"\n{setting}");
        Job::from_toml(&format!("[strategy]\n{strategy}"))
    };
    for (field, value) in [
        ("optimizer_copies", "1"),
        ("backup_workers", "1"),
        ("bucket_mebibytes", "0.5"),
        ("batch_norm", "\"synchronised\""),
        ("wire", "\"bf16\""),
    ] {
        let setting = format!("{field} = {value}");
        let error = job("multi-worker-mirrored", "nccl", &setting).unwrap_err();
        let error = error.to_string();
        let start = format!(
            "job setting `strategy.{field}` is {value}, but it does not count with `strategy.cross_device` \"nccl\"; "
        );
        assert!(error.starts_with(&start), "{error}");
        job("multi-worker-mirrored", "host", &setting).unwrap();
    }
    // Rows travel as `bf16`.
    job("hybrid", "nccl", "wire = \"bf16\"").unwrap();
}

#[test]
fn gradients_leave_in_buckets_where_workers_add_them_up() {
    let job = |settings: &str| Job::from_toml(&format!("[strategy]\n{settings}"));
    for name in ["multi-worker-mirrored", "hybrid"] {
        let job = job(&format!("name = \"{name}\"\nbucket_mebibytes = 0.5")).unwrap();
        assert_eq!(job.strategy.bucket_mebibytes, Some(0.5));
        assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
    }
    let mirrored = "name = \"multi-worker-mirrored\"\nbucket_mebibytes = ";
    for (settings, why) in [
        (
            "bucket_mebibytes = 4.5".to_owned(),
            "is 4.5, but it does not count with `strategy.name` \"parameter-server\"",
        ),
        (
            format!("{mirrored}1.0\noptimizer_copies = 2"),
            "is 1, but it does not count with `strategy.optimizer_copies` 2",
        ),
        (
            format!("{mirrored}1.0\nbatch_norm = \"synchronised\""),
            "is 1, but it does not count with `strategy.batch_norm` \"synchronised\"",
        ),
        (format!("{mirrored}0.0"), "is 0, but must be more than 0"),
        (format!("{mirrored}-1.0"), "is -1, but must be more than 0"),
        (format!("{mirrored}nan"), "is NaN, but must be more than 0"),
        (format!("{mirrored}inf"), "is inf, but must be more than 0"),
    ] {
        let error = job(&settings).unwrap_err().to_string();
        let start = format!("job setting `strategy.bucket_mebibytes` {why}");
        assert!(error.starts_with(&start), "{error}");
    }
    for (setting, other) in [
        ("clip_norm = 0.5", "`clip_norm` 0.5"),
        ("clip_value = 0.5", "`clip_value` 0.5"),
        ("accumulate = 2", "`accumulate` 2"),
    ] {
        let job = Job::from_toml(&format!("{setting}\n[strategy]\n{mirrored}1.0"));
        let error = job.unwrap_err().to_string();
        assert!(
            error.contains(&format!("does not count with {other}")),
            "{error}"
        );
    }
}

#[test]
fn optimizer_state_is_shared_out_where_workers_form_rings() {
    let job = |settings: &str| Job::from_toml(&format!("[strategy]\n{settings}"));
    for name in ["multi-worker-mirrored", "hybrid", "model-parallel"] {
        let job = job(&format!("name = \"{name}\"\noptimizer_copies = 2")).unwrap();
        assert_eq!(job.strategy.optimizer_copies, Some(2));
        assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
    }
    for (settings, why) in [
        (
            "optimizer_copies = 2",
            "job setting `strategy.optimizer_copies` is 2, but it does not count with `strategy.name` \"parameter-server\"",
        ),
        (
            "name = \"mirrored\"\noptimizer_copies = 1",
            "job setting `strategy.optimizer_copies` is 1, but it does not count with `strategy.name` \"mirrored\"",
        ),
        (
            "name = \"hybrid\"\noptimizer_copies = 0",
            "job setting `strategy.optimizer_copies` is 0, but must be at least 1, or absent",
        ),
    ] {
        let error = job(settings).unwrap_err().to_string();
        assert!(error.starts_with(why), "{error}");
    }
}

#[test]
fn steps_are_computed_ahead_where_servers_apply_gradients_as_they_come() {
    let job = |settings: &str| Job::from_toml(&format!("[strategy]\n{settings}"));
    for mode in ["bounded", "async"] {
        let job = job(&format!("mode = \"{mode}\"\npipeline = 1")).unwrap();
        assert_eq!(job.strategy.pipeline, 1);
        assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
    }
    assert_eq!(job("").unwrap().strategy.pipeline, 0);
    assert!(job("name = \"mirrored\"\npipeline = 0").is_ok());
    for (settings, expected) in [
        (
            "pipeline = 2",
            "job setting `strategy.pipeline` is 2, but must be 0 or 1",
        ),
        (
            "mode = \"sync\"\npipeline = 1",
            "job setting `strategy.pipeline` is 1, but it does not count with `strategy.mode` \"sync\"; leave it out, or set the mode to \"bounded\" or \"async\"",
        ),
        (
            "staleness = 0\npipeline = 1",
            "job setting `strategy.pipeline` is 1, but it does not count with `strategy.staleness` 0; leave it out, or allow a lead of at least one step",
        ),
    ] {
        let error = job(settings).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    assert!(job("mode = \"async\"\nstaleness = 0\npipeline = 1").is_ok());
    for name in [
        "mirrored",
        "central-storage",
        "multi-worker-mirrored",
        "hybrid",
        "one-device",
        "model-parallel",
    ] {
        let error = job(&format!("name = \"{name}\"\npipeline = 1")).unwrap_err();
        let expected = format!(
            "job setting `strategy.pipeline` is 1, but it does not count with `strategy.name` \"{name}\"; leave it out, or use \"parameter-server\""
        );
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn settings_of_stages_count_with_model_parallel_alone() {
    let settings = "schedule = \"gpipe\"\nmicro_batches = 6\nstages = 3";
    let job = format!("[strategy]\nname = \"model-parallel\"\n{settings}");
    let job = Job::from_toml(&job).unwrap();
    let strategy = &job.strategy;
    assert_eq!(strategy.schedule, Some(PipelineSchedule::GPipe));
    assert_eq!(
        (strategy.micro_batches, strategy.stages),
        (Some(6), Some(3))
    );
    assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
    let name = job.strategy.name;
    assert!(name.has_ring() && !name.has_servers() && !name.has_one_worker());
    assert_eq!(
        (strategy.usual_workers(), name.usual_mode()),
        (1, Mode::Sync)
    );
    for (setting, expected) in [
        (
            "schedule = \"1f1b\"",
            "`strategy.schedule` is \"1f1b\", but it does not count with `strategy.name` \"mirrored\"",
        ),
        (
            "micro_batches = 6",
            "`strategy.micro_batches` is 6, but it does not count",
        ),
        (
            "stages = 3",
            "`strategy.stages` is 3, but it does not count",
        ),
    ] {
        let other = format!("[strategy]\nname = \"mirrored\"\n{setting}");
        let error = Job::from_toml(&other).unwrap_err().to_string();
        assert!(
            error.contains(expected) && error.contains("model-parallel"),
            "{error}"
        );
    }
    for (setting, expected) in [
        (
            "micro_batches = 0",
            "`strategy.micro_batches` is 0, but must be at least 1 and at most 4096, or absent",
        ),
        (
            "stages = 0",
            "`strategy.stages` is 0, but must be at least 1 and at most 1024, or absent",
        ),
        ("schedule = \"zero-bubble\"", "expected `1f1b` or `gpipe`"),
    ] {
        let wrong = format!("[strategy]\nname = \"model-parallel\"\n{setting}");
        let error = Job::from_toml(&wrong).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn names_are_read_back() {
    for name in [
        "parameter-server",
        "mirrored",
        "central-storage",
        "multi-worker-mirrored",
        "hybrid",
        "one-device",
        "model-parallel",
    ] {
        let job = format!("[strategy]\nname = \"{name}\"");
        assert_eq!(Job::from_toml(&job).unwrap().strategy.name.name(), name);
    }
    assert!(Job::from_toml("[strategy]\nname = \"mirror\"").is_err());
}

#[test]
fn several_workers_hold_a_model_together() {
    let job = |settings: &str| {
        Job::from_toml(&format!(
            "strategy = {{ name = \"model-parallel\", {settings}"
        ))
    };
    let four = job("stages = 8, stage_workers = 4 }").unwrap();
    assert_eq!(Job::from_toml(&four.to_toml()).unwrap(), four);
    assert_eq!((four.workers(), four.strategy.usual_workers()), (4, 4));
    let alone = Strategy::default().stage_groups();
    assert_eq!((alone.computing(3), alone.of(2, 3)), (3, Some(2..3)));
    for (settings, expected) in [
        (
            "stage_workers = 0 }",
            "`strategy.stage_workers` is 0, but must be at least 1",
        ),
        (
            "stages = 3, stage_workers = 4 }",
            "`strategy.stages` is 3, but must be at least `strategy.stage_workers`",
        ),
        (
            "stage_workers = 4 }\ncluster = { workers = 3 }",
            "`cluster.workers` is 3, but must be at least `strategy.stage_workers`",
        ),
    ] {
        let error = job(settings).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn ranks_behind_the_last_whole_group_are_spare() {
    let groups = |ranks, workers| -> Vec<_> {
        let groups = StageGroups { workers };
        (0..ranks).map(|rank| groups.of(rank, ranks)).collect()
    };
    assert_eq!(groups(2, 2), [Some(0..2), Some(0..2)]);
    let two_and_a_spare = [Some(0..2), Some(0..2), Some(2..4), Some(2..4), None];
    assert_eq!(groups(5, 2), two_and_a_spare);
    assert_eq!(groups(2, 3), [None, None]);
    let four = StageGroups { workers: 4 };
    assert_eq!(
        [0, 3, 4, 7, 8, 9].map(|members| four.computing(members)),
        [0, 0, 4, 4, 8, 8]
    );
    assert_eq!([0, 3, 4, 9].map(|rank| four.place(rank)), [0, 3, 0, 1]);
}

#[test]
fn backup_workers_count_where_workers_add_up_whole_gradients() {
    let job = |strategy: &str, settings: &str| {
        let strategy = format!("strategy = {{ name = {strategy:?}, backup_workers = {settings}");
        Job::from_toml(&strategy)
    };
    let one = job("multi-worker-mirrored", "1 }\ncluster = { workers = 2 }").unwrap();
    assert_eq!(one.strategy.backup_workers, Some(1));
    assert_eq!(Job::from_toml(&one.to_toml()).unwrap(), one);
    job("model-parallel", "3 }").unwrap();
    for (strategy, settings, expected) in [
        (
            "hybrid",
            "1 }",
            "`strategy.backup_workers` is 1, but it does not count with `strategy.name` \"hybrid\"",
        ),
        (
            "mirrored",
            "1 }",
            "it does not count with `strategy.name` \"mirrored\"",
        ),
        (
            "multi-worker-mirrored",
            "1, optimizer_copies = 2 }",
            "it does not count with `strategy.optimizer_copies` 2",
        ),
        (
            "multi-worker-mirrored",
            "1, bucket_mebibytes = 2.5 }",
            "it does not count with `strategy.bucket_mebibytes` 2.5",
        ),
        (
            "multi-worker-mirrored",
            "1, batch_norm = \"synchronised\" }",
            "it does not count with `strategy.batch_norm` \"synchronised\"",
        ),
        (
            "model-parallel",
            "1, stage_workers = 2 }",
            "it does not count with `strategy.stage_workers` 2",
        ),
        (
            "multi-worker-mirrored",
            "0 }",
            "`strategy.backup_workers` is 0, but must be at least 1",
        ),
        (
            "multi-worker-mirrored",
            "2 }\ncluster = { workers = 2 }",
            "`strategy.backup_workers` is 2, but must be less than `cluster.workers`",
        ),
    ] {
        let error = job(strategy, settings).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn corrections_count_where_servers_apply_gradients_as_they_come() {
    let job = |settings: &str| Job::from_toml(&format!("[strategy]\n{settings}"));
    let plain = job("").unwrap();
    assert!(!plain.to_toml().contains("correction"));
    assert!(plain.looks_ahead());
    let limited = job("correction = { step_limit = 0.1, look_ahead = false }").unwrap();
    assert_eq!(Job::from_toml(&limited.to_toml()).unwrap(), limited);
    assert!(!limited.looks_ahead() && limited.evaluates_averages());
    for average in [
        "[strategy.correction]\naverage = 0.0",
        "[strategy]\nmode = \"sync\"",
    ] {
        assert!(!Job::from_toml(average).unwrap().evaluates_averages());
    }
    for settings in [
        "correction = { enabled = false }",
        "mode = \"sync\"\ncorrection = { enabled = false }",
        "name = \"mirrored\"\ncorrection = { enabled = false }",
        "mode = \"sync\"",
        "[optimizer]\nname = \"sgd\"",
    ] {
        assert!(!job(settings).unwrap().looks_ahead(), "{settings}");
    }
    let grouped = "[optimizer]\nname = \"sgd\"\n[[groups]]\nvariables = \"*\"\noptimizer = { name = \"adam\" }";
    assert!(Job::from_toml(grouped).unwrap().looks_ahead());
    let unused = "does not count with";
    for (settings, field, why) in [
        ("correction = { step_limit = 0.0 }", "step_limit", "above 0"),
        (
            "correction = { step_limit = -1.0 }",
            "step_limit",
            "above 0",
        ),
        ("correction = { step_limit = nan }", "step_limit", "above 0"),
        ("correction = { average = 1.5 }", "average", "from 0"),
        ("correction = { average = nan }", "average", "from 0"),
        (
            "mode = \"sync\"\ncorrection = { average = 0.1 }",
            "average",
            unused,
        ),
        (
            "mode = \"sync\"\ncorrection = { look_ahead = false }",
            "look_ahead",
            unused,
        ),
        (
            "name = \"mirrored\"\ncorrection = { step_limit = 0.1 }",
            "step_limit",
            unused,
        ),
        (
            "correction = { enabled = false, step_limit = 0.1 }",
            "step_limit",
            unused,
        ),
    ] {
        let error = job(settings).unwrap_err().to_string();
        let named = format!("`strategy.correction.{field}`");
        assert!(error.contains(&named) && error.contains(why), "{error}");
    }
}
