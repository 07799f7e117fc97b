//! The outcome of a job: records while it runs, the summary at its end.

use std::collections::BTreeMap;
use std::time::Instant;

use checkpoint::hexadecimal;
use shared_proto::staleness::StalenessBound;
use shared_proto::view::JobPhase;

use super::Cluster;
use super::ledger::Ledger;
use super::record::{Record, Summary};

impl Cluster {
    pub(super) fn record_progress(&mut self, now: Instant, steps: u64) {
        self.observed.recent.steps += steps;
        if self.observed.recent.steps < self.job.log_every {
            return;
        }
        let recent = std::mem::take(&mut self.observed.recent);
        let seconds = self.seconds(now);
        self.records.push_back(Record::Steps {
            seconds,
            steps: self.durable.training.tally.steps,
            samples: self.durable.training.tally.samples,
            epoch: self.durable.training.tally.samples as f64
                / self.durable.training_samples().max(1) as f64,
            loss: recent.loss_sum / recent.worker_steps.max(1) as f64,
            samples_per_second: self.rate(seconds),
        });
    }

    /// Returns the samples per second of this run.
    fn rate(&self, seconds: f64) -> f64 {
        let training = &self.durable.training;
        let samples = training
            .tally
            .samples
            .saturating_sub(training.earlier_samples);
        if seconds > 0.0 {
            samples as f64 / seconds
        } else {
            0.0
        }
    }

    pub(super) fn record_end(&mut self, now: Instant) {
        self.count_unreported_losses(now);
        self.durable.outcome.workers = self.workers_at_work();
        self.records.push_back(Record::Ended {
            seconds: self.seconds(now),
            error: self.durable.outcome.error.clone(),
        });
    }

    /// Summarizes the job.
    pub fn summary(&self, now: Instant) -> Summary {
        let last = self.durable.evaluations.done.last();
        let metric = |name: &str| last.and_then(|e| e.metrics.get(name)).copied();
        let progress = &self.durable.training;
        let ended_early = self.ended_early();
        let observed = self.observed.updates();
        let training = self
            .instants
            .last_finish
            .map_or(0.0, |last| self.seconds(last));
        Summary {
            mode: self.job.strategy.mode.name().to_owned(),
            staleness: match self.bound() {
                StalenessBound::Steps(bound) => Some(bound),
                StalenessBound::Unbounded => None,
            },
            pipeline: self.job.strategy.pipeline,
            ps: self.durable.servers().len(),
            // A coordinator that resumes an ended job knows none that is at work.
            workers: self.workers_at_work().max(self.durable.outcome.workers),
            epochs: self.trained_epochs(),
            job_epochs: self.job.epochs,
            steps: progress.tally.steps,
            samples: progress.tally.samples,
            seconds: self.seconds(now),
            samples_per_second: self.rate(training),
            test_accuracy: metric("accuracy"),
            test_loss: metric("loss"),
            metrics: last.map_or_else(BTreeMap::new, |last| {
                last.metrics.clone().into_iter().collect()
            }),
            // A job that has failed may have the evaluations of another run.
            model_sha256: last
                .filter(|_| self.durable.outcome.phase == JobPhase::Done)
                .map_or_else(String::new, |last| hexadecimal(&last.model_sha256)),
            lost_updates: self.durable.losses.total,
            lost_steps: self.durable.lost_steps(),
            skipped_steps: progress.tally.skipped,
            late_steps: progress.tally.late,
            max_clock_lead: observed.max_clock_lead,
            mean_gradient_staleness: observed.staleness_sum as f64 / observed.updates.max(1) as f64,
            mean_step_factor: observed.corrected_steps.mean_factor(),
            mean_synchronous_ratio: observed.corrected_steps.mean_synchronous_ratio(),
            times: self.mean_times(),
            loss_warning: self.observed.loss_warning.clone(),
            stopped: ended_early && progress.stopped_early.is_empty(),
            stopped_early: match ended_early {
                true => progress.stopped_early.clone(),
                false => String::new(),
            },
            unsaved: self.durable.outcome.unsaved.clone(),
            error: self.durable.outcome.error.clone(),
        }
    }

    /// Returns the number of workers that have finished a step.
    fn workers_at_work(&self) -> usize {
        let members = self.durable.members.values();
        self.durable.forgotten.workers + members.filter(|m| m.progress.steps > 0).count()
    }

    /// Returns whether the training has stopped, or will stop, before all its data is used.
    fn ended_early(&self) -> bool {
        let training = &self.durable.training;
        let has_data = !training.ledger.as_ref().is_some_and(Ledger::exhausted);
        training.stopping && has_data
    }

    /// Returns the number of passes over the data that were begun.
    pub(super) fn trained_epochs(&self) -> u32 {
        let samples = self.durable.training.tally.samples;
        let begun = match samples {
            0 => 0,
            _ => self.durable.training.data_epoch() + 1,
        };
        if !self.ended_early() && self.job.steps.is_none() {
            return begun;
        }
        // Data of the next pass may have been leased, and not used.
        let used = samples.div_ceil(self.durable.training_samples().max(1));
        begun.min(u32::try_from(used).unwrap_or(u32::MAX))
    }

    /// Returns the shares of pull, compute, push and wait in the total time of all workers, by name.
    fn mean_times(&self) -> BTreeMap<String, f64> {
        let mut times = self.durable.forgotten.times;
        for member in self.durable.members.values() {
            times.add(&member.progress.times);
        }
        let parts = [
            ("pull", times.pull),
            ("compute", times.compute),
            ("push", times.push),
            ("wait", times.wait),
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

    pub(crate) fn fail(&mut self, now: Instant, error: String) {
        if !self.ended() {
            self.durable.outcome.phase = JobPhase::Failed;
            self.durable.outcome.error = error;
            self.must_persist();
            self.record_end(now);
        }
    }

    pub(super) fn end_well(&mut self, now: Instant) {
        if self.ended() {
            return;
        }
        self.durable.outcome.phase = JobPhase::Done;
        self.must_persist();
        self.record_end(now);
    }
}
