//! Checkpoints: when one is due, what it is made of, and going back to one when a server is gone.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use checkpoint::{BlockRange, FORMAT, FileEntry, Manifest, SavedVariable};
use serde::{Deserialize, Serialize};
use shared_proto::blocks::Source;
use shared_proto::ids::{Clock, Epoch, Generation, Role, Task};
use shared_proto::job::Mode;
use shared_proto::view::{CheckpointOrder, JobPhase};
use shared_proto::wire;

use super::Cluster;
use super::training::{Evaluations, SavedEvaluation};
use crate::record::Record;
use crate::splits::Ledger;

/// How long to wait after a checkpoint that could not be written.
const TRY_AGAIN: Duration = Duration::from_secs(5);

/// Where checkpoints lie, and how servers know that they see the same place.
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
}

/// Where the training stands, as a checkpoint has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Progress {
    ledger: Ledger,
    due: Vec<u32>,
    evaluations: Vec<SavedEvaluation>,
    pub(crate) clock: Clock,
    steps: u64,
    samples: u64,
    /// The highest of any worker: later runs begin with higher ones, since blocks know the messages
    /// that they have taken by them.
    generation: Generation,
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
struct AtWork {
    manifest: Manifest,
    progress: Progress,
    /// Shards that have not reported.
    missing: BTreeSet<u32>,
    /// The job ends with it.
    last: bool,
}

