//! Reconciliation with a restored shard: the session compares the pushes that the blocks have with those that were
//! acknowledged, and reports losses. After that it has reconciled in the new epoch.

use std::sync::Arc;

use shared_proto::ids::Epoch;
use shared_proto::task;
use shared_proto::wire;
use tokio::sync::{oneshot, watch};

use super::Reconciliation;
use super::driver::Driver;
use crate::error::ClientError;
use crate::losses::{Loss, Lost};

impl Driver {
    /// Counts the acknowledged pushes that blocks lack as lost. Once all outcomes of the stream have come,
    /// reports the losses and reconciles in the stream's epoch.
    pub(super) fn compare(&self, outcome: &wire::Outcome, epoch: Epoch) {
        let mut state = self.state.lock();
        state.open_questions = state.open_questions.saturating_sub(1);
        let more = state.acknowledged.compare(&outcome.blocks);
        state.lost = Lost::sum(state.lost, more);
        if state.open_questions > 0 {
            return;
        }
        let lost = state.lost.take();
        drop(state);
        self.answered.notify_one();
        match lost {
            None => self.reconcile_in(epoch),
            Some(lost) => self.report(lost, epoch),
        }
    }

    /// Reports a loss, and reconciles in the epoch once the coordinator knows of it.
    fn report(&self, lost: Lost, epoch: Epoch) {
        let shard = self.target.shard;
        tracing::warn!(
            shard,
            updates = lost.updates,
            first_step = lost.first.0,
            last_step = lost.last.0,
            "acknowledged updates are lost with a server"
        );
        let (told, reported) = oneshot::channel();
        let loss = Loss {
            shard,
            epoch,
            lost,
            told,
        };
        let (losses, reconcile) = (self.target.losses.clone(), Arc::clone(&self.reconcile));
        let state = Arc::clone(&self.state);
        {
            let mut state = state.lock();
            state.reports += 1;
            state.reached = state.reached.max(epoch);
        }
        task::spawn(async move {
            if losses.send(loss).await.is_err() || reported.await.is_err() {
                // The coordinator has refused the report, or the worker's membership is over.
                drop(reconcile.send_replace(Err(ClientError::Unreported(shard))));
                return;
            }
            let mut state = state.lock();
            state.reports -= 1;
            if state.reports == 0 {
                raise(&reconcile, state.reached);
            }
        });
    }

    /// Reconciles in an epoch, once all losses are reported.
    pub(super) fn reconcile_in(&self, epoch: Epoch) {
        let mut state = self.state.lock();
        state.reached = state.reached.max(epoch);
        if state.reports == 0 {
            raise(&self.reconcile, state.reached);
        }
    }
}

fn raise(reconciled: &watch::Sender<Reconciliation>, epoch: Epoch) {
    reconciled.send_if_modified(|reconciled| match reconciled {
        Ok(earlier) if *earlier < epoch => {
            *earlier = epoch;
            true
        }
        _ => false,
    });
}
