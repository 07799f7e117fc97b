//! Who is there: registration, leases, generations.

use std::time::{Duration, Instant};

use shared_proto::ids::{Clock, Generation, Role, Sequence, Task, TaskId};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::JobPhase;
use shared_proto::wire;

use super::Cluster;
use crate::record::Record;

/// One process of the job.
pub(crate) struct Member {
    pub(crate) task: Task,
    pub(crate) identity: String,
    pub(crate) address: String,
    pub(crate) metrics_address: String,
    pub(crate) seen: Instant,
    pub(crate) alive: bool,
    /// Why it is not alive.
    pub(crate) gone: &'static str,
    /// Workers only.
    pub(crate) progress: Progress,
}

/// A worker's part in the training.
pub(crate) struct Progress {
    pub(crate) clock: Clock,
    /// Holds data, so others wait for it.
    pub(crate) active: bool,
    /// Has asked for work: knows the variables and can take part in a step.
    pub(crate) ready: bool,
    /// Of the newest FinishStep, so that one sent again does not count again.
    pub(crate) finished: Sequence,
    /// When it last finished a step or took up work.
    pub(crate) moved: Instant,
    pub(crate) samples: u64,
    pub(crate) steps: u64,
    pub(crate) loss: f64,
    pub(crate) samples_per_second: f64,
    pub(crate) times: wire::StepTimes,
    pub(crate) waiting_on: Vec<wire::Task>,
}

impl Progress {
    fn new(now: Instant) -> Self {
        Self {
            clock: Clock(0),
            active: false,
            ready: false,
            finished: Sequence(0),
            moved: now,
            samples: 0,
            steps: 0,
            loss: f64::NAN,
            samples_per_second: 0.0,
            times: wire::StepTimes::default(),
            waiting_on: Vec::new(),
        }
    }
}

impl Cluster {
    /// Makes the caller a member; supersedes an earlier process of the same identity at once.
    ///
    /// # Errors
    /// [`Reason::Malformed`] for a role that does not register, or without an identity.
    pub(crate) fn register(
        &mut self,
        now: Instant,
        role: Role,
        request: wire::RegisterRequest,
    ) -> Result<Task, Refusal> {
        if role == Role::Coordinator || request.identity.is_empty() {
            return Err(Refusal::new(
                Reason::Malformed,
                "only ps and worker processes register, each with an identity that is not empty",
            ));
        }
        let earlier = self
            .members
            .values()
            .find(|m| m.task.id.role == role && m.identity == request.identity)
            .map(|m| m.task);
        let task = match earlier {
            Some(task) => {
                self.remove(
                    now,
                    task.id,
                    "superseded by a newer process of its identity",
                );
                Task {
                    generation: task.generation.next(),
                    ..task
                }
            }
            None => Task {
                id: TaskId {
                    role,
                    index: self.members.keys().filter(|id| id.role == role).count() as u32,
                },
                generation: Generation(1),
            },
        };
        let member = Member {
            task,
            identity: request.identity,
            address: request.address,
            metrics_address: request.metrics_address,
            seen: now,
            alive: true,
            gone: "",
            progress: Progress::new(now),
        };
        self.members.insert(task.id, member);
        if role == Role::Ps {
            self.last_ps_joined = Some(now);
        }
        self.records.push(Record::Joined {
            seconds: self.seconds(now),
            task: task.to_string(),
            generation: task.generation.0,
        });
        Ok(task)
    }

    /// Renews a lease.
    pub(crate) fn heartbeat(&mut self, now: Instant, task: Task) {
        if let Some(member) = self.members.get_mut(&task.id) {
            member.seen = now;
        }
    }

    /// Gives a lease back. A worker that leaves with an error ends the job.
    pub(crate) fn leave(&mut self, now: Instant, task: Task, error: String) {
        if !error.is_empty() {
            self.fail(now, format!("{task}: {error}"));
        }
        self.remove(now, task.id, "it has left");
    }

    /// Ends leases that have run out, and puts out workers that hold others up without moving.
    pub(crate) fn tick(&mut self, now: Instant) {
        let lease = self.lease();
        // Where this process was stopped for a while, so were the heartbeats to it.
        let gap = now.duration_since(self.ticked.replace(now).unwrap_or(now));
        if gap > lease / 2 {
            for member in self.members.values_mut() {
                member.seen += gap;
                member.progress.moved += gap;
            }
        }
        let silent: Vec<TaskId> = self
            .members
            .values()
            .filter(|m| m.alive && now.duration_since(m.seen) > lease)
            .map(|m| m.task.id)
            .collect();
        for id in silent {
            self.remove(now, id, "nothing was heard from it");
        }
        if self.phase != JobPhase::Training {
            return;
        }
        let stall = Duration::from_secs_f64(self.job.cluster.stall_seconds);
        let blamed = self.slowest().into_iter().chain(self.evaluations.holder());
        let stalled: Vec<TaskId> = blamed
            .map(|task| task.id)
            .filter(|id| {
                let member = self.members.get(id);
                member.is_some_and(|m| now.duration_since(m.progress.moved) > stall)
            })
            .collect();
        for id in stalled {
            self.remove(now, id, "it finished no step for the stall time-out");
        }
    }

    fn remove(&mut self, now: Instant, id: TaskId, why: &'static str) {
        let Some(member) = self.members.get_mut(&id).filter(|m| m.alive) else {
            return;
        };
        member.alive = false;
        member.gone = why;
        member.progress.active = false;
        member.progress.ready = false;
        let task = member.task;
        if !self.ended() {
            tracing::warn!(%task, generation = task.generation.0, why, "a member is gone");
        }
        self.records.push(Record::Left {
            seconds: self.seconds(now),
            task: task.to_string(),
            why,
        });
        if let Some(variables) = &mut self.variables {
            variables.initializer = variables.initializer.filter(|t| *t != task);
        }
        if let Some(ledger) = &mut self.ledger {
            ledger.release(task);
        }
        self.evaluations.release(task);
        self.leave_step(now, task);
        if let Some(shard) = self.shard_of(task) {
            self.fail(
                now,
                format!("{task}, the server of shard {shard}, is gone ({why}), and its values with it; start the job again"),
            );
        }
    }

    fn shard_of(&self, task: Task) -> Option<usize> {
        let servers = &self.variables.as_ref()?.servers;
        servers.iter().position(|server| *server == task)
    }
}
