//! The threads that compute on CPUs.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread::available_parallelism;

use candle_core::utils::get_num_threads;

/// The environment variable from which rayon and candle read the number of threads.
pub const VARIABLE: &str = "RAYON_NUM_THREADS";

/// The environment variable with the id of the process that has re-executed its program.
const REEXECUTED_BY: &str = "FLAMBEAU_REEXECUTED_BY";

/// Returns the number of threads that [`VARIABLE`] sets; `None` if it does not have a number above 0.
pub fn configured() -> Option<usize> {
    let value = std::env::var(VARIABLE).ok()?;
    value.parse().ok().filter(|threads| *threads > 0)
}

/// Returns the number of cores that this process may use, hyperthreads included.
pub fn cores() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// Returns the number of threads with which this process computes on CPUs: the number that [`VARIABLE`] sets, or else
/// the number of physical cores of the host, but at most [`cores`].
pub fn number() -> usize {
    configured().unwrap_or_else(|| get_num_threads().min(cores()))
}

/// Re-executes this program with [`VARIABLE`] set, unless it is set already. Without it, candle reads `/proc/cpuinfo`
/// in each matrix product. Call this first in a process that computes. If the system refuses, the process continues
/// without the variable.
pub fn reexecute_if_unset() {
    let process = std::process::id().to_string();
    // A program that changes the variable before it calls this is not executed again and again.
    if configured().is_some() || std::env::var(REEXECUTED_BY).is_ok_and(|by| by == process) {
        return;
    }
    let mut arguments = std::env::args_os();
    let execute = |program| {
        let mut command = Command::new(program);
        if let Some(name) = arguments.next() {
            command.arg0(name);
        }
        let command = command.args(arguments).env(REEXECUTED_BY, process);
        command.env(VARIABLE, number().to_string()).exec()
    };
    let error = std::env::current_exe().map_or_else(|error| error, execute);
    eprintln!("{VARIABLE} is not set, so matrix products take longer; set it: {error}");
}

/// Calls `work` on a thread of a new pool with `threads` threads. A thread of a pool computes a part of each parallel
/// loop itself; a thread outside of the pool hands over the whole loop, and waits. If `threads` is `None`, `work` runs
/// on the calling thread, and uses the process's pool from outside.
pub(crate) fn in_pool(threads: Option<usize>, work: impl FnOnce() + Send) {
    let pool = threads.map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1));
        pool.thread_name(|number| format!("replica-{number}"))
            .build()
    });
    match pool {
        Some(Ok(pool)) => pool.install(work),
        Some(Err(error)) => {
            tracing::warn!("no threads of its own for a replica: {error}");
            work();
        }
        None => work(),
    }
}
