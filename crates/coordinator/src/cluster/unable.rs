//! Workers that cannot work, and a job that has none that can.
//!
//! A worker that cannot read its data, build its model or use its device says so and leaves. The job
//! goes on without it: others do its data, and the worker joins like a new one when it is started
//! again. Only where no worker can work for `cluster.stall_seconds` does the job fail. That is longer
//! than container engines wait between two starts of a process (five minutes at the most), so every
//! worker has tried again before. A job that has failed for this reason goes on when its coordinator is
//! started again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Role, Task, TaskId};
use shared_proto::refusal::brief;
use shared_proto::view::JobPhase;
use shared_proto::wire::WorkerFailure;

use super::Cluster;
use crate::record::Record;

/// How many troubles are remembered; beyond that the oldest is forgotten.
const MOST_TROUBLES: usize = 256;

/// How many workers an error names.
const MOST_NAMED: usize = 3;

/// What is known of workers that cannot work.
#[derive(Debug, Default)]
pub(crate) struct Unable {
    /// The newest trouble of each worker that has not been at work since.
    troubles: BTreeMap<TaskId, Trouble>,
    /// How often workers have left for each reason, since this coordinator started.
    counts: BTreeMap<String, u64>,
    /// Since when no worker is known to be able to work.
    since: Option<Instant>,
    /// The job has failed because no worker could work.
    failed: bool,
}

#[derive(Debug)]
struct Trouble {
    failure: WorkerFailure,
    reason: String,
    at: Instant,
}

/// [`Unable`], to be kept.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct SavedUnable {
    troubles: Vec<(TaskId, i32, String)>,
    failed: bool,
}

impl Unable {
    pub(super) fn saved(&self) -> SavedUnable {
        let troubles = self.troubles.iter();
        SavedUnable {
            troubles: troubles
                .map(|(id, trouble)| (*id, trouble.failure.into(), trouble.reason.clone()))
                .collect(),
            failed: self.failed,
        }
    }

    pub(super) fn resumed(saved: SavedUnable, now: Instant) -> Self {
        let trouble = |(id, failure, reason)| {
            let failure = WorkerFailure::try_from(failure).unwrap_or_default();
            let at = now;
            (
                id,
                Trouble {
                    failure,
                    reason,
                    at,
                },
            )
        };
        Self {
            troubles: saved.troubles.into_iter().map(trouble).collect(),
            failed: saved.failed,
            ..Self::default()
        }
    }

    /// A worker has its data and its model, and asks for work.
    pub(super) fn can_work(&mut self, worker: TaskId) {
        self.troubles.remove(&worker);
    }

    /// The coordinator did not run for so long.
    pub(super) fn was_stopped(&mut self, gap: Duration) {
        if let Some(since) = &mut self.since {
            *since += gap;
        }
        for trouble in self.troubles.values_mut() {
            trouble.at += gap;
        }
    }

    /// What keeps a worker from working, for people; empty if nothing does.
    pub(super) fn reason(&self, worker: TaskId) -> &str {
        let trouble = self.troubles.get(&worker);
        trouble.map_or("", |trouble| &trouble.reason)
    }

    /// What kind of thing that is.
    pub(super) fn failure(&self, worker: TaskId) -> WorkerFailure {
        let trouble = self.troubles.get(&worker);
        trouble.map_or(WorkerFailure::Unspecified, |trouble| trouble.failure)
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

/// A kind of failure as a metric label: `run_directory`.
fn label(failure: WorkerFailure) -> String {
    let name = failure.as_str_name();
    let name = name.strip_prefix("WORKER_FAILURE_").unwrap_or(name);
    name.to_ascii_lowercase()
}

impl Cluster {
    /// A worker leaves because it cannot work.
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
            tracing::error!(%task, failure = kind, "a worker cannot work, the job goes on without it: {reason}");
        }
        self.records.push(Record::CannotWork {
            seconds: self.seconds(now),
            task: task.to_string(),
            failure: kind.clone(),
            reason: reason.clone(),
        });
        *self.unable.counts.entry(kind).or_default() += 1;
        let at = now;
        let trouble = Trouble {
            failure,
            reason,
            at,
        };
        self.unable.troubles.insert(task.id, trouble);
        self.unable.forget_the_oldest();
        self.must_keep();
    }

    /// Ends a job in which no worker can work, once those that tried have had time to try again.
    pub(super) fn fail_without_workers(&mut self, now: Instant) {
        let able = self.live(Role::Worker).any(|member| member.progress.ready);
        // While the last checkpoint is written nobody needs a worker.
        let needless = self.ended() || self.checkpoints.ending;
        if able || needless || self.unable.troubles.is_empty() {
            self.unable.since = None;
            return;
        }
        let since = *self.unable.since.get_or_insert(now);
        // One that is there may be reading its data.
        let hope = self.live(Role::Worker).next().is_some();
        if hope || now.duration_since(since) < self.stall() {
            return;
        }
        let troubles = &self.unable.troubles;
        let mut named: Vec<String> = troubles
            .iter()
            .take(MOST_NAMED)
            .map(|(id, trouble)| format!("{id}: {}", trouble.reason))
            .collect();
        if let Some(more) = troubles.len().checked_sub(MOST_NAMED).filter(|m| *m > 0) {
            named.push(format!("and {more} more"));
        }
        let error = format!(
            "no worker could work for {} s (cluster.stall_seconds); remove the cause and start the coordinator again on its run directory, then the job goes on from its newest checkpoint: {}",
            self.job.cluster.stall_seconds,
            named.join("; ")
        );
        self.unable.failed = true;
        self.fail(now, error);
    }

    /// Whether the job has failed because no worker could work.
    pub(crate) fn failed_without_workers(&self) -> bool {
        self.phase == JobPhase::Failed && self.unable.failed
    }

    /// Goes on with a job that has failed. Its servers have gone, so each shard waits for one, which
    /// loads the newest checkpoint.
    pub(crate) fn take_up_failed(&mut self, now: Instant) {
        if self.phase != JobPhase::Failed {
            return;
        }
        let error = std::mem::take(&mut self.error);
        tracing::info!("taking up the job again; it had failed: {error}");
        self.unable.failed = false;
        self.phase = JobPhase::Starting;
        // Training had begun.
        if self.earlier_seconds > 0.0 {
            self.phase = JobPhase::Training;
            (self.began, self.last_finish) = (Some(now), Some(now));
        }
        self.records.push(Record::TakenUp {
            seconds: self.seconds(now),
            error,
        });
        let alive = |task: &Task| self.members.get(&task.id).is_some_and(|m| m.alive);
        let servers = self.servers().iter().copied().enumerate();
        let gone: Vec<_> = servers.filter(|(_, task)| !alive(task)).collect();
        for (shard, task) in gone {
            self.orphan(now, shard, task);
        }
        self.must_keep();
    }

    /// How an ended job has ended, for people.
    pub(crate) fn how_it_ended(&self) -> &str {
        match self.error.as_str() {
            "" => "well",
            error => error,
        }
    }

    /// Workers that said within the last `cluster.stall_seconds` that they cannot work, and have not
    /// worked since. One that was taken away for good is forgotten after that time.
    pub(crate) fn workers_unable(&self, now: Instant) -> usize {
        let recent = |trouble: &&Trouble| now.duration_since(trouble.at) <= self.stall();
        self.unable.troubles.values().filter(recent).count()
    }

    /// How often workers have left because they could not work, by kind.
    pub(crate) fn worker_failures(&self) -> impl Iterator<Item = (&String, u64)> {
        self.unable
            .counts
            .iter()
            .map(|(kind, times)| (kind, *times))
    }
}
