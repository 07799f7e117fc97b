//! The coordinator's decisions as plain data: calls come in with the time, answers go out, and the caller
//! fetches the resulting view and records.
//!
//! - `messages`: what calls say, read and checked; `limits`: limits of the names in them
//! - `admission`: of calls
//! - `members`: registration, leases, generations; `forgotten`: totals of members that are no longer tracked
//! - `variables`: the model's variables, initial values; `shard_map`: its cut; `map_size`: what a map may have
//! - `durable`: the state that outlives this process; `rows`, `stored`: its form; `possible`: whether one can be resumed
//! - `checkpoints`: those that the job has; `saving`: orders and collects one; `failures`, `backoff`: those that
//!   fail; `recovery`: going back to one
//! - `placement`: blocks to shards; `ledger`: data to workers; `capacity`: the memory that servers have for them
//! - `process`: the process behind a member, and its newest registration
//! - `drain`: servers that are about to stop
//! - `losses`: acknowledged updates that are lost with a server
//! - `evaluations`: those that are due, in progress and done; `monitors`: the metrics that early stopping and the learning rate follow
//! - `training`: leases of work, and the end; `steps`: planned, finished and committed; `finished`: checks of reported
//!   steps; `times`: where the time goes
//! - `ring`: the workers that hold the dense variables, and the steps that they make together
//! - `waits`: the reasons for which training waits
//! - `unable`: members that cannot work, and jobs that end because of them
//! - `stop`: the early end of a job
//! - `fuzzing`: the drivers of fuzz targets
//! - `observed`: counts for people, since this process started; `status`, `outcome`: the status, and the summary;
//!   `record`: their form in the run directory; `rise`: a warning when the training loss rises

mod admission;
mod backoff;
mod capacity;
mod checkpoints;
mod drain;
mod durable;
mod evaluations;
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
mod monitors;
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
mod split;
mod status;
mod steps;
mod stop;
mod stored;
mod times;
mod training;
mod unable;
mod variables;
mod waits;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use shared_proto::blocks::ShardMap;
use shared_proto::ids::{Clock, Epoch, Role, RunNumber, Task, TaskId};
use shared_proto::job::{Job, Mode};
use shared_proto::planted;
use shared_proto::receipt::ReceiptKey;
use shared_proto::staleness::StalenessBound;
use shared_proto::view::{Commit, JobPhase, View};

use backoff::Backoff;
use fast_path::ClockCounts;
use members::Member;
use observed::Observed;
use saving::Saving;
use steps::Norms;

pub use checkpoints::{CheckpointPlace, DurableCheckpoint, SavedProgress};
pub use durable::{Durable, Run};
pub use evaluations::DIGEST_BYTES;
pub use failures::{Lineage, Sweep};
pub use model::ModelSpecs;
pub use observed::FaultCounts;
pub use record::Summary;
pub use record::{Record, Timed};
pub use ring::{Cause, Joined, RingFigures, Rings};
pub use saving::{Failure, StoreTask};
pub use split::Split;
pub use training::Work;
pub use variables::{Initialization, WorkerData};

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

