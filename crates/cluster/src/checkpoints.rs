//! The checkpoints that a job has: the one it begins with, and the newest that it can go back to.

use std::collections::BTreeMap;
use std::time::Instant;

use checkpoint::{Manifest, SavedVariable};
use serde::{Deserialize, Serialize};
use shared_proto::blocks::{Source, VariableSpec};
use shared_proto::ids::{Clock, Epoch, Generation};
use shared_proto::job::Job;
use shared_proto::table::TableSpec;
use shared_proto::wire;

use super::Cluster;
use super::evaluations::SavedEvaluation;
use super::ledger::Ledger;
use super::model::ModelSpecs;
use super::monitors::Monitors;

/// The location of the checkpoints, and the run's id. Servers use the id to check that they access the same store.
#[derive(Clone, Debug)]
pub struct CheckpointPlace {
    /// The folder, or the address in an object store.
    pub location: String,
    /// The run's id.
    pub run_id: String,
}

/// The part of the checkpoints' state that outlives this process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Checkpoints {
    /// The number of the next checkpoint.
    pub(super) next: u64,
    /// The newest checkpoint, or the one that the job began with.
    pub(super) newest: Option<DurableCheckpoint>,
    pub(super) stage: Stage,
    /// The parts of a checkpoint that must be loaded and are not reported as loaded, each with the error of the last
    /// attempt. The error is empty before the first failure. The part of a shard has the shard's index, and the part of
    /// a ring comes after all shards.
    pub(super) loading: BTreeMap<usize, String>,
    /// The model and the data of the checkpoint that the job begins with; `None` if it begins without one.
    pub(super) start: Option<Start>,
}

/// The stage of a run, as far as its checkpoints decide it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Stage {
    /// This run has not written a checkpoint. Training does not begin before it has.
    #[default]
    First,
    /// Checkpoints are written at intervals.
    Regular,
    /// Training is over, and the job ends with the next checkpoint.
    Last,
}

/// A checkpoint that the job can go back to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DurableCheckpoint {
    /// The folder, or the address in an object store.
    pub location: String,
    /// The number of the checkpoint in its run.
    pub number: u64,
    /// The progress of the training at the checkpoint.
    pub progress: SavedProgress,
    /// The id of the run that wrote the checkpoint; empty for checkpoints of earlier releases.
    #[serde(default)]
    pub run: String,
}

/// The progress of the training, as a checkpoint stores it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedProgress {
    pub(super) ledger: Ledger,
    pub(super) due: Vec<u32>,
    pub(super) evaluations: Vec<SavedEvaluation>,
    /// The state of the metrics that the job's settings follow; `None` in checkpoints of earlier releases.
    #[serde(default)]
    pub(super) monitors: Option<Monitors>,
    pub(crate) clock: Clock,
    pub(super) steps: u64,
    pub(super) samples: u64,
    /// The highest generation of any member. Runs that begin with this checkpoint use higher generations, because the
    /// watermarks of blocks tell workers apart by index and generation.
    pub(super) generation: Generation,
}

impl SavedProgress {
    /// Returns the pass over the data that was evaluated last, from 1; 0 if none was.
    pub fn evaluated(&self) -> u32 {
        let newest = self.evaluations.last();
        newest.map_or(0, |evaluation| evaluation.data_epoch.saturating_add(1))
    }

    /// Encodes the progress for a manifest, and checks that it reads back the same.
    ///
    /// # Errors
    /// If the progress cannot be encoded, or reads back differently.
    pub(super) fn to_value(&self) -> Result<serde_json::Value, String> {
        let wrong = |error: serde_json::Error| error.to_string();
        let text = serde_json::to_vec(self).map_err(wrong)?;
        let value = serde_json::from_slice(&text).map_err(wrong)?;
        let read = serde_json::to_vec(&Self::of_value(&value)?).map_err(wrong)?;
        if read == text {
            Ok(value)
        } else {
            Err("a value changes when it is read back".to_owned())
        }
    }

    /// Reads the progress of a checkpoint from its manifest.
    ///
    /// # Errors
    /// Names the checkpoint, and what cannot be read.
    pub fn of_manifest(manifest: &Manifest) -> Result<Self, String> {
        let progress = Self::of_value(&manifest.progress);
        let progress = progress.and_then(|progress| progress.check().map(|()| progress));
        progress.map_err(|what| {
            format!(
                "the progress in checkpoint {} cannot be read: {what}",
                manifest.number
            )
        })
    }

    /// Reads progress that [`to_value`](Self::to_value) encoded.
    fn of_value(value: &serde_json::Value) -> Result<Self, String> {
        // By way of bytes: `from_value` would compile the readers of all types once more.
        let text = serde_json::to_vec(value);
        let read = text.and_then(|text| serde_json::from_slice(&text));
        read.map_err(|error| error.to_string())
    }
}

impl Checkpoints {
    /// Returns whether the job ends with the next checkpoint.
    pub(super) fn ending(&self) -> bool {
        self.stage == Stage::Last
    }

    /// Notes that training is over.
    pub(super) fn end(&mut self) {
        self.stage = Stage::Last;
    }

