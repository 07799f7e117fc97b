//! A job that ends before its data does, in good order.
//!
//! No more data is handed out. Workers finish what they hold, one of them evaluates and saves the model,
//! and the last checkpoint is written. It knows what of the data is left, so another run goes on from it.

use std::time::Instant;

use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::JobPhase;

use super::Cluster;

impl Cluster {
    /// Ends the job early. Asked again, it is the same.
    ///
    /// # Errors
    /// [`Reason::ForeignJob`] if another job is meant, [`Reason::NotInitialized`] before training has
    /// begun: there is no model yet.
    pub(crate) fn stop(&mut self, now: Instant, job: &str) -> Result<(), Refusal> {
        if job != self.job.name {
            return Err(Refusal::new(
                Reason::ForeignJob,
                format!(
                    "job {job:?} is to be stopped, but this is the coordinator of {:?}; give the name of this job",
                    self.job.name
                ),
            ));
        }
        if self.phase == JobPhase::Starting {
            return Err(Refusal::new(
                Reason::NotInitialized,
                "training has not begun, so there is nothing to save; end the processes instead",
            ));
        }
        if self.ended() || self.stopping {
            return Ok(());
        }
        tracing::info!("told to stop: no more data is handed out");
        self.stopping = true;
        self.must_keep();
        self.evaluate_when_at_rest();
        self.save_if_due(now);
        Ok(())
    }

    /// Once nobody holds data any more, the model is evaluated for the last time.
    pub(super) fn evaluate_when_at_rest(&mut self) {
        if self.stopping && !self.ended() && !self.checkpoints.ending {
            self.schedule_last_evaluation();
        }
    }
}
