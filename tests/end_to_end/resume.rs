//! `flambeau resume`: which settings of a job may change when it goes on, setting by setting.

mod settings;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use flambeau::Job;
use serde_json::Value;

use self::settings::Outcome::{self, Refused, Resumes};
use self::settings::SETTINGS;
use crate::program;

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