    /// Describes a part that must still load its values, with the error of its last attempt; `None` if there is no such
    /// part. Servers load the parts below `part_of_ring`, and a worker loads that one.
    pub(super) fn loads(&self, part_of_ring: usize) -> Option<String> {
        let loader = |shard: &usize| match *shard < part_of_ring {
            true => format!("shard {shard}"),
            false => "a worker".to_owned(),
        };
        let mut in_vain = self.loading.iter().filter(|(_, why)| !why.is_empty());
        if let Some((shard, why)) = in_vain.next() {
            let loader = loader(shard);
            return Some(format!(
                "{loader} cannot load its values from a checkpoint yet ({why})"
            ));
        }
        let loader = loader(self.loading.keys().next()?);
        Some(format!("{loader} is loading its values from a checkpoint"))
    }
}

impl Cluster {
    /// Makes the job begin with a checkpoint and its progress.
    pub fn start_from(&mut self, location: String, manifest: &Manifest, progress: SavedProgress) {
        self.durable.forgotten.first_generation = progress.generation.next();
        self.durable.training.earlier_samples = progress.samples;
        self.durable.checkpoints.start = Some(Start {
            variables: manifest.variables.clone(),
            tables: manifest.tables.clone(),
            block_elements: manifest.block_elements as usize,
            training_samples: progress.ledger.samples(),
            from: Some((location.clone(), manifest.number, manifest.run.clone())),
        });
        self.durable.checkpoints.newest = Some(DurableCheckpoint {
            location,
            number: manifest.number,
            progress,
            run: manifest.run.clone(),
        });
        self.must_persist();
    }

    /// Returns the number of the newest checkpoint.
    pub(super) fn newest_checkpoint(&self) -> Option<u64> {
        let newest = self.durable.checkpoints.newest.as_ref();
        newest.map(|newest| newest.number)
    }

    /// Returns the number, clock and age of the newest checkpoint. The age counts from the time at which the checkpoint
    /// was begun, or from a later restart of the coordinator; it is 0 if neither is known.
    pub fn checkpoint_status(&self, now: Instant) -> Option<wire::CheckpointStatus> {
        let newest = self.durable.checkpoints.newest.as_ref()?;
        let begun = self.saving.newest_begun;
        let age = begun.map(|begun| now.duration_since(begun));
        Some(wire::CheckpointStatus {
            number: newest.number,
            clock: newest.progress.clock.0,
            age: age.unwrap_or_default().as_secs_f64(),
        })
    }
}

/// The model and the size of the data of the checkpoint that a job begins with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    variables: Vec<SavedVariable>,
    #[serde(default)]
    tables: Vec<TableSpec>,
    pub(crate) block_elements: usize,
    pub(crate) training_samples: u64,
    /// The checkpoint's location and number, and the run that wrote it; `None` in states of earlier releases.
    #[serde(default)]
    pub(super) from: Option<(String, u64, String)>,
}

impl Start {
    /// Returns whether a model matches the checkpoint, by the names and shapes of its variables, and by its tables.
    pub(crate) fn is_of(&self, model: &ModelSpecs) -> bool {
        let shapes = |spec: &VariableSpec| (spec.name.clone(), spec.shape.clone());
        let saved = self.variables.iter().map(VariableSpec::from);
        let tables = model.tables.iter().zip(&self.tables);
        let same_variables = model
            .variables
            .iter()
            .map(shapes)
            .eq(saved.map(|spec| shapes(&spec)));
        same_variables
            && model.tables.len() == self.tables.len()
            && tables
                .into_iter()
                .all(|(ours, saved)| ours.is_stored_like(saved))
    }

    /// Describes the first variable that has different shapes in the checkpoint and in the model; empty if there is none.
    pub(crate) fn difference(&self, model: &ModelSpecs) -> String {
        let saved: Vec<VariableSpec> = self.variables.iter().map(VariableSpec::from).collect();
        let shape = |specs: &[VariableSpec], name: &str| {
            let found = specs.iter().find(|spec| spec.name == name);
            found.map_or("absent".to_owned(), |spec| format!("{:?}", spec.shape))
        };
        let names = model.variables.iter().chain(&saved);
        let shapes = names.map(|spec| {
            let name = &spec.name;
            (name, shape(&saved, name), shape(&model.variables, name))
        });
        let differs = shapes.into_iter().find(|(_, saved, ours)| saved != ours);
        differs.map_or_else(String::new, |(name, saved, ours)| {
            format!(": {name} is {saved} there, and {ours} here")
        })
    }

    /// Returns the first variable for which the job's optimizer keeps a different number of slots than the checkpoint
    /// has.
    pub(crate) fn other_slots(&self, job: &Job, specs: &[VariableSpec]) -> Option<&SavedVariable> {
        let mut pairs = self.variables.iter().zip(specs);
        let differs = |(saved, spec): &(&SavedVariable, &VariableSpec)| {
            saved.slots as usize != job.slots_of(&spec.name, spec.kind)
        };
        pairs.find(differs).map(|(saved, _)| saved)
    }
}

pub(super) fn source(epoch: Epoch, kept: &DurableCheckpoint) -> Source {
    Source {
        epoch,
        checkpoint: Some((kept.location.clone(), kept.number)),
        run: kept.run.clone(),
    }
}
