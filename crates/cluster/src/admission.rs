//! Admits calls of live members of this run that use the newest shard map and arrive in order.

use shared_proto::ids::{Origin, Task};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

use super::members::Standing;
use super::{Cluster, Turn};

impl Cluster {
    /// Checks that the sender is a live member of this job in its newest generation.
    ///
    /// # Errors
    /// [`Reason::ForeignJob`], [`Reason::Fenced`] or [`Reason::Superseded`].
    pub fn admit(&self, origin: &Origin) -> Result<(), Refusal> {
        if origin.job != self.job.name && self.turn != Turn::Alone {
            return Err(Refusal::new(
                Reason::Fenced,
                format!(
                    "job {:?} of {} has ended, and {:?} is at work; register again",
                    origin.job, origin.task, self.job.name
                ),
            ));
        }
        if origin.job != self.job.name {
            return Err(Refusal::new(
                Reason::ForeignJob,
                format!(
                    "{} belongs to job {:?}, but this is the coordinator of {:?}; give it another coordinator's address",
                    origin.task, origin.job, self.job.name
                ),
            ));
        }
        let task = origin.task;
        let why = match self.durable.members.get(&task.id) {
            _ if origin.run.differs_from(self.durable.run.number) => {
                format!("{task} is a member of another run of the job, not of this one")
            }
            None => format!("{task} is not known here"),
            Some(m) if m.task.generation > task.generation => {
                return Err(Refusal::new(
                    Reason::Superseded,
                    format!(
                        "generation {} of {task} has been superseded by generation {}, another process with the identity {:?}; give each process one of its own",
                        task.generation, m.task.generation, m.identity
                    ),
                ));
            }
            Some(m) if m.task.generation < task.generation => {
                format!("generation {} of {task} is not known here", task.generation)
            }
            Some(m) => match &m.standing {
                Standing::Gone(why) => format!("the lease of {task} has ended: {why}"),
                Standing::Alive => return Ok(()),
            },
        };
        Err(Refusal::new(
            Reason::Fenced,
            format!("{why}; register again"),
        ))
    }

    /// Checks that the sender uses the newest shard map or, in a job without a map, is in the newest ring.
    ///
    /// # Errors
    /// [`Reason::StaleEpoch`].
    pub(super) fn check_epoch(&self, origin: &Origin) -> Result<(), Refusal> {
        let newest = self.durable.epoch();
        if origin.epoch == newest || planted!(NeverReplaced) {
            return Ok(());
        }
        Err(Refusal::new(
            Reason::StaleEpoch,
            format!(
                "{} goes by the shard map of epoch {}, the newest is that of epoch {newest}; fetch it, open a session with each shard where it lives now, and call again",
                origin.task, origin.epoch
            ),
        ))
    }
}

/// Returns the refusal of a call that arrives after a newer call of the same sender, or that has no sequence number.
pub(super) fn out_of_order(origin: &Origin, call: &str) -> Refusal {
    Refusal::new(
        Reason::OutOfOrder,
        format!(
            "{call} {} of {} is not newer than the last that was taken; number calls from 1, each higher than the one before, and keep the number of a call that is made again",
            origin.sequence, origin.task
        ),
    )
}

/// Returns the refusal of a report on a split that the sender does not hold.
pub(super) fn not_leased(task: Task, request: &wire::FinishStepRequest) -> Refusal {
    Refusal::new(
        Reason::NotLeased,
        format!(
            "split {} is not leased to {task} up to position {}; register again",
            request.split, request.position
        ),
    )
}
