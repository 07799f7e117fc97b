//! The model's variables: registration, initial values.

use std::sync::OnceLock;
use std::time::Instant;

use checkpoint::hexadecimal;
use serde::{Deserialize, Serialize};
use shared_proto::blocks::{BLOCK_ELEMENTS, ShardMap, VariableKind, VariableSpec};
use shared_proto::ids::Task;
use shared_proto::job::Job;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::table::TableSpec;

use super::Cluster;
use super::checkpoints::Start;
use super::ledger::{Ledger, MOST_SAMPLES};
use super::map_size::check_map_size;
use super::model::ModelSpecs;

/// The model and the data that the first worker has registered, the shard map, and the state of the initialization.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Variables {
    #[serde(flatten)]
    pub(super) model: ModelSpecs,
    #[serde(flatten)]
    pub(super) data: WorkerData,
    pub(crate) map: Option<ShardMap>,
    pub(crate) initializer: Option<Task>,
    pub(crate) initialized: bool,
    /// The worker that has sent the initial values. Its repeated call is accepted.
    initialized_by: Option<Task>,
    /// By shard: the number of blocks that take updates. It is computed once, because the map fixes it.
    #[serde(skip)]
    updated_blocks: OnceLock<Vec<u64>>,
}

impl Variables {
    /// Returns, by shard, the number of blocks that take updates; empty before the map is cut.
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
pub struct WorkerData {
    pub(crate) training_samples: u64,
    pub(crate) evaluation_samples: u64,
    /// SHA-256 of the samples; empty if the worker does not state it.
    #[serde(default)]
    pub(crate) digest: Vec<u8>,
}

/// The error of a job with the setting `best` whose model has tables.
const BEST_WITH_TABLES: &str = "job setting `best` is not possible with this model: it has tables, whose rows are in checkpoints alone, and these are not of the best evaluation; leave `best` out, and let early_stopping end the job near the best evaluation";

/// What a worker must do for the initialization of the variables.
#[derive(Debug, PartialEq, Eq)]
pub enum Initialization {
    /// The worker must send its initial values.
    Yours,
    /// The worker must wait. The text says for what.
    Pending(String),
    /// All blocks have their initial values.
    Done,
}

impl Cluster {
    /// Registers a worker's model and data. Those of the first worker become the job's, and those of all others must
    /// equal them. Returns what the worker must do for the initialization.
    ///
    /// # Errors
    /// [`Reason::VariablesDiffer`] or [`Reason::DataDiffers`] name the difference; [`Reason::Malformed`] for a model or
    /// data that no job can have; [`Reason::Oversized`] for a model that is too large for a shard map or for the memory
    /// of the servers.
    pub fn register_variables(
        &mut self,
        now: Instant,
        task: Task,
        model: impl Into<ModelSpecs>,
        data: WorkerData,
    ) -> Result<Initialization, Refusal> {
        let model = model.into();
        let training_samples = data.training_samples;
        check(&model, &data)?;
        match &mut self.durable.variables {
            Some(known) => {
                compare(&known.model, &model, task)?;
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
                            "{task} has {training_samples} training samples, the checkpoint that the job begins with {}; give it the same data, with the same [data] settings",
                            start.training_samples
                        ),
                    ));
                }
                if let Some(start) = start {
                    check_start(start, &self.job, &model, task)?;
                }
                if self.job.best.is_some() && !model.tables.is_empty() {
                    self.fail(now, BEST_WITH_TABLES.to_owned());
                    return Err(Refusal::new(Reason::Malformed, BEST_WITH_TABLES));
                }
                self.durable.variables = Some(Variables {
                    model,
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
        if self.has_ring() {
            self.begin_with_workers();
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

    /// Notes that a worker has sent all initial values.
    ///
    /// # Errors
    /// [`Reason::NotLeased`] if the sender is not, or no longer, the initializer.
    pub fn finish_initialization(&mut self, task: Task) -> Result<(), Refusal> {
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

    /// Begins a job with a ring, in which each worker has the initial values: marks the variables as initialized, and
    /// creates the ledger of the data, and restores the progress of a checkpoint that the job begins with.
    fn begin_with_workers(&mut self) {
        let Some(variables) = &mut self.durable.variables else {
            return;
        };
        if std::mem::replace(&mut variables.initialized, true) {
            return;
        }
        let samples = variables.data.training_samples;
        self.durable.training.ledger = Some(self.fresh_ledger(samples));
        let start = self.durable.checkpoints.start.as_ref();
        if let Some(kept) = start.and(self.durable.checkpoints.newest.clone()) {
            self.restore_progress(&kept.progress);
        }
        self.must_persist();
    }

    fn fresh_ledger(&self, samples: u64) -> Ledger {
        let job = &self.job;
        let batch = job.samples_per_step();
        Ledger::new(samples, job.epochs, batch, job.steps, self.in_lock_step())
    }
}

fn check(model: &ModelSpecs, data: &WorkerData) -> Result<(), Refusal> {
    let malformed = |what| Err(Refusal::new(Reason::Malformed, what));
    let ModelSpecs { variables, tables } = model;
    if variables.is_empty() && tables.is_empty() {
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
    check_map_size(model, BLOCK_ELEMENTS, 1, "")?;
    let not_sorted = |what: &str, pair: &[&String]| {
        let (one, other) = (pair[0], pair[1]);
        let problem =
            || format!("{what} must be sorted by name, each once; {one:?} comes before {other:?}");
        (one >= other).then(problem)
    };
    let names: Vec<&String> = variables.iter().map(|spec| &spec.name).collect();
    let table_names: Vec<&String> = tables.iter().map(|spec| &spec.name).collect();
    let problem = names
        .windows(2)
        .find_map(|pair| not_sorted("variables", pair))
        .or_else(|| {
            let mut pairs = table_names.windows(2);
            pairs.find_map(|pair| not_sorted("tables", pair))
        })
        .or_else(|| {
            let mut tables = table_names.iter();
            let both = tables.find(|name| names.contains(name));
            both.map(|name| format!("{name:?} names a variable and a table; give one another name"))
        });
    problem.map_or(Ok(()), malformed)
}

/// Checks that a worker's model and its optimizers match the checkpoint with which the job begins.
fn check_start(start: &Start, job: &Job, model: &ModelSpecs, task: Task) -> Result<(), Refusal> {
    let what = if !start.is_of(model) {
        let differs = start.difference(model);
        format!(
            "{task} has another model than the checkpoint that the job begins with{differs}; look at [model] and [data] in the job"
        )
    } else if let Some(saved) = start.other_slots(job, &model.variables) {
        format!(
            "the checkpoint that the job begins with has variable {:?} of another optimizer, with {} values beside each weight; look at [optimizer] and [[groups]] in the job",
            saved.name, saved.slots
        )
    } else {
        return Ok(());
    };
    Err(Refusal::new(Reason::VariablesDiffer, what))
}

fn compare(ours: &ModelSpecs, theirs: &ModelSpecs, task: Task) -> Result<(), Refusal> {
    if ours.variables == theirs.variables {
        return compare_tables(&ours.tables, &theirs.tables, task);
    }
    let (ours, theirs) = (&ours.variables[..], &theirs.variables[..]);
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

fn compare_tables(ours: &[TableSpec], theirs: &[TableSpec], task: Task) -> Result<(), Refusal> {
    let of = |specs: &[TableSpec], name: &str| specs.iter().find(|s| s.name == name).cloned();
    let mut names = ours.iter().chain(theirs).map(|spec| spec.name.as_str());
    let Some(name) = names.find(|name| of(ours, name) != of(theirs, name)) else {
        return Ok(());
    };
    let described = |spec: Option<TableSpec>| {
        spec.map_or_else(|| "nothing".to_owned(), |spec| format!("{spec:?}"))
    };
    Err(Refusal::new(
        Reason::VariablesDiffer,
        format!(
            "{task} has another model than the job: table {name:?} is {} in the job, but {} in {task}; start all workers with the same program and settings",
            described(of(ours, name)),
            described(of(theirs, name))
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
