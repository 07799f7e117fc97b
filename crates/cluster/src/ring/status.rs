//! The status of the ring for people and dashboards.

use std::time::{Duration, Instant};

use shared_proto::ids::Task;
use shared_proto::view::JobPhase;
use shared_proto::wire;

use super::observed::Rings;
use super::{RingMember, Span};
use crate::Cluster;

/// The time after which the status names a member that holds up the others between steps.
const QUIET: Duration = Duration::from_secs(1);

/// The figures of the ring for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingFigures {
    /// The number of the newest ring; 0 before the first.
    pub number: u64,
    /// The number of its members; 0 while it is being formed.
    pub members: usize,
}

impl Cluster {
    /// Returns the figures of the ring.
    pub fn ring_figures(&self) -> RingFigures {
        let ring = &self.durable.ring;
        RingFigures {
            number: ring.number.0,
            members: if ring.formed { ring.members.len() } else { 0 },
        }
    }

    /// Returns the counts and times of rings, since this process started.
    pub fn rings(&self) -> &Rings {
        &self.observed.rings
    }

    /// Returns the status of the ring; `None` for a job without rings.
    pub(crate) fn ring_status(&self, now: Instant) -> Option<wire::RingStatus> {
        if !self.has_ring() {
            return None;
        }
        let ring = &self.durable.ring;
        let rings = &self.observed.rings;
        let (slow, waited) = self.waited_for(now).unzip();
        let slow: Vec<Task> = slow.unwrap_or_default();
        let groups = self.job.strategy.stage_groups();
        let has_groups = groups.workers > 1 && ring.formed;
        let ranks = ring.members.len() as u32;
        let is_in_group = |rank| groups.of(rank, ranks).is_some();
        let member = |(rank, member): (u32, &RingMember)| wire::RingMemberStatus {
            place: (has_groups && is_in_group(rank)).then(|| groups.place(rank)),
            spare: has_groups && !is_in_group(rank),
            task: Some(member.task.into()),
            joined: member.joined,
            made: member.made.0,
            waited_for: waited
                .filter(|_| slow.contains(&member.task))
                .map(|waited| waited.as_secs_f64()),
        };
        Some(wire::RingStatus {
            number: ring.number.0,
            stage: match (ring.formed, ring.is_settled()) {
                (true, true) => wire::RingStage::Settled,
                (true, false) => wire::RingStage::Formed,
                (false, _) => wire::RingStage::Forming,
            }
            .into(),
            seconds: rings.age(now).map(|age| age.as_secs_f64()),
            members: (0..).zip(&ring.members).map(member).collect(),
            wanted: self.job.workers(),
            broken: super::Cause::ALL
                .iter()
                .map(|cause| wire::BrokenRings {
                    cause: cause.name().to_owned(),
                    number: rings.broken(*cause),
                })
                .filter(|broken| broken.number > 0)
                .collect(),
            evicted: rings.evictions(),
        })
    }

    /// Returns the members that the others wait for, and for how long; `None` if no member waits.
    fn waited_for(&self, now: Instant) -> Option<(Vec<Task>, Duration)> {
        let ring = &self.durable.ring;
        let (slow, since) = if !ring.is_settled() {
            (self.slowest_of_ring(), now - self.observed.rings.age(now)?)
        } else if let Some(span) = &ring.span {
            self.waited_for_in_span(span, now)?
        } else {
            self.waited_for_at_rest(now)?
        };
        Some((slow, now.duration_since(since)))
    }

