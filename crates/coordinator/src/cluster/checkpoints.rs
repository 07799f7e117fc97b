//! Checkpoints: when one is due, what it is made of, and going back to one when a server is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use checkpoint::{BlockRange, FORMAT, FileEntry, Manifest, SavedVariable};
use serde::{Deserialize, Serialize};
use shared_proto::blocks::Source;
use shared_proto::ids::{Clock, Epoch, Generation, Task};
use shared_proto::view::{CheckpointOrder, JobPhase};
use shared_proto::wire;

use super::Cluster;
use super::backoff::Backoff;
use super::evaluations::SavedEvaluation;
use super::failures::Failure;
use crate::record::Record;
use crate::splits::Ledger;

/// Where checkpoints lie, and the run's id, by which servers know that they see the same place.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) location: String,
    pub(crate) probe: String,
}

/// A checkpoint to go back to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Kept {
    pub(crate) location: String,
    pub(crate) number: u64,
    pub(crate) progress: Progress,
    /// The run that has written it; empty if an earlier release did.
    #[serde(default)]
    pub(crate) run: String,
}

/// Where the training stands, as a checkpoint has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Progress {
    pub(super) ledger: Ledger,
    pub(super) due: Vec<u32>,
    pub(super) evaluations: Vec<SavedEvaluation>,
    pub(crate) clock: Clock,
    pub(super) steps: u64,
    pub(super) samples: u64,
    /// The highest of any worker: later runs begin with higher ones, since blocks know the messages
    /// that they have taken by them.
    generation: Generation,
}

impl Progress {
    /// As a manifest has it. Whoever goes on from there reads the same.
    ///
    /// # Errors
    /// Says what would be read as something else.
    fn to_value(&self) -> Result<serde_json::Value, String> {
        let wrong = |error: serde_json::Error| error.to_string();
        let value = serde_json::to_value(self).map_err(wrong)?;
        let text = serde_json::to_string(&value).map_err(wrong)?;
        let read: Self = serde_json::from_str(&text).map_err(wrong)?;
        if serde_json::to_value(read).map_err(wrong)? == value {
            Ok(value)
        } else {
            Err("something in it comes back as something else".to_owned())
        }
    }
}

/// What the cluster wants of the store.
#[derive(Debug)]
pub(crate) enum Errand {
    /// Write this manifest, and delete what is not to be kept any more.
    Write(Box<Manifest>),
    /// Find the newest checkpoint that is whole, among those before this one.
    FindBefore(Box<Kept>),
}

/// A checkpoint that the shards are writing.
#[derive(Debug)]
pub(super) struct AtWork {
    manifest: Manifest,
    progress: Progress,
    pub(super) begun: Instant,
    /// When a shard last wrote something of it.
    pub(super) moved: Instant,
    /// Shards that have not reported.
    pub(super) missing: BTreeSet<u32>,
    /// The job ends with it.
    pub(super) last: bool,
}

impl AtWork {
    pub(super) fn number(&self) -> u64 {
        self.manifest.number
    }
}

/// All about them.
#[derive(Debug, Default)]
pub(crate) struct Checkpoints {
    /// None: there are to be none.
    pub(crate) place: Option<Place>,
    /// The number of the next.
    pub(crate) next: u64,
    /// What the shards are to write; none once it is written or given up, so that a server that
    /// comes later does not write what it does not have.
    pub(crate) order: Option<CheckpointOrder>,
    pub(super) at_work: Option<AtWork>,
    /// What the newest one is, or the one that the job has begun with.
    pub(crate) newest: Option<Kept>,
    /// When that was begun, or at the latest: a coordinator that starts again does not know.
    pub(super) newest_begun: Option<Instant>,
    /// Whether one of this run is there: training does not begin before.
    pub(crate) first_written: bool,
    /// When, and after how many steps, the last one was begun, whether it came to anything or not.
    pub(super) begun: Option<(Instant, u64)>,
    /// Not before.
    pub(crate) try_again: Option<Instant>,
    /// Shards that were told to load values and have not said that they have; why they could not yet,
    /// if they have tried.
    pub(super) loading: BTreeMap<usize, String>,
    /// Nothing is trained any more: the job ends with the next one.
    pub(crate) ending: bool,
    /// Why none could be written since the newest; empty if none was tried in vain.
    pub(super) failed: String,
    /// That was since there was no room.
    pub(super) full: bool,
    pub(super) backoff: Backoff,
    /// When the first was begun of those that the job was to end with, and that failed.
    pub(super) last_fails: Option<Instant>,
    /// Why the job has ended without it; empty if it has not.
    pub(crate) unsaved: String,
    pub(super) errand: Option<Errand>,
    /// What was given up is to be deleted, and when that is to be done once more.
    pub(super) sweep: bool,
    pub(super) sweep_again: Option<Instant>,
}

impl Checkpoints {
    /// Who is still at the last one.
    pub(super) fn last_of(&self) -> String {
        let at_work = self.at_work.as_ref().filter(|at_work| at_work.last);
        match at_work.and_then(|at_work| at_work.missing.first()) {
            Some(shard) => format!("shard {shard} is writing its part of the last checkpoint"),
            None => self.awaits("last"),
        }
    }

    /// What is said while the first or last is waited for.
    pub(super) fn awaits(&self, which: &str) -> String {
        match self.failed.as_str() {
            "" => format!("the {which} checkpoint is being written"),
            why => {
                format!("the {which} checkpoint could not be written ({why}); it is tried again")
            }
        }
    }

    /// Who has values to load, and why that takes long.
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

    /// Whether one is being written, which steps of sync mode may have to wait for.
    pub(super) fn at_work(&self) -> bool {
        self.at_work.is_some()
    }

