//! The status of the ring for people and dashboards.

use std::time::{Duration, Instant};

use shared_proto::ids::Task;
use shared_proto::wire;

use super::observed::Rings;
use super::{RingMember, Span};
use crate::cluster::Cluster;

/// A member that holds up the others between their steps is shown after this time, as one in a step is.
const QUIET: Duration = Duration::from_secs(1);

/// The figures of the ring for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingFigures {
    /// The number of the newest ring; 0 before the first.
    pub(crate) number: u64,
    /// The workers in it; 0 while it is being formed.
    pub(crate) members: usize,
}

impl Cluster {
    /// Returns the figures of the ring.
    pub(crate) fn ring_figures(&self) -> RingFigures {
        let ring = &self.durable.ring;
        RingFigures {
            number: ring.number.0,
            members: if ring.formed { ring.members.len() } else { 0 },
        }
    }

    /// Returns the counts and times of rings, since this process started.
    pub(crate) fn rings(&self) -> &Rings {
        &self.observed.rings
    }

    /// Returns the status of the ring; none for a job with servers.
    pub(in crate::cluster) fn ring_status(&self, now: Instant) -> Option<wire::RingStatus> {
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

    /// Returns the members that the others wait for, and for how long; none if no member waits.
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
        let progress = |member: &&RingMember| Some(&self.member(member.task.id)?.progress);
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
        let members = &self.durable.ring.members;
        let evaluator = self.durable.evaluations.holder();
        let evaluator =
            evaluator.and_then(|task| Some((task, self.member(task.id)?.progress.acted)));
        let is_long = |(_, since): &(Task, Instant)| now.duration_since(*since) >= QUIET;
        let (task, since) = evaluator.into_iter().chain(self.copier()).find(is_long)?;
        // With `optimizer_copies` the others help the one that copies, and it reports for which it waits.
        let waiting_on = &self.member(task.id)?.progress.waiting_on;
        let helpers = members.iter().map(|member| member.task);
        let mut slow: Vec<Task> = helpers
            .filter(|task| waiting_on.contains(&(*task).into()))
            .collect();
        if slow.is_empty() {
            slow.push(task);
        }
        (members.len() > 1).then_some((slow, since))
    }
}
