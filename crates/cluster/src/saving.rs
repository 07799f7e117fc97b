//! The checkpoint that is being written: decides when one is due, collects the parts of the shards, and makes the
//! manifest.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::{CheckpointError, FORMAT, FileEntry, Manifest, SavedVariable};
use shared_proto::ids::{Clock, Epoch, Generation, Task};
use shared_proto::planted;
use shared_proto::refusal::brief;
use shared_proto::view::{CheckpointOrder, JobPhase};
use shared_proto::wire;

use super::Cluster;
use super::backoff::Backoff;
use super::checkpoints::{CheckpointPlace, DurableCheckpoint, SavedProgress, Stage};
use super::losses::is_alive;
use super::placement::block_elements;
use super::record::Record;

/// A task for the store of checkpoints.
#[derive(Debug)]
pub enum StoreTask {
    /// Write the manifest of a checkpoint that was begun at this time, and delete the checkpoints that are no longer
    /// kept.
    Write(Box<Manifest>, Instant),
    /// Find the newest complete checkpoint before this one.
    FindBefore(Box<DurableCheckpoint>),
}

/// How a checkpoint divides the values, and the worker that writes those of a ring.
struct Layout {
    block_elements: usize,
    shards: u32,
    writer: Option<Writer>,
}

/// A worker that writes the values of a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writer {
    pub(super) task: Task,
    /// True once the worker has copied its values, so that the next steps may change them.
    pub(super) has_copy: bool,
}

/// A checkpoint that is being written, by the shards, by a worker of the ring, or by both.
#[derive(Debug)]
pub(super) struct AtWork {
    pub(super) manifest: Manifest,
    /// The checkpoint that this one may build on; `None` if this one must be full.
    base: Option<Arc<Manifest>>,
    progress: SavedProgress,
    pub(super) begun: Instant,
    /// The time at which a member last wrote some of the checkpoint.
    pub(super) moved: Instant,
    /// The parts that have not been reported.
    pub(super) missing: BTreeSet<u32>,
    /// True if the job ends with this checkpoint.
    pub(super) last: bool,
    /// Jobs with a ring: the worker that writes the ring's part, which is the last part.
    pub(super) writer: Option<Writer>,
}

impl AtWork {
    pub(super) fn number(&self) -> u64 {
        self.manifest.number
    }

    /// Describes the writer of a part.
    pub(super) fn writer_of(&self, shard: u32) -> String {
        match self.writer {
            Some(writer) if shard + 1 == self.manifest.shards => writer.task.to_string(),
            _ => format!("shard {shard}"),
        }
    }

    fn order(&self) -> CheckpointOrder {
        CheckpointOrder {
            number: self.manifest.number,
            epoch: Epoch(self.manifest.epoch),
            clock: Clock(self.manifest.clock),
            base: self.base.as_ref().map(|base| base.number),
        }
    }
}

/// The reason why a checkpoint could not be written.
#[derive(Clone, Debug)]
pub struct Failure {
    pub(crate) why: String,
    /// True if the store is full.
    pub(crate) full: bool,
}

impl From<&CheckpointError> for Failure {
    fn from(error: &CheckpointError) -> Self {
        Self {
            why: error.to_string(),
            full: error.is_full(),
        }
    }
}

/// The attempts that have failed since the newest checkpoint.
#[derive(Debug)]
pub(super) struct Failed {
    /// The failure of the newest attempt.
    pub(super) failure: Failure,
    /// The time before which no other attempt is made.
    pub(super) try_again: Instant,
    /// The time at which the first failed attempt at the job's last checkpoint was begun; `None` before such an
    /// attempt.
    pub(super) last_since: Option<Instant>,
}