    /// Returns the members that the others wait for while they make steps, and since when.
    fn waited_for_in_span(&self, span: &Span, now: Instant) -> Option<(Vec<Task>, Instant)> {
        let members = &self.durable.ring.members;
        // A member that has made all steps gets no others before the rest has.
        let (ended, busy): (Vec<_>, Vec<_>) = members.iter().partition(|m| m.made >= span.end());
        let progress = |member: &&RingMember| Some(&self.durable.member(member.task.id)?.progress);
        let ended = ended
            .iter()
            .filter_map(|member| Some(progress(member)?.acted));
        let ended = ended.filter(|since| now.duration_since(*since) >= QUIET);
        let reported = members
            .iter()
            .filter_map(|member| progress(&member)?.waits_since);
        let since = reported.chain(ended).min()?;
        let mut slow = self.slowest_of_ring();
        slow.retain(|task| busy.iter().any(|member| member.task == *task));
        Some((slow, since))
    }

    /// Returns the members that the others wait for before they can make steps, and since when.
    fn waited_for_at_rest(&self, now: Instant) -> Option<(Vec<Task>, Instant)> {
        let evaluator = self.durable.evaluations.holder();
        let acted = |task: Task| Some(self.durable.member(task.id)?.progress.acted);
        let evaluator = evaluator.and_then(|task| Some((vec![task], acted(task)?)));
        let copying = self.copier().map(|copier| self.waited_for_in_copy(copier));
        let mut waited = evaluator.into_iter().chain(copying);
        let has_others = self.durable.ring.members.len() > 1;
        waited.find(|(_, since)| has_others && now.duration_since(*since) >= QUIET)
    }

    /// Returns the member that copies its values for a checkpoint, and since when. If it waits for helpers, as with
    /// `optimizer_copies`, returns instead those helpers that wait for no other member.
    fn waited_for_in_copy(&self, copier: (Task, Instant)) -> (Vec<Task>, Instant) {
        let progress = |task: Task| Some(&self.durable.member(task.id)?.progress);
        let is_busy = |task: &Task| progress(*task).is_some_and(|work| work.waiting_on.is_empty());
        let of_copier = progress(copier.0);
        let since = of_copier.and_then(|work| work.waits_since);
        let members = self.durable.ring.members.iter();
        let busy: Vec<Task> = members.map(|m| m.task).filter(is_busy).collect();
        let helpers = of_copier.map_or(&[][..], |work| &work.waiting_on);
        let awaited = |task: &&Task| helpers.contains(&(**task).into());
        let slow: Vec<Task> = busy.iter().filter(awaited).copied().collect();
        match since {
            Some(since) if !slow.is_empty() => (slow, since),
            _ => (vec![copier.0], copier.1),
        }
    }

    /// Describes what the ring that is being formed waits for.
    pub(crate) fn missing_in_ring(&self) -> String {
        let ring = &self.durable.ring;
        let absent = ring.members.iter().find(|member| !member.joined);
        if let Some(member) = absent {
            return format!("{} has not joined the next ring yet", member.task);
        }
        if let Some(shard) = self.durable.orphans().next() {
            return format!("shard {shard} has no server");
        }
        if let Some((gone, _)) = self.durable.awaited.first_key_value() {
            return format!("{gone} is given time to come back");
        }
        let (joined, wanted) = (ring.members.len(), self.wanted_in_ring());
        let training = self.durable.outcome.phase == JobPhase::Training;
        match training && wanted > 1 {
            true => format!("{joined} of the {wanted} workers of a stage group have joined"),
            false => format!("{joined} of {wanted} workers have joined"),
        }
    }

    /// Returns the minimum number of workers in a ring. At first, this is the number of workers of the job; later, the
    /// number of workers that hold a model together. One worker with values is enough to end a job in which no step is
    /// left. A worker without values is not enough, because the checkpoint that it loads may have steps left.
    pub(crate) fn wanted_in_ring(&self) -> u32 {
        let has_values = |member: &RingMember| member.joined && member.values.is_some();
        let ends = self.durable.training.stopping || self.durable.training.exhausted();
        match self.durable.outcome.phase {
            JobPhase::Starting => self.job.workers(),
            _ if ends && self.durable.ring.members.iter().any(has_values) => 1,
            _ => self.job.strategy.stage_groups().workers,
        }
    }
}
