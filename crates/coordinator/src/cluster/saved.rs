//! The state that outlives a coordinator, and the resumption from it.

use std::collections::VecDeque;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Clock, Generation, Role, Sequence, Task, TaskId, ViewNumber};
use shared_proto::job::Job;
use shared_proto::number::Number;
use shared_proto::planted;
use shared_proto::receipt::ReceiptKey;
use shared_proto::view::{Commit, JobPhase};
use shared_proto::wire;

use super::Cluster;
use super::checkpoints::{DurableCheckpoint, Start};
use super::evaluations::{Evaluation, Evaluations, SavedEvaluation};
use super::forgotten::Forgotten;
use super::losses::Losses;
use super::members::{Member, WorkerProgress};
use super::process::Process;
use super::training::Step;
use super::unable::{SavedUnable, Unable};
use super::variables::Variables;
use crate::splits::Ledger;

/// The number of views that one process may publish. The next process begins beyond them.
const VIEWS_IN_A_LIFE: u64 = 1 << 40;

/// The cluster in its stored form.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// The number of times that the coordinator has started.
    pub(crate) generation: Generation,
    first_generation: Generation,
    pub(crate) job_toml: String,
    members: Vec<SavedMember>,
    #[serde(default)]
    forgotten: Forgotten,
    pub(super) variables: Option<Variables>,
    pub(super) ledger: Option<Ledger>,
    evaluations_due: VecDeque<u32>,
    evaluation_at_work: Option<Evaluation>,
    evaluation_reported: Option<(u32, Task)>,
    evaluations: Vec<SavedEvaluation>,
    step: Option<Step>,
    commit: Option<Commit>,
    min_clock: Clock,
    pub(super) phase: i32,
    pub(crate) error: String,
    #[serde(with = "shared_proto::number")]
    pub(super) seconds: f64,
    earlier_samples: u64,
    steps: u64,
    samples: u64,
    skipped: u64,
    #[serde(default)]
    losses: Losses,
    receipt_key: [u8; 32],
    next_checkpoint: u64,
    pub(super) newest: Option<DurableCheckpoint>,
    first_written: bool,
    ending: bool,
    probe: Option<String>,
    pub(super) start: Option<Start>,
    awaited: Vec<TaskId>,
    #[serde(default)]
    pub(super) loading: Vec<usize>,
    #[serde(default)]
    unsaved: String,
    #[serde(default)]
    unable: SavedUnable,
    #[serde(default)]
    stopping: bool,
    /// The run's number: it has one without checkpoints too.
    #[serde(default)]
    run: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct SavedMember {
    task: Task,
    identity: String,
    address: String,
    metrics_address: String,
    #[serde(default)]
    process: Process,
    #[serde(default)]
    capacity: Option<u64>,
    alive: bool,
    gone: String,
    clock: Clock,
    active: bool,
    ready: bool,
    finished: Sequence,
    told_lost: Sequence,
    samples: u64,
    steps: u64,
    #[serde(default)]
    pushes: u64,
    /// The seconds spent in pull, compute, push and wait.
    times: [Number; 4],
}

impl Saved {
    /// Returns the run's id.
    pub(crate) fn run(&self) -> Option<String> {
        let number = (self.run != 0).then(|| format!("{:016x}", self.run));
        self.probe.clone().or(number)
    }

    fn phase(&self) -> JobPhase {
        JobPhase::try_from(self.phase).unwrap_or(JobPhase::Starting)
    }
}

impl From<&Member> for SavedMember {
    fn from(member: &Member) -> Self {
        let progress = &member.progress;
        let times = progress.times;
        Self {
            task: member.task,
            identity: member.identity.clone(),
            address: member.address.clone(),
            metrics_address: member.metrics_address.clone(),
            process: member.process.clone(),
            capacity: member.capacity,
            alive: member.alive,
            gone: member.gone.clone(),
            clock: progress.clock,
            active: progress.active,
            ready: progress.ready,
            finished: progress.finished,
            told_lost: progress.told_lost,
            samples: progress.samples,
            steps: progress.steps,
            pushes: progress.pushes,
            times: [times.pull, times.compute, times.push, times.wait].map(Number),
        }
    }
}

impl SavedMember {
    fn member(self, now: Instant) -> Member {
        let [pull, compute, push, wait] = self.times.map(|time| time.0);
        Member {
            task: self.task,
            identity: self.identity,
            address: self.address,
            metrics_address: self.metrics_address,
            process: self.process,
            capacity: self.capacity,
            // Each member has one full lease from now on.
            seen: now,
            alive: self.alive,
            gone: self.gone,
            progress: WorkerProgress {
                clock: self.clock,
                active: self.active,
                ready: self.ready,
                uncertain: true,
                finished: self.finished,
                told_lost: self.told_lost,
                samples: self.samples,
                steps: self.steps,
                pushes: self.pushes,
                times: wire::StepTimes {
                    pull,
                    compute,
                    push,
                    wait,
                },
                ..WorkerProgress::new(now)
            },
        }
    }
}

