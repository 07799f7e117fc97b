//! The part of the cluster's state that outlives this process, and how a new process resumes from it.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::blocks::{PlacedTable, ShardMap, ShardServer};
use shared_proto::ids::{Epoch, Role, RunNumber, Task, TaskId, ViewNumber};
use shared_proto::job::{Job, StrategyName};
use shared_proto::planted;
use shared_proto::receipt::ReceiptKey;
use shared_proto::view::JobPhase;

use super::Cluster;
use super::checkpoints::Checkpoints;
use super::evaluations::Evaluations;
use super::forgotten::Forgotten;
use super::losses::Losses;
use super::members::Member;
use super::ring::Ring;
use super::stored;
use super::training::Training;
use super::unable::Unable;
use super::variables::Variables;

/// The maximum number of views that one process may publish. The next process begins with a number beyond this range.
const VIEWS_IN_A_LIFE: u64 = 1 << 40;

/// The state that outlives a coordinator. Each field is persisted as a row, and each member as a row of its own
/// (`rows`). [`Cluster::resume`] sets the fields that are not persisted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Durable {
    /// The run, and the job that it trains.
    pub run: Run,
    #[serde(with = "stored::members")]
    pub(super) members: BTreeMap<TaskId, Member>,
    /// The workers that were evicted and are expected back, each with the end of the wait.
    #[serde(with = "stored::tasks")]
    pub(super) awaited: BTreeMap<TaskId, Instant>,
    pub(super) forgotten: Forgotten,
    pub(super) variables: Option<Variables>,
    pub(super) training: Training,
    /// Jobs with a ring: the workers that make each step together.
    #[serde(default)]
    pub(super) ring: Ring,
    pub(super) evaluations: Evaluations,
    pub(super) checkpoints: Checkpoints,
    pub(super) losses: Losses,
    pub(super) unable: Unable,
    pub(super) outcome: Outcome,
}

/// The identity of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// The job as TOML. Another release may write the same job differently.
    pub job_toml: String,
    /// The run's number, which distinguishes members of an earlier run from those of this one.
    pub(super) number: RunNumber,
    /// The run's id; `None` without checkpoints.
    #[serde(rename = "probe")]
    pub(super) run_id: Option<String>,
    /// The number of times that a coordinator of this run has started.
    pub(super) starts: u64,
    #[serde(with = "stored::Key")]
    pub(super) receipt_key: ReceiptKey,
}

impl Run {
    /// Returns the job's strategy; `None` if the job cannot be parsed.
    pub(super) fn strategy(&self) -> Option<StrategyName> {
        let job = Job::parse(&self.job_toml).ok()?;
        Some(job.strategy.name)
    }

    /// Returns the run's id or, without checkpoints, the run's number in hexadecimal; `None` if neither is set.
    pub fn id(&self) -> Option<String> {
        let number = (self.number.0 != 0).then(|| format!("{:016x}", self.number.0));
        self.run_id.clone().or(number)
    }
}

/// The progress of the job as a whole, and its end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Outcome {
    #[serde(with = "stored::enumeration")]
    pub(super) phase: JobPhase,
    /// The error with which the job failed; empty otherwise.
    pub(super) error: String,
    /// The seconds of training before this process started; in a snapshot, all seconds until the snapshot.
    #[serde(with = "shared_proto::number")]
    pub(super) seconds: f64,
    /// The reason why the job has ended without its last checkpoint; empty otherwise.
    pub(super) unsaved: String,
    /// The number of workers that took part; 0 until the job ends.
    #[serde(default)]
    pub(super) workers: usize,
}

impl Durable {
    pub(super) fn new(job: &Job) -> Self {
        Self {
            run: Run {
                job_toml: job.to_toml(),
                number: RunNumber::default(),
                run_id: None,
                starts: 1,
                receipt_key: ReceiptKey([0; 32]),
            },
            members: BTreeMap::new(),
            awaited: BTreeMap::new(),
            forgotten: Forgotten::default(),
            variables: None,
            training: Training::default(),
            ring: Ring::default(),
            evaluations: Evaluations::default(),
            checkpoints: Checkpoints::default(),
            losses: Losses::default(),
            unable: Unable::default(),
            outcome: Outcome {
                phase: JobPhase::Starting,
                error: String::new(),
                seconds: 0.0,
                unsaved: String::new(),
                workers: 0,
            },
        }
    }

    /// Returns the number of the next checkpoint.
    pub fn next_checkpoint(&self) -> u64 {
        self.checkpoints.next
    }

    /// Returns whether the run has ended.
    pub fn has_ended(&self) -> bool {
        matches!(self.outcome.phase, JobPhase::Done | JobPhase::Failed)
    }

    /// Returns the epoch of the shard map or, without a map, the number of the ring.
    pub(super) fn epoch(&self) -> Epoch {
        let map = self.map();
        map.map_or(self.ring.number, |map| map.epoch)
    }

    /// Returns the shard map, once it is cut.
    pub(super) fn map(&self) -> Option<&ShardMap> {
        self.variables.as_ref()?.map.as_ref()
    }