/// The writing of checkpoints by this process. It is not persisted, so a restarted process begins anew.
#[derive(Debug, Default)]
pub(super) struct Saving {
    /// The location of the checkpoints and the run's id; `None` if the job writes no checkpoints.
    pub(super) place: Option<CheckpointPlace>,
    /// The checkpoint that is being written at present. It is unset once the checkpoint is written or given up, so that
    /// a server that joins later does not write values that it does not have.
    pub(super) at_work: Option<AtWork>,
    /// The time and the number of steps when the newest checkpoint was begun. `None` if the next one must not wait for
    /// the job's interval, for example after a failure.
    pub(super) begun: Option<(Instant, u64)>,
    /// The newest checkpoint that this process has written, on which the next one may build; `None` for a model without
    /// tables.
    pub(super) base: Option<Arc<Manifest>>,
    /// The time at which the newest checkpoint was begun. After a restart: the time of the restart.
    pub(super) newest_begun: Option<Instant>,
    /// The failed attempts since the newest checkpoint; `None` if there are none.
    pub(super) failed: Option<Failed>,
    pub(super) backoff: Backoff,
    pub(super) store_task: Option<StoreTask>,
    /// True if the files of given-up checkpoints must be deleted now.
    pub(super) sweep: bool,
    /// The time at which these files must be deleted once more.
    pub(super) sweep_again: Option<Instant>,
}

impl Saving {
    /// Returns the order to the shards, while a checkpoint is being written.
    pub(super) fn order(&self) -> Option<CheckpointOrder> {
        self.at_work.as_ref().map(AtWork::order)
    }

    /// Describes what the last checkpoint waits for.
    pub(super) fn last_of(&self) -> String {
        let at_work = self.at_work.as_ref().filter(|at_work| at_work.last);
        let missing = at_work.and_then(|at_work| Some((at_work, at_work.missing.first()?)));
        match missing {
            Some((at_work, shard)) => format!(
                "{} is writing its part of the last checkpoint",
                at_work.writer_of(*shard)
            ),
            None => self.awaits("last"),
        }
    }

    /// Describes the wait for the first or the last checkpoint.
    pub(super) fn awaits(&self, which: &str) -> String {
        match &self.failed {
            None => format!("the {which} checkpoint is being written"),
            Some(failed) => format!(
                "the {which} checkpoint could not be written ({}); it is tried again",
                failed.failure.why
            ),
        }
    }

    /// Returns whether a checkpoint is being written. Where workers make each step together, a step may have to wait
    /// for it.
    pub(super) fn at_work(&self) -> bool {
        self.at_work.is_some()
    }

    /// Shifts the deadline of the checkpoint by `gap`, for which this process did not run.
    pub(super) fn was_stopped(&mut self, gap: Duration) {
        if let Some(at_work) = &mut self.at_work {
            at_work.moved += gap;
        }
    }
}

impl Cluster {
    /// Withdraws the end of the training, because values have gone back to a checkpoint.
    pub(super) fn not_last_any_more(&mut self) {
        if self.durable.checkpoints.ending() {
            self.durable.checkpoints.stage = Stage::Regular;
        }
        self.saving.begun = None;
        if let Some(failed) = &mut self.saving.failed {
            failed.last_since = None;
        }
    }

    /// Takes the next task for the store.
    pub fn take_store_task(&mut self) -> Option<StoreTask> {
        self.saving.store_task.take()
    }

    /// Returns whether a checkpoint can be written at present.
    fn can_save(&self, now: Instant) -> bool {
        let saving = &self.saving;
        let rests = |failed: &Failed| now < failed.try_again;
        saving.place.is_some()
            && saving.at_work.is_none()
            && saving.store_task.is_none()
            && !saving.failed.as_ref().is_some_and(rests)
            && !self.ended()
            && self.durable.initialized()
            && self.durable.orphans().next().is_none()
            && self.durable.checkpoints.loading.is_empty()
            && (!self.has_ring() || self.ring_rests())
    }

    /// Orders a checkpoint if one is due. In sync mode it must be called between two steps.
    pub(super) fn save_if_due(&mut self, now: Instant) {
        if !self.can_save(now) {
            return;
        }
        let settings = &self.job.checkpoint;
        let due = match self.saving.begun {
            _ if self.durable.checkpoints.stage != Stage::Regular => true,
            _ if self.awaits_draining() => true,
            _ if self.durable.outcome.phase != JobPhase::Training => false,
            None => true,
            Some((at, steps)) => {
                let seconds = now.duration_since(at).as_secs_f64();
                let enough =
                    |every| self.durable.training.tally.steps.saturating_sub(steps) >= every;
                (seconds >= settings.every_seconds || settings.every_steps.is_some_and(enough))
                    && self.durable.training.tally.steps > steps
            }
        };
        if due {
            self.save(now);
        }
    }

