//! The model's variables: registration, the cut of the shard map, initial values.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use checkpoint::hexadecimal;
use serde::{Deserialize, Serialize};
use shared_proto::blocks::{BLOCK_ELEMENTS, PlacedShard, ShardMap, Source, VariableSpec};
use shared_proto::ids::{Epoch, Role, Task};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::JobPhase;

use super::Cluster;
use super::capacity::check_capacity;
use super::checkpoints::source;
use super::map_size::check_map_size;
use super::members::Member;
use crate::placement::{block_elements, place};
use crate::splits::{Ledger, MOST_SAMPLES};

/// If the job does not give the number of servers, the shard map is cut when no server has joined for this long.
const SETTLE: Duration = Duration::from_secs(3);

/// The variables and data sizes that the first worker has registered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Variables {
    pub(super) specs: Vec<VariableSpec>,
    #[serde(flatten)]
    data: WorkerData,
    pub(crate) map: Option<ShardMap>,
    pub(crate) initializer: Option<Task>,
    pub(crate) initialized: bool,
    /// The worker that initialized them, so that a repeated call is accepted.
    initialized_by: Option<Task>,
    /// The number of blocks of each shard, which the map fixes once it is cut.
    #[serde(skip)]
    blocks: OnceLock<Vec<u64>>,
}

