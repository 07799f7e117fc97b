//! A network that is slow and breaks: each byte takes 20 ms each way, connections are cut at random.

use std::time::Duration;

use tests::distant::{job, train};
use tests::relay::Weather;

use super::program;

const DELAY: Duration = Duration::from_millis(20);

/// The accuracy on the digits' test samples without delays and cuts.
const ACCURACY: f64 = 0.95;

fn trains_as_well(mode: &str, seed: u64) {
    let weather = Weather {
        delay: DELAY,
        life: Some(Duration::from_secs(3)),
        seed,
    };
    let run = train(&program(), &job(mode, 12), (2, 2), weather);
    let accuracy = run.summary["test_accuracy"].as_f64().unwrap();
    assert!(accuracy >= ACCURACY, "{mode}: {}", run.summary);
    assert!(run.cuts >= 3, "{mode}: only {} cuts", run.cuts);
    assert_eq!(run.summary["lost_updates"], 0, "{mode}: {}", run.summary);
}

#[test]
fn far_away_and_cut_off_again_and_again_it_trains_as_well() {
    trains_as_well("mode = \"bounded\"\nstaleness = 4", 1);
}

#[test]
fn the_same_in_sync_mode() {
    trains_as_well("mode = \"sync\"", 2);
}
