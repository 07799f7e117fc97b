//! The steps that the members of a ring make together. Their data is leased to all members, and they count once all
//! members have made them.

use std::time::Instant;

use shared_proto::ids::{Clock, Origin, Task};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::Commit;
use shared_proto::wire;

use super::Span;
use crate::Cluster;
use crate::admission::not_leased;
use crate::ledger::{HELD_BY_ALL, Split};
use crate::work::{MOST_BATCHES, Work};

impl Cluster {
    /// Notes that a member has asked for work in the ring. Once all members have, the ring is settled. The steps of the
    /// previous ring that the values have then count as made, and the data of its other steps is leased again.
    pub(crate) fn enter_ring(&mut self, now: Instant, task: Task) {
        let ring = &mut self.durable.ring;
        if ring.is_settled() {
            return;
        }
        if let Some(member) = ring.member_mut(task) {
            member.entered = true;
        }
        if ring.members.iter().any(|member| !member.entered) {
            return;
        }
        ring.settled = ring.number;
        self.observed.rings.settled(now);
        let made = ring.clock;
        self.must_persist();
        self.settle_span(now, made);
    }

    /// Returns the steps that a member of the ring must make; `None` if it has made all leased steps, or the ring is
    /// not settled.
    pub(crate) fn work_in_ring(&self, task: Task) -> Option<Work> {
        let ring = &self.durable.ring;
        let member = ring.member(task).filter(|_| ring.is_settled())?;
        let span = ring.span.as_ref().filter(|span| member.made < span.end())?;
        Some(Work::Shared {
            split: Split {
                start: span.position(member.made),
                ..span.split
            },
            rank: ring.rank(task),
            ranks: self.computing_in_ring() as u32,
            // It changes with an evaluation alone, and no span begins before that is done.
            learning_rate_factor: self.learning_rate_factor(),
        })
    }

    /// Returns the number of members that have samples: those of whole stage groups. The others are spare.
    fn computing_in_ring(&self) -> u64 {
        let members = self.durable.ring.members.len() as u64;
        if planted!(SpareHasSamples) {
            return members;
        }
        self.job.strategy.stage_groups().computing(members)
    }

    /// Leases the next steps to the ring, unless it has steps to make or must wait.
    pub(crate) fn plan_span(&mut self, now: Instant) {
        if self.ring_rests() {
            self.save_if_due(now);
        }
        let ring = &self.durable.ring;
        let busy = ring.span.is_some()
            || !self.draining.is_empty()
            || self.copier().is_some() && !planted!(CopyNotAwaited)
            || self.durable.evaluations.pending()
            || self.durable.training.stopping
            || self.durable.checkpoints.ending();
        if busy || !ring.is_settled() {
            return;
        }
        let first = ring.made_by_all();
        let members: Vec<Task> = ring.members.iter().map(|member| member.task).collect();
        let ranks = self.computing_in_ring();
        if ranks == 0 {
            // The ring is smaller than a stage group, and only ends the job.
            return;
        }
        let size = self.job.samples_per_step().saturating_mul(ranks);
        let Some(ledger) = &mut self.durable.training.ledger else {
            return;
        };
        let Some((split, steps)) = ledger.lease_to_all(size, MOST_BATCHES) else {
            return;
        };
        self.durable.ring.span = Some(Span {
            split,
            first,
            steps,
            size,
            members,
            skipped: Vec::new(),
        });
        self.must_persist();
    }

