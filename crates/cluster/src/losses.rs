//! Acknowledged updates that are lost with a server. Live workers report their own losses. The losses of workers that
//! have ended are derived from the watermarks of restored shards.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Origin, Role, Sequence, Task, TaskId};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

use super::Cluster;
use super::admission::out_of_order;
use super::members::Member;
use super::record::Record;

/// The maximum number of ended worker generations that are remembered. The oldest are dropped first.
const MOST_LIVES: usize = 4096;

/// An ended generation of a worker.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Life {
    task: Task,
    /// The number of the generation's steps that count and have changed the weights.
    pushes: u64,
    /// The number of the first checkpoint that was ordered after the generation ended. It contains all pushes of the
    /// generation. `None` before one is ordered.
    covered_from: Option<u64>,
}

/// The updates (pairs of a block and a step) of one generation of a worker that a shard has lost.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Found {
    shard: u32,
    task: Task,
    /// The number of these updates that are counted, from the worker's reports or as derived.
    reported: u64,
    /// The number of these updates that follows from the watermarks: the counted steps that the restored blocks lack.
    derived: u64,
    /// The part of `reported` that was derived and that the worker may still report. Such a report does not count these
    /// updates again.
    #[serde(default)]
    ahead: u64,
}

/// All losses of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Losses {
    lives: Vec<Life>,
    found: Vec<Found>,
    /// The numbers of the newest complete checkpoints, as many as the store keeps.
    #[serde(default)]
    whole: VecDeque<u64>,
    /// The number of lost updates that are counted.
    pub(super) total: u64,
    /// The part of `total` that each shard has lost.
    #[serde(default)]
    pub(super) by_shard: BTreeMap<u32, u64>,
}

impl Losses {
    fn entry(&mut self, shard: u32, task: Task) -> &mut Found {
        let known = |found: &Found| found.shard == shard && found.task == task;
        let index = self.found.iter().position(known).unwrap_or_else(|| {
            self.found.push(Found {
                shard,
                task,
                reported: 0,
                derived: 0,
                ahead: 0,
            });
            self.found.len() - 1
        });
        &mut self.found[index]
    }

    /// Notes that a checkpoint is ordered. It contains all pushes of the generations that have ended by now.
    pub(super) fn ordered(&mut self, checkpoint: u64) {
        for life in &mut self.lives {
            life.covered_from.get_or_insert(checkpoint);
        }
    }

    /// Notes that a checkpoint is complete, and that the store keeps the newest `kept` checkpoints. Forgets the ended
    /// generations with no push that any of these lacks.
    pub(super) fn written(&mut self, checkpoint: u64, kept: usize, living: impl Fn(Task) -> bool) {
        self.whole.push_back(checkpoint);
        while self.whole.len() > kept {
            self.whole.pop_front();
        }
        if let Some(oldest) = self.whole.front().filter(|_| self.whole.len() == kept) {
            let open = |life: &Life| life.covered_from.is_none_or(|from| from > *oldest);
            self.lives.retain(open);
        }
        self.forget(living);
    }

    /// Notes that a generation of a worker has ended. Forgets the oldest ended generation if there are too many.
    pub(super) fn ends(&mut self, task: Task, pushes: u64) {
        self.lives.push(Life {
            task,
            pushes,
            covered_from: None,
        });
        let surplus = self.lives.len().saturating_sub(MOST_LIVES);
        self.lives.drain(..surplus);
    }

    /// Forgets the losses of workers that are neither alive nor among the ended generations that are kept.
    fn forget(&mut self, living: impl Fn(Task) -> bool) {
        let lives = &self.lives;
        let over = |task: Task| lives.iter().any(|life| life.task == task);
        self.found
            .retain(|found| living(found.task) || over(found.task));
    }
}

#[cfg(test)]
impl Losses {
    /// Returns the number of ended generations that are kept.
    pub(super) fn ended(&self) -> usize {
        self.lives.len()
    }
}

/// Returns the number of a worker's updates that the `blocks` restored blocks of a shard lack. `pushes` is the number
/// of pushes that the worker made to each block. A block has as many of them as its watermark says, or none without a
/// watermark.
fn lacking(pushes: u64, blocks: u64, task: Task, watermarks: &[wire::Watermark]) -> u64 {
    let of_task = |mark: &&wire::Watermark| {
        mark.task.as_ref().and_then(|t| Task::try_from(t).ok()) == Some(task)
    };
    let (mut listed, mut lacking) = (0u64, 0u64);
    for mark in watermarks.iter().filter(of_task) {
        let count = mark.blocks.min(blocks - listed);
        listed += count;
        lacking = lacking.saturating_add(pushes.saturating_sub(mark.taken).saturating_mul(count));
    }
    lacking.saturating_add(pushes.saturating_mul(blocks - listed))
}

/// Returns whether this generation of a task is alive.
pub(super) fn is_alive(members: &BTreeMap<TaskId, Member>, task: Task) -> bool {
    members
        .get(&task.id)
        .is_some_and(|m| m.task == task && m.is_alive())
}

