//! The status of the ring for people and dashboards.

use std::time::{Duration, Instant};

use shared_proto::wire;

use super::RingMember;
use super::observed::Rings;
use crate::cluster::Cluster;

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
        let waited = self.waited_for(now);
        let slow = match waited {
            Some(_) => self.slowest_of_ring(),
            None => Vec::new(),
        };
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

    /// Returns the time for which members wait for the slowest ones; none if no member waits.
    fn waited_for(&self, now: Instant) -> Option<Duration> {
        let ring = &self.durable.ring;
        if !ring.is_settled() {
            return self.observed.rings.age(now);
        }
        let members = ring.members.iter();
        let waits = members.filter_map(|member| self.member(member.task.id)?.progress.waits_since);
        Some(now.duration_since(waits.min()?))
    }
}
