//! The outcome of a job: records while it runs, the summary at its end.

use std::collections::BTreeMap;
use std::time::Instant;

use checkpoint::hexadecimal;
use shared_proto::ids::Task;
use shared_proto::job::NonFinite;
use shared_proto::refusal::brief;
use shared_proto::staleness::StalenessBound;
use shared_proto::view::JobPhase;
use shared_proto::wire;

use super::Cluster;
use crate::record::{Record, Summary};
use crate::splits::Ledger;

impl Cluster {
    pub(crate) fn report_shard(&mut self, now: Instant, task: Task, report: wire::ShardReport) {
        // The server does not know yet that it has another shard, or none.
        if self.servers().get(report.shard as usize) != Some(&task) {
            return;
        }
        if !report.non_finite.is_empty() && self.job.non_finite == NonFinite::Fail {
            let variable = brief(&report.non_finite);
            self.fail(
                now,
                format!(
                    "an update has made values of variable {variable:?} on {task} NaN or infinite; lower the learning rate, or set clip_norm"
                ),
            );
        }
        self.writes_on(now, task, &report);
        self.shard_reports.insert(task.id, report);
    }

    /// Returns whether every live server of a shard has sent its last report.
    pub(crate) fn all_shards_reported(&self) -> bool {
        let servers = self.servers();
        let live = |task: &&Task| self.members.get(&task.id).is_some_and(|m| m.alive);
        servers
            .iter()
            .filter(live)
            .all(|task| self.shard_reports.get(&task.id).is_some_and(|r| r.last))
    }

    /// Returns the servers of the shards, in the order of the shards.
    pub(super) fn servers(&self) -> Vec<Task> {
        let map = self.variables.as_ref().and_then(|v| v.map.as_ref());
        map.map_or_else(Vec::new, |map| {
            map.shards.iter().map(|shard| shard.server).collect()
        })
    }

    /// Returns the number of steps and of samples done.
    pub(crate) fn done(&self) -> (u64, u64) {
        (self.tally.steps, self.tally.samples)
    }

    /// Returns whether any member has not left yet.
    pub(crate) fn anyone_there(&self) -> bool {
        self.members.values().any(|m| m.alive)
    }

    pub(crate) fn seconds(&self, now: Instant) -> f64 {
        let since = |began| now.saturating_duration_since(began).as_secs_f64();
        self.earlier_seconds + self.began.map_or(0.0, since)
    }

    pub(super) fn record_progress(&mut self, now: Instant, steps: u64) {
        self.tally.recent.steps += steps;
        if self.tally.recent.steps < self.job.log_every {
            return;
        }
        let recent = std::mem::take(&mut self.tally.recent);
        let seconds = self.seconds(now);
        self.records.push(Record::Steps {
            seconds,
            steps: self.tally.steps,
            samples: self.tally.samples,
            epoch: self.tally.samples as f64 / self.training_samples().max(1) as f64,
            loss: recent.loss_sum / recent.worker_steps.max(1) as f64,
            samples_per_second: self.rate(seconds),
        });
    }

    /// Returns the samples per second of this run.
    fn rate(&self, seconds: f64) -> f64 {
        let samples = self.tally.samples.saturating_sub(self.earlier_samples);
        if seconds > 0.0 {
            samples as f64 / seconds
        } else {
            0.0
        }
    }

    pub(super) fn record_end(&mut self, now: Instant) {
        self.count_unreported_losses(now);
        self.records.push(Record::Ended {
            seconds: self.seconds(now),
            error: self.error.clone(),
        });
    }

    /// Summarizes the job.
    pub(crate) fn summary(&self, now: Instant) -> Summary {
        let last = self.evaluations.done.last();
        let metric = |name: &str| last.and_then(|e| e.metrics.get(name)).copied();
        let shards = || self.shard_reports.values();
        let gone = &self.forgotten;
        let updates: u64 = shards().map(|r| r.updates).sum::<u64>() + gone.updates;
        let staleness: u64 = shards().map(|r| r.staleness_sum).sum::<u64>() + gone.staleness_sum;
        let lead = shards().map(|r| r.max_clock_lead).max().unwrap_or(0);
        let training = self.last_finish.map_or(0.0, |last| self.seconds(last));
        Summary {
            mode: self.job.strategy.mode.name().to_owned(),
            staleness: match self.bound() {
                StalenessBound::Steps(bound) => Some(bound),
                StalenessBound::Unbounded => None,
            },
            ps: self.servers().len(),
            workers: gone.workers
                + self
                    .members
                    .values()
                    .filter(|m| m.progress.steps > 0)
                    .count(),
            epochs: self.job.epochs,
            steps: self.tally.steps,
            samples: self.tally.samples,
            seconds: self.seconds(now),
            samples_per_second: self.rate(training),
            test_accuracy: metric("accuracy"),
            test_loss: metric("loss"),
            // A job that has failed may have the evaluations of another run.
            model_sha256: last
                .filter(|_| self.phase == JobPhase::Done)
                .map_or_else(String::new, |last| hexadecimal(&last.model_sha256)),
            lost_updates: self.losses.total,
            skipped_steps: self.tally.skipped,
            max_clock_lead: lead.max(gone.max_clock_lead),
            mean_gradient_staleness: staleness as f64 / updates.max(1) as f64,
            times: self.mean_times(),
            stopped: self.stopping && !self.ledger.as_ref().is_some_and(Ledger::exhausted),
            unsaved: self.checkpoints.unsaved.clone(),
            error: self.error.clone(),
        }
    }

    /// Returns the shares of pull, compute, push and wait in the time of all workers together.
    fn mean_times(&self) -> BTreeMap<String, f64> {
        let sum = |part: fn(&wire::StepTimes) -> f64| -> f64 {
            self.members.values().map(|m| part(&m.progress.times)).sum()
        };
        let [pull, compute, push, wait] = self.forgotten.times();
        let parts = [
            ("pull", pull + sum(|t| t.pull)),
            ("compute", compute + sum(|t| t.compute)),
            ("push", push + sum(|t| t.push)),
            ("wait", wait + sum(|t| t.wait)),
        ];
        let whole: f64 = parts.iter().map(|(_, seconds)| seconds).sum();
        let share = |(name, seconds): (&str, f64)| {
            (
                format!("share_{name}"),
                seconds / whole.max(f64::MIN_POSITIVE),
            )
        };
        parts.into_iter().map(share).collect()
    }
}
