//! Ids and counters: tasks, generations, clocks, epochs, versions.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::refusal::{Reason, Refusal};
use crate::wire;

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub u64);

        impl $name {
            /// Returns the number after this one.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

counter! {
    /// The number of times that a task has registered, from 1. It fences messages of an earlier generation.
    Generation
}
counter! {
    /// The number of steps that a worker has finished.
    /// The push of a step carries the clock before the step, `FinishStep` the clock after it.
    Clock
}
counter! {
    /// The number of a shard map, from 1, raised whenever blocks move or are restored. 0: none yet.
    Epoch
}
counter! {
    /// The number of updates that a block has taken since its initial values. A restore sets it back, so versions are
    /// compared together with the epoch.
    Version
}
counter! {
    /// The number of a message among those of one task and generation, from 1.
    Sequence
}
counter! {
    /// The number of a view.
    ViewNumber
}

/// The number of a run. A run is a job from beginning to end, under one coordinator process or several that resume from
/// the same state. 0: unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RunNumber(pub u64);

impl RunNumber {
    /// Returns the number of the run with this id, which is the number in hexadecimal digits; 0 for any other text.
    pub fn of(id: &str) -> Self {
        Self(u64::from_str_radix(id, 16).unwrap_or(0))
    }

    /// Returns whether both runs are known and differ.
    pub fn differs_from(self, other: Self) -> bool {
        self != other && self.0 != 0 && other.0 != 0
    }
}

/// The highest clock that a message may state. No job has so many steps, and sums of clocks do not overflow.
pub const HIGHEST_CLOCK: Clock = Clock(1 << 61);

/// The role of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Decides which members are live, which step is committed, and where blocks live.
    Coordinator,
    /// Holds a shard of the variables.
    Ps,
    /// Computes gradients.
    Worker,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Coordinator => "coordinator",
            Role::Ps => "ps",
            Role::Worker => "worker",
        })
    }
}

/// A process's place in the cluster: its role, and its index within the role. The place outlives restarts of the
/// process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TaskId {
    /// The role of the process.
    pub role: Role,
    /// The index within the role, from 0.
    pub index: u32,
}

impl TaskId {
    /// Returns the worker with this index.
    pub const fn worker(index: u32) -> Self {
        let role = Role::Worker;
        Self { role, index }
    }

    /// Returns the parameter server with this index.
    pub const fn ps(index: u32) -> Self {
        let role = Role::Ps;
        Self { role, index }
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.role, self.index)
    }
}

/// A task in one of its generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Task {
    /// The task's place in the cluster.
    pub id: TaskId,
    /// The generation.
    pub generation: Generation,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id.fmt(f)
    }
}

impl From<Role> for wire::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Coordinator => Self::Coordinator,
            Role::Ps => Self::Ps,
            Role::Worker => Self::Worker,
        }
    }
}

impl TryFrom<i32> for Role {
    type Error = Refusal;

    fn try_from(number: i32) -> Result<Self, Refusal> {
        match wire::Role::try_from(number) {
            Ok(wire::Role::Coordinator) => Ok(Role::Coordinator),
            Ok(wire::Role::Ps) => Ok(Role::Ps),
            Ok(wire::Role::Worker) => Ok(Role::Worker),
            _ => Err(Refusal::new(
                Reason::Malformed,
                format!("role {number} is unknown; expected 1 (coordinator), 2 (ps) or 3 (worker)"),
            )),
        }
    }
}

impl From<Task> for wire::Task {
    fn from(task: Task) -> Self {
        Self {
            role: wire::Role::from(task.id.role).into(),
            index: task.id.index,
            generation: task.generation.0,
        }
    }
}

impl TryFrom<&wire::Task> for Task {
    type Error = Refusal;

    fn try_from(task: &wire::Task) -> Result<Self, Refusal> {
        Ok(Task {
            id: TaskId {
                role: Role::try_from(task.role)?,
                index: task.index,
            },
            generation: Generation(task.generation),
        })
    }
}

/// The sender of a message, and its position in the training: [`wire::Origin`], checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The name of the job.
    pub job: String,
    /// The run that the sender is a member of.
    pub run: RunNumber,
    /// The sender.
    pub task: Task,
    /// The epoch of the shard map that the sender uses.
    pub epoch: Epoch,
    /// The number of steps that the sender has finished.
    pub clock: Clock,
    /// The number of the message.
    pub sequence: Sequence,
}

impl Origin {
    /// Reads the origin of a message. `what` is the name of the message for errors.
    ///
    /// # Errors
    /// [`Reason::Malformed`] if the origin or its task is missing, or the clock is above [`HIGHEST_CLOCK`].
    pub fn read(origin: Option<&wire::Origin>, what: &str) -> Result<Self, Refusal> {
        let missing = |field| {
            Refusal::new(
                Reason::Malformed,
                format!("{what} lacks {field}; every message but the shortest needs it"),
            )
        };
        let origin = origin.ok_or_else(|| missing("origin"))?;
        let task = origin
            .task
            .as_ref()
            .ok_or_else(|| missing("origin.task"))?
            .try_into()?;
        if origin.clock > HIGHEST_CLOCK.0 {
            return Err(Refusal::new(
                Reason::Malformed,
                format!(
                    "{what} has origin.clock {}; no worker finishes more than {HIGHEST_CLOCK} steps",
                    origin.clock
                ),
            ));
        }
        Ok(Self {
            job: origin.job.clone(),
            run: RunNumber(origin.run),
            task,
            epoch: Epoch(origin.epoch),
            clock: Clock(origin.clock),
            sequence: Sequence(origin.sequence),
        })
    }
}

impl From<Origin> for wire::Origin {
    fn from(origin: Origin) -> Self {
        Self {
            job: origin.job,
            run: origin.run.0,
            task: Some(origin.task.into()),
            epoch: origin.epoch.0,
            clock: origin.clock.0,
            sequence: origin.sequence.0,
        }
    }
}

/// Lists tasks for messages to people, as in "worker-0, worker-3".
pub fn names<'a>(tasks: impl IntoIterator<Item = &'a Task>) -> String {
    let mut names: Vec<String> = tasks.into_iter().map(Task::to_string).collect();
    names.dedup();
    if names.is_empty() {
        "nobody".to_owned()
    } else {
        names.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_no_worker_reaches_is_refused() {
        let worker = Task {
            id: TaskId::worker(0),
            generation: Generation(1),
        };
        let origin = |clock| wire::Origin {
            task: Some(worker.into()),
            clock,
            ..wire::Origin::default()
        };
        let read = |clock| Origin::read(Some(&origin(clock)), "Push");
        assert_eq!(read(HIGHEST_CLOCK.0).unwrap().clock, HIGHEST_CLOCK);
        let refused = read(HIGHEST_CLOCK.0 + 1).unwrap_err();
        assert_eq!(refused.reason, Reason::Malformed);
    }
}
