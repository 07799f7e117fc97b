//! The coordinator's decisions as plain data. The caller passes each call with the current time and gets the reply.
//! Then it fetches the new view and the records.
//!
//! - `events`: the calls that can have follow-ups; `due`: these follow-ups
//! - `messages`: checks and converts messages; `limits`: limits on names and metrics in calls
//! - `admission`: which calls are admitted
//! - `members`: registration, leases, generations; `forgotten`: totals of members that are no longer tracked
//! - `variables`, `model`: the model's variables and their initial values; `shard_map`: cuts the shard map; `map_size`:
//!   the maximum size of a shard map
//! - `durable`: the state that outlives this process; `rows`, `stored`: its stored form; `possible`: refuses impossible
//!   stored state
//! - `checkpoints`: the checkpoints that the job has; `saving`: orders a checkpoint and collects its parts; `failures`,
//!   `backoff`: failed checkpoints; `recovery`: restores shards and the training from a checkpoint; `epoch`: begins a
//!   new epoch
//! - `placement`: places blocks on shards; `capacity`: the memory of servers; `ledger`: leases data to workers in
//!   pieces (`split`); `leases`: the leased pieces
//! - `process`: the process behind a member, and its newest registration
//! - `shard_reports`: the servers' reports of their shards; `drain`: servers that are about to stop
//! - `losses`: acknowledged updates that are lost with a server
//! - `evaluations`: evaluations that are due, in progress and done; `monitors`: the metrics that early stopping and the
//!   learning rate follow
//! - `training`: the progress of the training; `work`: leases of work; `modes`: how steps are made
//! - `steps`: plans, finishes and commits steps; `norms`: the gradient norm of a step; `finished`: checks and counts
//!   reports of steps; `times`: the time spent in each part of a step
//! - `ring`: the workers that hold the dense variables, and the steps that they make together
//! - `views`: the views that members follow; `fast_path`: calls that change only clocks and leased data; `waits`: the
//!   reasons for which training waits
//! - `unable`: members that cannot work, and jobs that end because of them
//! - `stop`: the early end of a job
//! - `fuzzing`: the drivers of the fuzz targets
//! - `observed`: counts since this process started; `status`: the status of the job; `outcome`: the end of the job, and
//!   its summary; `record`: records and the summary, as the run directory has them; `rise`: a warning when the training
//!   loss rises
//!
//! The calls between the files that implement `Cluster` form no cycle; `.ci/call-circles` checks this.

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

/// A running job: the state that outlives this process, and the state that only this process has.
pub struct Cluster {
    job: Job,
    turn: Turn,
    durable: Durable,
    instants: Instants,
    observed: Observed,
    saving: Saving,
    /// The servers that are about to stop, each with the number of the checkpoint that contains its shard. `None`: this
    /// checkpoint is not ordered yet.
    draining: BTreeMap<TaskId, Option<u64>>,
    due: Due,
    view: View,
    norms: Norms,
    /// The number of workers that hold data at each clock; `None` while calls do not take the fast path.
    fast_path: Option<ClockCounts>,
    /// The records that the caller has not taken yet. `records_taken` counts the others.
    records: VecDeque<Record>,
    records_taken: u64,
    changes: Changes,
}

/// How a job came to its coordinator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Turn {
    /// The coordinator has no other job.
    #[default]
    Alone,
    /// The coordinator was started with this job. Other jobs may follow.
    First,
    /// The job was submitted to a long-lived cluster.
    Submitted,
}

/// Points in time, which are not persisted.
#[derive(Debug, Default)]
struct Instants {
    ticked: Option<Instant>,
    /// The time at which the newest server joined. If the job does not set the number of servers, the shard map is cut
    /// a little later.
    last_ps_joined: Option<Instant>,
    /// The time at which training began, or at which this process resumed it; `None` before.
    began: Option<Instant>,
    /// The time of the newest report of finished steps, or of the resumption if no report has come since.
    last_finish: Option<Instant>,
    /// The time since which too few workers can work, if some have recently reported why; `None` otherwise.
    none_able_since: Option<Instant>,
    /// The time since which servers are missing, if some have recently reported that they cannot work; `None`
    /// otherwise.
    no_servers_since: Option<Instant>,
    /// The time from which the stall time-out counts while the job waits for members. It is reset whenever the number
    /// of members reaches a new maximum of this wait. `None` while the job does not wait.
    too_few_since: Option<Instant>,
    /// The number of members at `too_few_since`, which is the maximum during this wait.
    most_members: usize,
}

/// The number of changes to the durable state so far, by urgency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Changes that must be persisted before they are published.
    pub urgent: u64,
    /// The urgent changes on which other calls depend. The other urgent changes may be written a little later, in one
    /// write.
    pub hurried: u64,
    /// Changes that may be lost: another process can report them again, or the work is redone.
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

    /// Enables checkpoints at `place`. The next checkpoint has the number `next`, or a higher one if the state already
    /// has it.
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

    /// Sets how the job came to its coordinator.
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

    /// Sets the key with which servers make receipts. A job that is resumed keeps its key.
    pub fn with_receipt_key(mut self, key: ReceiptKey) -> Self {
        self.durable.run.receipt_key = key;
        self
    }

    /// Returns the key with which servers make receipts.
    pub fn receipt_key(&self) -> ReceiptKey {
        self.durable.run.receipt_key
    }

    /// Returns the location of the checkpoints and the run's id; `None` without checkpoints.
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

    /// Notes a change that must be persisted before it is published. No other call depends on the change, so it may be
    /// written a little later, together with others.
    fn must_persist_soon(&mut self) {
        self.changes.urgent += 1;
    }

    /// Notes a change that may be lost: another process can report it again, or the work is redone.
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

    /// Returns the numbers of steps and samples done.
    pub fn done(&self) -> (u64, u64) {
        self.durable.done()
    }

    /// Returns whether any member is alive.
    pub fn anyone_there(&self) -> bool {
        self.durable.anyone_there()
    }

    /// Removes and returns the oldest record.
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

    /// Returns the seconds of training until `now`, including those before a restart.
    pub(crate) fn seconds(&self, now: Instant) -> f64 {
        let since = |began| now.saturating_duration_since(began).as_secs_f64();
        self.durable.outcome.seconds + self.instants.began.map_or(0.0, since)
    }
}
