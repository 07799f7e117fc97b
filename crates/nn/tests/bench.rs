//! The arguments of the benchmark `train`.

#![allow(clippy::unwrap_used)]

#[path = "../benches/train/arguments.rs"]
mod arguments;

use std::time::Duration;

use arguments::Arguments;

fn read(arguments: &[&str], threads: usize) -> Result<Arguments, String> {
    let arguments = arguments.iter().map(|argument| (*argument).to_owned());
    Arguments::read(arguments, &["cnn", "resnet20"], threads)
}

#[test]
fn models_and_seconds_are_read() {
    let all = read(&["--bench"], 1).unwrap();
    assert_eq!((all.names.len(), all.time), (0, Duration::from_secs(5)));
    let one = read(&["cnn", "--seconds", "0.5", "--bench"], 1).unwrap();
    assert_eq!(one.names, ["cnn"]);
    assert_eq!(one.time, Duration::from_millis(500));
}

#[test]
fn what_is_not_known_is_an_error() {
    let error = read(&["cnn", "resnet50"], 1).unwrap_err();
    assert!(
        error.contains("`resnet50`") && error.contains("cnn, resnet20"),
        "{error}"
    );
    for seconds in [
        &["--seconds"][..],
        &["--seconds", "-1"],
        &["--seconds", "NaN"],
    ] {
        let error = read(seconds, 1).unwrap_err();
        assert!(error.contains("--seconds takes"), "{error}");
    }
}

#[test]
fn more_than_one_thread_is_an_error() {
    let error = read(&["cnn"], 2).unwrap_err();
    assert!(error.contains("RAYON_NUM_THREADS=1"), "{error}");
}