/// All about them.
#[derive(Debug, Default)]
pub(crate) struct Checkpoints {
    /// None: there are to be none.
    pub(crate) place: Option<Place>,
    /// What the probe says since the first coordinator of this run.
    pub(crate) known_probe: Option<String>,
    /// The number of the next.
    pub(crate) next: u64,
    pub(crate) order: Option<CheckpointOrder>,
    at_work: Option<AtWork>,
    /// What the newest one is, or the one that the job has begun with.
    pub(crate) newest: Option<Kept>,
    /// Whether one of this run is there: training does not begin before.
    pub(crate) first_written: bool,
    /// When, and after how many steps, the newest was begun.
    begun: Option<(Instant, u64)>,
    /// Not before.
    pub(crate) try_again: Option<Instant>,
    /// Shards that were told to load values and have not said that they have.
    pub(super) loading: BTreeSet<usize>,
    /// Nothing is trained any more: the job ends with the next one.
    pub(crate) ending: bool,
    errand: Option<Errand>,
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
        });
        self.checkpoints.newest = Some(Kept {
            location,
            number: manifest.number,
            progress,
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
                .map(|v| saved_variable(&v.spec))
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
        self.checkpoints.begun = Some((now, progress.steps));
        self.checkpoints.at_work = Some(AtWork {
            manifest,
            progress,
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
        let generations = self.members.values().map(|m| m.task.generation);
        let generation = generations.max().unwrap_or_default();
        let checkpoints = &mut self.checkpoints;
        let Some(at_work) = &mut checkpoints.at_work else {
            return;
        };
        if at_work.manifest.number != report.number || !at_work.missing.remove(&report.shard) {
            return;
        }
        if !report.error.is_empty() {
            return self.not_saved(now, &format!("shard {}: {}", report.shard, report.error));
        }
        at_work.manifest.slots = report.slots;
        let files = report.files.into_iter().map(file_entry);
        at_work.manifest.files.extend(files);
        if at_work.missing.is_empty() {
            at_work.manifest.files.sort_by(|a, b| a.name.cmp(&b.name));
            at_work.progress.generation = generation;
            at_work.manifest.progress = serde_json::to_value(&at_work.progress).unwrap_or_default();
            checkpoints.errand = Some(Errand::Write(Box::new(at_work.manifest.clone())));
        }
    }

    /// A manifest is written, or cannot be.
    /// Returns whether the cluster counts on it.
    pub(crate) fn manifest_written(
        &mut self,
        now: Instant,
        number: u64,
        written: Result<(), String>,
    ) -> bool {
        let is_it = |at_work: &&AtWork| at_work.manifest.number == number;
        if self.ended() || self.checkpoints.at_work.as_ref().filter(is_it).is_none() {
            return false;
        }
        if let Err(error) = written {
            self.not_saved(now, &error);
            return false;
        }
        let Some(at_work) = self.checkpoints.at_work.take() else {
            return false;
        };
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
        });
        self.checkpoints.first_written = true;
        self.must_keep();
        if at_work.last {
            self.end_well(now);
        } else {
            self.begin(now);
        }
        true
    }

    fn not_saved(&mut self, now: Instant, why: &str) {
        let Some(at_work) = self.checkpoints.at_work.take() else {
            return;
        };
        let number = at_work.manifest.number;
        tracing::warn!(number, "a checkpoint could not be written: {why}");
        metrics::counter!("flambeau_coordinator_failed_checkpoints_total").increment(1);
        self.checkpoints.errand = None;
        self.checkpoints.try_again = Some(now + TRY_AGAIN);
        if at_work.last {
            // What was trained is in the model's file; it does not help to wait for the store.
            self.end_well(now);
        }
    }

    /// The shards have changed: what they were writing is not completed.
    pub(super) fn give_up_saving(&mut self) {
        self.checkpoints.at_work = None;
        self.checkpoints.errand = None;
        self.checkpoints.order = None;
    }

    /// How old the newest checkpoint is, for people.
    pub(crate) fn checkpoint_status(&self, now: Instant) -> Option<wire::CheckpointStatus> {
        let newest = self.checkpoints.newest.as_ref()?;
        let begun = self.checkpoints.begun.map(|(at, _)| now.duration_since(at));
        Some(wire::CheckpointStatus {
            number: newest.number,
            clock: newest.progress.clock.0,
            age: begun.unwrap_or_default().as_secs_f64(),
        })
    }

    /// Shards without a server.
    pub(super) fn orphans(&self) -> impl Iterator<Item = usize> + '_ {
        let map = self.variables.as_ref().and_then(|v| v.map.as_ref());
        let addresses = map.map_or(&[][..], |map| &map.addresses);
        let empty = |(_, address): &(usize, &String)| address.is_empty();
        addresses
            .iter()
            .enumerate()
            .filter(empty)
            .map(|(shard, _)| shard)
    }

    /// A shard's server is gone: the shard has none until one comes for it.
    pub(super) fn orphan(&mut self, now: Instant, shard: usize, gone: Task) {
        self.give_up_saving();
        if let Some(map) = self.variables.as_mut().and_then(|v| v.map.as_mut()) {
            map.epoch = map.epoch.next();
            map.addresses[shard].clear();
        }
        self.must_keep();
        if self.checkpoints.place.is_none() {
            return self.fail_without_checkpoints(now, gone, shard);
        }
        let holds_none = |task: &Task| self.shard_of(*task).is_none();
        let spare = self.live(Role::Ps).map(|m| m.task).find(holds_none);
        if let Some(spare) = spare {
            self.seat(now, spare, shard);
        }
    }

    fn fail_without_checkpoints(&mut self, now: Instant, gone: Task, shard: usize) {
        self.fail(
            now,
            format!("{gone}, the server of shard {shard}, is gone, and its values with it: there are no checkpoints (checkpoint.enabled is false); start the job again"),
        );
    }

    /// Gives a server a shard, with values that are safe: those of the newest checkpoint.
    pub(super) fn seat(&mut self, now: Instant, server: Task, shard: usize) {
        self.give_up_saving();
        let address = self.members.get(&server.id).map(|m| m.address.clone());
        let sync = self.sync();
        let newest = self.checkpoints.newest.clone();
        let Some(variables) = &mut self.variables else {
            return;
        };
        let Some(map) = &mut variables.map else {
            return;
        };
        map.epoch = map.epoch.next();
        map.servers[shard] = server;
        map.addresses[shard] = address.unwrap_or_default();
        let epoch = map.epoch;
        tracing::info!(%server, shard, epoch = epoch.0, "gave a shard to a server");
        match newest.filter(|_| variables.initialized) {
            None if variables.initialized && self.checkpoints.place.is_none() => {
                self.fail_without_checkpoints(now, server, shard);
            }
            Some(kept) if sync => self.go_back(now, &kept),
            Some(kept) => {
                map.sources[shard] = source(epoch, &kept);
                self.checkpoints.loading.insert(shard);
                self.record_restore(now, kept.number, Some(shard));
            }
            None => self.initialize_anew(now, epoch),
        }
        self.must_keep();
    }

    /// All shards go back to a checkpoint, and the training with them.
    fn go_back(&mut self, now: Instant, kept: &Kept) {
        if let Some(map) = self.variables.as_mut().and_then(|v| v.map.as_mut()) {
            let source = source(map.epoch, kept);
            map.sources.fill(source);
            self.checkpoints.loading = (0..map.sources.len()).collect();
        }
        self.take_up(&kept.progress);
        self.record_restore(now, kept.number, None);
        self.put_out_workers(now, "the job has gone back to a checkpoint");
    }

    /// There is no checkpoint yet: the initial values are sent once more.
    fn initialize_anew(&mut self, now: Instant, epoch: Epoch) {
        if let Some(variables) = &mut self.variables {
            (variables.initialized, variables.initializer) = (false, None);
            if let Some(map) = &mut variables.map {
                map.sources.fill(Source {
                    epoch,
                    checkpoint: None,
                });
            }
        }
        self.put_out_workers(now, "the initial values are sent once more");
    }

    /// Makes a checkpoint's progress the job's.
    pub(super) fn take_up(&mut self, progress: &Progress) {
        let budget = self
            .job
            .steps
            .map(|steps| steps.saturating_sub(progress.steps));
        let ledger = progress.ledger.clone();
        self.ledger = Some(ledger.under(self.job.epochs, budget));
        self.evaluations = Evaluations::restored(&progress.due, &progress.evaluations);
        (self.step, self.commit) = (None, None);
        self.min_clock = progress.clock;
        self.tally.take_up(progress.steps, progress.samples);
        self.checkpoints.ending = false;
        self.checkpoints.begun = None;
        self.schedule_last_evaluation();
    }

    fn record_restore(&mut self, now: Instant, checkpoint: u64, shard: Option<usize>) {
        self.records.push(Record::Restored {
            seconds: self.seconds(now),
            checkpoint,
            shard,
            steps: self.tally.steps,
        });
    }

    /// A shard has loaded its values, or cannot: then an older checkpoint must do.
    pub(crate) fn shard_restored(
        &mut self,
        now: Instant,
        task: Task,
        report: &wire::RestoreReport,
    ) {
        let shard = report.shard as usize;
        let map = self.variables.as_ref().and_then(|v| v.map.as_ref());
        let expected = map.is_some_and(|map| {
            map.servers.get(shard) == Some(&task) && map.sources[shard].epoch.0 == report.epoch
        });
        if !expected {
            return;
        }
        if report.error.is_empty() {
            self.checkpoints.loading.remove(&shard);
            self.records.push(Record::loaded(self.seconds(now), report));
            return;
        }
        let Some(kept) = self.checkpoints.newest.clone() else {
            return;
        };
        tracing::error!(shard, checkpoint = kept.number, "{}", report.error);
        if !self.checkpoints.first_written {
            let why = format!(
                "the job cannot begin from checkpoint {}: {}",
                kept.number, report.error
            );
            return self.fail(now, why);
        }
        self.checkpoints
            .errand
            .get_or_insert(Errand::FindBefore(Box::new(kept)));
    }

    /// An older checkpoint was found, or there is none: the answer to [`Errand::FindBefore`].
    pub(crate) fn older_found(
        &mut self,
        now: Instant,
        damaged: &Kept,
        found: Result<Kept, String>,
    ) {
        if self.ended() {
            return;
        }
        let kept = match found {
            Ok(kept) => kept,
            Err(why) => {
                let number = damaged.number;
                return self.fail(
                    now,
                    format!("checkpoint {number} cannot be loaded, and {why}"),
                );
            }
        };
        tracing::warn!(
            damaged = damaged.number,
            instead = kept.number,
            "taking the checkpoint before"
        );
        self.checkpoints.newest = Some(kept.clone());
        let sync = self.sync();
        self.give_up_saving();
        let Some(map) = self.variables.as_mut().and_then(|v| v.map.as_mut()) else {
            return;
        };
        map.epoch = map.epoch.next();
        if sync {
            return self.go_back(now, &kept);
        }
        let epoch = map.epoch;
        let of_damaged = |source: &&mut Source| {
            source.checkpoint == Some((damaged.location.clone(), damaged.number))
        };
        for source in map.sources.iter_mut().filter(of_damaged) {
            *source = self::source(epoch, &kept);
        }
        self.must_keep();
    }
}

