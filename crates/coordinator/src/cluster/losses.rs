//! Acknowledged updates that are lost with a server: what workers report of themselves, and what follows
//! from the watermarks of restored shards for workers that cannot report any more.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared_proto::ids::{Origin, Role, Sequence, Task};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

use super::Cluster;
use crate::embedded::Fault;
use crate::record::Record;

/// The number of ended worker generations whose pushes are kept; the oldest are dropped first.
const MOST_LIVES: usize = 4096;

/// A worker's life, a generation of its task, that is over.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Life {
    task: Task,
    /// Steps of it that count, and changed the weights.
    pushes: u64,
    /// The first checkpoint that was ordered since: its blocks have all that this worker ever pushed.
    covered_from: Option<u64>,
}

/// What a shard has lost of a worker's updates (pairs of a block and a step), in one life of the worker.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Found {
    shard: u32,
    task: Task,
    /// As the worker has reported.
    reported: u64,
    /// As follows from the watermarks of the restored blocks: steps that count and that they lack.
    derived: u64,
}

/// All losses of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Losses {
    lives: Vec<Life>,
    found: Vec<Found>,
    /// Updates that are lost, as far as they are said to be.
    pub(super) total: u64,
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
            });
            self.found.len() - 1
        });
        &mut self.found[index]
    }

    /// A checkpoint is ordered: lives that are over by now are in it.
    pub(super) fn ordered(&mut self, checkpoint: u64) {
        for life in &mut self.lives {
            life.covered_from.get_or_insert(checkpoint);
        }
    }

    /// No checkpoint before this one will be gone back to. What is known of lives that all later ones have is
    /// forgotten, unless it is of a worker that lives.
    pub(super) fn oldest(&mut self, checkpoint: u64, living: impl Fn(Task) -> bool) {
        let open = |life: &Life| life.covered_from.is_none_or(|from| from > checkpoint);
        self.lives.retain(open);
        let surplus = self.lives.len().saturating_sub(MOST_LIVES);
        self.lives.drain(..surplus);
        let lives = &self.lives;
        let over = |task: Task| lives.iter().any(|life| life.task == task);
        self.found
            .retain(|found| living(found.task) || over(found.task));
    }
}

/// How many updates of a worker the restored blocks of a shard lack: each of `blocks` has taken as many of its
/// `pushes` as the watermarks say, none where they do not.
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

impl Cluster {
    /// A worker tells which of its acknowledged updates are lost with a server.
    ///
    /// # Errors
    /// [`Reason::Malformed`] for numbers that cannot be, [`Reason::OutOfOrder`].
    pub(crate) fn lost(
        &mut self,
        now: Instant,
        origin: &Origin,
        report: &wire::LostReport,
    ) -> Result<(), Refusal> {
        let task = origin.task;
        let blocks = self.blocks_of(report.shard);
        let most_steps = self
            .training_samples()
            .saturating_mul(self.job.epochs.into());
        let Some(member) = self.members.get_mut(&task.id) else {
            return Ok(());
        };
        // A client that lost the answer sends the same report again.
        if origin.sequence == member.progress.told_lost && origin.sequence > Sequence(0) {
            return Ok(());
        }
        if origin.sequence < member.progress.told_lost || origin.sequence == Sequence(0) {
            return Err(super::out_of_order(origin, "LostReport"));
        }
        // A worker pushes at most once a step to each block, and a step has at least one sample.
        let clock = member.progress.clock.max(origin.clock).0;
        let steps = clock.saturating_add(1).min(most_steps);
        if report.updates > blocks.saturating_mul(steps) {
            return Err(Refusal::new(
                Reason::Malformed,
                format!(
                    "{task} has finished at most {steps} steps and reports {} lost updates on shard {}, which has {blocks} blocks; that cannot be",
                    report.updates, report.shard
                ),
            ));
        }
        member.progress.told_lost = origin.sequence;
        if self.has(Fault::SilentLosses) {
            return Ok(());
        }
        let found = self.losses.entry(report.shard, task);
        found.reported = found.reported.saturating_add(report.updates);
        let steps = (report.first_step, report.last_step);
        self.say_lost(now, task, report.shard, report.updates, Some(steps));
        Ok(())
    }

    /// A shard was restored: what its blocks lack of the steps that count is lost. Workers that live say so
    /// themselves; for the others it is said here, now or when their life ends.
    pub(super) fn derive_losses(&mut self, now: Instant, report: &wire::RestoreReport, from: u64) {
        if self.sync() || self.has(Fault::ForgottenLives) {
            return;
        }
        let blocks = self.blocks_of(report.shard);
        let over = self.losses.lives.iter();
        let over = over.filter(|life| life.covered_from.is_none_or(|first| first > from));
        let over = over.map(|life| (life.task, life.pushes));
        let living = self.members.values().filter(|m| m.alive);
        let living = living.map(|m| (m.task, m.progress.pushes));
        let all: Vec<(Task, u64)> = over.chain(living).collect();
        for (task, pushes) in all {
            if pushes > 0 {
                let derived = lacking(pushes, blocks, task, &report.watermarks);
                self.losses.entry(report.shard, task).derived = derived;
            }
        }
        self.say_of_lives_that_are_over(now);
    }

    /// A worker's life is over: it cannot report any more.
    pub(super) fn end_life(&mut self, now: Instant, task: Task, pushes: u64) {
        if task.id.role != Role::Worker || pushes == 0 {
            return;
        }
        self.losses.lives.push(Life {
            task,
            pushes,
            covered_from: None,
        });
        self.say_of_lives_that_are_over(now);
    }

    fn say_of_lives_that_are_over(&mut self, now: Instant) {
        let lives: Vec<Task> = self.losses.lives.iter().map(|life| life.task).collect();
        let mut unsaid = Vec::new();
        for found in &mut self.losses.found {
            if found.derived > found.reported && lives.contains(&found.task) {
                unsaid.push((found.task, found.shard, found.derived - found.reported));
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
        self.must_keep();
        if updates == 0 {
            return;
        }
        self.losses.total = self.losses.total.saturating_add(updates);
        let (first_step, last_step) = steps.unzip();
        tracing::warn!(%task, shard, updates, first_step, last_step, "updates are lost");
        self.records.push(Record::Lost {
            seconds: self.seconds(now),
            task: task.to_string(),
            shard,
            updates,
            first_step,
            last_step,
        });
    }

    /// The number of blocks that a shard has; 0 of one that is not there.
    pub(super) fn blocks_of(&self, shard: u32) -> u64 {
        let map = self.variables.as_ref().and_then(|v| v.map.as_ref());
        map.map_or(0, |map| map.blocks_of(shard).count() as u64)
    }
}
