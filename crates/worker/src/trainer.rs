//! The training loop of a member: asks for work, does it, reports it.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use daemon::membership::{Membership, MembershipError};
use model::Metrics;
use replica::{Positions, Prepared, Replica, ReplicaError};
use shared_proto::ids::{Clock, Epoch, ViewNumber};
use shared_proto::job::{Job, OnFullDisk, StageGroups, run_dir};
use shared_proto::view::learning_rate_factor;
use shared_proto::wire;
use shared_proto::wire::lease_work_reply::Work;
use tokio::task::JoinError;
use tokio::time::Instant;
use variables::digest_of;

use crate::best::{Candidate, Kept};
use crate::counters::Counters;
use crate::error::WorkerError;
use crate::reporter::{Reporter, SplitProgress};
use crate::step::{PlaceOfStep, compute, idle, push};
use crate::strategy::{Strategy, StrategyError};
use crate::unfinished::Unfinished;

/// The pause before the worker tries again to write a file to a full disk.
const ROOM_AGAIN: Duration = Duration::from_secs(2);

/// The training loop of a member.
pub(crate) struct Trainer<'a> {
    pub(crate) job: &'a Job,
    pub(crate) membership: &'a Membership,
    pub(crate) replica: &'a dyn Replica,
    pub(crate) strategy: Box<dyn Strategy>,
    pub(crate) reporter: Reporter,
    pub(crate) counters: &'a Counters,
    pub(crate) clock: Clock,
    /// The newest checkpoint for which the values were copied, since the present group was formed.
    pub(crate) copied: Option<u64>,
}

