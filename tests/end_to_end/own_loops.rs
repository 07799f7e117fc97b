//! The example of a training loop of a program's own: on replicas of one process, and on two hosts.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs the example as two processes of a device each. With `kills`, kills the second process once the first one has printed a line.
fn gan_on_two_hosts(steps: &str, kills: bool) -> [Output; 2] {
    let [a, b] = [tests::free_address(), tests::free_address()];
    let start = |index: usize| {
        let config = format!(
            r#"{{"cluster":{{"worker":["{a}","{b}"]}},"task":{{"type":"worker","index":{index}}}}}"#
        );
        Command::new(env!("CARGO_BIN_EXE_gan"))
            .args(["cpu", steps])
            .env("TF_CONFIG", config)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let [mut first, mut second] = [start(0), start(1)];
    let mut line = String::new();
    if kills {
        // A buffer of one byte leaves all later lines in the pipe.
        let mut lines = BufReader::with_capacity(1, first.stdout.as_mut().unwrap());
        lines.read_line(&mut line).unwrap();
        second.kill().unwrap();
    }
    let mut outputs = [first, second].map(|process| process.wait_with_output().unwrap());
    outputs[0].stdout.splice(0..0, line.into_bytes());
    outputs
}

#[test]
fn a_loop_whose_other_host_is_killed_ends_with_the_reason() {
    let [first, _] = gan_on_two_hosts("100000000", true);
    let error = text(&first.stderr);
    assert!(!first.status.success());
    assert!(error.contains("Lost"), "{error}");
    assert!(!text(&first.stdout).is_empty());
}

#[test]
fn the_generator_of_the_example_learns_the_circle_on_two_replicas() {
    let gan = |steps: &str| {
        let run = Command::new(env!("CARGO_BIN_EXE_gan"))
            .args(["cpu,cpu", steps])
            .output()
            .unwrap();
        assert!(run.status.success(), "{run:?}");
        text(&run.stdout)
    };
    let said = gan("2000");
    let radius = said.trim().rsplit(' ').next().unwrap();
    let radius: f64 = radius.parse().unwrap();
    assert!((0.8..1.25).contains(&radius), "{said}");
    let said = gan("400");
    assert_eq!(said, gan("400"), "a repeated run has the same bits");
    assert_eq!(
        [said.clone(), said],
        gan_on_two_hosts("400", false).map(|o| text(&o.stdout))
    );
    let example = include_str!("../../examples/gan.rs");
    assert!(example.lines().count() <= 80);
}
