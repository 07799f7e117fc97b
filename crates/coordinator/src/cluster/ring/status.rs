//! The status of the ring for people and dashboards.

use std::time::{Duration, Instant};

use shared_proto::ids::Task;
use shared_proto::wire;

use super::RingMember;
use super::observed::Rings;
use crate::cluster::Cluster;

/// The time after which a member is waited for that holds up the others at the end of their steps: as long as workers wait before they
/// report it.
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
        if !ring.is_settled() {
            return Some((self.slowest_of_ring(), self.observed.rings.age(now)?));
        }
        let is_long = |since: &Instant| now.duration_since(*since) >= QUIET;
        let Some(span) = &ring.span else {
            let (task, since) = self.evaluator().or_else(|| self.copier())?;
            let others_wait = ring.members.len() > 1 && is_long(&since);
            return others_wait.then(|| (vec![task], now.duration_since(since)));
        };
        let waits = ring.members.iter().filter_map(|member| {
            let progress = &self.member(member.task.id)?.progress;
            // A member that has made all steps gets no others before the rest has.
            let has_made_all = member.made >= span.end();
            let ended = has_made_all.then_some(progress.moved).filter(is_long);
            progress.waits_since.or(ended)
        });
        Some((self.slowest_of_ring(), now.duration_since(waits.min()?)))
    }

    /// Returns the worker that evaluates, and since when.
    fn evaluator(&self) -> Option<(Task, Instant)> {
        let task = self.durable.evaluations.holder()?;
        Some((task, self.member(task.id)?.progress.moved))
    }
}
