//! Checkpoints: decides when one is due, collects the parts of the shards, and makes the manifest.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use checkpoint::{BlockRange, FORMAT, FileEntry, Manifest, SavedVariable};
use serde::{Deserialize, Serialize};
use shared_proto::blocks::Source;
use shared_proto::ids::{Clock, Epoch, Generation, Task};
use shared_proto::planted;
use shared_proto::refusal::brief;
use shared_proto::view::{CheckpointOrder, JobPhase};
use shared_proto::wire;

use super::Cluster;
use super::backoff::Backoff;
use super::evaluations::SavedEvaluation;
use super::failures::Failure;
use super::losses::is_alive;
use crate::record::Record;
use crate::splits::Ledger;

/// The location of the checkpoints, and the run's id. By the id servers check that they see the same store.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointPlace {
    pub(crate) location: String,
    pub(crate) probe: String,
}

/// A checkpoint that the job can go back to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DurableCheckpoint {
    pub(crate) location: String,
    pub(crate) number: u64,
    pub(crate) progress: SavedProgress,
    /// The id of the run that wrote it; empty for earlier releases.
    #[serde(default)]
    pub(crate) run: String,
}

/// The progress of the training, as a checkpoint stores it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedProgress {
    pub(super) ledger: Ledger,
    pub(super) due: Vec<u32>,
    pub(super) evaluations: Vec<SavedEvaluation>,
    pub(crate) clock: Clock,
    pub(super) steps: u64,
    pub(super) samples: u64,
    /// The highest generation of any member. Later runs begin with higher ones, because the marks of blocks
    /// identify messages by them.
    generation: Generation,
}

impl SavedProgress {
    /// Encodes the progress for a manifest, and checks that it reads back the same.
    ///
    /// # Errors
    /// If it would be read back as something else.
    fn to_value(&self) -> Result<serde_json::Value, String> {
        let wrong = |error: serde_json::Error| error.to_string();
        let value = serde_json::to_value(self).map_err(wrong)?;
        let text = serde_json::to_string(&value).map_err(wrong)?;
        let read: Self = serde_json::from_str(&text).map_err(wrong)?;
        if serde_json::to_value(read).map_err(wrong)? == value {
            Ok(value)
        } else {
            Err("a value changes when it is read back".to_owned())
        }
    }
}

/// A task for the store of checkpoints.
#[derive(Debug)]
pub(crate) enum StoreTask {
    /// Write the manifest of a checkpoint that was begun at this time, and delete the checkpoints that are no longer
    /// kept.
    Write(Box<Manifest>, Instant),
    /// Find the newest whole checkpoint before this one.
    FindBefore(Box<DurableCheckpoint>),
}

/// A checkpoint that the shards are writing.
#[derive(Debug)]
pub(super) struct AtWork {
    manifest: Manifest,
    progress: SavedProgress,
    pub(super) begun: Instant,
    /// The time at which a shard last wrote some of it.
    pub(super) moved: Instant,
    /// The shards that have not reported.
    pub(super) missing: BTreeSet<u32>,
    /// True if the job ends with it.
    pub(super) last: bool,
}

impl AtWork {
    pub(super) fn number(&self) -> u64 {
        self.manifest.number
    }
}

/// The state of a job's checkpoints.
#[derive(Debug, Default)]
pub(crate) struct Checkpoints {
    /// The location and the run's id; none if the job writes no checkpoints.
    pub(crate) place: Option<CheckpointPlace>,
    /// The number of the next checkpoint.
    pub(crate) next: u64,
    /// The checkpoint that the shards write at present. Unset once it is written or given up, so that a
    /// server that joins later does not write values that it does not have.
    pub(crate) order: Option<CheckpointOrder>,
    pub(super) at_work: Option<AtWork>,
    /// The newest checkpoint, or the one that the job began with.
    pub(crate) newest: Option<DurableCheckpoint>,
    /// The time at which the newest one was begun. After a restart it is the time of the restart.
    pub(super) newest_begun: Option<Instant>,
    /// True if this run has written one. Training does not begin before.
    pub(crate) first_written: bool,
    /// The time and the number of steps at which the last one was begun. Unset after a failure.
    pub(super) begun: Option<(Instant, u64)>,
    /// The time before which no checkpoint is tried again after a failure.
    pub(crate) try_again: Option<Instant>,
    /// The shards that were told to load values and have not reported success, each with the error of its
    /// last attempt; empty before the first.
    pub(super) loading: BTreeMap<usize, String>,
    /// True if training is over, so that the job ends with the next checkpoint.
    pub(crate) ending: bool,
    /// The error of the last attempt since the newest checkpoint; empty if none has failed.
    pub(super) failed: String,
    /// True if that attempt failed because the store is full.
    pub(super) full: bool,
    pub(super) backoff: Backoff,
    /// The time at which the first failed attempt at the last checkpoint was begun.
    pub(super) last_fails: Option<Instant>,
    /// The reason why the job has ended without its last checkpoint; empty if it has not.
    pub(crate) unsaved: String,
    pub(super) store_task: Option<StoreTask>,
    /// True if the files of given-up checkpoints are to be deleted now.
    pub(super) sweep: bool,
    /// The time at which they are to be deleted once more.
    pub(super) sweep_again: Option<Instant>,
}

