//! The cost of 20 ms each way between all roles, and the settings that hide it: the table of docs/benchmarks.md.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use tests::Program;
use tests::distant::{job, train};
use tests::relay::Weather;

const DELAY: Duration = Duration::from_millis(20);

fn main() {
    what_delay_costs();
    what_batches_hide();
}

/// Measures by mode and number of workers, on the digits.
fn what_delay_costs() {
    println!("| mode | workers | samples/s near | 20 ms each way | share |");
    println!("| --- | --- | --- | --- | --- |");
    for (name, mode) in [
        ("sync", "mode = \"sync\""),
        ("bounded, 0", "mode = \"bounded\"\nstaleness = 0"),
        ("bounded, 4", "mode = \"bounded\"\nstaleness = 4"),
        ("async", "mode = \"async\""),
    ] {
        for workers in [2, 8] {
            let (near, far, share) = near_and_far(&job(mode, 20), workers);
            println!("| {name} | {workers} | {near:.0} | {far:.0} | {share:.2} |");
        }
    }
}

/// Measures by batch size, on data of MNIST's shape.
fn what_batches_hide() {
    println!("| batch | samples/s near | 20 ms each way | share |");
    println!("| --- | --- | --- | --- |");
    for batch in [64, 512, 4096] {
        let steps = 2 + 100_000 / batch;
        let larger = format!(
            "{}[data]\nkind = \"random\"\n",
            job("mode = \"bounded\"\nstaleness = 4", 20)
        );
        let job = format!("steps = {steps}\nbatch_size = {batch}\n{larger}");
        let (near, far, share) = near_and_far(&job, 2);
        println!("| {batch} | {near:.0} | {far:.0} | {share:.2} |");
    }
}

/// Returns the samples per second without and with the delay, and their ratio.
fn near_and_far(job: &str, workers: usize) -> (f64, f64, f64) {
    let job = job.replace("workers = 2", &format!("workers = {workers}"));
    let program = Program(env!("CARGO_BIN_EXE_flambeau-under-test").into());
    let speed = |delay| {
        let weather = Weather {
            delay,
            life: None,
            seed: 1,
        };
        let run = train(&program, &job, (2, workers), weather);
        run.summary["samples_per_second"].as_f64().unwrap()
    };
    let (near, far) = (speed(Duration::ZERO), speed(DELAY));
    (near, far, far / near)
}
