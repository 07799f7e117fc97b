//! Valid and invalid job files.

use super::*;

#[test]
fn a_job_survives_its_file() {
    let mut job = Job {
        clip_norm: Some(1.5),
        steps: Some(7),
        optimizer: Optimizer::Ftrl(Ftrl::default()),
        ..Job::default()
    };
    job.model.options.insert("depth".into(), 3.into());
    assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
}

#[test]
fn the_template_says_the_defaults_and_names_every_setting() {
    let names = |count| (0..count).map(|_| "a-name");
    let template = template(names(40), names(1));
    assert!(template.lines().all(|line| line.len() <= 150), "{template}");
    assert!(template.contains("# a-name | a model of your own\n"));
    assert_eq!(Job::from_toml(&template).unwrap(), Job::default());
    // If they are uncommented, the optional settings are known ones too.
    let all: String = template
        .lines()
        .map(|line| line.strip_prefix("#: ").unwrap_or(line))
        .fold(String::new(), |text, line| text + line + "\n");
    // Some of them exclude others.
    const WITH_BUCKETS: [&str; 9] = [
        "clip_value",
        "clip_norm",
        "optimizer_copies",
        "cross_device",
        "schedule",
        "micro_batches",
        "stages",
        "stage_workers",
        "backup_workers",
    ];
    const WITH_BACKUPS: [&str; 7] = [
        "optimizer_copies",
        "bucket_mebibytes",
        "cross_device",
        "schedule",
        "micro_batches",
        "stages",
        "stage_workers",
    ];
    for (strategy, others) in [
        (
            "model-parallel",
            &["bucket_mebibytes", "cross_device", "backup_workers"][..],
        ),
        ("multi-worker-mirrored", &WITH_BUCKETS),
        ("multi-worker-mirrored", &WITH_BACKUPS),
    ] {
        // Strategies with rings have no corrections.
        let excluded = others.iter().chain(&["correction"]);
        let counts = |line: &&str| !excluded.clone().any(|other| line.starts_with(other));
        let some: Vec<&str> = all.lines().filter(counts).collect();
        let some = some.join("\n");
        let some = some
            .replace("\"parameter-server\"", &format!("{strategy:?}"))
            .replace("\"bounded\"", "\"sync\"");
        let job = Job::from_toml(&some).unwrap();
        let table: toml::Table = toml::from_str(&job.to_toml()).unwrap();
        let template: toml::Table = toml::from_str(&some).unwrap();
        assert_eq!(keys(&table), keys(&template));
    }
}

fn keys(table: &toml::Table) -> Vec<String> {
    let mut keys = Vec::new();
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) => {
                keys.extend(self::keys(inner).iter().map(|k| format!("{key}.{k}")));
            }
            _ => keys.push(key.clone()),
        }
    }
    keys.sort();
    keys
}

#[test]
fn unknown_keys_are_refused_by_name() {
    for (text, key) in [
        ("batchsize = 3", "batchsize"),
        ("[optimizer]\nname = \"sgd\"\nbeta1 = 0.5", "beta1"),
        ("[strategy]\nstalenes = 1", "stalenes"),
    ] {
        let error = Job::from_toml(text).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn settings_without_sense_are_named_with_their_value() {
    for (text, field, value) in [
        ("batch_size = 0", "batch_size", "0"),
        ("[optimizer]\nname = \"adam\"\nbeta1 = 1.5", "beta1", "1.5"),
        (
            "[optimizer]\nname = \"sgd\"\nlearning_rate = -1.0",
            "learning_rate",
            "-1",
        ),
        (
            "[schedule]\nkind = \"step\"\nstep_every = 0",
            "step_every",
            "0",
        ),
        ("accumulate = 0", "accumulate", "is 0,"),
        ("ema_decay = 1.0", "ema_decay", "is 1"),
        ("steps = 0", "steps", "is 0,"),
        ("[data]\nprefetch = 2000", "data.prefetch", "2000"),
    ] {
        let error = Job::from_toml(text).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains(value), "{error}");
    }
}

#[test]
fn settings_that_become_durations_have_a_limit() {
    let error = |text: &str| Job::from_toml(text).unwrap_err().to_string();
    for (field, limit) in [
        ("cluster.lease_seconds", "3600"),
        ("cluster.stall_seconds", "2592000"),
        ("checkpoint.every_seconds", "2592000"),
    ] {
        let (table, key) = field.split_once('.').unwrap();
        for value in ["1e300", "inf", "nan", "2592000.5", "-1.0"] {
            let error = error(&format!("[{table}]\n{key} = {value}"));
            let value: f64 = value.parse().unwrap();
            for part in [field, limit, &format!("{value:?}")] {
                assert!(error.contains(part), "{part:?} is not in {error}");
            }
        }
    }
    let longest = "[cluster]\nstall_seconds = 2592000\n[checkpoint]\nevery_seconds = 2592000";
    Job::from_toml(longest).unwrap();
}
