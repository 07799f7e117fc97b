//! Failed checkpoints: they are tried again later, and their files are deleted.

use std::time::{Duration, Instant};

use checkpoint::Manifest;
use shared_proto::job::OnFullDisk;

use super::Cluster;
use super::saving::{AtWork, Failed, Failure, Saving};

/// The delay before the files of a given-up checkpoint are deleted once more, because a server may
/// still finish a file.
const LATE: Duration = Duration::from_secs(10);

/// The shortest pause before the last checkpoint is tried again while the store is full. The longest pause is twice as
/// long.
const ROOM_AGAIN: Duration = Duration::from_secs(5);

/// Determines which unfinished checkpoints of this run were given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    below: u64,
    under_way: Option<u64>,
}

impl Sweep {
    /// Returns whether an unfinished checkpoint was given up, so that it gets no manifest.
    pub fn is_given_up(&self, number: u64) -> bool {
        number < self.below && Some(number) != self.under_way
    }
}

/// The checkpoints that the training went through: those of its run, and those of an earlier run up to the one that it
/// began with.
#[derive(Clone, Debug)]
pub struct Lineage {
    run: String,
    /// The location, the number and the run of the checkpoint that the job began with; `None` if it began without one.
    from: Option<(String, u64, String)>,
}

impl Lineage {
    /// Returns whether the training went through a checkpoint. Checkpoints of earlier releases name no run and are
    /// accepted.
    pub fn has(&self, location: &str, manifest: &Manifest) -> bool {
        let earlier = |(place, number, run): &(String, u64, String)| {
            place == location && manifest.number <= *number && manifest.run == *run
        };
        manifest.run.is_empty()
            || manifest.run == self.run
            || self.from.as_ref().is_some_and(earlier)
    }
}

impl Saving {
    fn sweep_now_and_later(&mut self, now: Instant) {
        self.sweep = true;
        self.sweep_again = Some(now + LATE);
    }
}

impl Cluster {
    /// Returns the lineage of the training, to find a checkpoint that it can go back to.
    pub fn lineage(&self) -> Lineage {
        let start = self.durable.checkpoints.start.as_ref();
        Lineage {
            run: self.run_id().to_owned(),
            from: start.and_then(|start| start.from.clone()),
        }
    }

    /// Takes the order to delete the files of given-up checkpoints, if there is one.
    pub fn take_sweep(&mut self, now: Instant) -> Option<Sweep> {
        let saving = &mut self.saving;
        let again = saving.sweep_again.take_if(|at| now >= *at).is_some();
        let wanted = std::mem::take(&mut saving.sweep) || again;
        let at_work = saving.at_work.as_ref();
        wanted.then(|| Sweep {
            below: self.durable.checkpoints.next,
            under_way: at_work.map(AtWork::number),
        })
    }

    pub(super) fn not_saved(&mut self, now: Instant, failure: Failure) {
        let stall = self.stall();
        self.drain_again();
        let saving = &mut self.saving;
        let Some(at_work) = saving.at_work.take() else {
            return;
        };
        tracing::warn!(
            number = at_work.number(),
            "a checkpoint could not be written: {}",
            failure.why
        );
        self.observed.fault_counts.failed_checkpoints += 1;
        saving.store_task = None;
        saving.sweep_now_and_later(now);
        saving.begun = None;
        let mut try_again = saving.backoff.failed(now);
        let waits = failure.full && self.job.checkpoint.on_full_disk == OnFullDisk::Wait;
        let earlier = saving.failed.take();
        let mut last_since = earlier.and_then(|failed| failed.last_since);
        if at_work.last {
            let since = *last_since.get_or_insert(at_work.begun);
            // It is tried once more at the end of the stall time-out.
            try_again = try_again.min((since + stall).max(now));
            if waits {
                try_again = try_again.max(now + ROOM_AGAIN).min(now + 2 * ROOM_AGAIN);
            }
        }
        let over = |since: Instant| now.duration_since(since) >= stall;
        if failure.full && !waits {
            let why = &failure.why;
            self.fail(now, format!("there is no room for a checkpoint: {why}"));
        } else if at_work.last && last_since.is_some_and(over) && !waits {
            // The worker that evaluated last has written the model's file.
            let why = &failure.why;
            tracing::error!("the job ends without its last checkpoint: {why}");
            self.durable.outcome.unsaved.clone_from(why);
            self.end_well(now);
        }
        self.saving.failed = Some(Failed {
            failure,
            try_again,
            last_since,
        });
    }

    /// Gives up a checkpoint on which no member has made progress for the stall time-out.
    pub(super) fn give_up_if_stuck(&mut self, now: Instant) {
        let longest = self.stall();
        let stuck = |at_work: &&AtWork| now.duration_since(at_work.moved) > longest;
        if let Some(at_work) = self.saving.at_work.as_ref().filter(stuck) {
            let parts = at_work
                .missing
                .iter()
                .map(|shard| at_work.writer_of(*shard));
            let parts: Vec<String> = parts.collect();
            let who = match parts.as_slice() {
                [] => "its manifest is".to_owned(),
                parts => format!("the parts of {} are", parts.join(", ")),
            };
            let seconds = longest.as_secs_f64();
            let why = format!("{who} missing, and nothing was written for {seconds} s");
            self.not_saved(now, Failure { why, full: false });
        }
    }

    /// Gives up the checkpoint in progress, because the shards have changed.
    pub(super) fn give_up_saving(&mut self) {
        if self.saving.at_work.take().is_some() {
            self.saving.sweep = true;
        }
        self.saving.store_task = None;
        self.drain_again();
    }

    /// Ends the job because another run owns the location of the checkpoints now.
    pub fn taken_over(&mut self, now: Instant, by: &str) {
        if self.ended() {
            return;
        }
        self.give_up_saving();
        self.saving.sweep = false;
        tracing::error!("{by}");
        self.fail(
            now,
            format!(
                "{by}. This run writes no more there and ends; its own checkpoints stay as they are"
            ),
        );
    }

    /// Describes the failures since the newest checkpoint; empty if there are none.
    pub(crate) fn checkpoint_error(&self, now: Instant) -> String {
        let Some(failed) = self.saving.failed.as_ref().filter(|_| !self.ended()) else {
            return String::new();
        };
        let what = match failed.failure.full {
            true => "the store of checkpoints is full",
            false => "checkpoints cannot be written",
        };
        let tries = match self.saving.backoff.failures() {
            1 => "once".to_owned(),
            failures => format!("{failures} times in a row"),
        };
        let again = match failed.try_again.saturating_duration_since(now).as_secs() {
            seconds @ 1.. => format!("tried again in {seconds} s"),
            0 => "tried again now".to_owned(),
        };
        format!("{what} ({}); failed {tries}, {again}", failed.failure.why)
    }

    /// Returns whether checkpoints fail because their store is full.
    pub fn is_store_full(&self) -> bool {
        let failed = self.saving.failed.as_ref();
        failed.is_some_and(|failed| failed.failure.full) && !self.ended()
    }
}