impl Cluster {
    /// Takes a worker's report of its acknowledged updates that are lost with a server.
    ///
    /// # Errors
    /// [`Reason::Malformed`] for impossible numbers, [`Reason::OutOfOrder`] if a newer report of the sender was
    /// counted.
    pub(crate) fn lost(
        &mut self,
        now: Instant,
        origin: &Origin,
        report: &wire::LostReport,
    ) -> Result<(), Refusal> {
        let task = origin.task;
        let blocks = self.durable.updated_blocks_of(report.shard);
        let most_steps = self
            .durable
            .training_samples()
            .saturating_mul(self.job.epochs.into());
        let Some(member) = self.durable.members.get_mut(&task.id) else {
            return Ok(());
        };
        // A client that did not get the answer sends the same report again.
        if origin.sequence == member.progress.told_lost && origin.sequence > Sequence(0) {
            return Ok(());
        }
        if origin.sequence < member.progress.told_lost || origin.sequence == Sequence(0) {
            return Err(out_of_order(origin, "LostReport"));
        }
        // A worker pushes at most once a step to each block, and a step has at least one sample.
        let clock = member.progress.clock.max(origin.clock).0;
        let steps = clock.saturating_add(1).min(most_steps);
        if report.updates == 0 || report.updates > blocks.saturating_mul(steps) {
            return Err(Refusal::new(
                Reason::Malformed,
                format!(
                    "{task} has finished at most {steps} steps and reports {} lost updates on shard {}, which has {blocks} blocks; that cannot be",
                    report.updates, report.shard
                ),
            ));
        }
        if report.first_step > report.last_step {
            return Err(Refusal::new(
                Reason::Malformed,
                format!(
                    "{task} reports updates lost from step {} to step {}; the first comes before the last",
                    report.first_step, report.last_step
                ),
            ));
        }
        member.progress.told_lost = origin.sequence;
        if planted!(SilentLosses) {
            return Ok(());
        }
        let found = self.durable.losses.entry(report.shard, task);
        let counted = found.ahead.min(report.updates);
        let updates = report.updates - counted;
        found.ahead -= counted;
        found.reported = found.reported.saturating_add(updates);
        let steps = (report.first_step, report.last_step);
        self.say_lost(now, task, report.shard, updates, Some(steps));
        Ok(())
    }

    /// Derives the losses of a shard that was restored from checkpoint `from`: the counted steps that its blocks lack.
    /// Live workers report their losses themselves. The losses of ended generations are counted at once; those of live
    /// workers, when their generation ends.
    pub(super) fn derive_losses(&mut self, now: Instant, report: &wire::RestoreReport, from: u64) {
        if self.sync() || planted!(ForgottenLives) {
            return;
        }
        let blocks = self.durable.updated_blocks_of(report.shard);
        let over = self.durable.losses.lives.iter();
        let over = over.filter(|life| life.covered_from.is_none_or(|first| first > from));
        let over = over.map(|life| (life.task, life.pushes));
        let living = self.durable.members.values().filter(|m| m.is_alive());
        let living = living.map(|m| (m.task, m.progress.pushes));
        let all: Vec<(Task, u64)> = over.chain(living).collect();
        for (task, pushes) in all {
            if pushes > 0 {
                let derived = lacking(pushes, blocks, task, &report.watermarks);
                self.durable.losses.entry(report.shard, task).derived = derived;
            }
        }
        self.say_of_lives_that_are_over(now);
    }

    /// Notes that a worker's generation has ended. It reports no more losses, so its derived losses are counted.
    pub(super) fn end_life(&mut self, now: Instant, task: Task, pushes: u64) {
        if task.id.role != Role::Worker || pushes == 0 {
            return;
        }
        self.durable.losses.ends(task, pushes);
        let members = &self.durable.members;
        self.durable.losses.forget(|task| is_alive(members, task));
        self.say_of_lives_that_are_over(now);
    }

    fn say_of_lives_that_are_over(&mut self, now: Instant) {
        let lives = self.durable.losses.lives.iter();
        let lives: Vec<Task> = lives.map(|life| life.task).collect();
        self.count_derived(now, |task| lives.contains(&task));
    }

    /// Counts the derived losses that live workers have not reported yet, because the job ends, and workers may leave
    /// without a report.
    pub(super) fn count_unreported_losses(&mut self, now: Instant) {
        self.count_derived(now, |_| true);
    }

    fn count_derived(&mut self, now: Instant, of: impl Fn(Task) -> bool) {
        let mut unsaid = Vec::new();
        for found in &mut self.durable.losses.found {
            if found.derived > found.reported && of(found.task) {
                let updates = found.derived - found.reported;
                unsaid.push((found.task, found.shard, updates));
                found.ahead = found.ahead.saturating_add(updates);
                found.reported = found.derived;
            }
        }
        for (task, shard, updates) in unsaid {
            self.say_lost(now, task, shard, updates, None);
        }
    }

    fn say_lost(
        &mut self,
        now: Instant,
        task: Task,
        shard: u32,
        updates: u64,
        steps: Option<(u64, u64)>,
    ) {
        self.must_persist();
        if updates == 0 {
            return;
        }
        let losses = &mut self.durable.losses;
        losses.total = losses.total.saturating_add(updates);
        let of_shard = losses.by_shard.entry(shard).or_default();
        *of_shard = of_shard.saturating_add(updates);
        let (first_step, last_step) = steps.unzip();
        tracing::warn!(%task, shard, updates, first_step, last_step, "updates are lost");
        self.records.push_back(Record::Lost {
            seconds: self.seconds(now),
            task: task.to_string(),
            shard,
            updates,
            first_step,
            last_step,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::ids::{Generation, TaskId};

    #[test]
    fn blocks_lack_what_their_watermarks_do_not_say() {
        let worker = |index| Task {
            id: TaskId::worker(index),
            generation: Generation(1),
        };
        let mark = |index, taken, blocks| wire::Watermark {
            task: Some(worker(index).into()),
            taken,
            blocks,
        };
        // Of four blocks two have taken one of three pushes, one has taken all, and one none.
        let marks = [mark(0, 1, 2), mark(1, 3, 4), mark(0, 3, 1)];
        assert_eq!(lacking(3, 4, worker(0), &marks), 2 * 2 + 3);
        // No more blocks lack something than there are.
        let marks = [mark(0, 1, 3), mark(0, 1, 9)];
        assert_eq!(lacking(3, 4, worker(0), &marks), 4 * 2);
    }
}
