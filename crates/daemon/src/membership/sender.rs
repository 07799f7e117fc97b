//! The sender of a task's calls: it numbers them, and knows the newest epoch that the coordinator has named.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shared_proto::ids::{Clock, Epoch, Origin, RunNumber, Sequence, Task};
use shared_proto::job::Job;
use tokio::sync::watch;

/// The sender of a task's calls. Clones share the numbering of calls.
#[derive(Clone, Debug)]
pub struct Sender {
    job: Arc<str>,
    run: RunNumber,
    task: Task,
    sequence: Arc<AtomicU64>,
    clock: Arc<AtomicU64>,
    epoch: Arc<watch::Sender<Epoch>>,
}

impl Sender {
    pub(super) fn new(job: &Job, run: RunNumber, task: Task) -> Self {
        Self {
            job: job.name.as_str().into(),
            run,
            task,
            sequence: Arc::default(),
            clock: Arc::default(),
            epoch: Arc::new(watch::channel(Epoch(0)).0),
        }
    }

    /// Notes the epoch of the newest shard map in an answer of the coordinator.
    pub fn heard(&self, epoch: Epoch) {
        self.epoch.send_if_modified(|newest| {
            let newer = epoch > *newest;
            if newer {
                *newest = epoch;
            }
            newer
        });
    }

    /// Notes that the coordinator has a newer shard map than that of `epoch`. Returns the least epoch that the newer
    /// map can have.
    pub fn must_move_beyond(&self, epoch: Epoch) -> Epoch {
        let newer = epoch.next();
        self.heard(newer);
        newer
    }

    /// Returns a watch on the epoch of the newest shard map that the coordinator has named.
    pub fn newest_epoch(&self) -> watch::Receiver<Epoch> {
        self.epoch.subscribe()
    }

    /// Sets the number of steps that this worker has finished. Its calls contain the number from now on, for a
    /// coordinator that has restarted.
    pub fn set_clock(&self, clock: Clock) {
        self.clock.store(clock.0, Relaxed);
    }

    /// Returns the origin of the next call under a new sequence number, at the clock that was set last and without an epoch.
    pub fn next_origin_here(&self) -> Origin {
        self.next_origin(Epoch(0), Clock(self.clock.load(Relaxed)))
    }

    /// Returns the origin of the next call, under a new sequence number.
    pub fn next_origin(&self, epoch: Epoch, clock: Clock) -> Origin {
        Origin {
            job: self.job.to_string(),
            run: self.run,
            task: self.task,
            epoch,
            clock,
            sequence: Sequence(self.sequence.fetch_add(1, Relaxed) + 1),
        }
    }
}
