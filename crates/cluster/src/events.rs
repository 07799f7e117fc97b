//! The calls that can have follow-ups. Each call first changes the state, and notes its follow-ups in `due`. Then
//! `settle` carries them out: it evicts members, forms a ring, or plans the next step.

use std::time::Instant;

use shared_proto::ids::{Clock, Origin, Role, Sequence, Task};
use shared_proto::refusal::{Refusal, brief};
use shared_proto::view::JobPhase;
use shared_proto::wire;

use super::Cluster;
use super::admission::out_of_order;
use super::checkpoints::DurableCheckpoint;
use super::due::FollowUp;
use super::members::Identified;
use super::ring::Joined;
use super::saving::Failure;

impl Cluster {
    /// Registers the caller, and returns its task. If an earlier process of the same identity is a member, the caller
    /// supersedes it at once. A repeated registration returns the same task.
    ///
    /// # Errors
    /// [`Reason::Malformed`](shared_proto::refusal::Reason::Malformed) for a role that does not register, or without an
    /// identity; [`Reason::OutOfOrder`](shared_proto::refusal::Reason::OutOfOrder) if a newer registration of the
    /// process was accepted, or its membership has ended;
    /// [`Reason::Superseded`](shared_proto::refusal::Reason::Superseded) if another process has taken its identity.
    pub fn register(
        &mut self,
        now: Instant,
        role: Role,
        request: wire::RegisterRequest,
    ) -> Result<Task, Refusal> {
        let newcomer = match self.identify(now, role, request)? {
            Identified::Member(task) => return Ok(task),
            Identified::Newcomer(newcomer) => newcomer,
        };
        // The follow-ups of the eviction of an earlier process must not evict the new one.
        self.settle(now);
        let task = self.add_member(now, *newcomer);
        self.settle(now);
        Ok(task)
    }

    /// Removes a member that leaves. If the request states a failure of this member, the job continues without it; any
    /// other error fails the job.
    pub fn leave(&mut self, now: Instant, task: Task, request: &wire::LeaveRequest) {
        let mut why = "it has left";
        if request.failure != wire::WorkerFailure::Unspecified as i32 {
            why = "it cannot work";
            self.cannot_work(now, task, request.failure(), &request.error);
        } else if !request.error.is_empty() {
            self.fail(now, format!("{task}: {}", brief(&request.error)));
        }
        self.durable.awaited.remove(&task.id);
        self.remove(now, task.id, why);
        self.settle(now);
    }

    /// Does what depends on time. Evicts members with an expired lease, and workers that delay others without making
    /// progress. Orders checkpoints that are due. Cancels a stuck checkpoint, and fails a stuck job.
    pub fn tick(&mut self, now: Instant) {
        let lease = self.lease();
        // While this process was paused it received no heartbeats.
        let gap = now.duration_since(self.instants.ticked.replace(now).unwrap_or(now));
        if gap > lease / 2 {
            self.was_stopped(gap);
        }
        self.durable.awaited.retain(|_, until| now < *until);
        self.due.add(FollowUp::FormRing);
        self.settle(now);
        self.evict_silent(now);
        self.settle(now);
        self.give_up_if_stuck(now);
        self.fail_without_workers(now);
        self.fail_without_servers(now);
        self.fail_with_too_few_members(now);
        if self.durable.training.step.is_none() {
            self.save_if_due(now);
            if self.in_lock_step() && self.durable.outcome.phase == JobPhase::Training {
                self.plan(now);
            }
        } else if !self.sync() {
            self.save_if_due(now);
        }
        let loading = !self.durable.checkpoints.loading.is_empty();
        // A checkpoint that makes no progress is given up.
        let saving = self.in_lock_step() && self.saving.at_work();
        if self.durable.orphans().next().is_some()
            || loading
            || saving
            || self.durable.checkpoints.ending()
        {
            // No worker can finish a step.
            for member in self.durable.members.values_mut() {
                member.progress.moved = now;
            }
        }
        if self.durable.outcome.phase == JobPhase::Training {
            self.evict_stalled(now);
            self.settle(now);
        }
    }

    /// Takes a worker's request to join the ring. If a ring is formed, the request breaks it, unless the worker is a
    /// member that has not received this ring yet.
    ///
    /// # Errors
    /// [`Reason::Malformed`](shared_proto::refusal::Reason::Malformed) in a job without rings,
    /// [`Reason::NotInitialized`](shared_proto::refusal::Reason::NotInitialized) before a worker has registered
    /// variables, [`Reason::Fenced`](shared_proto::refusal::Reason::Fenced) if the sender is evicted because another
    /// worker cannot reach it.
    pub fn join_ring(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::JoinRingRequest,
    ) -> Result<Joined, Refusal> {
        let answer = self.ask_to_join(now, origin, request);
        self.settle(now);
        match answer? {
            Some(answer) => Ok(answer),
            None => self.answer_to_join(origin),
        }
    }