    fn save(&mut self, now: Instant) {
        let (Some(variables), Some(ledger)) =
            (&self.durable.variables, &self.durable.training.ledger)
        else {
            return;
        };
        let Some(layout) = self.layout() else {
            return;
        };
        let progress = SavedProgress {
            ledger: ledger.at_rest(),
            due: self.durable.evaluations.all_due(),
            evaluations: self.durable.evaluations.done.clone(),
            monitors: Some(self.durable.evaluations.monitors.clone()),
            clock: self.durable.training.min_clock,
            steps: self.durable.training.tally.steps,
            samples: self.durable.training.tally.samples,
            generation: Generation(0),
        };
        let number = self.durable.checkpoints.next;
        let manifest = Manifest {
            format: FORMAT,
            number,
            run: self.run_id().to_owned(),
            job: self.job.name.clone(),
            job_toml: self.job.to_toml(),
            mode: self.job.strategy.mode.name().to_owned(),
            epoch: self.durable.epoch().0,
            clock: progress.clock.0,
            steps: progress.steps,
            samples: progress.samples,
            // Set when it is written: there is no wall clock here.
            began: 0,
            variables: variables
                .model
                .variables
                .iter()
                .map(|spec| SavedVariable::new(spec, self.job.slots_of(&spec.name, spec.kind)))
                .collect(),
            tables: variables.model.tables.clone(),
            block_elements: layout.block_elements as u64,
            slots: None,
            shards: layout.shards,
            files: Vec::new(),
            progress: serde_json::Value::Null,
            checksum: String::new(),
        };
        let missing = (0..manifest.shards).collect();
        self.durable.checkpoints.next = number.saturating_add(1);
        self.durable.losses.ordered(number);
        self.drains_into(number);
        // The remains of earlier attempts take room.
        self.saving.sweep |= self.saving.failed.is_some();
        self.saving.begun = Some((now, progress.steps));
        let most = self.job.checkpoint.increments as usize;
        let base = self.saving.base.clone();
        let base = base.filter(|base| base.builds_on().len() < most);
        self.saving.at_work = Some(AtWork {
            manifest,
            base,
            progress,
            begun: now,
            moved: now,
            missing,
            last: self.durable.checkpoints.ending(),
            writer: layout.writer,
        });
        self.must_persist();
    }

    /// Returns how the checkpoint divides the values; `None` if a job with a ring has none formed, or another job has
    /// no shard map yet.
    fn layout(&self) -> Option<Layout> {
        let variables = self.durable.variables.as_ref()?;
        let start = self.durable.checkpoints.start.as_ref();
        let map = self.durable.map();
        let writer = match self.has_ring() {
            true => Some(Writer {
                task: self.first_of_ring()?,
                has_copy: false,
            }),
            false => None,
        };
        if map.is_none() && writer.is_none() {
            return None;
        }
        Some(Layout {
            block_elements: match (map, start) {
                (Some(map), _) => map.block_elements,
                (None, Some(start)) => start.block_elements,
                (None, None) => block_elements(&variables.model.variables, 1),
            },
            shards: self.part_of_ring() as u32 + u32::from(writer.is_some()),
            writer,
        })
    }

    /// Returns whether a member writes this part of the checkpoint.
    fn writes(&self, shard: u32, task: Task) -> bool {
        let servers = self.durable.servers();
        let at_work = self.saving.at_work.as_ref();
        match at_work.and_then(|at_work| at_work.writer) {
            Some(writer) if shard as usize == servers.len() => writer.task == task,
            _ => servers.get(shard as usize) == Some(&task),
        }
    }

