//! The end-to-end suite: real processes, real sockets, real training.

#![allow(clippy::unwrap_used)]

mod backup_workers;
mod book;
mod browser;
mod buckets;
mod calls;
mod chaos;
mod command_line;
mod damaged;
mod data;
mod devices;
mod evaluator;
mod examples;
mod faults;
mod fit;
mod flood;
mod floors;
mod found;
mod hostile;
mod hybrid;
mod jobs;
mod joined;
mod learning_rate;
mod lookups;
mod model_parallel;
mod modes;
mod network;
mod next_job;
mod optimizer_copies;
mod outputs;
mod own_loops;
mod page;
mod planted;
mod protocol;
mod renewal;
mod replaced;
mod resume;
mod ring_kills;
mod ring_operations;
mod rings;
mod security;
mod start;
mod steps;
mod stop;
mod stores;
mod streams;
mod synchronised;
mod tables;
mod tf_config;
mod unable;
mod watching;
mod weights;

use std::path::PathBuf;

use tests::Program;

/// Returns the program under test, or the one that `FLAMBEAU_TEST_PROGRAM` names, which must have the same models.
pub(crate) fn program() -> Program {
    let built = || env!("CARGO_BIN_EXE_flambeau-under-test").into();
    let path = std::env::var_os("FLAMBEAU_TEST_PROGRAM").unwrap_or_else(built);
    Program(PathBuf::from(path))
}

/// Returns the folder of a real data set. If it is not present, prints that the test is skipped and returns none.
pub(crate) fn data_set(name: &str) -> Option<PathBuf> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/data");
    let folder = std::env::var_os("FLAMBEAU_TEST_DATA").map_or(beside, PathBuf::from);
    let folder = folder.join(name);
    if folder.is_dir() {
        return Some(folder);
    }
    tests::say(&format!(
        "SKIPPED: {name} is not present; set FLAMBEAU_TEST_DATA to the folder that has it"
    ));
    None
}
