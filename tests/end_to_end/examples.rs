//! The jobs in `examples/jobs` that end where PyTorch does (`vectors/make_example_vectors.py`).

use std::path::{Path, PathBuf};

use crate::program;
use crate::weights::{largest, weights};

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/end_to_end/vectors");

/// The initial values of PyTorch.
fn initial() -> PathBuf {
    Path::new(VECTORS).join("initial.safetensors")
}

/// Trains an example from these initial values, and compares its weights with those of PyTorch after as many steps.
/// Variables with names that begin with `frozen` must stay.
fn ends_where_pytorch_does(example: &str, initial: &Path, frozen: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let dir = tempfile::tempdir().unwrap();
    let (job, run) = (format!("examples/jobs/{example}.toml"), dir.path());
    let initial_values = format!("model.init_from={}", initial.display());
    let arguments = ["train", &job, "--quiet", "--json", "--set", &initial_values];
    let mut command = program().command(&arguments);
    let output = command
        .arg("--run-dir")
        .arg(run)
        .current_dir(&root)
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["steps"], 20, "{summary}");

    let found = weights(&run.join("model.safetensors"));
    let begin = weights(&initial.canonicalize().unwrap());
    let expected = weights(&Path::new(VECTORS).join("examples.safetensors"));
    assert!(found.keys().eq(begin.keys()));
    for (name, value) in &found {
        let expected = &expected[&format!("{example}.{name}")];
        let differs = largest(&(value - expected).unwrap());
        println!("{example}: {name} differs by {differs:.1e} from PyTorch's");
        assert!(differs < 2e-5, "{example}: {name}: {differs}");
        let moved = largest(&(value - &begin[name]).unwrap());
        let is_frozen = !frozen.is_empty() && name.starts_with(frozen);
        assert_eq!(moved == 0.0, is_frozen, "{example}: {name}: {moved}");
    }
}

#[test]
fn accumulated_gradients_are_those_of_the_large_batch() {
    ends_where_pytorch_does("accumulate", &initial(), "");
}

#[test]
fn a_group_without_decay_has_none() {
    ends_where_pytorch_does("groups", &initial(), "");
}

#[test]
fn all_but_the_last_layer_of_a_pretrained_network_stay() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let pretrained = root.join("examples/jobs/pretrained.safetensors");
    ends_where_pytorch_does("finetune", &pretrained, "hidden.");
}