impl Checkpoints {
    /// Describes what the last checkpoint waits for.
    pub(super) fn last_of(&self) -> String {
        let at_work = self.at_work.as_ref().filter(|at_work| at_work.last);
        match at_work.and_then(|at_work| at_work.missing.first()) {
            Some(shard) => format!("shard {shard} is writing its part of the last checkpoint"),
            None => self.awaits("last"),
        }
    }

    /// Describes the wait for the first or the last checkpoint.
    pub(super) fn awaits(&self, which: &str) -> String {
        match self.failed.as_str() {
            "" => format!("the {which} checkpoint is being written"),
            why => {
                format!("the {which} checkpoint could not be written ({why}); it is tried again")
            }
        }
    }

    /// Names a shard that has values to load, and the reason why it has not; none if there is no such shard.
    pub(super) fn loads(&self) -> Option<String> {
        let mut in_vain = self.loading.iter().filter(|(_, why)| !why.is_empty());
        if let Some((shard, why)) = in_vain.next() {
            return Some(format!(
                "shard {shard} cannot load its values from a checkpoint yet ({why})"
            ));
        }
        let shard = self.loading.keys().next()?;
        Some(format!(
            "shard {shard} is loading its values from a checkpoint"
        ))
    }

    /// Returns whether one is being written. In sync mode a step may have to wait for it.
    pub(super) fn at_work(&self) -> bool {
        self.at_work.is_some()
    }

    /// Withdraws the end of the training, because a shard has gone back.
    pub(super) fn not_last_any_more(&mut self) {
        (self.ending, self.last_fails, self.begun) = (false, None, None);
    }

    /// Shifts the deadline of the checkpoint by a time in which this process did not run.
    pub(super) fn was_stopped(&mut self, gap: Duration) {
        if let Some(at_work) = &mut self.at_work {
            at_work.moved += gap;
        }
    }
}

impl Cluster {
    /// Begins with the progress of a checkpoint.
    pub(crate) fn start_from(
        &mut self,
        location: String,
        manifest: &Manifest,
        progress: SavedProgress,
    ) {
        self.first_generation = progress.generation.next();
        self.earlier_samples = progress.samples;
        self.start = Some(Start {
            variables: manifest.variables.clone(),
            block_elements: manifest.block_elements as usize,
            training_samples: progress.ledger.samples(),
            from: Some((location.clone(), manifest.number, manifest.run.clone())),
        });
        self.checkpoints.newest = Some(DurableCheckpoint {
            location,
            number: manifest.number,
            progress,
            run: manifest.run.clone(),
        });
        self.must_persist();
    }

    /// Takes the next task for the store.
    pub(crate) fn take_store_task(&mut self) -> Option<StoreTask> {
        self.checkpoints.store_task.take()
    }

    /// Returns whether a checkpoint can be written at present.
    fn can_save(&self, now: Instant) -> bool {
        let checkpoints = &self.checkpoints;
        checkpoints.place.is_some()
            && checkpoints.at_work.is_none()
            && checkpoints.store_task.is_none()
            && checkpoints.try_again.is_none_or(|at| now >= at)
            && !self.ended()
            && self.variables.as_ref().is_some_and(|v| v.initialized)
            && self.orphans().next().is_none()
            && self.checkpoints.loading.is_empty()
    }

