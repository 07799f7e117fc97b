//! Members of a long-lived cluster that wait for its next job.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::limits::LONGEST_NAME;
use parking_lot::Mutex;
use shared_proto::wire;

/// A waiting member repeats its call at once, so a member that has made no call for this long is gone.
const GONE_AFTER: Duration = Duration::from_secs(10);

/// The maximum number of waiting members that are kept.
const MOST: usize = 16_384;

/// The activity that a status shows for a waiting member.
const ACTIVITY: &str = "waiting for a job";

/// The waiting members, by the number of their process. A status shows them; no decision depends on them.
#[derive(Clone, Debug, Default)]
pub(crate) struct WaitingMembers(Arc<Mutex<BTreeMap<u64, Waiting>>>);

#[derive(Debug)]
struct Waiting {
    member: wire::WaitingMember,
    seen: Instant,
}

impl WaitingMembers {
    /// Remembers a member that asks for a job, unless its names are too long or too many members wait already.
    pub(super) fn saw(&self, member: wire::WaitingMember, now: Instant) {
        let names = [&member.identity, &member.address, &member.metrics_address];
        if names.iter().any(|name| name.len() > LONGEST_NAME) {
            return;
        }
        let mut waiting = self.0.lock();
        waiting.retain(|_, member| now.duration_since(member.seen) < GONE_AFTER);
        if waiting.len() < MOST || waiting.contains_key(&member.process) {
            waiting.insert(member.process, Waiting { member, seen: now });
        }
    }

    /// Forgets a member because it has registered for a job.
    pub(super) fn registered(&self, process: u64) {
        self.0.lock().remove(&process);
    }

    /// Adds the waiting members to a status. Each member replaces its task of the ended job. A member whose task is
    /// still alive is left out.
    pub(super) fn add_to(&self, status: &mut wire::Status, now: Instant) {
        let waiting = self.0.lock();
        for Waiting { member, seen } in waiting.values() {
            let age = now.duration_since(*seen);
            if age >= GONE_AFTER {
                continue;
            }
            let identity = |task: &wire::TaskStatus| {
                task.task
                    .as_ref()
                    .is_some_and(|task| task.identity == member.identity)
            };
            if status.tasks.iter().any(|task| task.alive && identity(task)) {
                continue;
            }
            status.tasks.retain(|task| !identity(task));
            status.tasks.push(wire::TaskStatus {
                task: Some(wire::ClusterTask {
                    // Without a generation: it gets an index with its job.
                    task: Some(wire::Task {
                        role: member.role,
                        ..wire::Task::default()
                    }),
                    identity: member.identity.clone(),
                    address: member.address.clone(),
                    metrics_address: member.metrics_address.clone(),
                }),
                alive: true,
                heartbeat_age: age.as_secs_f64(),
                loss: f64::NAN,
                activity: ACTIVITY.to_owned(),
                ..wire::TaskStatus::default()
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(process: u64, identity: &str) -> wire::WaitingMember {
        wire::WaitingMember {
            role: wire::Role::Worker.into(),
            identity: identity.to_owned(),
            process,
            ..wire::WaitingMember::default()
        }
    }

    fn shown(waiting: &WaitingMembers, mut status: wire::Status, now: Instant) -> Vec<String> {
        waiting.add_to(&mut status, now);
        let identity = |task: wire::TaskStatus| task.task.unwrap_or_default().identity;
        status.tasks.into_iter().map(identity).collect()
    }

    #[test]
    fn a_member_is_shown_while_it_asks_and_until_it_registers() {
        let (waiting, now) = (WaitingMembers::default(), Instant::now());
        waiting.saw(member(1, "a"), now);
        waiting.saw(member(2, "b"), now + GONE_AFTER / 2);
        assert_eq!(shown(&waiting, wire::Status::default(), now), ["a", "b"]);
        let later = now + GONE_AFTER;
        assert_eq!(shown(&waiting, wire::Status::default(), later), ["b"]);
        waiting.registered(2);
        assert!(shown(&waiting, wire::Status::default(), now).len() < 2);
    }

    #[test]
    fn a_member_takes_the_place_of_the_task_that_it_was() {
        let task = |alive| wire::TaskStatus {
            task: Some(wire::ClusterTask {
                identity: "a".to_owned(),
                ..wire::ClusterTask::default()
            }),
            alive,
            ..wire::TaskStatus::default()
        };
        let (waiting, now) = (WaitingMembers::default(), Instant::now());
        waiting.saw(member(1, "a"), now);
        for alive in [true, false] {
            let mut status = wire::Status {
                tasks: vec![task(alive)],
                ..wire::Status::default()
            };
            waiting.add_to(&mut status, now);
            assert_eq!(status.tasks.len(), 1);
            assert_eq!(status.tasks[0].activity == ACTIVITY, !alive);
        }
    }

    #[test]
    fn names_without_end_and_numbers_without_end_are_not_kept() {
        let (waiting, now) = (WaitingMembers::default(), Instant::now());
        waiting.saw(member(1, &"x".repeat(LONGEST_NAME + 1)), now);
        assert!(shown(&waiting, wire::Status::default(), now).is_empty());
        for process in 0..MOST as u64 + 10 {
            waiting.saw(member(process, "x"), now);
        }
        assert_eq!(waiting.0.lock().len(), MOST);
    }
}