/// What the model and the data of a checkpoint look like, for a job that begins with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    variables: Vec<SavedVariable>,
    pub(crate) block_elements: usize,
    pub(crate) training_samples: u64,
}

impl Start {
    /// Whether the model is that of the checkpoint.
    pub(crate) fn is_of(&self, specs: &[shared_proto::blocks::VariableSpec]) -> bool {
        self.variables.len() == specs.len()
            && specs
                .iter()
                .map(saved_variable)
                .eq(self.variables.iter().cloned())
    }
}

pub(super) fn source(epoch: Epoch, kept: &Kept) -> Source {
    Source {
        epoch,
        checkpoint: Some((kept.location.clone(), kept.number)),
    }
}

fn saved_variable(spec: &shared_proto::blocks::VariableSpec) -> SavedVariable {
    SavedVariable {
        name: spec.name.clone(),
        shape: spec.shape.iter().map(|d| *d as u64).collect(),
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

/// What differs between the job and the one that a checkpoint was written by, where it must not.
pub(crate) fn difference(
    ours: &shared_proto::job::Job,
    theirs: &shared_proto::job::Job,
) -> Option<String> {
    let sync = |job: &shared_proto::job::Job| job.strategy.mode == Mode::Sync;
    let fields = [
        ("name", ours.name.clone(), theirs.name.clone()),
        ("seed", ours.seed.to_string(), theirs.seed.to_string()),
        (
            "data.kind",
            format!("{:?}", ours.data.kind),
            format!("{:?}", theirs.data.kind),
        ),
        (
            "model.name",
            ours.model.name.clone(),
            theirs.model.name.clone(),
        ),
        (
            "optimizer.name",
            ours.optimizer.name().to_owned(),
            theirs.optimizer.name().to_owned(),
        ),
        (
            "batch_size",
            ours.batch_size.to_string(),
            theirs.batch_size.to_string(),
        ),
        (
            "strategy.mode = \"sync\"",
            sync(ours).to_string(),
            sync(theirs).to_string(),
        ),
    ];
    fields
        .into_iter()
        .find(|(_, ours, theirs)| ours != theirs)
        .map(|(field, ours, theirs)| {
            format!("it is of another job: {field} is {theirs} there, and {ours} here")
        })
}