/// The largest number of slowest workers in a view.
const MOST_SLOWEST: usize = 8;

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
    /// The time since which the job waits for more members, or at which the newest of them came.
    too_few_since: Option<Instant>,
    /// The most members that were there since then.
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
    /// Returns the cluster of a job without members.
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

    /// Returns the time after which a member without a sign of life is gone.
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

    fn sync(&self) -> bool {
        self.job.strategy.mode == Mode::Sync
    }

    /// Returns whether each worker makes steps of its own, so that a report of steps changes nothing for other workers but the min clock.
    pub fn steps_alone(&self) -> bool {
        !self.sync() && !self.has_ring()
    }

    /// Makes a new view, with a higher number if anything in it has changed, and returns it.
    pub fn refresh_view(&mut self) -> &View {
        if self.on_fast_path() && !self.view_is_outdated() {
            return self.refresh_min_clock();
        }
        self.leave_fast_path();
        let fresh = self.fresh_view();
        if fresh != self.view {
            self.view = View {
                number: self.view.number.next(),
                ..fresh
            };
        }
        &self.view
    }

    /// Computes the view from all members. It has the number of the newest view.
    pub(crate) fn fresh_view(&mut self) -> View {
        let mut workers: Vec<Task> = self.live(Role::Worker).map(|m| m.task).collect();
        workers.sort_by_key(|task| task.id.index);
        View {
            number: self.view.number,
            epoch: self.epoch(),
            workers,
            min_clock: self.update_min_clock(),
            slowest: self.slowest(),
            initializer: self.durable.variables.as_ref().and_then(|v| v.initializer),
            initialized: self.initialized(),
            commit: self.durable.training.commit.clone(),
            phase: self.durable.outcome.phase,
            error: self.durable.outcome.error.clone(),
            checkpoint: self.saving.order(),
            run: self.durable.run.number,
            learning_rate_factor: self.learning_rate_factor(),
            // Set when the view is published.
            persisted: 0,
            opened: 0,
            measured: self.step_to_measure(),
        }
    }

    /// Returns whether the view differs in a field that is compared without looking at members. The list of workers is not compared: a call
    /// that changes it leaves the fast path.
    fn view_is_outdated(&self) -> bool {
        let initializer = self.durable.variables.as_ref().and_then(|v| v.initializer);
        let step = |commit: &Option<Commit>| commit.as_ref().map(|commit| commit.step);
        let view = &self.view;
        view.epoch != self.epoch()
            || view.initializer != initializer
            || view.initialized != self.initialized()
            || step(&view.commit) != step(&self.durable.training.commit)
            || view.phase != self.durable.outcome.phase
            || view.error != self.durable.outcome.error
            || view.checkpoint != self.saving.order()
            || view.learning_rate_factor != self.learning_rate_factor()
    }

    /// Makes a new view if the min clock has risen.
    fn refresh_min_clock(&mut self) -> &View {
        let min_clock = self.update_min_clock();
        if self.view.min_clock != min_clock {
            self.view.min_clock = min_clock;
            self.view.slowest = self.slowest();
            self.view.number = self.view.number.next();
        }
        &self.view
    }

    /// Returns the view that was made last.
    pub fn view(&self) -> &View {
        &self.view
    }

    fn epoch(&self) -> Epoch {
        let map = self.map();
        map.map_or(self.durable.ring.number, |map| map.epoch)
    }

    /// Begins another epoch, because a shard has moved or has other values, or a ring is over. A ring ends with its epoch.
    fn raise_epoch(&mut self, now: Instant, cause: Cause) {
        match self.durable.ring.is_formed() {
            true => self.note_broken(now, cause),
            false => self.observed.rings.waits_again(now),
        }
        let next = self.epoch().next();
        if let Some(map) = self.map_mut() {
            map.epoch = next;
        }
        if self.has_ring() {
            self.durable.ring.end(next);
            // Its source may be gone. If the next ring begins with a checkpoint as well, its own source loads it.
            let part = self.part_of_ring();
            self.durable.checkpoints.loading.remove(&part);
        }
        if self.has_ring() && self.map().is_some() && self.saving.at_work() {
            // Servers write a checkpoint in one epoch. The next ring begins with another.
            self.give_up_saving();
            self.saving.begun = None;
        }
        self.must_persist();
    }

    /// Returns the shard map, once it is cut.
    fn map(&self) -> Option<&ShardMap> {
        self.durable.variables.as_ref()?.map.as_ref()
    }

    fn map_mut(&mut self) -> Option<&mut ShardMap> {
        self.durable.variables.as_mut()?.map.as_mut()
    }

    /// Returns whether the variables have their initial values.
    fn initialized(&self) -> bool {
        let variables = self.durable.variables.as_ref();
        variables.is_some_and(|variables| variables.initialized)
    }

    fn member(&self, id: TaskId) -> Option<&Member> {
        self.durable.members.get(&id)
    }

    fn live(&self, role: Role) -> impl Iterator<Item = &Member> {
        let of_role = move |m: &&Member| m.alive && m.task.id.role == role;
        self.durable.members.values().filter(of_role)
    }

    /// Raises the min clock to the lowest clock of the workers that hold data, in sync mode to the number of
    /// committed steps, and returns it.
    fn update_min_clock(&mut self) -> Clock {
        let lowest = if self.has_ring() {
            // Set when all members have made a step.
            None
        } else if self.sync() {
            self.durable
                .training
                .commit
                .as_ref()
                .map(|commit| commit.step.next())
        } else {
            let known = self.fast_path.as_ref().and_then(ClockCounts::lowest);
            let active = self.live(Role::Worker).filter(|m| m.progress.active);
            // Where no worker holds data, the evaluator must not wait for the clock of another.
            let evaluator = || {
                let evaluator = self.member(self.durable.evaluations.holder()?.id)?;
                Some(evaluator.progress.clock)
            };
            let clocks = active.map(|m| m.progress.clock);
            match planted!(FastestMinClock) {
                true => clocks.max(),
                false => known.or_else(|| clocks.min()).or_else(evaluator),
            }
        };
        let training = &mut self.durable.training;
        training.min_clock = training.min_clock.max(lowest.unwrap_or_default());
        training.min_clock
    }

    /// Returns the workers that the others wait for, [`MOST_SLOWEST`] at the most.
    fn slowest(&self) -> Vec<Task> {
        let mut slowest = self.stragglers();
        slowest.truncate(MOST_SLOWEST);
        slowest
    }

    /// Returns all workers that the others wait for.
    fn stragglers(&self) -> Vec<Task> {
        if self.has_ring() {
            return self.slowest_of_ring();
        }
        if let Some(step) = &self.durable.training.step {
            return step.unfinished().collect();
        }
        self.live(Role::Worker)
            .filter(|m| m.progress.active && m.progress.clock <= self.durable.training.min_clock)
            .map(|m| m.task)
            .collect()
    }

    fn bound(&self) -> StalenessBound {
        self.job.strategy.bound()
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

    pub(crate) fn fail(&mut self, now: Instant, error: String) {
        if !self.ended() {
            self.durable.outcome.phase = JobPhase::Failed;
            self.durable.outcome.error = error;
            self.must_persist();
            self.record_end(now);
        }
    }
}