    /// What comes after the last one starts anew: the training has gone back.
    pub(super) fn not_last_any_more(&mut self) {
        (self.ending, self.last_fails, self.begun) = (false, None, None);
    }

    /// This process was stopped for a while, and heard nothing.
    pub(super) fn was_stopped(&mut self, gap: Duration) {
        if let Some(at_work) = &mut self.at_work {
            at_work.moved += gap;
        }
    }
}

impl Cluster {
    /// Takes up the training where a checkpoint has left it.
    pub(crate) fn start_from(&mut self, location: String, manifest: &Manifest, progress: Progress) {
        self.first_generation = progress.generation.next();
        self.earlier_samples = progress.samples;
        self.start = Some(Start {
            variables: manifest.variables.clone(),
            block_elements: manifest.block_elements as usize,
            training_samples: progress.ledger.samples(),
            from: Some((location.clone(), manifest.number, manifest.run.clone())),
        });
        self.checkpoints.newest = Some(Kept {
            location,
            number: manifest.number,
            progress,
            run: manifest.run.clone(),
        });
        self.must_keep();
    }

    /// What is to be done with the store; asked once.
    pub(crate) fn take_errand(&mut self) -> Option<Errand> {
        self.checkpoints.errand.take()
    }

    /// Whether a checkpoint can be written at present.
    fn can_save(&self, now: Instant) -> bool {
        let checkpoints = &self.checkpoints;
        checkpoints.place.is_some()
            && checkpoints.at_work.is_none()
            && checkpoints.errand.is_none()
            && checkpoints.try_again.is_none_or(|at| now >= at)
            && !self.ended()
            && self.variables.as_ref().is_some_and(|v| v.initialized)
            && self.orphans().next().is_none()
            && self.checkpoints.loading.is_empty()
    }

    /// Orders a checkpoint where one is due. In sync mode to be called between two steps.
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
        let progress = Progress {
            ledger: ledger.at_rest(),
            due: self.evaluations.all_due(),
            evaluations: self.evaluations.saved(),
            clock: self.min_clock,
            steps: self.tally.steps,
            samples: self.tally.samples,
            generation: Generation(0),
        };
        let began = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
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
            began: began.map_or(0, |began| began.as_secs()),
            variables: map
                .variables
                .iter()
                .map(|v| SavedVariable::from(&v.spec))
                .collect(),
            block_elements: map.block_elements as u64,
            slots: 0,
            shards: map.addresses.len() as u32,
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
        self.checkpoints.next = number + 1;
        self.losses.ordered(number);
        self.drains_into(number);
        // What earlier ones left may be in the way.
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
        self.must_keep();
    }

    /// A shard's part is written, or cannot be.
    pub(crate) fn shard_saved(&mut self, now: Instant, task: Task, report: wire::CheckpointReport) {
        if self.servers().get(report.shard as usize) != Some(&task) {
            return;
        }
        // Of those that are forgotten, all were below the first one.
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
                why: format!("shard {}: {}", report.shard, report.error),
                full: report.store_full,
            };
            return self.not_saved(now, failure);
        }
        at_work.moved = now;
        at_work.manifest.slots = report.slots;
        let files = report.files.into_iter().map(file_entry);
        at_work.manifest.files.extend(files);
        if at_work.missing.is_empty() {
            at_work.manifest.files.sort_by(|a, b| a.name.cmp(&b.name));
            at_work.progress.generation = generation;
            match at_work.progress.to_value() {
                Ok(progress) => at_work.manifest.progress = progress,
                Err(error) => {
                    let why = format!("where the training stands cannot be written: {error}");
                    return self.not_saved(now, Failure { why, full: false });
                }
            }
            checkpoints.errand = Some(Errand::Write(Box::new(at_work.manifest.clone())));
        }
    }

    /// A manifest is written, or cannot be.
    /// Returns whether the cluster counts on it.
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
        self.checkpoints.newest = Some(Kept {
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
        let kept = u64::from(self.job.checkpoint.keep);
        let members = &self.members;
        let living = |task: Task| members.get(&task.id).is_some_and(|m| m.task == task);
        self.losses.oldest(number.saturating_sub(kept), living);
        self.must_keep();
        if at_work.last {
            self.end_well(now);
        } else {
            self.begin(now);
        }
        true
    }

    /// A server tells how much it has written.
    pub(super) fn writes_on(&mut self, now: Instant, task: Task, report: &wire::ShardReport) {
        let before = self.shard_reports.get(&task.id);
        let more = report.checkpoint_bytes > before.map_or(0, |before| before.checkpoint_bytes);
        let of_shard = self.servers().get(report.shard as usize) == Some(&task);
        let at_work = self.checkpoints.at_work.as_mut();
        if let Some(at_work) = at_work.filter(|_| of_shard && more) {
            at_work.moved = now;
        }
    }

    /// How old the newest checkpoint is, for people.
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

/// What the model and the data of a checkpoint look like, for a job that begins with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    variables: Vec<SavedVariable>,
    pub(crate) block_elements: usize,
    pub(crate) training_samples: u64,
    /// Where it lies, its number, and the run that has written it.
    #[serde(default)]
    pub(super) from: Option<(String, u64, String)>,
}

impl Start {
    /// Whether the model is that of the checkpoint.
    pub(crate) fn is_of(&self, specs: &[shared_proto::blocks::VariableSpec]) -> bool {
        self.variables.len() == specs.len()
            && specs
                .iter()
                .map(SavedVariable::from)
                .eq(self.variables.iter().cloned())
    }
}

pub(super) fn source(epoch: Epoch, kept: &Kept) -> Source {
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
