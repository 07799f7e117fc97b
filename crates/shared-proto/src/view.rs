//! Views: the coordinator's decisions as numbered statements, which shards follow and enforce.

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
    /// The worker that sends the initial values, if one is chosen. Initial values from other workers are refused.
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
    /// The number of the run.
    pub run: RunNumber,
    /// The factor to which the job's `plateau` has lowered the learning rate; 1 without a fall. In sync mode, the
    /// factor changes only between two steps.
    pub learning_rate_factor: f64,
    /// The number of changes of the coordinator's state that were persisted when the coordinator published this view; 0
    /// if unknown.
    pub persisted: u64,
    /// The number of changes that were persisted when the coordinator's process opened its state.
    pub opened: u64,
    /// Sync mode, if the job limits the norm: the step whose gradients are all there, and whose norm the servers are to
    /// report.
    pub measured: Option<Commit>,
}

/// The order to write a checkpoint. In sync mode, the checkpoint has the state after one step. Otherwise, it has each
/// block as it is when the server saves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointOrder {
    /// The checkpoint's number.
    pub number: u64,
    /// The epoch in which it is to be written. After the epoch, the order lapses.
    pub epoch: Epoch,
    /// Sync mode: the number of committed steps in it.
    pub clock: Clock,
    /// The number of the checkpoint that this one may build on, so that only rows that have changed since then need to
    /// be written. `None`: all rows are written.
    #[serde(default)]
    pub base: Option<u64>,
}

/// The gradients that count in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Commit {
    /// The clock of the step's pushes.
    pub step: Clock,
    /// The workers that contributed, each with its number of samples, in rank order.
    pub contributors: Vec<(Task, u64)>,
    /// The factor by which the contributors' mean gradient is scaled, because the job limits its norm; `None`: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_factor: Option<f32>,
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
            persisted: 0,
            opened: 0,
            measured: None,
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
    /// Returns whether the coordinator has restarted with an outdated copy of its state since it published `earlier`, a
    /// view of the same run: the state that it has opened lacks changes from which `earlier` followed.
    pub fn is_older_than(&self, earlier: &Self) -> bool {
        let is_known = self.run != RunNumber::default() && self.persisted > 0;
        let opened_older = self.opened != earlier.opened && self.opened < earlier.persisted;
        is_known && self.run == earlier.run && (opened_older || self.persisted < earlier.persisted)
    }

    /// Returns whether the job has ended, successfully or not.
    pub fn ended(&self) -> bool {
        matches!(self.phase, JobPhase::Done | JobPhase::Failed)
    }
}

impl From<&View> for wire::View {
    fn from(view: &View) -> Self {
        Self {
            workers: tasks(&view.workers),
            commit: view.commit.as_ref().map(Commit::to_wire),
            measured: view.measured.as_ref().map(Commit::to_wire),
            ..view.without_lists()
        }
    }
}

fn tasks(tasks: &[Task]) -> Vec<wire::Task> {
    tasks.iter().copied().map(wire::Task::from).collect()
}

impl View {
    /// Returns the message for a peer that knows the workers `known` of an earlier view. If the workers are the same,
    /// the message leaves them out.
    pub fn difference(&self, known: &[Task]) -> wire::View {
        let same_workers = !known.is_empty() && self.workers == known;
        wire::View {
            workers: match same_workers {
                true => Vec::new(),
                false => tasks(&self.workers),
            },
            same_workers,
            commit: self
                .commit
                .as_ref()
                .map(|commit| commit.among(&self.workers)),
            measured: self.measured.as_ref().map(|step| step.among(&self.workers)),
            ..self.without_lists()
        }
    }

    /// Returns the message without workers and commit.
    fn without_lists(&self) -> wire::View {
        wire::View {
            number: self.number.0,
            epoch: self.epoch.0,
            workers: Vec::new(),
            min_clock: self.min_clock.0,
            slowest: tasks(&self.slowest),
            initializer: self.initializer.map(Into::into),
            initialized: self.initialized,
            commit: None,
            phase: self.phase.into(),
            error: self.error.clone(),
            checkpoint: self.checkpoint.map(|order| wire::CheckpointOrder {
                number: order.number,
                epoch: order.epoch.0,
                clock: order.clock.0,
                base: order.base,
            }),
            run: self.run.0,
            learning_rate_factor: Some(self.learning_rate_factor),
            same_workers: false,
            persisted: self.persisted,
            opened: self.opened,
            measured: None,
        }
    }

    /// Reads a message that may leave out the workers. They are then `known`, those of the view before.
    ///
    /// # Errors
    /// [`Reason::Malformed`].
    pub fn read(view: wire::View, known: &[Task]) -> Result<Self, Refusal> {
        let tasks = |tasks: &[wire::Task]| -> Result<Vec<Task>, Refusal> {
            tasks.iter().map(Task::try_from).collect()
        };
        let workers = match view.same_workers {
            true => known.to_vec(),
            false => tasks(&view.workers)?,
        };
        let phase = view.phase();
        Ok(Self {
            number: ViewNumber(view.number),
            epoch: Epoch(view.epoch),
            min_clock: Clock(view.min_clock),
            slowest: tasks(&view.slowest)?,
            initializer: view.initializer.as_ref().map(Task::try_from).transpose()?,
            initialized: view.initialized,
            commit: view
                .commit
                .map(|commit| Commit::read(commit, &workers))
                .transpose()?,
            measured: view
                .measured
                .map(|commit| Commit::read(commit, &workers))
                .transpose()?,
            workers,
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
            persisted: view.persisted,
            opened: view.opened,
        })
    }
}

