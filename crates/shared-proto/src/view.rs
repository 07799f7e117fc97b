//! The coordinator's decisions: the numbered statement that shards follow and enforce.

use serde::{Deserialize, Serialize};

use crate::ids::{Clock, Epoch, RunNumber, Task, ViewNumber};
use crate::refusal::{Reason, Refusal};
use crate::wire;

pub use crate::wire::JobPhase;

/// [`wire::View`], checked. Each view is complete, so a process needs only the newest.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// The view's number, which grows with each change.
    pub number: ViewNumber,
    /// The epoch of the shard map; 0 until variables are registered.
    pub epoch: Epoch,
    /// The live workers in rank order.
    pub workers: Vec<Task>,
    /// The lowest clock of the workers that hold data; in sync mode the number of committed steps. It falls only in
    /// sync mode, with a new epoch, when the job goes back to a checkpoint.
    pub min_clock: Clock,
    /// The workers at the min clock.
    pub slowest: Vec<Task>,
    /// The worker that sends the initial values; no other's are accepted.
    pub initializer: Option<Task>,
    /// True if the variables have their initial values.
    pub initialized: bool,
    /// Sync mode: the newest committed step.
    pub commit: Option<Commit>,
    /// The phase of the job.
    pub phase: JobPhase,
    /// The error with which the job failed; empty otherwise.
    pub error: String,
    /// The newest checkpoint that was ordered.
    pub checkpoint: Option<CheckpointOrder>,
    /// The run.
    pub run: RunNumber,
    /// The factor of the learning rate that the job's `plateau` has led to. In sync mode it changes between two steps alone.
    pub learning_rate_factor: f64,
}

/// A checkpoint that is to be written: in sync mode of one step, else of each block as it is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointOrder {
    /// The checkpoint's number.
    pub number: u64,
    /// The epoch in which it is to be written. After the epoch, the order lapses.
    pub epoch: Epoch,
    /// Sync mode: the number of committed steps in it.
    pub clock: Clock,
    /// The checkpoint that it may build on: only rows that have changed since need to be written. None: all rows.
    #[serde(default)]
    pub base: Option<u64>,
}

/// A step's gradients that count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// The clock of the step's pushes.
    pub step: Clock,
    /// The workers that contributed, each with its number of samples, in rank order.
    pub contributors: Vec<(Task, u64)>,
}

impl Default for View {
    fn default() -> Self {
        Self {
            number: ViewNumber(0),
            epoch: Epoch(0),
            workers: Vec::new(),
            min_clock: Clock(0),
            slowest: Vec::new(),
            initializer: None,
            initialized: false,
            commit: None,
            phase: JobPhase::Starting,
            error: String::new(),
            checkpoint: None,
            run: RunNumber::default(),
            learning_rate_factor: 1.0,
        }
    }
}

/// Reads the factor of the learning rate in a message; it is 1 if the message has none.
///
/// # Errors
/// [`Reason::Malformed`] if it is not positive, or larger than 1.
pub fn learning_rate_factor(factor: Option<f64>) -> Result<f64, Refusal> {
    let factor = factor.unwrap_or(1.0);
    match factor > 0.0 && factor <= 1.0 {
        true => Ok(factor),
        false => Err(Refusal::new(
            Reason::Malformed,
            format!(
                "the factor of the learning rate is {factor}; it is more than 0, and 1 at most"
            ),
        )),
    }
}

impl View {
    /// Returns whether the job has ended, well or not.
    pub fn ended(&self) -> bool {
        matches!(self.phase, JobPhase::Done | JobPhase::Failed)
    }
}

impl From<&View> for wire::View {
    fn from(view: &View) -> Self {
        let tasks = |tasks: &[Task]| tasks.iter().copied().map(wire::Task::from).collect();
        Self {
            number: view.number.0,
            epoch: view.epoch.0,
            workers: tasks(&view.workers),
            min_clock: view.min_clock.0,
            slowest: tasks(&view.slowest),
            initializer: view.initializer.map(Into::into),
            initialized: view.initialized,
            commit: view.commit.as_ref().map(|commit| wire::Commit {
                step: commit.step.0,
                contributors: commit
                    .contributors
                    .iter()
                    .map(|(task, samples)| wire::Contributor {
                        task: Some((*task).into()),
                        samples: *samples,
                    })
                    .collect(),
            }),
            phase: view.phase.into(),
            error: view.error.clone(),
            checkpoint: view.checkpoint.map(|order| wire::CheckpointOrder {
                number: order.number,
                epoch: order.epoch.0,
                clock: order.clock.0,
                base: order.base,
            }),
            run: view.run.0,
            learning_rate_factor: Some(view.learning_rate_factor),
        }
    }
}

