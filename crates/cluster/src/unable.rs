//! Members that cannot work, and jobs that end because of them.
//!
//! A worker that cannot read its data, build its model or use its device reports this and leaves. The job continues
//! without it: others take its data, and the worker joins like a new one when it is restarted. The job fails only if no
//! worker, or too few for a stage group, can work for `cluster.stall_seconds`. By default, that is longer than the time
//! that container engines wait between two starts of a process (five minutes at the most), so each worker has tried
//! again before the job fails. A job that has failed for this reason is resumed when its coordinator restarts. A job
//! that was submitted to a long-lived cluster fails after a minute, and is not resumed: other jobs wait behind it.
//!
//! A server that cannot use the job's checkpoints also reports this and leaves. A job that waits for such a server
//! fails after the same time.
//!
//! A job with too few members also fails after `cluster.stall_seconds`: a submitted job at any time, other jobs only
//! before their training begins.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Role, Task, TaskId};
use shared_proto::refusal::brief;
use shared_proto::view::JobPhase;
use shared_proto::wire::WorkerFailure;

use super::record::Record;
use super::{Cluster, Turn, stored};

/// The maximum number of troubles that are kept. The oldest are dropped first.
const MOST_TROUBLES: usize = 256;

/// The maximum time for which a submitted job waits for a member that can work.
const QUEUED: Duration = Duration::from_secs(60);

/// The time for which a submitted job waits once all its workers have reported that they cannot build its model.
/// Workers that know the model may register meanwhile.
const REFUSED: Duration = Duration::from_secs(5);

/// The maximum number of members that an error names.
const MOST_NAMED: usize = 3;

/// The members that cannot work.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Unable {
    /// The newest trouble of each member that has not been at work since.
    #[serde(with = "stored::by_task")]
    troubles: BTreeMap<TaskId, Trouble>,
    /// True if the job has failed because members were missing or could not work.
    failed: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Trouble {
    #[serde(with = "stored::enumeration")]
    failure: WorkerFailure,
    reason: String,
    /// The time of the report, or of the coordinator's last start if that is later.
    #[serde(skip, default = "Instant::now")]
    at: Instant,
}

impl Unable {
    /// Continues with the troubles that an earlier coordinator has persisted.
    pub(super) fn resumed(&mut self, now: Instant) {
        for trouble in self.troubles.values_mut() {
            trouble.at = now;
        }
    }

    /// Notes that a member can work: a worker asks for work, so it has its data and its model, or a server serves its
    /// shard.
    pub(super) fn can_work(&mut self, member: TaskId) {
        self.troubles.remove(&member);
    }

    /// Shifts the times by `gap`, for which this process did not run.
    pub(super) fn was_stopped(&mut self, gap: Duration) {
        for trouble in self.troubles.values_mut() {
            trouble.at += gap;
        }
    }

    /// Returns what keeps a member from working; empty if nothing does.
    pub(super) fn reason(&self, member: TaskId) -> &str {
        let trouble = self.troubles.get(&member);
        trouble.map_or("", |trouble| &trouble.reason)
    }

    /// Returns the kind of failure that keeps a member from working; [`WorkerFailure::Unspecified`] if nothing does.
    pub(super) fn failure(&self, member: TaskId) -> WorkerFailure {
        let trouble = self.troubles.get(&member);
        trouble.map_or(WorkerFailure::Unspecified, |trouble| trouble.failure)
    }

    /// Returns the troubles of a role.
    fn of(&self, role: Role) -> impl Iterator<Item = (&TaskId, &Trouble)> {
        let troubles = self.troubles.iter();
        troubles.filter(move |(member, _)| member.role == role)
    }

    /// Returns text to append to a message: a semicolon, and the servers that cannot work with their reasons; empty if
    /// there are none.
    pub(super) fn troubled_servers(&self) -> String {
        let troubles: Vec<_> = self.of(Role::Ps).collect();
        match troubles.is_empty() {
            true => String::new(),
            false => format!("; {}", names(&troubles)),
        }
    }

    fn forget_the_oldest(&mut self) {
        while self.troubles.len() > MOST_TROUBLES {
            let oldest = self.troubles.iter().min_by_key(|(_, trouble)| trouble.at);
            let Some(id) = oldest.map(|(id, _)| *id) else {
                return;
            };
            self.troubles.remove(&id);
        }
    }
}

/// Lists the first few members with their troubles, and counts the others.
fn names(troubles: &[(&TaskId, &Trouble)]) -> String {
    let first = troubles.iter().take(MOST_NAMED);
    let mut named: Vec<String> = first
        .map(|(id, trouble)| format!("{id}: {}", trouble.reason))
        .collect();
    if let Some(more) = troubles.len().checked_sub(MOST_NAMED).filter(|m| *m > 0) {
        named.push(format!("and {more} more"));
    }
    named.join("; ")
}

