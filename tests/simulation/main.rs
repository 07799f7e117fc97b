//! The whole cluster under a simulated network and clock: seeded random schedules of partitions,
//! delays, crashes and restarts of each role, and a checker of the history.
//!
//! `FLAMBEAU_SIM_SEEDS=5000 cargo test -p tests --test simulation` runs more of them,
//! `FLAMBEAU_SIM_SEED=17` one of them; with `RUST_LOG=info` it prints the logs of the roles.

#![allow(clippy::unwrap_used)]

mod checker;
mod disk;
mod drain;
mod history;
mod hosts;
mod model;
mod network;
mod pairs;
mod pause;
mod plan;
mod planted;
mod repeat;
mod rings;
mod runs;
mod sim;
mod store;
mod trouble;
mod world;

use std::num::NonZeroUsize;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mad_turmoil::time::SimClocksGuard;
use tests::runs_slow_tests;
use world::World;

/// Seeds in the test command, and with the slow tests.
const SEEDS: [u64; 2] = [15, 200];

/// Those of them that are run twice, in fresh processes.
const TWICE: [u64; 2] = [6, 20];

/// Seeds of worlds of rings in the test command and with the slow tests, and those of them that are run twice.
const RING_SEEDS: [u64; 2] = [8, 100];
const RINGS_TWICE: [u64; 2] = [3, 10];

/// The tests that run worlds.
const TEST: &str = "under_any_schedule_what_was_promised_holds";
const RING_TEST: &str = "in_any_world_of_rings_what_was_promised_holds";

macro_rules! tests {
    ($($test:path),* $(,)?) => {
        vec![$(libtest_mimic::Trial::test(stringify!($test), || {
            $test();
            Ok(())
        })),*]
    };
}

/// Runs the tests that the command line names. The standard harness waits with time-outs, which are over at once here: outside worlds the
/// clock stands at zero.
fn main() {
    // Libraries that ask the system for the time get the simulated one, too. Otherwise a seed depends on the speed of the machine: h2, for
    // one, forgets a stream one second after its reset.
    let clocks = SimClocksGuard::init();
    let mut arguments = libtest_mimic::Arguments::from_args();
    let threads = told("RUST_TEST_THREADS").map(|threads| threads as usize);
    arguments.test_threads = arguments.test_threads.or(threads);
    let tests = tests![
        under_any_schedule_what_was_promised_holds,
        in_any_world_of_rings_what_was_promised_holds,
        a_seed_replays_exactly,
        a_seed_of_rings_replays_exactly,
        planted::planted_faults_are_found,
        planted::planted_faults_are_found_in_rings,
    ];
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(clocks);
    conclusion.exit();
}

fn told(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

fn under_any_schedule_what_was_promised_holds() {
    run_all(SEEDS, |seed| {
        let (history, wrong) = World::new(seed).run();
        judge(seed, TEST, &wrong, history.hash(), |count| {
            history.tail(count)
        });
    });
}

fn in_any_world_of_rings_what_was_promised_holds() {
    run_all(RING_SEEDS, |seed| {
        let (history, wrong) = rings::World::new(seed).run();
        judge(seed, RING_TEST, &wrong, history.hash(), |count| {
            history.tail(count)
        });
    });
}

/// Runs the worlds of all seeds, or of the one that the environment names.
fn run_all(seeds: [u64; 2], run: impl Fn(u64) + Sync) {
    let seeds = match told("FLAMBEAU_SIM_SEED") {
        Some(seed) => {
            let _ = tracing_subscriber::fmt()
                .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
                .try_init();
            seed..seed + 1
        }
        None => 0..told("FLAMBEAU_SIM_SEEDS").unwrap_or_else(|| few_or_many(seeds)),
    };
    // Each world has one thread, and shares nothing with the others.
    let next = AtomicU64::new(seeds.start);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZeroUsize::get) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    run(seed);
                }
            });
        }
    });
}

/// Fails if a world has broken promises. `tail` describes its last events.
fn judge(seed: u64, test: &str, wrong: &[String], hash: u64, tail: impl Fn(usize) -> String) {
    if told("FLAMBEAU_SIM_SEED").is_some() {
        println!("hash {hash:016x}\n{}", tail(usize::MAX));
    }
    assert!(
        wrong.is_empty(),
        "seed {seed}: {wrong:#?}\n{}FLAMBEAU_SIM_SEED={seed} replays it ({test})",
        tail(60)
    );
}

/// The same seed gives the same history in two fresh processes.
fn a_seed_replays_exactly() {
    replay(TEST, TWICE);
}

fn a_seed_of_rings_replays_exactly() {
    replay(RING_TEST, RINGS_TWICE);
}

/// Returns the second number with the slow tests, otherwise the first.
fn few_or_many([few, many]: [u64; 2]) -> u64 {
    match runs_slow_tests(&format!("{} of {many} seeds", many - few)) {
        true => many,
        false => few,
    }
}

/// Runs worlds twice, each time in a fresh process.
fn replay(test: &str, seeds: [u64; 2]) {
    if told("FLAMBEAU_SIM_SEED").is_some() {
        return;
    }
    if !cfg!(tokio_unstable) {
        tests::say(
            "SKIPPED: tokio takes seeds only with --cfg tokio_unstable, which RUSTFLAGS in the environment has taken away (.cargo/config.toml)",
        );
        return;
    }
    let hash = |seed: u64| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env("FLAMBEAU_SIM_SEED", seed.to_string())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().find_map(|line| line.strip_prefix("hash "));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    for seed in 0..few_or_many(seeds) {
        assert_eq!(hash(seed), hash(seed), "seed {seed}");
    }
}