    /// Counts finished steps, each step once. Returns the min clock.
    ///
    /// # Errors
    /// [`Reason::OutOfOrder`](shared_proto::refusal::Reason::OutOfOrder) if a newer report of the sender was counted,
    /// [`Reason::NotLeased`](shared_proto::refusal::Reason::NotLeased) if the split is not leased to the sender,
    /// [`Reason::FutureClock`](shared_proto::refusal::Reason::FutureClock) if the sender's clock is higher than it can
    /// be, [`Reason::Malformed`](shared_proto::refusal::Reason::Malformed) for impossible numbers or a missing receipt,
    /// [`Reason::StaleEpoch`](shared_proto::refusal::Reason::StaleEpoch) if a shard has moved since and may have lost
    /// the gradients.
    pub fn finish_step(
        &mut self,
        now: Instant,
        origin: &Origin,
        request: &wire::FinishStepRequest,
    ) -> Result<Clock, Refusal> {
        let task = origin.task;
        let Some(member) = self.durable.members.get(&task.id) else {
            return Ok(self.durable.training.min_clock);
        };
        let finished = member.progress.finished;
        if origin.sequence == Sequence(0) || origin.sequence < finished && !request.repeated {
            return Err(out_of_order(origin, "FinishStep"));
        }
        if origin.sequence <= finished {
            return Ok(self.durable.training.min_clock);
        }
        let counted = match self.has_ring() {
            true => self.finish_in_ring(now, origin, request),
            false => self.finish_own_steps(now, origin, request),
        };
        self.settle(now);
        counted?;
        Ok(self.update_min_clock())
    }

    /// Takes the result of an evaluation. The last evaluation leads to the end of the job. Returns true if the
    /// evaluation counts, even if an earlier report of it was already counted.
    ///
    /// # Errors
    /// [`Reason::NotLeased`](shared_proto::refusal::Reason::NotLeased) if the evaluation is not leased to the sender,
    /// [`Reason::StaleEpoch`](shared_proto::refusal::Reason::StaleEpoch) if a shard has moved since the weights were
    /// pulled, [`Reason::Malformed`](shared_proto::refusal::Reason::Malformed) if the metrics have no loss, or if the
    /// last evaluation lacks the digest of the model file that it writes.
    pub fn evaluated(
        &mut self,
        now: Instant,
        origin: &Origin,
        report: wire::EvaluationReport,
    ) -> Result<bool, Refusal> {
        let counts = self.take_evaluation(now, origin, report);
        self.settle(now);
        counts
    }

    /// Takes the outcome of [`StoreTask::FindBefore`](crate::StoreTask::FindBefore): the checkpoint to use instead of
    /// `damaged`, or the reason why there is none.
    pub fn older_found(
        &mut self,
        now: Instant,
        damaged: &DurableCheckpoint,
        found: Result<DurableCheckpoint, String>,
    ) {
        self.go_back_before(now, damaged, found);
        self.settle(now);
    }

    /// Takes the outcome of writing the manifest of checkpoint `number`. Returns true if the checkpoint is complete
    /// now, and false if writing failed or the checkpoint was given up.
    pub fn manifest_written(
        &mut self,
        now: Instant,
        number: u64,
        written: Result<(), Failure>,
    ) -> bool {
        let counts = self.take_manifest(now, number, written);
        if counts && !self.ended() {
            self.begin(now);
        }
        self.settle(now);
        counts
    }

    /// Notes that a server is about to stop, and orders a checkpoint of its shard. From then on the server takes no
    /// pushes outside sync mode; in sync mode no step is planned until the server has left. Returns whether the server
    /// may leave.
    pub fn drain(&mut self, now: Instant, server: Task) -> bool {
        if !self.begin_draining(now, server) {
            return true;
        }
        // In sync mode a checkpoint is made between two steps.
        if self.durable.training.step.is_none() {
            self.save_if_due(now);
        }
        self.settle(now);
        self.drained()
    }

    /// Resumes a failed job. A shard without a server waits for another server, which loads the newest checkpoint.
    pub fn resume_failed(&mut self, now: Instant) {
        self.take_up_failed(now);
        self.settle(now);
    }

    /// Carries out the follow-ups of a call, until none is left.
    fn settle(&mut self, now: Instant) {
        while let Some(next) = self.due.take() {
            match next {
                FollowUp::Evict(member, why) => self.remove(now, member, why),
                FollowUp::EvictWorkers(workers, why) => self.evict_workers(now, &workers, why),
                FollowUp::FormRing => self.form_ring(now),
                FollowUp::Plan if self.ended() => {}
                FollowUp::Plan => self.plan(now),
            }
        }
    }
}
