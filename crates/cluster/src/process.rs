//! The process that has an identity, and its newest registration. Calls may arrive late, or twice.

use serde_tuple::{Deserialize_tuple, Serialize_tuple};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

/// The maximum number of earlier processes of an identity that are remembered.
const REMEMBERED: usize = 8;

/// The process behind a member, and its newest registration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize_tuple, Deserialize_tuple)]
pub(crate) struct Process {
    /// A number that the process has drawn at random; 0 if the process states none.
    id: u64,
    attempt: u32,
    /// The ids of the processes that had the identity before, the newest last.
    superseded: Vec<u64>,
}

impl Process {
    /// Returns the first process of an identity.
    pub(super) fn new(request: &wire::RegisterRequest) -> Self {
        Self {
            id: request.process,
            attempt: request.attempt,
            superseded: Vec::new(),
        }
    }

    /// Returns the process behind the identity after this registration. The result equals `self` if the registration
    /// was accepted before.
    ///
    /// # Errors
    /// [`Reason::OutOfOrder`] for an older registration of the same process, [`Reason::Superseded`] for one of a
    /// process that another process of the identity has replaced.
    pub(super) fn next(&self, request: &wire::RegisterRequest) -> Result<Self, Refusal> {
        let told = request.process != 0;
        if told && self.superseded.contains(&request.process) {
            return Err(Refusal::new(
                Reason::Superseded,
                format!(
                    "another process has registered with the identity {:?} since; give each process one of its own",
                    request.identity
                ),
            ));
        }
        let mut next = Self::new(request);
        next.superseded.clone_from(&self.superseded);
        if told && request.process == self.id {
            if request.attempt < self.attempt {
                return Err(Refusal::new(
                    Reason::OutOfOrder,
                    format!(
                        "registration {} of {:?} is older than its registration {}, which was accepted; give the next one a higher number",
                        request.attempt, request.identity, self.attempt
                    ),
                ));
            }
        } else if self.id != 0 {
            next.superseded.push(self.id);
            let surplus = next.superseded.len().saturating_sub(REMEMBERED);
            next.superseded.drain(..surplus);
        } else if !told {
            // Calls without a process id cannot be told apart: each is a new registration.
            next.attempt = self.attempt.wrapping_add(1);
        }
        Ok(next)
    }

    /// Returns the refusal of a registration whose membership has ended. The registration arrives late, or its reply
    /// was lost for longer than the lease.
    pub(super) fn is_over(&self, identity: &str) -> Refusal {
        Refusal::new(
            Reason::OutOfOrder,
            format!(
                "registration {} of {identity:?} was accepted before, and its membership has ended; give the next one a higher number",
                self.attempt
            ),
        )
    }

    /// Returns whether both registrations are known to come from one process.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.id != 0 && self.id == other.id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(process: u64, attempt: u32) -> wire::RegisterRequest {
        wire::RegisterRequest {
            identity: "ps-0".to_owned(),
            process,
            attempt,
            ..wire::RegisterRequest::default()
        }
    }

    #[test]
    fn a_registration_that_comes_twice_is_the_same_and_one_that_comes_late_is_refused() {
        let first = Process::new(&request(7, 1));
        assert_eq!(first.next(&request(7, 1)).unwrap(), first);
        let second = first.next(&request(7, 2)).unwrap();
        assert_ne!(second, first);
        let late = second.next(&request(7, 1)).unwrap_err();
        assert_eq!(late.reason, Reason::OutOfOrder);
    }

    #[test]
    fn a_process_that_was_superseded_stays_so() {
        let mut process = Process::new(&request(1, 1));
        for id in 2..=u64::try_from(REMEMBERED).unwrap() + 1 {
            process = process.next(&request(id, 1)).unwrap();
            for earlier in 1..id {
                let refused = process.next(&request(earlier, 5)).unwrap_err();
                assert_eq!(refused.reason, Reason::Superseded);
            }
        }
        // Memory is bounded: the oldest is forgotten.
        let process = process.next(&request(100, 1)).unwrap();
        assert_eq!(process.superseded.len(), REMEMBERED);
        assert!(process.next(&request(1, 1)).is_ok());
    }

    #[test]
    fn whoever_does_not_tell_its_process_registers_anew_each_time() {
        let first = Process::new(&request(0, 0));
        let second = first.next(&request(0, 0)).unwrap();
        assert_ne!(second, first);
        assert_ne!(second.next(&request(0, 0)).unwrap(), second);
        // A process that states its id takes over from one that does not, and the other way round.
        let telling = second.next(&request(3, 1)).unwrap();
        assert_eq!(telling, Process::new(&request(3, 1)));
        let silent = telling.next(&request(0, 0)).unwrap();
        assert_eq!(silent.superseded, [3]);
    }
}
