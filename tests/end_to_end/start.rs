//! Runs that cannot begin: their messages, and the files that they leave.

use std::os::unix::fs::PermissionsExt;

use crate::program;

#[test]
fn what_is_wrong_is_found_before_anything_is_made() {
    let cases: [(&[&str], &str); 13] = [
        (&["--model", "nope"], "there is no model \"nope\""),
        (&["--data", "nope"], "there is no data source \"nope\""),
        (
            &["--set", "strategy.name=nope"],
            "unknown variant `nope`, expected one of `parameter-server`, `mirrored`, `central-storage`, `multi-worker-mirrored`, `hybrid`, `one-device`, `model-parallel`",
        ),
        (&["--device", "cuda:7"], "cuda:7 cannot be used"),
        (&["--device", "gpu"], "\"gpu\" is no device"),
        (&["--device", "cuda:0@8"], "\"8\" is no limit of memory"),
        (
            &["--device", "cpu@8GiB"],
            "\"cpu@8GiB\" limits the memory of the CPU",
        ),
        (
            &["--data", "mnist", "--data-dir", "/nowhere"],
            "/nowhere has no train-images-idx3-ubyte",
        ),
        (&["--learning-rate", "-1"], "is -1.0, but must be positive"),
        (&["--clip-norm", "-1"], "`clip_norm` is -1.0, but"),
        (&["--steps", "0"], "`steps` is 0, but must be"),
        (&["--data", "mnist"], "`data.dir` is absent; it must"),
        (
            &["--mode", "sync", "--staleness", "3"],
            "`strategy.staleness` is 3, but it does not count with `strategy.mode` \"sync\"",
        ),
    ];
    for (arguments, expected) in cases {
        let here = tempfile::tempdir().unwrap();
        let mut command = program().command(&["train", "--quiet"]);
        let command = command.args(arguments).current_dir(here.path());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains(expected), "{arguments:?}: {said}");
        let left: Vec<_> = std::fs::read_dir(here.path()).unwrap().collect();
        assert!(left.is_empty(), "{arguments:?} leaves {left:?}");
    }
}

#[test]
fn candles_words_are_not_hidden_under_a_backtrace() {
    let mut command = program().command(&["train", "--model", "odd", "--quiet"]);
    let command = command.env("TEST_NO_MODEL", "1").env("RUST_BACKTRACE", "1");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert_eq!(
        said.trim_end(),
        "flambeau: model \"odd\" cannot be built: told to be none"
    );
}

#[test]
fn a_worker_that_cannot_work_at_the_start_ends_the_run_with_its_words() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let run = run.to_str().unwrap();
    let mut command = program().command(&["train", "--model", "odd", "--quiet", "--run-dir", run]);
    let command = command.env("TEST_NO_MODEL_FOR", "worker-1");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("worker-1 has ended (exit status: 3)") && said.contains("told to be none"),
        "{said}"
    );
}

#[test]
fn the_model_may_be_read_by_whoever_may_read_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let output = program().run(&[
        "train",
        "--epochs",
        "1",
        "--quiet",
        "--run-dir",
        run.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{output:?}");
    let mode = |file: &str| {
        let metadata = std::fs::metadata(run.join(file)).unwrap();
        metadata.permissions().mode() & 0o777
    };
    assert_eq!(mode("model.safetensors"), mode("metrics.jsonl"));
}

#[test]
fn the_help_and_the_template_name_every_data_set_and_model() {
    let registry = model::registry::Registry::builtin();
    for arguments in [["train", "--help"].as_slice(), &["job", "init", "-"]] {
        let output = program().run(arguments);
        let said = String::from_utf8_lossy(&output.stdout);
        for name in registry.sources().chain(registry.models()) {
            assert!(said.contains(name), "{name} is not in {said}");
        }
    }
}
