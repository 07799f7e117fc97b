//! The coordinator's decisions as plain data: calls come in with the time, answers go out, and the caller
//! fetches the resulting view and records.
//!
//! - `members`: registration, leases, generations; `forgotten`: totals of members that are no longer tracked
//! - `variables`: the model's variables, the shard map, initial values; `map_size`: what a map may have
//! - `checkpoints`: orders and collects them; `failures`, `backoff`: those that fail;
//!   `recovery`: going back to one
//! - `saved`: the state that outlives this process; `possible`: whether one can be resumed
//! - `drain`: servers that are about to stop
//! - `losses`: acknowledged updates that are lost with a server
//! - `evaluations`: those that are due, in progress and done
//! - `training`: leases of work, finished steps, commits, the end; `finished`: checks of reported steps
//! - `unable`: workers that cannot work, and jobs in which no worker can
//! - `stop`: the early end of a job
//! - `fuzzing`: the drivers of fuzz targets
//! - `status`, `outcome`: the status for people, and the summary

mod backoff;
mod capacity;
mod checkpoints;
mod drain;
mod evaluations;
mod failures;
mod finished;
mod forgotten;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod losses;
mod map_size;
mod members;
mod outcome;
mod possible;
mod process;
mod recovery;
mod saved;
mod status;
mod stop;
mod training;
mod unable;
mod variables;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use shared_proto::ids::{Clock, Epoch, Generation, Origin, Role, RunId, Task, TaskId};
use shared_proto::job::{Job, Mode};
use shared_proto::planted;
use shared_proto::receipt::ReceiptKey;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::staleness::StalenessBound;
use shared_proto::view::{Commit, JobPhase, View};
use shared_proto::wire;

use crate::record::Record;
use crate::splits::Ledger;
use backoff::Backoff;
use checkpoints::{Checkpoints, Start};
use evaluations::Evaluations;
use forgotten::Forgotten;
use losses::Losses;
use members::{Awaited, Member};
use status::FaultCounts;
use training::{Step, Tally};
use unable::Unable;
use variables::Variables;

pub(crate) use checkpoints::{CheckpointPlace, DurableCheckpoint, SavedProgress, StoreTask};
pub(crate) use failures::{Failure, Sweep};
pub(crate) use saved::Saved;
pub(crate) use training::Work;
pub(crate) use variables::{Initialization, WorkerData};

/// The whole state of a job.
pub(crate) struct Cluster {
    job: Job,
    /// The number of times that the coordinator has started.
    generation: Generation,
    /// The generation of tasks that register for the first time.
    first_generation: Generation,
    members: BTreeMap<TaskId, Member>,
    forgotten: Forgotten,
    /// The time at which the newest server joined. The shard map is cut a little later.
    last_ps_joined: Option<Instant>,
    ticked: Option<Instant>,
    variables: Option<Variables>,
    ledger: Option<Ledger>,
    evaluations: Evaluations,
    /// Sync mode: the open step.
    step: Option<Step>,
    commit: Option<Commit>,
    min_clock: Clock,
    phase: JobPhase,
    error: String,
    began: Option<Instant>,
    /// Seconds of training before this process began.
    earlier_seconds: f64,
    /// Samples trained on before this run, according to the checkpoint that it began with.
    earlier_samples: u64,
    /// The time at which the newest step was finished.
    last_finish: Option<Instant>,
    tally: Tally,
    fault_counts: FaultCounts,
    /// For each server, the number of times that it was lost and its shard was restored, since this coordinator
    /// started.
    recoveries: BTreeMap<TaskId, u64>,
    shard_reports: BTreeMap<TaskId, wire::ShardReport>,
    losses: Losses,
    view: View,
    records: Vec<Record>,
    checkpoints: Checkpoints,
    /// The checkpoint that the job begins with.
    start: Option<Start>,
    /// Workers that were evicted and are expected back.
    awaited: Awaited,
    unable: Unable,
    /// True if the job was told to end before its data does.
    stopping: bool,
    changes: Changes,
    /// The servers that are about to stop, each with the checkpoint that contains its shard, once ordered.
    draining: BTreeMap<TaskId, Option<u64>>,
    receipt_key: ReceiptKey,
    /// The run's number, which distinguishes members of an earlier run from those of this one.
    run: RunId,
}

/// Counts the changes of state that has to outlive this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// Changes that must be persisted before they are published.
    pub(crate) urgent: u64,
    /// Changes that may be lost: another process knows of them, or the work is done again.
    pub(crate) others: u64,
}