    /// Orders a checkpoint if one is due. In sync mode it must be called between two steps.
    pub(super) fn save_if_due(&mut self, now: Instant) {
        if !self.can_save(now) {
            return;
        }
        let settings = &self.job.checkpoint;
        let due = match self.checkpoints.begun {
            _ if self.checkpoints.ending || !self.checkpoints.first_written => true,
            _ if self.awaits_draining() => true,
            _ if self.phase != JobPhase::Training => false,
            None => true,
            Some((at, steps)) => {
                let seconds = now.duration_since(at).as_secs_f64();
                let enough = |every| self.tally.steps.saturating_sub(steps) >= every;
                (seconds >= settings.every_seconds || settings.every_steps.is_some_and(enough))
                    && self.tally.steps > steps
            }
        };
        if due {
            self.save(now);
        }
    }

    fn save(&mut self, now: Instant) {
        let (Some(variables), Some(ledger)) = (&self.variables, &self.ledger) else {
            return;
        };
        let Some(map) = &variables.map else {
            return;
        };
        let progress = SavedProgress {
            ledger: ledger.at_rest(),
            due: self.evaluations.all_due(),
            evaluations: self.evaluations.saved(),
            clock: self.min_clock,
            steps: self.tally.steps,
            samples: self.tally.samples,
            generation: Generation(0),
        };
        let number = self.checkpoints.next;
        let manifest = Manifest {
            format: FORMAT,
            number,
            run: self.run().to_owned(),
            job: self.job.name.clone(),
            job_toml: self.job.to_toml(),
            mode: self.job.strategy.mode.name().to_owned(),
            epoch: map.epoch.0,
            clock: progress.clock.0,
            steps: progress.steps,
            samples: progress.samples,
            // Set when it is written: there is no wall clock here.
            began: 0,
            variables: map
                .variables
                .iter()
                .map(|v| SavedVariable::from(&v.spec))
                .collect(),
            block_elements: map.block_elements as u64,
            slots: 0,
            shards: map.shards.len() as u32,
            files: Vec::new(),
            progress: serde_json::Value::Null,
            checksum: String::new(),
        };
        let missing = (0..manifest.shards).collect();
        self.checkpoints.order = Some(CheckpointOrder {
            number,
            epoch: map.epoch,
            clock: progress.clock,
        });
        self.checkpoints.next = number.saturating_add(1);
        self.losses.ordered(number);
        self.drains_into(number);
        // The remains of earlier attempts take room.
        self.checkpoints.sweep |= !self.checkpoints.failed.is_empty();
        self.checkpoints.begun = Some((now, progress.steps));
        self.checkpoints.at_work = Some(AtWork {
            manifest,
            progress,
            begun: now,
            moved: now,
            missing,
            last: self.checkpoints.ending,
        });
        self.must_persist();
    }

    /// Takes the report that a shard's part is written, or cannot be.
    pub(crate) fn shard_saved(&mut self, now: Instant, task: Task, report: wire::CheckpointReport) {
        if self.servers().get(report.shard as usize) != Some(&task) {
            return;
        }
        // The generations of forgotten members are all below the first generation.
        let forgotten = Generation(self.first_generation.0.saturating_sub(1));
        let generations = self.members.values().map(|m| m.task.generation);
        let generation = generations.max().unwrap_or_default().max(forgotten);
        let checkpoints = &mut self.checkpoints;
        let Some(at_work) = &mut checkpoints.at_work else {
            return;
        };
        if at_work.manifest.number != report.number || !at_work.missing.remove(&report.shard) {
            return;
        }
        if !report.error.is_empty() {
            let failure = Failure {
                why: format!("shard {}: {}", report.shard, brief(&report.error)),
                full: report.store_full,
            };
            return self.not_saved(now, failure);
        }
        at_work.moved = now;
        at_work.manifest.slots = report.slots;
        let files = report.files.into_iter().map(file_entry);
        at_work.manifest.files.extend(files);
        if at_work.missing.is_empty() || planted!(EarlyManifest) {
            at_work.manifest.files.sort_by(|a, b| a.name.cmp(&b.name));
            at_work.progress.generation = generation;
            match at_work.progress.to_value() {
                Ok(progress) => at_work.manifest.progress = progress,
                Err(error) => {
                    let why = format!("where the training stands cannot be written: {error}");
                    return self.not_saved(now, Failure { why, full: false });
                }
            }
            checkpoints.store_task = Some(StoreTask::Write(
                Box::new(at_work.manifest.clone()),
                at_work.begun,
            ));
        }
    }

