//! `flambeau resume`: which settings of a job may change when it goes on, setting by setting.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use flambeau::Job;
use serde_json::Value;

use crate::program;

/// What becomes of a run that goes on with another setting.
#[derive(Clone, Copy)]
enum Outcome {
    /// It goes on.
    Resumes,
    /// It is refused, and the message has this text.
    Refused(&'static str),
}

use Outcome::{Refused, Resumes};

/// A setting, the flags that change it, and the outcome. `DIR` stands for the folder of the test.
const SETTINGS: &[(&str, &str, Outcome)] = &[
    ("name", "name=other", Refused("name is flambeau there")),
    ("seed", "seed=9", Refused("seed is 5 there")),
    ("epochs", "epochs=3", Resumes),
    ("steps", "steps=30", Resumes),
    (
        "batch_size",
        "batch_size=8",
        Refused("batch_size * accumulate"),
    ),
    (
        "accumulate",
        "accumulate=2",
        Refused("batch_size * accumulate"),
    ),
    ("non_finite", "non_finite=skip", Resumes),
    ("clip_value", "clip_value=0.5", Resumes),
    ("clip_norm", "clip_norm=1.0", Resumes),
    (
        "ema_decay",
        "ema_decay=0.9",
        Refused("ema_decay is absent there"),
    ),
    ("log_every", "log_every=3", Resumes),
    ("evaluations", "evaluations=last", Resumes),
    ("run_dir", "run_dir=DIR/another", Resumes),
    (
        "data.kind",
        "data.kind=digits",
        Refused("data.kind is csv there"),
    ),
    ("data.dir", "data.dir=DIR/moved", Resumes),
    (
        "data.label",
        "data.label=y",
        Refused("a finite number was expected"),
    ),
    ("data.target", "data.target=class", Resumes),
    (
        "data.held_out",
        "data.held_out=0.5",
        Refused("training samples"),
    ),
    ("data.prefetch", "data.prefetch=0", Resumes),
    (
        "data.stream",
        "data.stream=true",
        Refused("training samples"),
    ),
    (
        "data.shuffle_mebibytes",
        "data.shuffle_mebibytes=8",
        Resumes,
    ),
    (
        "data.columns",
        "data.columns.x.type=\"ignore\"",
        Refused("hidden.0.weight is [4, 2] there, and [4, 1] here"),
    ),
    ("data.delimiter", "data.delimiter=\",\"", Resumes),
    (
        "data.header",
        "data.header=false",
        Refused("no column is called"),
    ),
    (
        "data.column_names",
        "data.column_names=[\"x\"]",
        Refused("data.column_names"),
    ),
    ("data.decimal", "data.decimal=\",\"", Resumes),
    (
        "data.label_transform",
        "data.label_transform=standardise",
        Refused("label_transform"),
    ),
    ("data.missing", "data.missing=\"mean\"", Resumes),
    ("data.missing_texts", "data.missing_texts=[\"-\"]", Resumes),
    ("data.missing_label", "data.missing_label=skip", Resumes),
    (
        "data.weight",
        "data.weight=none",
        Refused("no column is called"),
    ),
    (
        "data.class_weight",
        "data.class_weight.a=2.0",
        Refused("class_weight"),
    ),
    (
        "data.pictures",
        "data.pictures.flip=true",
        Refused("pictures"),
    ),
    ("data.options", "data.options.depth=3", Refused("options")),
    (
        "model.name",
        "model.name=softmax",
        Refused("model.name is mlp there"),
    ),
    (
        "model.init_from",
        "model.init_from=DIR/run/model.safetensors",
        Resumes,
    ),
    ("model.init_strip", "model.init_strip=wrapper.", Resumes),
    (
        "model.init_except",
        "model.init_from=DIR/run/model.safetensors;model.init_except=[\"output.*\"]",
        Resumes,
    ),
    (
        "model.hidden",
        "model.hidden=[5]",
        Refused("hidden.0.bias is [4] there, and [5] here"),
    ),
    ("model.channels", "model.channels=[3]", Resumes),
    ("model.embedding", "model.embedding=3", Resumes),
    (
        "model.tables",
        "model.tables=true",
        Refused("no input of ids"),
    ),
    ("model.precision", "model.precision=bf16", Resumes),
    ("model.options", "model.options.depth=3", Refused("depth")),
    ("objective.loss", "objective.loss=cross-entropy", Resumes),
    (
        "objective.label_smoothing",
        "objective.label_smoothing=0.1",
        Resumes,
    ),
    (
        "objective.metrics",
        "objective.metrics=[\"log_loss\"]",
        Resumes,
    ),
    (
        "optimizer.name",
        "optimizer={name=\"sgd\"}",
        Refused("optimizer.name is adam there"),
    ),
    (
        "optimizer.learning_rate",
        "optimizer.learning_rate=0.01",
        Resumes,
    ),
    ("optimizer.beta1", "optimizer.beta1=0.8", Resumes),
    ("optimizer.beta2", "optimizer.beta2=0.99", Resumes),
    ("optimizer.epsilon", "optimizer.epsilon=1e-7", Resumes),
    (
        "optimizer.weight_decay",
        "optimizer.weight_decay=0.01",
        Resumes,
    ),
    ("schedule.kind", "schedule.kind=cosine", Resumes),
    ("schedule.warmup_steps", "schedule.warmup_steps=5", Resumes),
    ("schedule.step_every", "schedule.step_every=5", Resumes),
    ("schedule.step_factor", "schedule.step_factor=0.5", Resumes),
    ("schedule.total_steps", "schedule.total_steps=50", Resumes),
    ("schedule.floor", "schedule.floor=0.1", Resumes),
    (
        "groups",
        "groups=[{variables=\"*.bias\",learning_rate=0.1}]",
        Resumes,
    ),
    (
        "groups",
        "groups=[{variables=\"*.bias\",optimizer={name=\"sgd\"}}]",
        Refused("of another optimizer"),
    ),
    (
        "tables",
        "tables=[{tables=\"*\",buckets=4}]",
        Refused("matches no table"),
    ),
    (
        "strategy.name",
        "strategy={name=\"one-device\",mode=\"sync\"};cluster.workers=1",
        Resumes,
    ),
    ("strategy.mode", "strategy.mode=async", Resumes),
    (
        "strategy.mode",
        "strategy.mode=sync",
        Refused("strategy.mode = \"sync\" is false there"),
    ),
    ("strategy.staleness", "strategy.staleness=2", Resumes),
    (
        "strategy.correction",
        "strategy.correction={enabled=false}",
        Resumes,
    ),
    ("strategy.pipeline", "strategy.pipeline=1", Resumes),
    ("strategy.wire", "strategy.wire=bf16", Resumes),
    (
        "strategy.batch_norm",
        "strategy.batch_norm=synchronised",
        Refused("strategy.batch_norm"),
    ),
    (
        "strategy.optimizer_copies",
        "strategy.optimizer_copies=1",
        Refused("strategy.optimizer_copies"),
    ),
    (
        "strategy.bucket_mebibytes",
        "strategy.bucket_mebibytes=1.0",
        Refused("strategy.bucket_mebibytes"),
    ),
    (
        "strategy.cross_device",
        "strategy.cross_device=host",
        Refused("strategy.cross_device"),
    ),
    (
        "strategy.schedule",
        "strategy.schedule=gpipe",
        Refused("strategy.schedule"),
    ),
    (
        "strategy.micro_batches",
        "strategy.micro_batches=2",
        Refused("strategy.micro_batches"),
    ),
    (
        "strategy.stages",
        "strategy.stages=2",
        Refused("strategy.stages"),
    ),
    (
        "strategy.stage_workers",
        "strategy.stage_workers=2",
        Refused("strategy.stage_workers"),
    ),
    (
        "strategy.backup_workers",
        "strategy.backup_workers=1",
        Refused("strategy.backup_workers"),
    ),
    ("cluster.ps", "cluster.ps=2", Resumes),
    ("cluster.workers", "cluster.workers=2", Resumes),
    (
        "cluster.lease_seconds",
        "cluster.lease_seconds=5.0",
        Resumes,
    ),
    (
        "cluster.stall_seconds",
        "cluster.stall_seconds=60.0",
        Resumes,
    ),
    ("checkpoint.enabled", "checkpoint.enabled=false", Resumes),
    (
        "checkpoint.location",
        "checkpoint.location=DIR/elsewhere",
        Resumes,
    ),
    (
        "checkpoint.every_seconds",
        "checkpoint.every_seconds=1.0",
        Resumes,
    ),
    (
        "checkpoint.every_steps",
        "checkpoint.every_steps=5",
        Resumes,
    ),
    ("checkpoint.keep", "checkpoint.keep=1", Resumes),
    (
        "checkpoint.snapshot_mebibytes",
        "checkpoint.snapshot_mebibytes=8",
        Resumes,
    ),
    ("checkpoint.increments", "checkpoint.increments=0", Resumes),
    (
        "checkpoint.on_full_disk",
        "checkpoint.on_full_disk=stop",
        Resumes,
    ),
    (
        "early_stopping.metric",
        "early_stopping.metric=accuracy",
        Resumes,
    ),
    ("early_stopping.goal", "early_stopping.goal=max", Resumes),
    (
        "early_stopping.patience",
        "early_stopping.patience=5",
        Resumes,
    ),
    (
        "early_stopping.min_delta",
        "early_stopping.min_delta=0.1",
        Resumes,
    ),
    ("plateau.metric", "plateau.metric=accuracy", Resumes),
    ("plateau.goal", "plateau.goal=max", Resumes),
    ("plateau.factor", "plateau.factor=0.5", Resumes),
    ("plateau.patience", "plateau.patience=2", Resumes),
    ("plateau.min_delta", "plateau.min_delta=0.1", Resumes),
    ("plateau.cooldown", "plateau.cooldown=1", Resumes),
    (
        "plateau.min_learning_rate",
        "plateau.min_learning_rate=0.0001",
        Resumes,
    ),
    ("best.metric", "best.metric=accuracy", Resumes),
    ("best.goal", "best.goal=max", Resumes),
];

/// Returns the names that a part of a job may have, from the message about one that it may not have.
fn names(part: &str) -> Vec<String> {
    let text = match part {
        "" => "no_such_setting = 1".to_owned(),
        "optimizer" => "[optimizer]\nname = \"adam\"\nno_such_setting = 1".to_owned(),
        _ => format!("[{part}]\nno_such_setting = 1"),
    };
    let message = Job::from_toml(&text).unwrap_err().to_string();
    let (_, expected) = message
        .split_once("expected")
        .unwrap_or_else(|| panic!("{message}"));
    let quoted = expected.split('`').skip(1).step_by(2);
    quoted.map(str::to_owned).collect()
}

/// The earlier names of settings, which jobs may still have.
const EARLIER: &[&str] = &["checkpoint.aside_mebibytes"];

/// Returns every setting of a job, as the job itself tells them.
fn all_settings() -> BTreeSet<String> {
    let parts = [
        "data",
        "model",
        "objective",
        "optimizer",
        "schedule",
        "strategy",
        "cluster",
        "checkpoint",
        "early_stopping",
        "plateau",
        "best",
    ];
    let mut settings = BTreeSet::new();
    for name in names("") {
        if !parts.contains(&name.as_str()) {
            settings.insert(name);
            continue;
        }
        let inner = names(&name);
        assert!(inner.len() > 1, "{name}: {inner:?}");
        settings.extend(inner.iter().map(|inner| format!("{name}.{inner}")));
        if name == "optimizer" {
            settings.insert("optimizer.name".to_owned());
        }
    }
    for earlier in EARLIER {
        assert!(settings.remove(*earlier), "{earlier}");
    }
    settings
}

#[test]
fn each_setting_is_in_the_list_of_what_may_change() {
    let listed = SETTINGS.iter().map(|(setting, ..)| (*setting).to_owned());
    assert_eq!(listed.collect::<BTreeSet<_>>(), all_settings());
}

/// Writes a table of 200 points.
fn write_points(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    let mut text = "x,y,colour\n".to_owned();
    for i in 0..200 {
        let colour = if i % 20 > i / 10 { "red" } else { "blue" };
        text += &format!("{},{},{colour}\n", i % 20, i / 20);
    }
    std::fs::write(folder.join("train.csv"), text).unwrap();
}

#[test]
fn a_run_goes_on_with_another_setting_or_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let (data, run) = (dir.path().join("points"), dir.path().join("run"));
    write_points(&data);
    write_points(&dir.path().join("moved"));
    let text = format!(
        "seed = 5\nepochs = 1\nbatch_size = 16\n[data]\nkind = \"csv\"\ndir = {:?}\nlabel = \"colour\"\n[model]\nhidden = [4]\n[cluster]\nps = 1\nworkers = 1\n",
        data.display()
    );
    let file = dir.path().join("job.toml");
    std::fs::write(&file, text).unwrap();
    let [file, run] = [&file, &run].map(|path| path.to_str().unwrap().to_owned());
    let begun = program().run(&["train", &file, "--quiet", "--json", "--run-dir", &run]);
    assert!(begun.status.success(), "{begun:?}");
    let begun: Value = serde_json::from_slice(&begun.stdout).unwrap();