impl Trainer<'_> {
    /// Works until the job is done.
    pub(crate) async fn train(&mut self) -> Result<(), WorkerError> {
        loop {
            let asked = Instant::now();
            let leased = self.lease_work().await?;
            self.clock = self.clock.max(Clock(leased.clock));
            let work = leased.work.ok_or(WorkerError::Protocol("LeaseWork"))?;
            self.reporter.waited(&idle(asked.elapsed()));
            match work {
                Work::Split(split) => match self.train_split(&split).await {
                    Err(WorkerError::Strategy(StrategyError::Abandoned(why))) => {
                        tracing::info!("a step is abandoned: {why}");
                        self.regroup().await?;
                    }
                    trained => trained?,
                },
                Work::Regroup(_) => self.regroup().await?,
                Work::CopyValues(order) => {
                    let view = ViewNumber(leased.view);
                    let copied = self.strategy.write_checkpoint(&order, view, self.replica);
                    match copied.await {
                        Err(StrategyError::Abandoned(why)) => {
                            tracing::info!("a copy for a checkpoint is abandoned: {why}");
                            self.regroup().await?;
                        }
                        copied => {
                            copied?;
                            self.copied = Some(order.number);
                        }
                    }
                }
                Work::Evaluate(evaluate) => {
                    self.evaluate(&evaluate, ViewNumber(leased.view)).await?
                }
                Work::Idle(idle) => tracing::debug!(reason = idle.reason, "idle"),
                Work::Done(done) if done.error.is_empty() => {
                    tracing::info!("the job is done");
                    return Ok(());
                }
                Work::Done(done) => return Err(MembershipError::JobFailed(done.error).into()),
            }
        }
    }

    /// Asks for work, unless the coordinator has given some with the answer to the last report.
    async fn lease_work(&mut self) -> Result<wire::LeaseWorkReply, WorkerError> {
        if let Some(given) = self.reporter.take_work() {
            self.membership.sender().heard(Epoch(given.epoch));
            return Ok(given);
        }
        let mut origin = self.membership.next_origin();
        (origin.clock, origin.epoch) = (self.clock, self.strategy.reconciled().epoch());
        let leased = self.membership.coordinator.lease_work(origin, self.copied);
        let reply = leased.await?;
        self.membership.sender().heard(Epoch(reply.epoch));
        Ok(reply)
    }

    /// Joins the next group of workers. Reports the finished steps first, because they belong to the split of the last
    /// group.
    async fn regroup(&mut self) -> Result<(), WorkerError> {
        self.reporter.flush().await?;
        self.clock = self.strategy.regroup(self.replica).await?;
        // All members of the next ring take part in the copies for a checkpoint.
        self.copied = None;
        self.membership.sender().set_clock(self.clock);
        Ok(())
    }

    async fn train_split(&mut self, split: &wire::Split) -> Result<(), WorkerError> {
        let factor = learning_rate_factor(split.learning_rate_factor);
        let factor = factor.map_err(|_| WorkerError::Protocol("LeaseWork"))?;
        let lowered = self.strategy.scale_learning_rate(factor, self.replica);
        lowered.await?;
        let prefetch = self.job.data.prefetch as usize;
        let groups = self.job.strategy.stage_groups();
        let mut unprepared = batches(split, self.job.samples_per_step(), groups);
        let mut prepared = VecDeque::new();
        let (replica, strategy) = (self.replica, &mut *self.strategy);
        let (membership, counters) = (self.membership, self.counters);
        let (reporter, clock) = (&self.reporter, &mut self.clock);
        let failed = reporter.failed();
        let mut unfinished = Unfinished::none(*clock, failed, |now, step, position| {
            *clock = now;
            membership.sender().set_clock(now);
            let place = SplitProgress {
                clock: now,
                split: split.id,
                position,
            };
            let wants_work = position == split.end && split.ranks == 0;
            counters.step(&step);
            counters.clock.set(now.0 as f64);
            reporter.finished(place, step, wants_work);
        });
        loop {
            while prepared.len() <= prefetch
                && let Some(positions) = unprepared.next()
            {
                prepared.push_back(match positions.is_empty() {
                    true => Prepared::new(positions, Vec::new()),
                    false => {
                        let reading = async { Ok(replica.prepare(positions).await) };
                        unfinished.meanwhile(reading).await?
                    }
                });
            }
            let Some(mut batch) = prepared.pop_front() else {
                break;
            };
            let index = membership.task.id.index;
            let place = PlaceOfStep::new(unfinished.next_clock(), index, groups, split.rank);
            let next = prepared.front_mut();
            let computed = compute(replica, strategy, place, &mut batch, next);
            let computed = unfinished.meanwhile(computed).await?;
            // At most one push is unacknowledged, so that a push that is sent again is recognised.
            unfinished.finish().await?;
            let (next, non_finite) = (prepared.front_mut(), self.job.non_finite);
            let pushed = push(replica, strategy, counters, computed, next, non_finite);
            let pushed = unfinished.meanwhile(pushed).await?;
            unfinished.pushed(pushed);
            if self.job.strategy.pipeline == 0 {
                unfinished.finish().await?;
            }
        }
        unfinished.finish().await?;
        // The split is done once the coordinator has counted it.
        self.reporter.flush().await
    }

    /// Evaluates weights under `view` or a later one. Repeats this if the epoch has been raised since.
    async fn evaluate(
        &mut self,
        evaluate: &wire::Evaluate,
        view: ViewNumber,
    ) -> Result<(), WorkerError> {
        loop {
            let (clock, replica) = (self.clock, self.replica);
            let evaluated = self.strategy.evaluate(clock, view, replica).await?;
            let (epoch, metrics) = (evaluated.epoch, evaluated.metrics);
            tracing::info!(data_epoch = evaluate.data_epoch + 1, ?metrics, "evaluated");
            let model_sha256 = match evaluate.save_model {
                true => self.save_model().await?,
                false => Bytes::new(),
            };
            let best = self.save_if_best(evaluate.data_epoch, &metrics).await?;
            let report = wire::EvaluationReport {
                data_epoch: evaluate.data_epoch,
                samples: self.replica.description().evaluation_samples,
                metrics: metrics.into_iter().collect(),
                model_sha256,
            };
            match self.report_evaluation(epoch, report).await {
                Err(MembershipError::Outdated(_)) => {
                    let newer = self.membership.sender().must_move_beyond(epoch);
                    self.strategy.reconciled().await_epoch(newer).await?;
                }
                counts => {
                    let counts = counts?;
                    return match best.filter(|_| counts) {
                        Some(best) => Ok(best.keep().map_err(ReplicaError::from)?),
                        None => Ok(()),
                    };
                }
            }
        }
    }

    /// Saves the evaluated weights as a candidate, if they are better than the best ones that the run directory has.
    async fn save_if_best(
        &mut self,
        data_epoch: u32,
        metrics: &Metrics,
    ) -> Result<Option<Candidate>, WorkerError> {
        let (Some(best), Some(dir)) = (&self.job.best, &self.job.run_dir) else {
            return Ok(None);
        };
        if metrics
            .get(&best.metric)
            .is_some_and(|value| value.is_nan())
        {
            tracing::warn!(
                "{} of the evaluation after epoch {} is NaN, so its weights are not kept as the best (best.metric); auc, for instance, needs held-out samples of both classes",
                best.metric,
                data_epoch + 1
            );
        }
        let kept = Kept::read(dir).map_err(ReplicaError::from)?;
        let pass = (self.membership.run, data_epoch);
        let Some(new) = Kept::better(best, kept, pass, metrics) else {
            return Ok(None);
        };
        let candidate = new.candidate(dir, self.membership.task.id);
        self.save(candidate.path.clone()).await?;
        Ok(Some(candidate))
    }

    /// Writes the evaluated weights to a file. If the disk is full and the job says so, waits for room.
    async fn save(&mut self, path: PathBuf) -> Result<(), WorkerError> {
        let waits = self.job.checkpoint.on_full_disk == OnFullDisk::Wait;
        let mut said = false;
        loop {
            let saved = self.strategy.save(path.clone(), self.replica).await;
            match saved.map_err(WorkerError::from) {
                Err(error) if waits && error.is_of_full_disk() => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::error!("waiting for room: {error}");
                    }
                    tokio::time::sleep(ROOM_AGAIN).await;
                }
                saved => return saved,
            }
        }
    }

    /// Writes the evaluated weights as the job's model, and returns the file's SHA-256. For a job without a run
    /// directory, writes nothing and returns no bytes.
    async fn save_model(&mut self) -> Result<Bytes, WorkerError> {
        let Some(dir) = &self.job.run_dir else {
            return Ok(Bytes::new());
        };
        let path = dir.join(run_dir::MODEL);
        self.save(path.clone()).await?;
        let digest = tokio::task::spawn_blocking(move || digest_of(&path)).await;
        let panicked = |error: JoinError| ReplicaError::Panicked(error.to_string());
        Ok(digest.map_err(panicked)?.map_err(ReplicaError::from)?)
    }

    async fn report_evaluation(
        &self,
        epoch: Epoch,
        report: wire::EvaluationReport,
    ) -> Result<bool, MembershipError> {
        let mut origin = self.membership.next_origin();
        origin.epoch = epoch;
        let coordinator = &self.membership.coordinator;
        coordinator.report_evaluation(origin, report).await
    }
}