    /// Takes the outcome of writing a manifest. Returns whether the checkpoint counts.
    pub(crate) fn manifest_written(
        &mut self,
        now: Instant,
        number: u64,
        written: Result<(), Failure>,
    ) -> bool {
        let is_it = |at_work: &&AtWork| at_work.manifest.number == number;
        if self.ended() || self.checkpoints.at_work.as_ref().filter(is_it).is_none() {
            return false;
        }
        if let Err(failure) = written {
            self.not_saved(now, failure);
            return false;
        }
        let Some(at_work) = self.checkpoints.at_work.take() else {
            return false;
        };
        self.checkpoints.order = None;
        let Some(place) = &self.checkpoints.place else {
            return false;
        };
        tracing::info!(
            number,
            steps = at_work.progress.steps,
            "a checkpoint is whole"
        );
        self.records.push(Record::Checkpoint {
            seconds: self.seconds(now),
            number,
            steps: at_work.progress.steps,
        });
        self.checkpoints.newest = Some(DurableCheckpoint {
            location: place.location.clone(),
            number,
            progress: at_work.progress,
            run: at_work.manifest.run,
        });
        self.checkpoints.newest_begun = Some(at_work.begun);
        self.checkpoints.first_written = true;
        self.checkpoints.failed.clear();
        self.checkpoints.full = false;
        self.checkpoints.backoff.succeeded();
        // The oldest lies there until it is pruned.
        let kept = self.job.checkpoint.keep as usize + 1;
        let members = &self.members;
        self.losses
            .written(number, kept, |task| is_alive(members, task));
        self.must_persist();
        if at_work.last {
            self.end_well(now);
        } else {
            self.begin(now);
        }
        true
    }

    /// Notes that a server has written more of the checkpoint.
    pub(super) fn writes_on(&mut self, now: Instant, task: Task, report: &wire::ShardReport) {
        let before = self.shard_reports.get(&task.id);
        let more = report.checkpoint_bytes > before.map_or(0, |before| before.checkpoint_bytes);
        let of_shard = self.servers().get(report.shard as usize) == Some(&task);
        let at_work = self.checkpoints.at_work.as_mut();
        if let Some(at_work) = at_work.filter(|_| of_shard && more) {
            at_work.moved = now;
        }
    }

    /// Returns the number, clock and age of the newest checkpoint.
    pub(crate) fn checkpoint_status(&self, now: Instant) -> Option<wire::CheckpointStatus> {
        let newest = self.checkpoints.newest.as_ref()?;
        let begun = self.checkpoints.newest_begun;
        let age = begun.map(|begun| now.duration_since(begun));
        Some(wire::CheckpointStatus {
            number: newest.number,
            clock: newest.progress.clock.0,
            age: age.unwrap_or_default().as_secs_f64(),
        })
    }
}

/// The model and the data of the checkpoint that a job begins with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    variables: Vec<SavedVariable>,
    pub(crate) block_elements: usize,
    pub(crate) training_samples: u64,
    /// The checkpoint's location and number, and the run that wrote it.
    #[serde(default)]
    pub(super) from: Option<(String, u64, String)>,
}

impl Start {
    /// Returns whether the model is that of the checkpoint.
    pub(crate) fn is_of(&self, specs: &[shared_proto::blocks::VariableSpec]) -> bool {
        self.variables.len() == specs.len()
            && specs
                .iter()
                .map(SavedVariable::from)
                .eq(self.variables.iter().cloned())
    }
}

pub(super) fn source(epoch: Epoch, kept: &DurableCheckpoint) -> Source {
    Source {
        epoch,
        checkpoint: Some((kept.location.clone(), kept.number)),
        run: kept.run.clone(),
    }
}

fn file_entry(file: wire::CheckpointFile) -> FileEntry {
    let range = |range: wire::BlockRange| BlockRange {
        variable: range.variable,
        first: range.first,
        last: range.last,
    };
    FileEntry {
        name: file.name,
        bytes: file.bytes,
        sha256: file.sha256,
        blocks: file.blocks.into_iter().map(range).collect(),
    }
}