impl Cluster {
    pub(crate) fn new(job: Job) -> Self {
        Self {
            job,
            generation: Generation(1),
            first_generation: Generation(1),
            members: BTreeMap::new(),
            forgotten: Forgotten::default(),
            last_ps_joined: None,
            ticked: None,
            variables: None,
            ledger: None,
            evaluations: Evaluations::default(),
            step: None,
            commit: None,
            min_clock: Clock(0),
            phase: JobPhase::Starting,
            error: String::new(),
            began: None,
            earlier_seconds: 0.0,
            earlier_samples: 0,
            last_finish: None,
            tally: Tally::default(),
            fault_counts: FaultCounts::default(),
            recoveries: BTreeMap::new(),
            shard_reports: BTreeMap::new(),
            losses: Losses::default(),
            view: View::default(),
            records: Vec::new(),
            checkpoints: Checkpoints::default(),
            start: None,
            awaited: Awaited::new(),
            unable: Unable::default(),
            stopping: false,
            changes: Changes::default(),
            draining: BTreeMap::new(),
            receipt_key: ReceiptKey([0; 32]),
            run: RunId::default(),
        }
    }

    /// Enables checkpoints, numbered from `next` on.
    pub(crate) fn with_checkpoints(mut self, place: CheckpointPlace, next: u64) -> Self {
        let bytes = place.probe.bytes();
        let seed = bytes.fold(0, |seed: u64, byte| seed.rotate_left(8) ^ u64::from(byte));
        self.checkpoints.backoff = Backoff::seeded(seed);
        // An earlier coordinator of this run may have left files.
        self.checkpoints.sweep = true;
        self.checkpoints.place = Some(place);
        self.checkpoints.next = self.checkpoints.next.max(next);
        self
    }

    /// Returns the run's id; empty without checkpoints.
    pub(crate) fn run(&self) -> &str {
        self.place().map_or("", |place| &place.probe)
    }

    /// Sets the number of the run.
    pub(crate) fn with_run(mut self, run: RunId) -> Self {
        self.run = run;
        self
    }

    /// Returns the number of the run.
    pub(crate) fn run_id(&self) -> RunId {
        self.run
    }

    /// Sets the key with which servers make receipts. A job keeps its first one.
    pub(crate) fn with_receipt_key(mut self, key: ReceiptKey) -> Self {
        self.receipt_key = key;
        self
    }

    /// Returns the key with which servers make receipts.
    pub(crate) fn receipt_key(&self) -> ReceiptKey {
        self.receipt_key
    }

    /// Returns the location of checkpoints and the run's id; none without checkpoints.
    pub(crate) fn place(&self) -> Option<&CheckpointPlace> {
        self.checkpoints.place.as_ref()
    }

    /// Returns the counts of changes.
    pub(crate) fn changes(&self) -> Changes {
        self.changes
    }

    fn must_persist(&mut self) {
        self.changes.urgent += 1;
    }

    fn may_persist(&mut self) {
        self.changes.others += 1;
    }

    pub(crate) fn job(&self) -> &Job {
        &self.job
    }

    pub(crate) fn lease(&self) -> Duration {
        Duration::from_secs_f64(self.job.cluster.lease_seconds)
    }

    /// Returns how long a member may hold up others without making progress.
    fn stall(&self) -> Duration {
        Duration::from_secs_f64(self.job.cluster.stall_seconds)
    }

    pub(crate) fn ended(&self) -> bool {
        matches!(self.phase, JobPhase::Done | JobPhase::Failed)
    }

    fn sync(&self) -> bool {
        self.job.strategy.mode == Mode::Sync
    }

    /// Makes a new view, with a higher number if anything in it has changed, and returns it.
    pub(crate) fn refresh_view(&mut self) -> &View {
        let mut workers: Vec<Task> = self.live(Role::Worker).map(|m| m.task).collect();
        workers.sort_by_key(|task| task.id.index);
        let fresh = View {
            number: self.view.number,
            epoch: self.epoch(),
            workers,
            min_clock: self.update_min_clock(),
            slowest: self.slowest(),
            initializer: self.variables.as_ref().and_then(|v| v.initializer),
            initialized: self.variables.as_ref().is_some_and(|v| v.initialized),
            commit: self.commit.clone(),
            phase: self.phase,
            error: self.error.clone(),
            checkpoint: self.checkpoints.order,
            run: self.run,
        };
        if fresh != self.view {
            self.view = View {
                number: self.view.number.next(),
                ..fresh
            };
        }
        &self.view
    }

