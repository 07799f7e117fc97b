//! The model's variables: registration, initial values.

use std::sync::OnceLock;
use std::time::Instant;

use checkpoint::hexadecimal;
use serde::{Deserialize, Serialize};
use shared_proto::blocks::{BLOCK_ELEMENTS, ShardMap, VariableKind, VariableSpec};
use shared_proto::ids::Task;
use shared_proto::job::Job;
use shared_proto::refusal::{Reason, Refusal};

use super::Cluster;
use super::checkpoints::Start;
use super::ledger::{Ledger, MOST_SAMPLES};
use super::map_size::check_map_size;

/// The variables and data sizes that the first worker has registered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Variables {
    pub(super) specs: Vec<VariableSpec>,
    #[serde(flatten)]
    pub(super) data: WorkerData,
    pub(crate) map: Option<ShardMap>,
    pub(crate) initializer: Option<Task>,
    pub(crate) initialized: bool,
    /// The worker that initialized them, so that a repeated call is accepted.
    initialized_by: Option<Task>,
    /// The number of blocks of each shard that take updates, which the map fixes once it is cut.
    #[serde(skip)]
    updated_blocks: OnceLock<Vec<u64>>,
}

impl Variables {
    /// Returns the number of blocks of each shard that take updates; empty before the map is cut.
    pub(super) fn updated_blocks_of_shards(&self) -> &[u64] {
        let Some(map) = &self.map else { return &[] };
        self.updated_blocks.get_or_init(|| {
            let mut counts = vec![0; map.shards.len()];
            for (id, shard) in map.blocks() {
                counts[shard as usize] += u64::from(map.takes_updates(id));
            }
            counts
        })
    }
}

/// The data of a worker, as far as the coordinator compares it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WorkerData {
    pub(crate) training_samples: u64,
    pub(crate) evaluation_samples: u64,
    /// SHA-256 of the samples; empty if the worker does not state it.
    #[serde(default)]
    pub(crate) digest: Vec<u8>,
}

/// A worker's part in the initial values.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Initialization {
    Yours,
    /// It waits for what the text names.
    Pending(String),
    Done,
}

impl Cluster {
    /// Takes the first worker's variables and data sizes as the job's; compares the others'.
    ///
    /// # Errors
    /// [`Reason::VariablesDiffer`] or [`Reason::DataDiffers`] name the difference; [`Reason::Oversized`] for a model
    /// that is too large for a shard map or for the memory of the servers.
    pub(crate) fn register_variables(
        &mut self,
        now: Instant,
        task: Task,
        specs: Vec<VariableSpec>,
        data: WorkerData,
    ) -> Result<Initialization, Refusal> {
        let training_samples = data.training_samples;
        check(&specs, &data)?;
        match &mut self.durable.variables {
            Some(known) => {
                compare(&known.specs, &specs, task)?;
                compare_data(&known.data, &data, task)?;
                if known.data.digest.is_empty() && !data.digest.is_empty() {
                    // The first worker has not stated its digest.
                    known.data.digest = data.digest;
                    self.must_persist();
                }
            }
            None => {
                let start = self.durable.checkpoints.start.as_ref();
                if let Some(start) = start
                    && start.training_samples != training_samples
                {
                    return Err(Refusal::new(
                        Reason::DataDiffers,
                        format!(
                            "{task} has {training_samples} training samples, the checkpoint that the job begins with {}; give it the same data",
                            start.training_samples
                        ),
                    ));
                }
                if let Some(start) = start {
                    check_start(start, &self.job, &specs, task)?;
                }
                self.durable.variables = Some(Variables {
                    specs,
                    data,
                    map: None,
                    initializer: None,
                    initialized: false,
                    initialized_by: None,
                    updated_blocks: OnceLock::new(),
                });
                self.must_persist();
            }
        }
        match self.cut_shard_map(now) {
            Ok(None) => {}
            Ok(Some(missing)) => return Ok(Initialization::Pending(missing)),
            Err(refusal) => {
                self.durable.variables = None;
                self.must_persist();
                return Err(refusal);
            }
        }
        let Some(variables) = &mut self.durable.variables else {
            unreachable!("registered above")
        };
        if variables.initialized {
            return Ok(Initialization::Done);
        }
        if variables.initializer.is_none() {
            variables.initializer = Some(task);
            self.must_persist();
            return Ok(Initialization::Yours);
        }
        match variables.initializer {
            Some(other) if other != task => {
                let pending = format!("{other} is sending the initial values");
                Ok(Initialization::Pending(pending))
            }
            _ => Ok(Initialization::Yours),
        }
    }

