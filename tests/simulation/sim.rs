//! Simulations: how one is made, and how work outside of it is done.

use std::time::Duration;

use turmoil::Sim;

/// The longest time that a message takes, except on a slow link.
pub(crate) const LATENCY: Duration = Duration::from_millis(12);

/// Returns the simulation of a seed, for at most this time.
pub(crate) fn make<'a>(seed: u64, most: Duration) -> Sim<'a> {
    // Delays between retries are drawn from here.
    fastrand::seed(seed);
    turmoil::Builder::new()
        .rng_seed(seed)
        .tick_duration(Duration::from_millis(5))
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(LATENCY)
        .simulation_duration(most)
        .tcp_capacity(4096)
        .build()
}

/// Waits for work outside the simulation.
pub(crate) fn wait_for<F: Future>(work: F) -> F::Output {
    // The clock must be paused: mad-turmoil answers `clock_gettime` with tokio's clock, and a running one asks `clock_gettime` again.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    runtime.unwrap().block_on(work)
}