/// Returns a kind of failure as a metric label, such as `run_directory`.
fn label(failure: WorkerFailure) -> String {
    let name = failure.as_str_name();
    let name = name.strip_prefix("WORKER_FAILURE_").unwrap_or(name);
    name.to_ascii_lowercase()
}

impl Cluster {
    /// Notes that a member leaves because it cannot work.
    pub(super) fn cannot_work(
        &mut self,
        now: Instant,
        task: Task,
        failure: WorkerFailure,
        reason: &str,
    ) {
        let reason = brief(reason).into_owned();
        let kind = label(failure);
        if !self.ended() {
            tracing::error!(%task, failure = kind, "a member cannot work, the job goes on without it: {reason}");
        }
        self.records.push_back(Record::CannotWork {
            seconds: self.seconds(now),
            task: task.to_string(),
            failure: kind.clone(),
            reason: reason.clone(),
        });
        if task.id.role == Role::Worker {
            *self.observed.worker_failures.entry(kind).or_default() += 1;
        }
        let at = now;
        let trouble = Trouble {
            failure,
            reason,
            at,
        };
        self.durable.unable.troubles.insert(task.id, trouble);
        self.durable.unable.forget_the_oldest();
        self.must_persist();
    }

    /// Fails a job in which no worker, or too few for a stage group, can work, once the workers have had time to try
    /// again.
    pub(super) fn fail_without_workers(&mut self, now: Instant) {
        // A stage group that is not complete computes nothing.
        let needed = match self.has_ring() {
            true => self
                .wanted_in_ring()
                .min(self.job.strategy.stage_groups().workers),
            false => 1,
        } as usize;
        let ready = self.durable.live(Role::Worker);
        let ready = ready.filter(|member| member.progress.ready).count();
        let able = ready >= needed;
        // While the last checkpoint is written no worker is needed.
        let needless = self.ended() || self.durable.checkpoints.ending();
        if able || needless {
            self.instants.none_able_since = None;
            return;
        }
        let since = self.instants.none_able_since.unwrap_or(now);
        // An older trouble does not explain why too few workers are there now. Those that have reported none may come back.
        let patience = match ready {
            0 if self.is_refused_by_all() => REFUSED.min(self.patience()),
            0 => self.patience(),
            _ => self.stall(),
        };
        let recent = |trouble: &Trouble| since.saturating_duration_since(trouble.at) < patience;
        let troubles = self.durable.unable.of(Role::Worker);
        let troubles: Vec<_> = troubles.filter(|(_, trouble)| recent(trouble)).collect();
        if troubles.is_empty() {
            self.instants.none_able_since = None;
            return;
        }
        self.instants.none_able_since = Some(since);
        // Of workers that refuse the model, the last one may have come just now.
        let newest = troubles.iter().map(|(_, trouble)| trouble.at).max();
        let refused_just_now = patience == REFUSED
            && newest.is_some_and(|at| now.saturating_duration_since(at) < REFUSED);
        // A live worker may still be reading its data.
        let hope = self.durable.live(Role::Worker).count() >= needed;
        if hope || refused_just_now || now.duration_since(since) < patience {
            return;
        }
        let named = names(&troubles);
        let (limit, advice) = self.way_on();
        let (which, needs) = match needed {
            1 => ("no worker".to_owned(), String::new()),
            _ => (
                format!("fewer than {needed} workers"),
                format!(", and a stage group needs {needed} (strategy.stage_workers)"),
            ),
        };
        let error = format!(
            "{which} could work for {} s{limit}{needs}; remove the cause and {advice}: {named}",
            patience.as_secs_f64()
        );
        self.durable.unable.failed = true;
        self.fail(now, error);
    }

    /// Returns whether all workers of a submitted job have reported that they cannot build its model, so that another
    /// try makes no difference.
    fn is_refused_by_all(&self) -> bool {
        let troubles = self.durable.unable.of(Role::Worker);
        let refused: BTreeSet<TaskId> = troubles
            .filter(|(_, trouble)| trouble.failure == WorkerFailure::Model)
            .map(|(worker, _)| *worker)
            .collect();
        let mut live = self.durable.live(Role::Worker);
        self.turn == Turn::Submitted
            && refused.len() >= self.job.workers() as usize
            && live.all(|worker| refused.contains(&worker.task.id))
    }

