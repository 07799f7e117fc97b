//! The number of threads that compute on CPUs.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread::available_parallelism;

use candle_core::utils::get_num_threads;

/// The variable by which rayon and candle learn the number.
pub const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Returns the number that the variable sets, if it sets one.
pub fn set() -> Option<usize> {
    let value = std::env::var(VARIABLE).ok()?;
    value.parse().ok().filter(|threads| *threads > 0)
}

/// Returns the number of threads with which this process computes on CPUs: the one that is set, otherwise that of the cores that it may use.
pub fn number() -> usize {
    // candle counts the cores of the host, and no hyperthreads. A container may have fewer.
    let usable = available_parallelism().map_or(1, usize::from);
    set().unwrap_or_else(|| get_num_threads().min(usable))
}

/// Starts this program anew with the variable set, in the same process, unless it is set. Without it, candle reads `/proc/cpuinfo` in each
/// matrix product. Call this first in a process that computes. If the system refuses, the process goes on as it is.
pub fn settle() {
    if set().is_some() {
        return;
    }
    let mut arguments = std::env::args_os();
    let Ok(program) = std::env::current_exe() else {
        return;
    };
    let mut command = Command::new(program);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    let error = command
        .args(arguments)
        .env(VARIABLE, number().to_string())
        .exec();
    eprintln!(
        "cannot start anew with {VARIABLE} set, so matrix products take longer; set it: {error}"
    );
}
