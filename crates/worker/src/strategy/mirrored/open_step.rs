//! The step of a ring that is open: the answers of its members to rank 0, in jobs with backup workers and in those with devices that add up.

use std::cell::{Cell, RefCell};

use collective::Rank;
use shared_proto::planted;

/// A message of a member to rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The gradient is ready, or the device has done its part.
    Ready,
    /// The member has no samples.
    NoSamples,
    /// The step was closed before the gradient was ready.
    Late,
}

impl Answer {
    pub(super) fn of_signal(signal: u8) -> Option<Self> {
        let all = [Self::Ready, Self::NoSamples, Self::Late];
        all.into_iter().find(|answer| *answer as u8 == signal)
    }
}

/// The signal of rank 0 that closes a step, or releases the others.
pub(super) const CLOSE: u8 = 0xff;

/// The state of a step that is open.
#[derive(Default)]
pub(super) struct OpenStep {
    /// On rank 0, the answers of all members, itself included.
    pub(super) answers: RefCell<Vec<Option<Answer>>>,
    /// True while this member waits for others, and not for its own pass.
    pub(super) waits: Cell<bool>,
}

impl OpenStep {
    /// Returns the ranks for which the member `rank` waits: rank 0 for those that have not answered, the others for
    /// rank 0.
    pub(super) fn awaited_by(&self, rank: Rank) -> Vec<Rank> {
        match (self.waits.get(), rank) {
            (false, _) => Vec::new(),
            (true, 0) => self.missing(),
            (true, _) => vec![0],
        }
    }

    /// Returns the other ranks that have not answered rank 0.
    pub(super) fn missing(&self) -> Vec<Rank> {
        let answers = self.answers.borrow();
        let others = answers.iter().enumerate().skip(1);
        let missing = others.filter(|(_, answer)| answer.is_none());
        missing.map(|(rank, _)| rank).collect()
    }

    pub(super) fn note(&self, rank: Rank, answer: Answer) {
        self.answers.borrow_mut()[rank] = Some(answer);
    }

    /// Returns whether the answers are enough to close a step that does not wait for `backups` members.
    pub(super) fn has_enough(&self, backups: usize) -> bool {
        let answers = self.answers.borrow();
        let count = |wanted| answers.iter().filter(|a| **a == Some(wanted)).count();
        let (ready, without) = (count(Answer::Ready), count(Answer::NoSamples));
        ready + without + backups >= answers.len() && (ready > 0 || planted!(ClosesEmpty))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(answers: &[Option<Answer>]) -> OpenStep {
        let step = OpenStep::default();
        *step.answers.borrow_mut() = answers.to_vec();
        step
    }

    #[test]
    fn a_step_is_closed_once_all_but_the_backup_workers_have_answered() {
        use Answer::{Late, NoSamples, Ready};
        let (ready, without, late) = (Some(Ready), Some(NoSamples), Some(Late));
        let enough = |answers: &[Option<Answer>], backups| step(answers).has_enough(backups);
        assert!(enough(&[ready, None, ready, ready], 1));
        assert!(!enough(&[ready, None, None, ready], 1));
        assert!(enough(&[ready, None, None, ready], 2));
        // A late member's answer does not count.
        assert!(!enough(&[ready, late, None, ready], 1));
        // In the last step of an epoch some have no samples; one gradient is needed all the same.
        assert!(!enough(&[None, without, without, without], 1));
        assert!(enough(&[ready, without, without, None], 1));
        // A ring may be smaller than the number of backup workers.
        assert!(enough(&[ready, None], 3));
        assert!(!enough(&[None, None], 3));
    }

    #[test]
    fn rank_0_waits_for_those_that_have_not_answered_and_the_others_for_rank_0() {
        let step = step(&[Some(Answer::Ready), None, Some(Answer::Ready), None]);
        assert!(step.awaited_by(0).is_empty());
        step.waits.set(true);
        assert_eq!(step.awaited_by(0), [1, 3]);
        assert_eq!(step.awaited_by(2), [0]);
    }

    #[test]
    fn each_answer_has_a_signal_of_its_own() {
        for answer in [Answer::Ready, Answer::NoSamples, Answer::Late] {
            assert_eq!(Answer::of_signal(answer as u8), Some(answer));
        }
        assert_eq!(Answer::of_signal(CLOSE), None);
        assert_eq!(Answer::of_signal(3), None);
    }
}