    /// Fails a job that has waited for missing members for the stall time-out.
    pub(super) fn fail_with_too_few_members(&mut self, now: Instant) {
        let workers = self.durable.live(Role::Worker).count();
        let lacks_server = self.durable.orphans().next().is_some()
            || (self.durable.map().is_none() && self.missing_servers(true).is_some());
        let lacks = match self.durable.outcome.phase {
            JobPhase::Starting => lacks_server || workers < self.job.workers() as usize,
            JobPhase::Training => self.turn == Turn::Submitted && (lacks_server || workers == 0),
            _ => false,
        };
        if !lacks || self.durable.checkpoints.ending() {
            self.instants.too_few_since = None;
            return;
        }
        let members = workers + self.durable.live(Role::Ps).count();
        let instants = &mut self.instants;
        if instants.too_few_since.is_none() || members > instants.most_members {
            (instants.too_few_since, instants.most_members) = (Some(now), members);
        }
        let since = instants.too_few_since.unwrap_or(now);
        // Members that cannot work have rules of their own, with their reasons.
        let of_others = [
            self.instants.none_able_since,
            self.instants.no_servers_since,
        ];
        if now.duration_since(since) < self.stall() || of_others.iter().any(Option::is_some) {
            return;
        }
        let advice = match self.turn {
            Turn::Submitted => "submit the job again",
            Turn::Alone | Turn::First => "start the coordinator again on its run directory",
        };
        let error = format!(
            "the job has waited for {} s (cluster.stall_seconds): {}; start what is missing, or ask for less (cluster.ps, cluster.workers), and {advice}",
            self.stall().as_secs_f64(),
            self.missing(),
        );
        self.durable.unable.failed = true;
        self.fail(now, error);
    }

    /// Fails a job that waits for servers that cannot work, once they have had time to try again.
    pub(super) fn fail_without_servers(&mut self, now: Instant) {
        let served = self.durable.map().is_some() && self.durable.orphans().next().is_none();
        let since = self.instants.no_servers_since.unwrap_or(now);
        // An older trouble does not explain why a server is missing now.
        let patience = self.patience();
        let recent = |trouble: &Trouble| since.saturating_duration_since(trouble.at) < patience;
        let troubles = self.durable.unable.of(Role::Ps);
        let troubles: Vec<_> = troubles.filter(|(_, trouble)| recent(trouble)).collect();
        if self.ended() || served || troubles.is_empty() {
            self.instants.no_servers_since = None;
            return;
        }
        self.instants.no_servers_since = Some(since);
        if now.duration_since(since) < patience {
            return;
        }
        let (limit, advice) = self.way_on();
        let error = format!(
            "parameter servers could not work for {} s{limit}; remove the cause and {advice}: {}",
            patience.as_secs_f64(),
            names(&troubles)
        );
        self.durable.unable.failed = true;
        self.fail(now, error);
    }

    /// Returns two texts for an error: the setting that limits how long a job waits for members that cannot work, and
    /// what to do afterwards.
    fn way_on(&self) -> (&'static str, &'static str) {
        match self.turn {
            Turn::Submitted => ("", "submit the job again"),
            Turn::Alone | Turn::First => (
                " (cluster.stall_seconds)",
                "start the coordinator again on its run directory, then the job goes on from its newest checkpoint",
            ),
        }
    }

    fn patience(&self) -> Duration {
        match self.turn {
            Turn::Submitted => self.stall().min(QUEUED),
            Turn::Alone | Turn::First => self.stall(),
        }
    }

    /// Returns whether the job has failed because members were missing or could not work.
    pub fn failed_without_members(&self) -> bool {
        self.durable.outcome.phase == JobPhase::Failed && self.durable.unable.failed
    }

    /// Returns the error of a failed job, otherwise `well`.
    pub fn how_it_ended(&self) -> &str {
        match self.durable.outcome.error.as_str() {
            "" => "well",
            error => error,
        }
    }

    /// Returns the number of workers that reported within the last `cluster.stall_seconds` that they cannot work,
    /// and have not worked since. A worker that was removed for good drops out after that time.
    pub fn workers_unable(&self, now: Instant) -> usize {
        let recent = |trouble: &&Trouble| now.duration_since(trouble.at) <= self.stall();
        let troubles = self.durable.unable.of(Role::Worker);
        troubles.map(|(_, trouble)| trouble).filter(recent).count()
    }

    /// Returns, by kind of failure, the number of times that workers have left because they could not work.
    pub fn worker_failures(&self) -> impl Iterator<Item = (&String, u64)> {
        self.observed
            .worker_failures
            .iter()
            .map(|(kind, times)| (kind, *times))
    }

    /// Resumes a job that has failed, as [`Self::resume_failed`] says.
    pub(super) fn take_up_failed(&mut self, now: Instant) {
        if self.durable.outcome.phase != JobPhase::Failed {
            return;
        }
        let error = std::mem::take(&mut self.durable.outcome.error);
        tracing::info!("taking up the job again; it had failed: {error}");
        self.durable.unable.failed = false;
        self.durable.outcome.phase = JobPhase::Starting;
        // The training had begun before the failure.
        if self.durable.outcome.seconds > 0.0 {
            self.durable.outcome.phase = JobPhase::Training;
            (self.instants.began, self.instants.last_finish) = (Some(now), Some(now));
        }
        self.records.push_back(Record::TakenUp {
            seconds: self.seconds(now),
            error,
        });
        let alive = |task: &Task| self.durable.member(task.id).is_some_and(|m| m.is_alive());
        let servers = self.durable.servers().into_iter().enumerate();
        let gone: Vec<_> = servers.filter(|(_, task)| !alive(task)).collect();
        for (shard, task) in gone {
            self.orphan(now, shard, task);
        }
        self.must_persist();
    }
}