    /// Takes a member's report that it has written its part, has written more of it, or cannot write it.
    pub(crate) fn shard_saved(&mut self, now: Instant, task: Task, report: wire::CheckpointReport) {
        if !self.writes(report.shard, task) {
            return;
        }
        // The generations of forgotten members are all below the first generation.
        let forgotten = Generation(self.durable.forgotten.first_generation.0.saturating_sub(1));
        let generations = self.durable.members.values().map(|m| m.task.generation);
        let generation = generations.max().unwrap_or_default().max(forgotten);
        let Some(at_work) = &mut self.saving.at_work else {
            return;
        };
        if at_work.manifest.number != report.number || !at_work.missing.contains(&report.shard) {
            return;
        }
        if report.unfinished {
            at_work.moved = now;
            return;
        }
        at_work.missing.remove(&report.shard);
        if !report.error.is_empty() {
            let failure = Failure {
                why: format!(
                    "{}: {}",
                    at_work.writer_of(report.shard),
                    brief(&report.error)
                ),
                full: report.store_full,
            };
            return self.not_saved(now, failure);
        }
        at_work.moved = now;
        let files = report.files.into_iter().map(FileEntry::from);
        at_work.manifest.files.extend(files);
        if at_work.missing.is_empty() || planted!(EarlyManifest) {
            if let Some(base) = &at_work.base {
                let files = at_work.manifest.files.iter();
                let changes: Vec<_> = files.flat_map(|file| &file.changes).copied().collect();
                match base.files_under(&changes) {
                    Ok(files) => at_work.manifest.files.extend(files),
                    Err(error) => {
                        let why = format!("the servers' reports make no checkpoint: {error}");
                        return self.not_saved(now, Failure { why, full: false });
                    }
                }
            }
            let place = |file: &FileEntry| (file.checkpoint, file.name.clone());
            at_work.manifest.files.sort_by_key(place);
            at_work.progress.generation = generation;
            match at_work.progress.to_value() {
                Ok(progress) => at_work.manifest.progress = progress,
                Err(error) => {
                    let why = format!("where the training stands cannot be written: {error}");
                    return self.not_saved(now, Failure { why, full: false });
                }
            }
            self.saving.store_task = Some(StoreTask::Write(
                Box::new(at_work.manifest.clone()),
                at_work.begun,
            ));
        }
    }

    /// Takes the outcome of writing a manifest, as [`Self::manifest_written`] says.
    pub(super) fn take_manifest(
        &mut self,
        now: Instant,
        number: u64,
        written: Result<(), Failure>,
    ) -> bool {
        let is_it = |at_work: &&AtWork| at_work.manifest.number == number;
        if self.ended() || self.saving.at_work.as_ref().filter(is_it).is_none() {
            return false;
        }
        if let Err(failure) = written {
            self.not_saved(now, failure);
            return false;
        }
        let Some(at_work) = self.saving.at_work.take() else {
            return false;
        };
        let Some(place) = &self.saving.place else {
            return false;
        };
        tracing::info!(
            number,
            steps = at_work.progress.steps,
            bytes = at_work.manifest.own_bytes(),
            builds_on = ?at_work.manifest.builds_on(),
            "a checkpoint is whole"
        );
        self.records.push_back(Record::Checkpoint {
            seconds: self.seconds(now),
            number,
            steps: at_work.progress.steps,
        });
        self.durable.checkpoints.newest = Some(DurableCheckpoint {
            location: place.location.clone(),
            number,
            progress: at_work.progress,
            run: at_work.manifest.run.clone(),
        });
        let has_tables = !at_work.manifest.tables.is_empty();
        self.saving.base = has_tables.then(|| Arc::new(at_work.manifest));
        self.saving.newest_begun = Some(at_work.begun);
        if self.durable.checkpoints.stage == Stage::First {
            self.durable.checkpoints.stage = Stage::Regular;
        }
        self.saving.failed = None;
        self.saving.backoff.succeeded();
        // Pruning comes later, so one more is stored. With tables, the chains of the newest and of another one are too.
        let settings = &self.job.checkpoint;
        let chains = 2 * (settings.increments as usize + 1) * usize::from(has_tables);
        let kept = settings.keep as usize + 1 + chains;
        let members = &self.durable.members;
        self.durable
            .losses
            .written(number, kept, |task| is_alive(members, task));
        self.must_persist();
        if at_work.last {
            self.end_well(now);
        }
        true
    }
}