    /// Counts the steps that a member has made. A report of an earlier ring has no effect. Instead, the values with
    /// which its sender joins the next ring count.
    ///
    /// # Errors
    /// [`Reason::NotLeased`], [`Reason::FutureClock`] or [`Reason::Malformed`]. A sender without the receipts of its
    /// rows is also evicted.
    pub(crate) fn finish_in_ring(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::FinishStepRequest,
    ) -> Result<(), Refusal> {
        let task = origin.task;
        let ring = &self.durable.ring;
        let current = ring.is_settled() && origin.epoch == ring.number;
        let Some(member) = ring.member(task).filter(|_| current) else {
            return Ok(());
        };
        if origin.clock <= member.made {
            return Ok(());
        }
        let Some(span) = ring.span.as_ref().filter(|s| s.split.id == request.split) else {
            return Err(not_leased(task, request));
        };
        let made = origin.clock.0.saturating_sub(member.made.0);
        // Rows of the next step are pulled once those of this one are committed.
        let last = match self.commits_rows() {
            true => self.durable.training.min_clock.next().min(span.end()),
            false => span.end(),
        };
        if origin.clock > last || request.steps > made {
            return Err(Refusal::new(
                Reason::FutureClock,
                format!(
                    "{task} says that it has finished {} steps after {} more, but it had finished {}, of the steps up to {}",
                    origin.clock, request.steps, member.made, last
                ),
            ));
        }
        self.check_report(task, request, request.steps)?;
        self.require_receipts(origin, request)?;
        let samples = made.saturating_mul(self.job.samples_per_step());
        let samples = request.samples.min(samples);
        if let Some(member) = self.durable.ring.member_mut(task) {
            member.made = origin.clock;
        }
        let span = self.durable.ring.span.as_ref();
        if self.commits_rows() || span.is_some_and(|span| span.end() == origin.clock) {
            // It asks for work next, or waits for the commit, and does not report this step again.
            self.must_persist();
        }
        if request.skipped > 0
            && let Some(span) = &mut self.durable.ring.span
        {
            span.skipped.push(task);
        }
        self.count(now, origin, request, samples);
        let made = match planted!(CountsEarly) {
            true => origin.clock,
            false => self.durable.ring.made_by_all(),
        };
        self.count_made(now, made);
        Ok(())
    }

    /// Counts the steps before clock `made`, which all members have made, and commits their rows if servers have staged
    /// them.
    fn count_made(&mut self, now: Instant, made: Clock) {
        let counted = self.durable.training.min_clock;
        let Some(span) = &mut self.durable.ring.span else {
            return;
        };
        let made = made.min(span.end());
        let contributors = span.contributors(counted);
        if made > counted {
            span.skipped.clear();
        }
        let (position, id, whole) = (span.position(made), span.split.id, made == span.end());
        let ledger = self.durable.training.ledger.as_mut();
        let advanced = ledger.and_then(|ledger| ledger.advance(HELD_BY_ALL, id, position));
        let Some((samples, complete)) = advanced else {
            return;
        };
        self.evaluate_after(complete);
        let tally = &mut self.durable.training.tally;
        self.durable.training.min_clock = made.max(counted);
        let steps = made.0.saturating_sub(counted.0);
        tally.samples = tally.samples.saturating_add(samples);
        tally.steps = tally.steps.saturating_add(steps);
        if steps > 0 && self.commits_rows() {
            self.durable.training.commit = Some(Commit {
                step: counted,
                contributors,
                clip_factor: None,
            });
            self.must_persist();
        }
        if whole {
            self.durable.ring.span = None;
            self.must_persist();
        } else {
            self.may_persist();
        }
        if steps > 0 {
            self.record_progress(now, steps);
        }
        self.schedule_last_evaluation();
    }

    /// Ends the span. The steps before clock `made` count as made, and the data of the span's later steps is leased
    /// again.
    fn settle_span(&mut self, now: Instant, made: Clock) {
        let counted = self.durable.training.min_clock;
        let ring = &mut self.durable.ring;
        if let Some(span) = &mut ring.span {
            // Their reports of this step may be lost.
            let members = ring.members.iter();
            let skipped = members.filter(|member| member.skipped == Some(counted));
            span.skipped.extend(skipped.map(|member| member.task));
        }
        self.count_made(now, made);
        let Some(span) = self.durable.ring.span.take() else {
            return;
        };
        if let Some(ledger) = &mut self.durable.training.ledger {
            ledger.take_back(span.size);
        }
        self.must_persist();
    }
}
