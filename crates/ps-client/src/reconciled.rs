//! A watch on the epoch in which all sessions of a worker have reconciled.

use shared_proto::ids::Epoch;
use shared_proto::task::boxed;
use tokio::sync::watch;

use crate::error::ClientError;
use crate::session::Reconciliation;

/// The epoch of the shard map that all of a worker's sessions have reconciled in: each acknowledged update is in the
/// values of that epoch's servers, or reported lost.
#[derive(Clone, Debug)]
pub struct Reconciled(pub(crate) Vec<watch::Receiver<Reconciliation>>);

impl Reconciled {
    /// Returns the present epoch. It is 0 until every session has had its first stream, and after a session has ended.
    pub fn epoch(&self) -> Epoch {
        let epochs = self.0.iter().map(|session| match &*session.borrow() {
            Ok(epoch) => *epoch,
            Err(_) => Epoch(0),
        });
        epochs.min().unwrap_or_default()
    }

    /// Waits until the reconciled epoch is at least `epoch`.
    ///
    /// # Errors
    /// If a session has ended.
    #[boxed]
    pub async fn reaches(&mut self, epoch: Epoch) -> Result<(), ClientError> {
        for (shard, session) in (0u32..).zip(&mut self.0) {
            let there =
                |reconciled: &Reconciliation| reconciled.as_ref().map_or(true, |at| *at >= epoch);
            match session.wait_for(there).await.as_deref() {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return Err(error.clone()),
                Err(_) => return Err(ClientError::Closed(shard)),
            }
        }
        Ok(())
    }
}