impl TryFrom<wire::View> for View {
    type Error = Refusal;

    fn try_from(view: wire::View) -> Result<Self, Refusal> {
        let tasks = |tasks: &[wire::Task]| -> Result<Vec<Task>, Refusal> {
            tasks.iter().map(Task::try_from).collect()
        };
        let commit = |commit: wire::Commit| -> Result<Commit, Refusal> {
            let contributors = commit
                .contributors
                .iter()
                .map(|c| {
                    let task = c.task.as_ref().ok_or_else(|| {
                        Refusal::new(Reason::Malformed, "a contributor of a commit has no task")
                    })?;
                    Ok((task.try_into()?, c.samples))
                })
                .collect::<Result<_, Refusal>>()?;
            let mut samples = commit.contributors.iter().map(|c| c.samples);
            let total = samples.try_fold(0, u64::checked_add);
            if total.is_none() {
                let what = "the samples of a commit add up to more than 64 bits hold";
                return Err(Refusal::new(Reason::Malformed, what));
            }
            Ok(Commit {
                step: Clock(commit.step),
                contributors,
            })
        };
        let phase = view.phase();
        Ok(Self {
            number: ViewNumber(view.number),
            epoch: Epoch(view.epoch),
            workers: tasks(&view.workers)?,
            min_clock: Clock(view.min_clock),
            slowest: tasks(&view.slowest)?,
            initializer: view.initializer.as_ref().map(Task::try_from).transpose()?,
            initialized: view.initialized,
            commit: view.commit.map(commit).transpose()?,
            phase,
            error: view.error,
            checkpoint: view.checkpoint.map(|order| CheckpointOrder {
                number: order.number,
                epoch: Epoch(order.epoch),
                clock: Clock(order.clock),
                base: order.base,
            }),
            run: RunNumber(view.run),
            learning_rate_factor: learning_rate_factor(view.learning_rate_factor)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Generation, Role, TaskId};

    #[test]
    fn a_view_survives_the_wire() {
        let task = |index| Task {
            id: TaskId {
                role: Role::Worker,
                index,
            },
            generation: Generation(2),
        };
        let view = View {
            number: ViewNumber(9),
            epoch: Epoch(1),
            workers: vec![task(0), task(3)],
            min_clock: Clock(4),
            slowest: vec![task(3)],
            initializer: Some(task(0)),
            initialized: true,
            commit: Some(Commit {
                step: Clock(3),
                contributors: vec![(task(0), 16), (task(3), 7)],
            }),
            phase: JobPhase::Training,
            error: String::new(),
            checkpoint: Some(CheckpointOrder {
                number: 4,
                epoch: Epoch(1),
                clock: Clock(4),
                base: Some(3),
            }),
            run: RunNumber(7),
            learning_rate_factor: 0.1,
        };
        assert_eq!(View::try_from(wire::View::from(&view)).unwrap(), view);
    }

    #[test]
    fn a_view_with_an_impossible_learning_rate_is_refused() {
        for factor in [0.0, -1.0, 1.5, f64::NAN] {
            let view = wire::View {
                learning_rate_factor: Some(factor),
                ..wire::View::default()
            };
            assert!(View::try_from(view).is_err(), "{factor}");
        }
        assert_eq!(
            View::try_from(wire::View::default())
                .unwrap()
                .learning_rate_factor,
            1.0
        );
    }

    #[test]
    fn a_commit_of_more_samples_than_can_be_counted_is_refused() {
        let contributor = |samples| wire::Contributor {
            task: Some(wire::Task {
                role: wire::Role::Worker.into(),
                index: 0,
                generation: 1,
            }),
            samples,
        };
        let view = |more| wire::View {
            commit: Some(wire::Commit {
                step: 1,
                contributors: vec![contributor(u64::MAX), contributor(more)],
            }),
            ..wire::View::default()
        };
        View::try_from(view(0)).unwrap();
        let refused = View::try_from(view(1)).unwrap_err();
        assert_eq!(refused.reason, Reason::Malformed);
    }
}