    /// Returns the view that was made last.
    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    fn epoch(&self) -> Epoch {
        let map = self.variables.as_ref().and_then(|v| v.map.as_ref());
        map.map_or(Epoch(0), |map| map.epoch)
    }

    fn live(&self, role: Role) -> impl Iterator<Item = &Member> {
        let of_role = move |m: &&Member| m.alive && m.task.id.role == role;
        self.members.values().filter(of_role)
    }

    /// Raises the min clock to the lowest clock of the workers that hold data, in sync mode to the number of
    /// committed steps, and returns it.
    fn update_min_clock(&mut self) -> Clock {
        let lowest = if self.sync() {
            self.commit.as_ref().map(|commit| commit.step.next())
        } else {
            let active = self.live(Role::Worker).filter(|m| m.progress.active);
            // Where no worker holds data, the evaluator must not wait for the clock of another.
            let evaluator = || {
                let member = self.members.get(&self.evaluations.holder()?.id)?;
                Some(member.progress.clock)
            };
            let clocks = active.map(|m| m.progress.clock);
            match planted!(FastestMinClock) {
                true => clocks.max(),
                false => clocks.min().or_else(evaluator),
            }
        };
        self.min_clock = self.min_clock.max(lowest.unwrap_or(self.min_clock));
        self.min_clock
    }

    /// Returns the workers that the others wait for.
    fn slowest(&self) -> Vec<Task> {
        if let Some(step) = &self.step {
            return step.unfinished().collect();
        }
        self.live(Role::Worker)
            .filter(|m| m.progress.active && m.progress.clock <= self.min_clock)
            .map(|m| m.task)
            .collect()
    }

    fn bound(&self) -> StalenessBound {
        self.job.strategy.bound()
    }

    pub(crate) fn take_records(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.records)
    }

    /// Checks that the sender is a live member of this job in its newest generation.
    ///
    /// # Errors
    /// [`Reason::ForeignJob`], [`Reason::Fenced`] or [`Reason::Superseded`].
    pub(crate) fn admit(&self, origin: &Origin) -> Result<(), Refusal> {
        if origin.job != self.job.name {
            return Err(Refusal::new(
                Reason::ForeignJob,
                format!(
                    "{} belongs to job {:?}, but this is the coordinator of {:?}; give it another coordinator's address",
                    origin.task, origin.job, self.job.name
                ),
            ));
        }
        let task = origin.task;
        let why = match self.members.get(&task.id) {
            _ if origin.run.differs_from(self.run) => {
                format!("{task} is a member of another run of the job, not of this one")
            }
            None => format!("{task} is not known here"),
            Some(m) if m.task.generation > task.generation => {
                return Err(Refusal::new(
                    Reason::Superseded,
                    format!(
                        "generation {} of {task} has been superseded by generation {}, another process with the identity {:?}; give each process one of its own",
                        task.generation, m.task.generation, m.identity
                    ),
                ));
            }
            Some(m) if m.task.generation < task.generation => {
                format!("generation {} of {task} is not known here", task.generation)
            }
            Some(m) if !m.alive => format!("the lease of {task} has ended: {}", m.gone),
            Some(_) => return Ok(()),
        };
        Err(Refusal::new(
            Reason::Fenced,
            format!("{why}; register again"),
        ))
    }

    /// Checks that the sender uses the shard map in force.
    ///
    /// # Errors
    /// [`Reason::StaleEpoch`].
    fn check_epoch(&self, origin: &Origin) -> Result<(), Refusal> {
        let newest = self.epoch();
        if origin.epoch == newest || planted!(NeverReplaced) {
            return Ok(());
        }
        Err(Refusal::new(
            Reason::StaleEpoch,
            format!(
                "{} goes by the shard map of epoch {}, the newest is that of epoch {newest}; fetch it, open a session with each shard where it lives now, and call again",
                origin.task, origin.epoch
            ),
        ))
    }

    pub(crate) fn fail(&mut self, now: Instant, error: String) {
        if !self.ended() {
            self.phase = JobPhase::Failed;
            self.error = error;
            self.must_persist();
            self.record_end(now);
        }
    }
}

/// Returns the refusal for a call that comes after a later one of its sender, or has no number.
fn out_of_order(origin: &Origin, call: &str) -> Refusal {
    Refusal::new(
        Reason::OutOfOrder,
        format!(
            "{call} {} of {} is not newer than the last that was taken; number calls from 1, each higher than the one before, and keep the number of a call that is made again",
            origin.sequence, origin.task
        ),
    )
}
