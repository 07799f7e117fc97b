//! The drivers of the fuzz targets `calls` and, for persisted states, `decode`.
//!
//! - `events`: the input of `calls`
//! - `player`: plays events on a cluster; `origins`: the calls of its members
//! - `edits`: changes to a persisted state

mod edits;
mod events;
mod origins;
mod player;

use std::time::Instant;

use arbitrary::Unstructured;
use fuzz_input::events;
use serde_json::Value;
use shared_proto::ids::{Clock, Origin, Role, Sequence, Task};
use shared_proto::job::Job;
use shared_proto::wire;

use super::{Cluster, Durable};
use player::Player;

/// The maximum number of events in an input.
const MOST_EVENTS: usize = 150;

/// Plays the events in an input.
pub fn calls(bytes: &[u8]) {
    let mut input = Unstructured::new(bytes);
    let Ok(setting) = input.arbitrary() else {
        return;
    };
    let mut player = Player::new(&setting);
    for event in events(&mut input, MOST_EVENTS) {
        player.play(event);
    }
}

/// Reads the bytes as a persisted state, and also as changes to a persisted state. Returns the number of states that
/// were resumed.
pub fn decode(bytes: &[u8]) -> usize {
    let mut resumed = usize::from(resume(bytes));
    if let Ok(edited) = edits::edited(&mut Unstructured::new(bytes)) {
        resumed += usize::from(resume(edited.to_string().as_bytes()));
    }
    resumed
}

/// Resumes from a persisted state if possible, and lets time pass. Checks that the state persists unchanged. Returns
/// whether it was resumed.
fn resume(bytes: &[u8]) -> bool {
    let now = Instant::now();
    let Some(mut cluster) = resumed(bytes, now) else {
        return false;
    };
    let kept = kept(&cluster, now);
    let again = resumed(kept.as_bytes(), now).expect("what was kept");
    assert_eq!(
        without_generation(&self::kept(&again, now)),
        without_generation(&kept)
    );
    cluster.tick(now);
    cluster.refresh_view();
    cluster.status(now);
    let workers: Vec<Task> = cluster.durable.live(Role::Worker).map(|m| m.task).collect();
    for worker in workers {
        let origin = Origin {
            job: cluster.job().name.clone(),
            run: cluster.run_number(),
            task: worker,
            epoch: cluster.durable.epoch(),
            clock: Clock(0),
            sequence: Sequence(1),
        };
        cluster.lease_work(now, &origin, None);
    }
    self::kept(&cluster, now);
    true
}

/// Reads a persisted state and resumes from it; `None` if it is not possible.
fn resumed(bytes: &[u8], now: Instant) -> Option<Cluster> {
    let durable: Durable = serde_json::from_slice(bytes).ok()?;
    durable.check().ok()?;
    let job = Job::from_toml(&durable.run.job_toml).ok()?;
    Some(Cluster::resume(job, durable, now))
}

/// Returns the state as it is persisted.
fn kept(cluster: &Cluster, now: Instant) -> String {
    serde_json::to_string(&cluster.snapshot(now)).expect("a state is plain data")
}

/// Returns a persisted state without the number of the coordinator's starts.
fn without_generation(kept: &str) -> Value {
    let mut state: Value = serde_json::from_str(kept).expect("what was kept");
    state["run"]["starts"].take();
    state
}

impl Cluster {
    /// Adds the result of an evaluation that no worker has leased, for tests of the state on disk.
    pub fn add_evaluation(&mut self, report: wire::EvaluationReport) {
        self.durable.evaluations.add(report.into());
    }
}

#[cfg(test)]
mod tests {
    use fuzz_input::replay;

    #[test]
    fn any_calls_are_taken_or_refused() {
        replay("calls", super::calls);
    }

    #[test]
    fn any_kept_states_are_resumed_or_refused() {
        let mut resumed = std::cell::Cell::new(0);
        replay("decode", |bytes| {
            resumed.set(resumed.get() + super::decode(bytes))
        });
        assert!(*resumed.get_mut() > 3, "no kept state is good");
    }
}
