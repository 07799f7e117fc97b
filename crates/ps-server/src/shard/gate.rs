//! Admission of messages by sender and clock. The decisions depend on the view alone; the gate has no state.

use shared_proto::ids::{Clock, Epoch, Origin, Task, names};
use shared_proto::job::{Mode, Strategy};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::View;

/// The decision about a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Proceed,
    /// The message waits until these tasks have advanced.
    Wait(Vec<Task>),
    Reject(Refusal),
}

/// The rules of a job.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    pub(crate) job: String,
    pub(crate) strategy: Strategy,
}

impl Gate {
    /// Checks that the sender is a live worker of this job.
    ///
    /// # Errors
    /// [`Reason::ForeignJob`], [`Reason::Fenced`], [`Reason::Superseded`].
    pub(crate) fn member(&self, origin: &Origin, view: &View) -> Result<(), Refusal> {
        let task = origin.task;
        if origin.job != self.job {
            return Err(Refusal::new(
                Reason::ForeignJob,
                format!(
                    "{task} belongs to job {:?}, but this server to {:?}; give it another coordinator's address",
                    origin.job, self.job
                ),
            ));
        }
        if origin.run.differs_from(view.run) {
            return Err(Refusal::new(
                Reason::Fenced,
                format!(
                    "{task} is a member of another run of the job than this server; register again"
                ),
            ));
        }
        let newer = |live: &&Task| live.id == task.id && live.generation > task.generation;
        if let Some(newer) = view.workers.iter().find(newer) {
            return Err(Refusal::new(
                Reason::Superseded,
                format!(
                    "generation {} of {task} has been superseded by generation {}, another process with its identity",
                    task.generation, newer.generation
                ),
            ));
        }
        if !view.workers.contains(&task) {
            return Err(Refusal::new(
                Reason::Fenced,
                format!(
                    "{task} of generation {} is not in view {}, which has {}; register again",
                    task.generation,
                    view.number,
                    names(&view.workers)
                ),
            ));
        }
        Ok(())
    }

    /// Checks that the sender uses this server's shard map.
    ///
    /// # Errors
    /// [`Reason::StaleEpoch`].
    pub(crate) fn epoch(origin: &Origin, epoch: Epoch) -> Result<(), Refusal> {
        if origin.epoch == epoch {
            return Ok(());
        }
        Err(Refusal::new(
            Reason::StaleEpoch,
            format!(
                "{} goes by the shard map of epoch {}, this server by that of epoch {epoch}; fetch the shard map again",
                origin.task, origin.epoch
            ),
        ))
    }

    /// Decides whether a worker may have the weights for its step at `clock`.
    pub(crate) fn pull(&self, task: Task, clock: Clock, view: &View) -> Admission {
        let min = match planted!(LooseBound) {
            true => view.min_clock.next(),
            false => view.min_clock,
        };
        if self.strategy.bound().admits(clock, min) {
            return Admission::Proceed;
        }
        // A worker asks for the weights of its next step while its last is being acknowledged: it
        // is at most one step beyond what has been admitted.
        let previous = Clock(clock.0.saturating_sub(1));
        if self.strategy.bound().admits(previous, min) {
            return Admission::Wait(view.slowest.clone());
        }
        Admission::Reject(self.too_far(task, clock, min))
    }

    /// Decides whether the shard may take a gradient of the step at `clock`.
    pub(crate) fn push(&self, task: Task, clock: Clock, view: &View) -> Admission {
        let min = view.min_clock;
        if !self.strategy.bound().admits(clock, min) {
            return Admission::Reject(self.too_far(task, clock, min));
        }
        if self.strategy.mode == Mode::Sync && clock < min {
            return Admission::Reject(Refusal::new(
                Reason::StaleClock,
                format!(
                    "step {clock} was committed without this gradient of {task}; {min} steps are committed, pull again"
                ),
            ));
        }
        Admission::Proceed
    }

