//! The early but orderly end of a job.
//!
//! The coordinator leases no more data. Workers finish the data that they hold, one of them evaluates and saves the
//! model, and the last checkpoint is written. This checkpoint records which data is left, so another run can continue
//! from it.

use std::time::Instant;

use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::JobPhase;

use super::Cluster;

impl Cluster {
    /// Ends the job early. A repeated call changes nothing. A call that comes when all data is done has an effect only
    /// if the job later goes back to a checkpoint.
    ///
    /// # Errors
    /// [`Reason::ForeignJob`] if `job` is not this job's name, [`Reason::NotInitialized`] before training has begun:
    /// there is no model yet.
    pub fn stop(&mut self, job: &str) -> Result<(), Refusal> {
        if job != self.job.name {
            return Err(Refusal::new(
                Reason::ForeignJob,
                format!(
                    "job {job:?} is to be stopped, but this is the coordinator of {:?}; give the name of this job",
                    self.job.name
                ),
            ));
        }
        if self.durable.outcome.phase == JobPhase::Starting {
            return Err(Refusal::new(
                Reason::NotInitialized,
                "training has not begun, so there is nothing to save; end the processes instead",
            ));
        }
        let training = &mut self.durable.training;
        // Whoever says so ends the job for good; an early stop may be taken back.
        let is_early = !std::mem::take(&mut training.stopped_early).is_empty();
        if training.stopping && is_early {
            self.must_persist();
        }
        if self.ended() || self.durable.training.stopping {
            return Ok(());
        }
        tracing::info!("told to stop: no more data is handed out");
        self.durable.training.stopping = true;
        self.must_persist();
        self.evaluate_when_at_rest();
        Ok(())
    }

    /// Cancels the job: ends it early, as [`Self::stop`] does. With `at_once`, or before training has begun, the job
    /// fails at once.
    pub fn cancel(&mut self, now: Instant, at_once: bool) {
        let name = self.job.name.clone();
        if at_once {
            self.fail(
                now,
                "it was cancelled, and told not to wait for its last checkpoint".to_owned(),
            );
        } else if self.durable.outcome.phase == JobPhase::Starting {
            self.fail(now, "it was cancelled before its training began".to_owned());
        } else if let Err(refused) = self.stop(&name) {
            tracing::warn!("cannot be cancelled: {refused}");
        }
    }
}