    /// Returns the shard map for changes; `None` before the map is cut.
    pub(super) fn map_mut(&mut self) -> Option<&mut ShardMap> {
        self.variables.as_mut()?.map.as_mut()
    }

    /// Returns whether the variables have their initial values.
    pub(super) fn initialized(&self) -> bool {
        let variables = self.variables.as_ref();
        variables.is_some_and(|variables| variables.initialized)
    }

    /// Returns a member.
    pub(super) fn member(&self, id: TaskId) -> Option<&Member> {
        self.members.get(&id)
    }

    /// Returns the members of a role that are alive.
    pub(super) fn live(&self, role: Role) -> impl Iterator<Item = &Member> {
        let of_role = move |m: &&Member| m.is_alive() && m.task.id.role == role;
        self.members.values().filter(of_role)
    }

    /// Returns the servers of the shards, in the order of the shards. A shard that has lost its server has this
    /// server's task.
    pub(super) fn servers(&self) -> Vec<Task> {
        let map = self.map();
        map.map_or_else(Vec::new, |map| {
            map.shards.iter().map(|shard| shard.server.task()).collect()
        })
    }

    /// Returns the indices of the shards without a server.
    pub(super) fn orphans(&self) -> impl Iterator<Item = usize> + '_ {
        let map = self.map();
        let shards = map.map_or(&[][..], |map| &map.shards);
        let numbered = shards.iter().enumerate();
        let without_server =
            numbered.filter(|(_, shard)| matches!(shard.server, ShardServer::Lost(_)));
        without_server.map(|(number, _)| number)
    }

    /// Returns the index of the shard that a server holds, or that has lost this server.
    pub(super) fn shard_of(&self, task: Task) -> Option<usize> {
        let shards = &self.map()?.shards;
        shards.iter().position(|shard| shard.server.task() == task)
    }

    /// Returns the tables of the shard map; empty before the map is cut.
    pub(super) fn tables(&self) -> &[PlacedTable] {
        let variables = self.variables.as_ref();
        let map = variables.and_then(|variables| variables.map.as_ref());
        map.map_or(&[], |map| &map.tables)
    }

    /// Returns the number of training samples; 0 before a worker has stated it.
    pub(super) fn training_samples(&self) -> u64 {
        self.variables
            .as_ref()
            .map_or(0, |v| v.data.training_samples)
    }

    /// Returns the number of blocks of a shard that take updates; 0 if there is no such shard.
    pub(super) fn updated_blocks_of(&self, shard: u32) -> u64 {
        let variables = self.variables.as_ref();
        let counts = variables.map(Variables::updated_blocks_of_shards);
        counts
            .and_then(|counts| counts.get(shard as usize))
            .map_or(0, |count| *count)
    }

    /// Returns, by shard, its lost updates, converted into steps of one worker that updates all of the shard's blocks,
    /// rounded up. Shards without losses are absent.
    pub(super) fn lost_steps(&self) -> BTreeMap<u32, u64> {
        let by_shard = self.losses.by_shard.iter();
        let steps = |(shard, updates): (&u32, &u64)| {
            (
                *shard,
                updates.div_ceil(self.updated_blocks_of(*shard).max(1)),
            )
        };
        by_shard.map(steps).collect()
    }

    /// Returns the numbers of steps and samples done.
    pub(super) fn done(&self) -> (u64, u64) {
        (self.training.tally.steps, self.training.tally.samples)
    }

    /// Returns whether any member is alive.
    pub(super) fn anyone_there(&self) -> bool {
        self.members.values().any(|m| m.is_alive())
    }
}

impl Cluster {
    /// Returns a copy of the state to persist.
    pub fn snapshot(&self, now: Instant) -> Durable {
        let mut durable = self.durable.clone();
        durable.outcome.seconds = self.seconds(now);
        durable
    }

    /// Resumes from the state that an earlier coordinator has persisted.
    pub fn resume(job: Job, mut durable: Durable, now: Instant) -> Self {
        let beyond = durable.run.starts.saturating_mul(VIEWS_IN_A_LIFE);
        durable.run.starts = durable.run.starts.saturating_add(1);
        for member in durable.members.values_mut() {
            member.resumed(now);
        }
        durable.unable.resumed(now);
        let mut cluster = Self::over(job, durable);
        if cluster.done().0 > 0 {
            cluster.forget_losses();
        }
        let until = now + cluster.lease();
        for at in cluster.durable.awaited.values_mut() {
            *at = until;
        }
        cluster.view.number = ViewNumber(if planted!(OldViews) { 0 } else { beyond });
        if cluster.durable.outcome.phase == JobPhase::Training {
            (cluster.instants.began, cluster.instants.last_finish) = (Some(now), Some(now));
        }
        let newest = cluster.durable.checkpoints.newest.as_ref();
        cluster.saving.newest_begun = newest.map(|_| now);
        let servers = cluster.durable.live(Role::Ps).next().is_some();
        cluster.instants.last_ps_joined = servers.then_some(now);
        cluster.must_persist();
        cluster
    }
}
