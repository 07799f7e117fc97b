//! The progress of the members of a measured cluster, as they observe it.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use parking_lot::Mutex;
use shared_proto::ids::Clock;
use shared_proto::view::View;

/// A clock that lies this far behind a server's min clock is dropped: its latency is not measured.
const AWAITED: u64 = 10_000;

/// The progress of all members.
pub(super) struct Progress {
    workers: usize,
    servers: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    steps: u64,
    /// By worker: the value of `steps` when the worker last finished a step.
    finished: HashMap<u32, u64>,
    /// By clock: the number of workers that are about to report it.
    reaching: HashMap<u64, usize>,
    /// By clock: the time at which the last worker reached it, and the number of servers whose newest view has reached
    /// it.
    reached: BTreeMap<u64, (Instant, usize)>,
    /// By server: the min clock of the server's newest view, and the number of workers in that view.
    seen: HashMap<u32, (u64, usize)>,
    /// The latencies of views that were measured, in seconds.
    latencies: Vec<f64>,
}

impl Progress {
    pub(super) fn new(workers: u32, servers: u32) -> Self {
        Self {
            workers: workers as usize,
            servers: servers as usize,
            state: Mutex::default(),
        }
    }

    /// Notes that a worker is about to report a clock.
    pub(super) fn reaches(&self, clock: Clock) {
        let mut state = self.state.lock();
        let count = state.reaching.entry(clock.0).or_default();
        *count += 1;
        if *count == self.workers {
            state.reaching.remove(&clock.0);
            state.reached.insert(clock.0, (Instant::now(), 0));
        }
    }

    /// Notes that a worker's report is answered.
    pub(super) fn finished(&self, worker: u32) {
        let mut state = self.state.lock();
        state.steps += 1;
        let steps = state.steps;
        state.finished.insert(worker, steps);
    }

    /// Notes a server's view.
    pub(super) fn sees(&self, server: u32, view: &View) {
        let mut state = self.state.lock();
        let now = view.min_clock.0;
        let (before, _) = state
            .seen
            .insert(server, (now, view.workers.len()))
            .unwrap_or((now, 0));
        let mut known = Vec::new();
        for (clock, (at, servers)) in state.reached.range_mut(before + 1..=now.max(before + 1)) {
            if *clock > now {
                break;
            }
            *servers += 1;
            if *servers == self.servers {
                known.push((*clock, at.elapsed().as_secs_f64()));
            }
        }
        for (clock, seconds) in known {
            state.reached.remove(&clock);
            state.latencies.push(seconds);
        }
        state.reached = state.reached.split_off(&now.saturating_sub(AWAITED));
    }

    pub(super) fn steps(&self) -> u64 {
        self.state.lock().steps
    }

    /// Returns whether each worker has finished a step since the number of all steps was `since`.
    pub(super) fn all_have_finished(&self, since: u64) -> bool {
        let state = self.state.lock();
        let later = state.finished.values().filter(|steps| **steps > since);
        later.count() == self.workers
    }

    /// Returns whether the newest view of each server has exactly `workers` workers.
    pub(super) fn all_servers_see(&self, workers: usize) -> bool {
        let state = self.state.lock();
        let see = state.seen.values().filter(|(_, count)| *count == workers);
        see.count() == self.servers
    }

    pub(super) fn forget_latencies(&self) {
        self.state.lock().latencies.clear();
    }

    /// Returns the latencies of views in seconds, sorted.
    pub(super) fn latencies(&self) -> Vec<f64> {
        let mut latencies = self.state.lock().latencies.clone();
        latencies.sort_by(f64::total_cmp);
        latencies
    }
}