impl Commit {
    /// Returns the message for a peer that knows these workers. If they are exactly the contributors, the message
    /// leaves out the contributors.
    fn among(&self, workers: &[Task]) -> wire::Commit {
        let contributors = self.contributors.iter().map(|(task, _)| task);
        match contributors.eq(workers) {
            true => wire::Commit {
                contributors: Vec::new(),
                samples: self.contributors.iter().map(|(_, n)| *n).collect(),
                ..self.to_wire()
            },
            false => self.to_wire(),
        }
    }

    /// Returns the number of samples of all contributors.
    pub fn samples(&self) -> u64 {
        self.contributors.iter().map(|(_, samples)| samples).sum()
    }

    fn to_wire(&self) -> wire::Commit {
        let contributor = |(task, samples): &(Task, u64)| wire::Contributor {
            task: Some((*task).into()),
            samples: *samples,
        };
        wire::Commit {
            step: self.step.0,
            contributors: self.contributors.iter().map(contributor).collect(),
            samples: Vec::new(),
            clip_factor: self.clip_factor,
        }
    }

    fn read(commit: wire::Commit, workers: &[Task]) -> Result<Self, Refusal> {
        let malformed = |what| Refusal::new(Reason::Malformed, what);
        let contributors: Vec<(Task, u64)> = match commit.samples.as_slice() {
            [] => commit
                .contributors
                .iter()
                .map(|c| {
                    let task = c.task.as_ref();
                    let task =
                        task.ok_or_else(|| malformed("a contributor of a commit has no task"))?;
                    Ok((task.try_into()?, c.samples))
                })
                .collect::<Result<_, Refusal>>()?,
            samples if samples.len() == workers.len() && commit.contributors.is_empty() => workers
                .iter()
                .copied()
                .zip(samples.iter().copied())
                .collect(),
            _ => {
                return Err(malformed(
                    "a commit has numbers of samples for other workers than those of the view",
                ));
            }
        };
        let mut samples = contributors.iter().map(|(_, samples)| *samples);
        if samples.try_fold(0, u64::checked_add).is_none() {
            return Err(malformed(
                "the samples of a commit add up to more than 64 bits hold",
            ));
        }
        if let Some(factor) = commit.clip_factor
            && !(0.0..=1.0).contains(&factor)
        {
            return Err(malformed("the clip_factor of a commit is not from 0 to 1"));
        }
        Ok(Self {
            step: Clock(commit.step),
            contributors,
            clip_factor: commit.clip_factor,
        })
    }
}

impl TryFrom<wire::View> for View {
    type Error = Refusal;

    fn try_from(view: wire::View) -> Result<Self, Refusal> {
        Self::read(view, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Generation, TaskId};

    #[test]
    fn a_view_survives_the_wire() {
        let task = |index| Task {
            id: TaskId::worker(index),
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
                clip_factor: Some(0.25),
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
            persisted: 12,
            opened: 10,
            measured: Some(Commit {
                step: Clock(4),
                contributors: vec![(task(0), 16)],
                clip_factor: None,
            }),
        };
        assert_eq!(View::try_from(wire::View::from(&view)).unwrap(), view);
    }

    #[test]
    fn a_peer_that_knows_the_workers_reads_the_same_view() {
        let task = |index, generation| Task {
            id: TaskId::worker(index),
            generation: Generation(generation),
        };
        let workers = vec![task(0, 2), task(3, 2)];
        let replaced = vec![task(0, 2), task(3, 3)];
        let alike = vec![(task(0, 2), 16), (task(3, 2), 7)];
        for contributors in [
            alike.clone(),
            alike[..1].to_vec(),
            Vec::new(),
            vec![(task(0, 2), 16), (task(3, 1), 7)],
        ] {
            let view = View {
                workers: workers.clone(),
                commit: Some(Commit {
                    step: Clock(3),
                    contributors: contributors.clone(),
                    clip_factor: None,
                }),
                ..View::default()
            };
            for known in [&workers, &replaced, &Vec::new()] {
                let message = view.difference(known);
                assert_eq!(message.same_workers, *known == workers);
                assert_eq!(message.workers.is_empty(), *known == workers);
                let commit = message.commit.as_ref().unwrap();
                assert_eq!(commit.samples.is_empty(), contributors != alike);
                assert_eq!(View::read(message, known).unwrap(), view);
            }
        }
        // A view without workers names none, whatever the peer knows.
        let nobody = View::default();
        for known in [&workers, &Vec::new()] {
            assert_eq!(View::read(nobody.difference(known), known).unwrap(), nobody);
        }
        let mut short = View {
            workers: workers.clone(),
            commit: Some(Commit {
                step: Clock(3),
                contributors: alike,
                clip_factor: None,
            }),
            ..View::default()
        }
        .difference(&workers);
        short.commit.as_mut().unwrap().samples.pop();
        assert!(View::read(short, &workers).is_err());
    }

    #[test]
    fn a_process_that_has_opened_less_than_was_followed_has_an_older_copy() {
        let view = |run, opened, persisted| View {
            run: RunNumber(run),
            opened,
            persisted,
            ..View::default()
        };
        let followed = view(7, 10, 100);
        for (later, is_older) in [
            (view(7, 10, 101), false),
            (view(7, 100, 101), false),
            (view(7, 120, 500), false),
            // Its own changes may have passed the number since.
            (view(7, 99, 500), true),
            (view(7, 10, 99), true),
            (view(8, 1, 2), false),
            (view(7, 0, 0), false),
        ] {
            assert_eq!(later.is_older_than(&followed), is_older, "{later:?}");
        }
        assert!(!view(0, 1, 2).is_older_than(&view(0, 10, 100)));
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
                ..wire::Commit::default()
            }),
            ..wire::View::default()
        };
        View::try_from(view(0)).unwrap();
        let refused = View::try_from(view(1)).unwrap_err();
        assert_eq!(refused.reason, Reason::Malformed);
    }
}
