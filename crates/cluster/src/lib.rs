//! The coordinator's decisions as plain data: calls come in with the time, answers go out, and the caller
//! fetches the resulting view and records.
//!
//! - `events`: the calls with follow-ups; `due`: these follow-ups
//! - `messages`: reads and checks calls, and writes answers; `limits`: the limits of their names
//! - `admission`: of calls
//! - `members`: registration, leases, generations; `forgotten`: totals of members that are no longer tracked
//! - `variables`, `model`: the model's variables, initial values; `shard_map`: its cut; `map_size`: what a map may have
//! - `durable`: the state that outlives this process; `rows`, `stored`: its form; `possible`: whether one can be resumed
//! - `checkpoints`: those that the job has; `saving`: orders and collects one; `failures`, `backoff`: those that
//!   fail; `recovery`: going back to one; `epoch`: what ends with it
//! - `placement`: blocks to shards; `capacity`: the memory that servers have for them; `ledger`: data to workers, in pieces (`split`)
//!   that they lease (`leases`)
//! - `process`: the process behind a member, and its newest registration
//! - `shard_reports`: what servers report of their shards; `drain`: servers that are about to stop
//! - `losses`: acknowledged updates that are lost with a server
//! - `evaluations`: those that are due, in progress and done; `monitors`: the metrics that early stopping and the learning rate follow
//! - `training`: its progress; `work`: leases of work; `modes`: how steps are made
//! - `steps`: planned, finished and committed; `norms`: the norm of one; `finished`: reports of steps; `times`: where the time goes
//! - `ring`: the workers that hold the dense variables, and the steps that they make together
//! - `views`: what members follow; `fast_path`: calls that change only clocks and leased data; `waits`: the reasons for which
//!   training waits
//! - `unable`: members that cannot work, and jobs that end because of them
//! - `stop`: the early end of a job
//! - `fuzzing`: the drivers of fuzz targets
//! - `observed`: counts for people, since this process started; `status`: the status; `outcome`: the end
//!   of the job, and its summary; `record`: their form in the run directory; `rise`: a warning when the training loss rises
//!
//! The files of `Cluster` call each other in one direction only; `.ci/call-circles` checks it.

mod admission;
mod backoff;
mod capacity;
mod checkpoints;
mod drain;
mod due;
mod durable;
mod epoch;
mod evaluations;
mod events;
mod failures;
mod fast_path;
mod finished;
mod forgotten;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod leases;
mod ledger;
pub mod limits;
mod losses;
mod map_size;
mod members;
pub mod messages;
mod model;
mod modes;
mod monitors;
mod norms;
mod observed;
mod outcome;
mod placement;
mod possible;
mod process;
mod record;
mod recovery;
mod ring;
mod rise;
mod rows;
mod saving;
mod shard_map;
mod shard_reports;
mod split;
mod status;
mod steps;
mod stop;
mod stored;
mod times;
mod training;
mod unable;
mod variables;
mod views;
mod waits;
mod work;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use shared_proto::ids::{RunNumber, TaskId};
use shared_proto::job::Job;
use shared_proto::receipt::ReceiptKey;
use shared_proto::view::View;

use backoff::Backoff;
use due::Due;
use fast_path::ClockCounts;
use norms::Norms;
use observed::Observed;
use saving::Saving;

pub use checkpoints::{CheckpointPlace, DurableCheckpoint, SavedProgress};
pub use durable::{Durable, Run};
pub use evaluations::DIGEST_BYTES;
pub use failures::{Lineage, Sweep};
pub use model::ModelSpecs;
pub use observed::FaultCounts;
pub use record::{Record, Summary, Timed};
pub use ring::{Cause, Joined, RingFigures, Rings};
pub use saving::{Failure, StoreTask};
pub use split::Split;
pub use variables::{Initialization, WorkerData};
pub use work::Work;

/// A job at work: the state that outlives this process, and what this process adds to it.
pub struct Cluster {
    job: Job,
    turn: Turn,
    durable: Durable,
    instants: Instants,
    observed: Observed,
    saving: Saving,
    /// The servers that are about to stop, each with the checkpoint that contains its shard, once ordered.
    draining: BTreeMap<TaskId, Option<u64>>,
    due: Due,
    view: View,
    norms: Norms,
    /// The number of workers at each clock, while calls take the fast path; `None` otherwise.
    fast_path: Option<ClockCounts>,
    /// The records that are not taken yet, and the number of those that are.
    records: VecDeque<Record>,
    records_taken: u64,
    changes: Changes,
}

/// The place of a job among those of its coordinator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Turn {
    /// The coordinator has no other job.
    #[default]
    Alone,
    /// The coordinator was started with it, and other jobs may follow.
    First,
    /// It was submitted to a long-lived cluster.
    Submitted,
}

/// Times of this process.
#[derive(Debug, Default)]
struct Instants {
    ticked: Option<Instant>,
    /// The time at which the newest server joined. The shard map is cut a little later.
    last_ps_joined: Option<Instant>,
    /// The time at which training began, or this process resumed it.
    began: Option<Instant>,
    /// The time at which the newest step was finished.
    last_finish: Option<Instant>,
    /// The time since which no worker is known to be able to work.
    none_able_since: Option<Instant>,
    /// The time since which the job waits for servers of which one cannot work.
    no_servers_since: Option<Instant>,
    /// The time from which the stall time-out counts while the job waits for members. It is set again whenever the
    /// number of members exceeds the maximum of this wait. None while the job does not wait.
    too_few_since: Option<Instant>,
    /// The number of members at `too_few_since`: the most during this wait.
    most_members: usize,
}