    fn too_far(&self, task: Task, clock: Clock, min: Clock) -> Refusal {
        Refusal::new(
            Reason::FutureClock,
            format!(
                "{task} is at clock {clock}, which it cannot have reached: the slowest is at {min} in {} mode{}",
                self.strategy.mode.name(),
                match self.strategy.mode {
                    Mode::Bounded => format!(" with staleness bound {}", self.strategy.staleness),
                    Mode::Sync | Mode::Async => String::new(),
                }
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{prop_assert_eq, proptest};
    use shared_proto::ids::{Generation, RunNumber, Sequence, TaskId, ViewNumber};

    fn worker(index: u32) -> Task {
        Task {
            id: TaskId::worker(index),
            generation: Generation(1),
        }
    }

    fn gate(mode: Mode, staleness: u64) -> Gate {
        Gate {
            job: "j".to_owned(),
            strategy: Strategy {
                mode,
                staleness,
                ..Strategy::default()
            },
        }
    }

    fn view(min_clock: u64) -> View {
        View {
            number: ViewNumber(3),
            workers: vec![worker(0), worker(1)],
            min_clock: Clock(min_clock),
            slowest: vec![worker(1)],
            ..View::default()
        }
    }

    proptest! {
        #[test]
        fn no_pull_passes_beyond_the_bound(clock in 0u64..40, min in 0u64..40, k in 0u64..6) {
            let admission = gate(Mode::Bounded, k).pull(worker(0), Clock(clock), &view(min));
            prop_assert_eq!(admission == Admission::Proceed, clock <= min + k);
            prop_assert_eq!(
                admission == Admission::Wait(vec![worker(1)]),
                clock == min + k + 1
            );
        }

        #[test]
        fn async_never_waits(clock in 0u64..40, min in 0u64..40) {
            let gate = gate(Mode::Async, 0);
            prop_assert_eq!(gate.pull(worker(0), Clock(clock), &view(min)), Admission::Proceed);
            prop_assert_eq!(gate.push(worker(0), Clock(clock), &view(min)), Admission::Proceed);
        }

        #[test]
        fn sync_takes_gradients_of_the_open_step_alone(clock in 0u64..40, min in 0u64..40) {
            let admission = gate(Mode::Sync, 9).push(worker(0), Clock(clock), &view(min));
            prop_assert_eq!(admission == Admission::Proceed, clock == min);
        }
    }

    #[test]
    fn strangers_are_named() {
        let gate = gate(Mode::Async, 0);
        let mut origin = Origin {
            job: "other".to_owned(),
            run: RunNumber::default(),
            task: worker(0),
            epoch: Epoch(1),
            clock: Clock(0),
            sequence: Sequence(1),
        };
        let foreign = gate.member(&origin, &view(0)).unwrap_err();
        assert_eq!(foreign.reason, Reason::ForeignJob);
        origin.job = "j".to_owned();
        assert_eq!(gate.member(&origin, &view(0)), Ok(()));
        let of_run = View {
            run: RunNumber(7),
            ..view(0)
        };
        origin.run = RunNumber(5);
        let other = gate.member(&origin, &of_run).unwrap_err();
        assert_eq!(other.reason, Reason::Fenced);
        origin.run = RunNumber(7);
        assert_eq!(gate.member(&origin, &of_run), Ok(()));
        origin.task.generation = Generation(2);
        let fenced = gate.member(&origin, &view(0)).unwrap_err();
        assert_eq!(fenced.reason, Reason::Fenced);
        assert!(fenced.message.contains("worker-0"), "{fenced}");
        let stale = Gate::epoch(&origin, Epoch(2)).unwrap_err();
        assert_eq!(stale.reason, Reason::StaleEpoch);
        assert_eq!(Gate::epoch(&origin, Epoch(1)), Ok(()));
    }

    #[test]
    fn a_later_life_of_the_same_worker_supersedes_it_and_no_other() {
        let origin = |task| Origin {
            job: "j".to_owned(),
            run: RunNumber::default(),
            task,
            epoch: Epoch(1),
            clock: Clock(0),
            sequence: Sequence(1),
        };
        let again = |index| Task {
            generation: Generation(2),
            ..worker(index)
        };
        let view = View {
            workers: vec![again(0), again(1)],
            ..view(0)
        };
        let gate = gate(Mode::Async, 0);
        let reason = |task| gate.member(&origin(task), &view).unwrap_err().reason;
        assert_eq!(reason(worker(0)), Reason::Superseded);
        assert_eq!(reason(worker(2)), Reason::Fenced);
        assert_eq!(gate.member(&origin(again(0)), &view), Ok(()));
    }

    #[test]
    fn a_pull_or_push_that_cannot_have_come_so_far_says_why() {
        let gate = gate(Mode::Bounded, 3);
        let far = (worker(0), Clock(9), &view(2));
        let admissions = [
            gate.pull(far.0, far.1, far.2),
            gate.push(far.0, far.1, far.2),
        ];
        for admission in admissions {
            let Admission::Reject(refusal) = admission else {
                panic!("{admission:?}")
            };
            assert_eq!(refusal.reason, Reason::FutureClock);
            for part in ["worker-0", "clock 9", "at 2", "bounded", "bound 3"] {
                assert!(refusal.message.contains(part), "{refusal}");
            }
        }
    }
}