/// Returns the positions that this worker computes, for each step of a split. A step has `size` samples for each
/// worker. A worker that shares the split may have none in the last step, and has none at all if its rank is spare. The
/// workers of a stage group compute the samples of the whole group together.
fn batches(
    split: &wire::Split,
    size: u64,
    groups: StageGroups,
) -> impl Iterator<Item = Positions> + use<> {
    let (data_epoch, end) = (split.data_epoch, split.end);
    let ranks = split.ranks.max(1);
    let whole = size.saturating_mul(ranks.into());
    let group = groups.of(split.rank, ranks).unwrap_or_default();
    let before = size.saturating_mul(group.start.into());
    let of_group = size.saturating_mul(group.len() as u64);
    let mut step = split.start;
    std::iter::from_fn(move || {
        let start = end.min(step.saturating_add(before));
        let batch = Positions {
            data_epoch,
            start,
            end: end.min(start.saturating_add(of_group)),
        };
        let has_samples = step < end;
        step = step.saturating_add(whole);
        has_samples.then_some(batch)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_is_cut_into_batches_of_which_the_last_may_be_smaller() {
        let split = wire::Split {
            id: 1,
            data_epoch: 2,
            start: 10,
            end: 17,
            ..wire::Split::default()
        };
        let cut = |size| -> Vec<_> {
            let batches = batches(&split, size, StageGroups { workers: 1 });
            batches.map(|b| (b.data_epoch, b.start, b.end)).collect()
        };
        assert_eq!(cut(3), [(2, 10, 13), (2, 13, 16), (2, 16, 17)]);
        assert_eq!(cut(8), [(2, 10, 17)]);
    }

    #[test]
    fn workers_that_share_a_split_have_parts_of_each_step() {
        let parts = |rank| -> Vec<_> {
            let split = wire::Split {
                id: 1,
                data_epoch: 0,
                start: 10,
                end: 23,
                rank,
                ranks: 3,
                learning_rate_factor: None,
            };
            batches(&split, 3, StageGroups { workers: 1 })
                .map(|b| (b.start, b.end))
                .collect()
        };
        assert_eq!(parts(0), [(10, 13), (19, 22)]);
        assert_eq!(parts(1), [(13, 16), (22, 23)]);
        assert_eq!(parts(2), [(16, 19), (23, 23)]);
    }

    #[test]
    fn workers_that_hold_a_model_together_have_the_same_positions() {
        let parts = |rank| -> Vec<_> {
            let split = wire::Split {
                id: 1,
                data_epoch: 0,
                start: 10,
                end: 31,
                rank,
                ranks: 4,
                learning_rate_factor: None,
            };
            batches(&split, 3, StageGroups { workers: 2 })
                .map(|b| (b.start, b.end))
                .collect()
        };
        assert_eq!(parts(0), [(10, 16), (22, 28)]);
        assert_eq!(parts(1), parts(0));
        assert_eq!(parts(2), [(16, 22), (28, 31)]);
        assert_eq!(parts(3), parts(2));
        // A spare worker.
        assert!(parts(4).iter().all(|(start, end)| start == end));
        assert_eq!(parts(4).len(), 2);
    }
}