/// Counts the changes of state that has to outlive this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Changes that must be persisted before they are published.
    pub urgent: u64,
    /// The urgent changes on which other calls depend. The other urgent changes may be written a little later, together.
    pub hurried: u64,
    /// Changes that may be lost: another process knows of them, or the work is done again.
    pub others: u64,
}

impl Cluster {
    /// Returns a cluster without members for a job.
    pub fn new(job: Job) -> Self {
        let durable = Durable::new(&job);
        Self::over(job, durable)
    }

    fn over(job: Job, durable: Durable) -> Self {
        Self {
            job,
            turn: Turn::default(),
            durable,
            instants: Instants::default(),
            observed: Observed::default(),
            saving: Saving::default(),
            draining: BTreeMap::new(),
            due: Due::default(),
            view: View::default(),
            norms: Norms::default(),
            fast_path: None,
            records: VecDeque::new(),
            records_taken: 0,
            changes: Changes::default(),
        }
    }

    /// Enables checkpoints, numbered from `next` on.
    pub fn with_checkpoints(mut self, place: CheckpointPlace, next: u64) -> Self {
        let bytes = place.run_id.bytes();
        let seed = bytes.fold(0, |seed: u64, byte| seed.rotate_left(8) ^ u64::from(byte));
        self.saving.backoff = Backoff::seeded(seed);
        // An earlier coordinator of this run may have left files.
        self.saving.sweep = true;
        self.durable.run.run_id = Some(place.run_id.clone());
        self.saving.place = Some(place);
        self.durable.checkpoints.next = self.durable.checkpoints.next.max(next);
        self
    }

    /// Sets the place of the job among those of its coordinator.
    pub fn in_turn(mut self, turn: Turn) -> Self {
        self.turn = turn;
        self
    }

    /// Returns the run's id; empty without checkpoints.
    pub(crate) fn run_id(&self) -> &str {
        self.place().map_or("", |place| &place.run_id)
    }

    /// Sets the number of the run.
    pub fn with_run_number(mut self, run: RunNumber) -> Self {
        self.durable.run.number = run;
        self
    }

    /// Returns the number of the run.
    pub fn run_number(&self) -> RunNumber {
        self.durable.run.number
    }

    /// Sets the key with which servers make receipts. A job keeps its first one.
    pub fn with_receipt_key(mut self, key: ReceiptKey) -> Self {
        self.durable.run.receipt_key = key;
        self
    }

    /// Returns the key with which servers make receipts.
    pub fn receipt_key(&self) -> ReceiptKey {
        self.durable.run.receipt_key
    }

    /// Returns the location of checkpoints and the run's id; none without checkpoints.
    pub fn place(&self) -> Option<&CheckpointPlace> {
        self.saving.place.as_ref()
    }

    /// Returns the counts of changes.
    pub fn changes(&self) -> Changes {
        self.changes
    }

    fn must_persist(&mut self) {
        self.changes.urgent += 1;
        self.changes.hurried += 1;
    }

    /// Notes a change that must be persisted before it is published. No other call depends on it, so it may be written a little later,
    /// together with others.
    fn must_persist_soon(&mut self) {
        self.changes.urgent += 1;
    }

    /// Notes a change that may be lost: another process knows of it, or the work is done again.
    pub fn may_persist(&mut self) {
        self.changes.others += 1;
    }

    /// Returns the job.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Returns the length of a lease: a member that sends nothing for this long is evicted.
    pub fn lease(&self) -> Duration {
        Duration::from_secs_f64(self.job.cluster.lease_seconds)
    }

    /// Returns how long a member may hold up others without making progress.
    fn stall(&self) -> Duration {
        Duration::from_secs_f64(self.job.cluster.stall_seconds)
    }

    /// Returns whether the job has ended.
    pub fn ended(&self) -> bool {
        self.durable.has_ended()
    }

    /// Returns the number of steps and of samples done.
    pub fn done(&self) -> (u64, u64) {
        self.durable.done()
    }

    /// Returns whether any member has not left yet.
    pub fn anyone_there(&self) -> bool {
        self.durable.anyone_there()
    }

    /// Takes the oldest record.
    pub fn take_record(&mut self) -> Option<Record> {
        let record = self.records.pop_front();
        self.records_taken += u64::from(record.is_some());
        record
    }

    /// Returns the number of records that were taken.
    pub fn records_taken(&self) -> u64 {
        self.records_taken
    }

    /// Returns the number of records that were made.
    pub fn records_made(&self) -> u64 {
        self.records_taken + self.records.len() as u64
    }

    /// Takes all records that were not taken.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn take_records(&mut self) -> Vec<Record> {
        std::iter::from_fn(|| self.take_record()).collect()
    }

    /// Returns the seconds of training up to now.
    pub(crate) fn seconds(&self, now: Instant) -> f64 {
        let since = |began| now.saturating_duration_since(began).as_secs_f64();
        self.durable.outcome.seconds + self.instants.began.map_or(0.0, since)
    }
}