    /// Marks the variables as having their initial values.
    ///
    /// # Errors
    /// [`Reason::NotLeased`] if the sender is not, or no longer, the initialiser.
    pub(crate) fn finish_initialization(&mut self, task: Task) -> Result<(), Refusal> {
        let variables = self.durable.variables.as_mut();
        if variables
            .as_ref()
            .is_some_and(|v| v.initialized_by == Some(task))
        {
            return Ok(());
        }
        let Some(variables) = variables.filter(|v| v.initializer == Some(task)) else {
            return Err(Refusal::new(
                Reason::NotLeased,
                format!("{task} is not the initialiser; register the variables again"),
            ));
        };
        variables.initialized = true;
        variables.initializer = None;
        variables.initialized_by = Some(task);
        let samples = variables.data.training_samples;
        self.durable.training.ledger = Some(self.fresh_ledger(samples));
        self.must_persist();
        Ok(())
    }

    fn fresh_ledger(&self, samples: u64) -> Ledger {
        let job = &self.job;
        let batch = job.samples_per_step();
        Ledger::new(samples, job.epochs, batch, job.steps, self.sync())
    }

    pub(crate) fn training_samples(&self) -> u64 {
        self.durable
            .variables
            .as_ref()
            .map_or(0, |v| v.data.training_samples)
    }
}

fn check(specs: &[VariableSpec], data: &WorkerData) -> Result<(), Refusal> {
    let malformed = |what| Err(Refusal::new(Reason::Malformed, what));
    if specs.is_empty() {
        return malformed("the model has no variables; there is nothing to train".to_owned());
    }
    if data.training_samples == 0 {
        return malformed("the data has no training samples; look at [data] in the job".to_owned());
    }
    if data.evaluation_samples == 0 {
        return malformed(
            "the data has no samples held out for evaluation; look at [data] in the job".to_owned(),
        );
    }
    let most = data.training_samples.max(data.evaluation_samples);
    if most > MOST_SAMPLES {
        return malformed(format!(
            "the data has {most} samples; a job takes {MOST_SAMPLES} at the most"
        ));
    }
    // Checked before servers are known: a model that is too large for a map is refused at once.
    check_map_size(specs, BLOCK_ELEMENTS, 1, "")?;
    for pair in specs.windows(2) {
        if pair[0].name >= pair[1].name {
            return malformed(format!(
                "variables must be sorted by name, each once; {:?} comes before {:?}",
                pair[0].name, pair[1].name
            ));
        }
    }
    Ok(())
}

/// Checks that a worker's model is that of the checkpoint with which the job begins.
fn check_start(
    start: &Start,
    job: &Job,
    specs: &[VariableSpec],
    task: Task,
) -> Result<(), Refusal> {
    let what = if !start.is_of(specs) {
        format!(
            "{task} has another model than the checkpoint that the job begins with; look at [model] in the job"
        )
    } else if let Some(saved) = start.other_slots(job, specs) {
        format!(
            "the checkpoint that the job begins with has variable {:?} of another optimizer, with {} values beside each weight; look at [optimizer] and [[groups]] in the job",
            saved.name, saved.slots
        )
    } else {
        return Ok(());
    };
    Err(Refusal::new(Reason::VariablesDiffer, what))
}

fn compare(ours: &[VariableSpec], theirs: &[VariableSpec], task: Task) -> Result<(), Refusal> {
    if ours == theirs {
        return Ok(());
    }
    let named = |specs: &[VariableSpec], name: &str| {
        let found = specs.iter().find(|s| s.name == name);
        found.map_or_else(
            || "nothing".to_owned(),
            |s| match s.kind {
                VariableKind::Trained => format!("shape {:?}", s.shape),
                kind => format!("shape {:?}, {kind}", s.shape),
            },
        )
    };
    let mut names = ours.iter().chain(theirs).map(|s| s.name.as_str());
    let name = names
        .find(|name| named(ours, name) != named(theirs, name))
        .unwrap_or_default();
    Err(Refusal::new(
        Reason::VariablesDiffer,
        format!(
            "{task} has another model than the job: variable {name:?} is {} in the job, but {} in {task}; start all workers with the same program and settings",
            named(ours, name),
            named(theirs, name)
        ),
    ))
}

fn compare_data(ours: &WorkerData, theirs: &WorkerData, task: Task) -> Result<(), Refusal> {
    let counts = |data: &WorkerData| (data.training_samples, data.evaluation_samples);
    let what = if counts(ours) != counts(theirs) {
        format!(
            "{} training and {} evaluation samples, but the job has {} and {}",
            theirs.training_samples,
            theirs.evaluation_samples,
            ours.training_samples,
            ours.evaluation_samples
        )
    } else if ours.digest.is_empty() || theirs.digest.is_empty() || ours.digest == theirs.digest {
        return Ok(());
    } else {
        format!(
            "as many samples, but with the digest {} and not {}",
            hexadecimal(&theirs.digest),
            hexadecimal(&ours.digest)
        )
    };
    Err(Refusal::new(
        Reason::DataDiffers,
        format!("{task} has other data than the job: {what}; give all workers the same files"),
    ))
}