    let (left, failed) = (
        Mutex::new(SETTINGS.iter().enumerate()),
        Mutex::new(Vec::new()),
    );
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let Some((number, case)) = left.lock().unwrap().next() else {
                        return;
                    };
                    let wrong = resume(&run, dir.path(), number, case, &begun["steps"]);
                    failed.lock().unwrap().extend(wrong);
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn a_copy_of_a_run_goes_on_beside_the_copy() {
    let dir = tempfile::tempdir().unwrap();
    let (run, copy) = (dir.path().join("run"), dir.path().join("copy"));
    let [original, copied] = [&run, &copy].map(|path| path.to_str().unwrap());
    let options = ["--quiet", "--device", "cpu", "--steps", "20"];
    let begun = program().run(&[&["train", "--run-dir", original], &options[..]].concat());
    assert!(begun.status.success(), "{begun:?}");
    let copying = std::process::Command::new("cp")
        .args(["-r", original, copied])
        .status();
    assert!(copying.unwrap().success());
    let files = |dir: &Path| -> Vec<(PathBuf, Vec<u8>)> {
        let files = std::fs::read_dir(dir)
            .unwrap()
            .map(|file| file.unwrap().path());
        let files = files.filter(|path| path.is_file());
        let mut files: Vec<_> = files
            .map(|path| (path.clone(), std::fs::read(path).unwrap()))
            .collect();
        files.sort();
        files
    };
    let before = files(&run);
    let restore = format!("--restore={copied}");
    let itself = format!("--run-dir={copied}/../copy");
    for arguments in [
        &["resume", copied][..],
        &["train", &restore],
        &["train", &format!("{copied}/job.toml"), &restore],
        &["resume", copied, &itself],
    ] {
        let more = ["--quiet", "--device", "cpu", "--steps", "40"];
        let resumed = program().run(&[arguments, &more[..]].concat());
        assert!(resumed.status.success(), "{resumed:?}");
    }
    // The records that are left tell that it is a run directory.
    std::fs::remove_file(copy.join("coordinator.state")).unwrap();
    let job = format!("{copied}/job.toml");
    let again = ["train", &job, &restore, "--quiet", "--device", "cpu"];
    let resumed = program().run(&[&again[..], &["--steps", "40"]].concat());
    assert!(resumed.status.success(), "{resumed:?}");
    assert!(files(&run) == before, "the original has changed");
    for next in ["copy-2", "copy-3", "copy-4", "copy-5", "copy-6"] {
        assert!(
            dir.path().join(next).join("summary.json").exists(),
            "{next}"
        );
    }
}

/// Goes on with a run. Returns what is wrong with the outcome.
fn resume(
    run: &str,
    dir: &Path,
    number: usize,
    (setting, change, outcome): &(&str, &str, Outcome),
    steps: &Value,
) -> Option<String> {
    let change = change.replace("DIR", dir.to_str().unwrap());
    let place = dir.join(format!("run-of-{number}"));
    let mut arguments = vec!["resume", run, "--quiet", "--json", "--device", "cpu"];
    if *setting != "epochs" {
        arguments.extend(["--epochs", "2"]);
    }
    if *setting != "run_dir" {
        arguments.extend(["--run-dir", place.to_str().unwrap()]);
    }
    arguments.extend(["--set", &change]);
    let output = program().run(&arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match outcome {
        Resumes if !output.status.success() => {
            Some(format!("{setting} ({change}) is refused: {said}"))
        }
        Resumes => {
            let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
            let (before, after) = (steps.as_u64().unwrap(), summary["steps"].as_u64().unwrap());
            (after <= before)
                .then(|| format!("{setting} ({change}) has {after} steps after {before}"))
        }
        Refused(_) if output.status.success() => {
            Some(format!("{setting} ({change}) is not refused"))
        }
        Refused(why) => {
            (!said.contains(why)).then(|| format!("{setting} ({change}): no {why:?} in {said}"))
        }
    }
}