impl Cluster {
    /// Copies the state that has to survive.
    pub(crate) fn save_all(&self, now: Instant) -> Saved {
        let (due, at_work, reported) = self.evaluations.parts();
        Saved {
            generation: self.generation,
            first_generation: self.first_generation,
            earlier_samples: self.earlier_samples,
            job_toml: self.job.to_toml(),
            members: self.members.values().map(Into::into).collect(),
            forgotten: self.forgotten.clone(),
            variables: self.variables.clone(),
            ledger: self.ledger.clone(),
            evaluations_due: due,
            evaluation_at_work: at_work,
            evaluation_reported: reported,
            evaluations: self.evaluations.saved(),
            step: self.step.clone(),
            commit: self.commit.clone(),
            min_clock: self.min_clock,
            phase: self.phase.into(),
            error: self.error.clone(),
            seconds: self.seconds(now),
            steps: self.tally.steps,
            samples: self.tally.samples,
            skipped: self.tally.skipped,
            losses: self.losses.clone(),
            receipt_key: self.receipt_key.0,
            next_checkpoint: self.checkpoints.next,
            newest: self.checkpoints.newest.clone(),
            first_written: self.checkpoints.first_written,
            ending: self.checkpoints.ending,
            probe: self
                .checkpoints
                .place
                .as_ref()
                .map(|place| place.probe.clone()),
            start: self.start.clone(),
            awaited: self.awaited.keys().copied().collect(),
            loading: self.checkpoints.loading.keys().copied().collect(),
            unsaved: self.checkpoints.unsaved.clone(),
            unable: self.unable.saved(),
            stopping: self.stopping,
            run: self.run_id().0,
        }
    }

    /// Resumes from the state of an earlier coordinator.
    pub(crate) fn resume(job: Job, saved: Saved, now: Instant) -> Self {
        let mut cluster = Self::new(job);
        let phase = saved.phase();
        cluster.generation = saved.generation.next();
        let beyond = saved.generation.0.saturating_mul(VIEWS_IN_A_LIFE);
        cluster.view.number = ViewNumber(if planted!(OldViews) { 0 } else { beyond });
        let members = saved.members.into_iter().map(|saved| saved.member(now));
        cluster.members = members.map(|member| (member.task.id, member)).collect();
        cluster.forgotten = saved.forgotten;
        cluster.variables = saved.variables;
        cluster.ledger = saved.ledger;
        cluster.evaluations = Evaluations::resumed(
            saved.evaluations_due,
            saved.evaluation_at_work,
            saved.evaluation_reported,
            &saved.evaluations,
        );
        cluster.step = saved.step;
        cluster.commit = saved.commit;
        cluster.min_clock = saved.min_clock;
        cluster.phase = phase;
        cluster.error = saved.error;
        cluster.first_generation = saved.first_generation;
        cluster.earlier_seconds = saved.seconds;
        cluster.earlier_samples = saved.earlier_samples;
        if phase == JobPhase::Training {
            cluster.began = Some(now);
            cluster.last_finish = Some(now);
        }
        cluster.tally.continue_from(saved.steps, saved.samples);
        cluster.tally.skipped = saved.skipped;
        cluster.losses = saved.losses;
        cluster.receipt_key = ReceiptKey(saved.receipt_key);
        cluster.start = saved.start;
        let until = now + cluster.lease();
        cluster.awaited = saved.awaited.into_iter().map(|id| (id, until)).collect();
        let checkpoints = &mut cluster.checkpoints;
        checkpoints.next = saved.next_checkpoint;
        checkpoints.newest_begun = saved.newest.is_some().then_some(now);
        checkpoints.newest = saved.newest;
        checkpoints.first_written = saved.first_written;
        checkpoints.ending = saved.ending;
        checkpoints.unsaved = saved.unsaved;
        let loading = saved.loading.into_iter();
        checkpoints.loading = loading.map(|shard| (shard, String::new())).collect();
        let servers = cluster.live(Role::Ps).next().is_some();
        cluster.last_ps_joined = servers.then_some(now);
        cluster.unable = Unable::resumed(saved.unable, now);
        cluster.stopping = saved.stopping;
        // The state of an earlier release has all departed members.
        cluster.forget_the_dead();
        cluster.must_persist();
        cluster
    }
}