impl Variables {
    /// Returns the number of blocks of each shard; empty before the map is cut.
    pub(super) fn blocks_of_shards(&self) -> &[u64] {
        let Some(map) = &self.map else { return &[] };
        self.blocks.get_or_init(|| {
            let mut counts = vec![0; map.shards.len()];
            for (_, shard) in map.blocks() {
                counts[shard as usize] += 1;
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
        match &mut self.variables {
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
                if let Some(start) = &self.start
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
                if self
                    .start
                    .as_ref()
                    .is_some_and(|start| !start.is_of(&specs))
                {
                    return Err(Refusal::new(
                        Reason::VariablesDiffer,
                        format!(
                            "{task} has another model than the checkpoint that the job begins with; look at [model] in the job"
                        ),
                    ));
                }
                self.variables = Some(Variables {
                    specs,
                    data,
                    map: None,
                    initializer: None,
                    initialized: false,
                    initialized_by: None,
                    blocks: OnceLock::new(),
                });
                self.must_persist();
            }
        }
        match self.cut_shard_map(now) {
            Ok(None) => {}
            Ok(Some(missing)) => return Ok(Initialization::Pending(missing)),
            Err(refusal) => {
                self.variables = None;
                self.must_persist();
                return Err(refusal);
            }
        }
        let Some(variables) = &mut self.variables else {
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
        let variables = self.variables.as_mut();
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
        self.ledger = Some(self.fresh_ledger(samples));
        self.must_persist();
        Ok(())
    }

    fn fresh_ledger(&self, samples: u64) -> Ledger {
        let job = &self.job;
        let batch = job.batch_size.into();
        Ledger::new(samples, job.epochs, batch, job.steps, self.sync())
    }

    /// Returns the shard map.
    ///
    /// # Errors
    /// [`Reason::NotInitialized`] before it is cut.
    pub(crate) fn shard_map(&self) -> Result<&ShardMap, Refusal> {
        let map = self.variables.as_ref().and_then(|v| v.map.as_ref());
        map.ok_or_else(|| {
            Refusal::new(
                Reason::NotInitialized,
                "the shard map is not cut yet: no worker has registered variables, or servers are missing",
            )
        })
    }

    pub(crate) fn training_samples(&self) -> u64 {
        self.variables
            .as_ref()
            .map_or(0, |v| v.data.training_samples)
    }

    /// Cuts the shard map if possible. Otherwise returns the missing condition.
    ///
    /// # Errors
    /// [`Reason::Oversized`] if a server has too little memory.
    fn cut_shard_map(&mut self, now: Instant) -> Result<Option<String>, Refusal> {
        if self.variables.as_ref().is_some_and(|v| v.map.is_some()) {
            return Ok(None);
        }
        let mut servers: Vec<&Member> = self.live(Role::Ps).collect();
        servers.sort_by_key(|m| m.task.id.index);
        match self.job.cluster.ps {
            Some(wanted) if servers.len() < wanted as usize => {
                return Ok(Some(format!(
                    "{} of {wanted} parameter servers have registered",
                    servers.len()
                )));
            }
            Some(wanted) => servers.truncate(wanted as usize),
            None if servers.is_empty() => {
                return Ok(Some("no parameter server has registered".into()));
            }
            None if self.last_ps_joined.is_some_and(|at| now < at + SETTLE) => {
                return Ok(Some("waiting for more parameter servers to join".into()));
            }
            None => {}
        }
        let Some(variables) = &self.variables else {
            return Ok(None);
        };
        let shards = servers.len() as u32;
        let block_elements = match &self.start {
            Some(start) => start.block_elements,
            None => block_elements(&variables.specs, shards),
        };
        let location = self.checkpoint_location();
        check_map_size(&variables.specs, block_elements, servers.len(), location)?;
        let placed = place(variables.specs.clone(), shards, block_elements);
        check_capacity(&self.job, &servers, &placed, block_elements)?;
        let servers: Vec<(Task, String)> = servers
            .iter()
            .map(|m| (m.task, m.address.clone()))
            .collect();
        let begin_with = self.start.as_ref().and(self.checkpoints.newest.clone());
        let workers = u64::from(self.job.cluster.workers.unwrap_or(1));
        let Some(variables) = &mut self.variables else {
            return Ok(None);
        };
        let source = match &begin_with {
            Some(kept) => source(Epoch(1), kept),
            None => Source::initializer(Epoch(1)),
        };
        tracing::info!(
            shards,
            variables = variables.specs.len(),
            block_elements,
            "cut the shard map"
        );
        variables.map = Some(ShardMap {
            epoch: Epoch(1),
            shards: servers
                .into_iter()
                .map(|(server, address)| PlacedShard {
                    address,
                    server,
                    source: source.clone(),
                })
                .collect(),
            variables: placed,
            block_elements,
            total_updates: self
                .job
                .total_updates(variables.data.training_samples, workers),
        });
        if let Some(kept) = begin_with {
            variables.initialized = true;
            self.checkpoints.loading = (0..shards as usize).map(|s| (s, String::new())).collect();
            self.restore_progress(&kept.progress);
        }
        self.must_persist();
        Ok(None)
    }

    /// Returns the longest location of a checkpoint that shards may come from; empty without checkpoints.
    fn checkpoint_location(&self) -> &str {
        let newest = self.checkpoints.newest.as_ref();
        let newest = newest.map_or("", |kept| &kept.location);
        let place = self.place().map_or("", |place| &place.location);
        if newest.len() > place.len() {
            newest
        } else {
            place
        }
    }

    /// Describes what keeps training from beginning or continuing; empty if nothing does.
    pub(crate) fn missing(&self) -> String {
        if self.ended() {
            return String::new();
        }
        if let Some(shard) = self.orphans().next() {
            let map = self.variables.as_ref().and_then(|v| v.map.as_ref());
            let gone = map.and_then(|map| self.members.get(&map.shards[shard].server.id));
            let gone = gone.map_or_else(String::new, |m| {
                format!(": {} is gone ({})", m.task, m.gone)
            });
            return format!("shard {shard} has no server{gone}; start it again");
        }
        if let Some(loads) = self.checkpoints.loads() {
            return loads;
        }
        if self.checkpoints.ending {
            return self.checkpoints.last_of();
        }
        let nobody = self.live(Role::Worker).next().is_none();
        if self.phase == JobPhase::Training && nobody {
            return "no worker is there; start one".to_owned();
        }
        let wanted = self.job.cluster.workers.unwrap_or(1) as usize;
        let ready = self.live(Role::Worker).filter(|m| m.progress.ready).count();
        match &self.variables {
            _ if self.phase != JobPhase::Starting => String::new(),
            None => "no worker has registered its variables".to_owned(),
            Some(v) if v.map.is_none() => {
                let servers = self.live(Role::Ps).count();
                match self.job.cluster.ps {
                    Some(wanted) => {
                        format!("{servers} of {wanted} parameter servers have registered")
                    }
                    None => {
                        format!(
                            "{servers} parameter servers have registered; training begins once no other has joined for {} s",
                            SETTLE.as_secs()
                        )
                    }
                }
            }
            Some(v) if !v.initialized => match v.initializer {
                Some(task) => format!("{task} is sending the initial values"),
                None => "no worker has begun to send initial values".to_owned(),
            },
            Some(_) if ready < wanted => format!("{ready} of {wanted} workers are ready"),
            Some(_) if self.checkpoints.place.is_some() && !self.checkpoints.first_written => {
                self.checkpoints.awaits("first")
            }
            Some(_) => String::new(),
        }
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

fn compare(ours: &[VariableSpec], theirs: &[VariableSpec], task: Task) -> Result<(), Refusal> {
    if ours == theirs {
        return Ok(());
    }
    let named = |specs: &[VariableSpec], name: &str| {
        let found = specs.iter().find(|s| s.name == name);
        found.map_or_else(|| "nothing".to_owned(), |s| format!("shape {:?}", s.shape))
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
