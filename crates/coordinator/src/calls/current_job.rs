//! The current job, and the checks of its callers.

use std::sync::Arc;
use std::time::Instant;

use cluster::Cluster;
use cluster::messages::not_for;
use metrics::counter;
use network::security::Security;
use shared_proto::ids::Origin;
use shared_proto::planted;
use shared_proto::quiet::Quiet;
use shared_proto::refusal::{Reason, Refusal};
use tonic::Status;

use super::origin::CallOrigin;
use super::slot::Slot;
use crate::keeping::shared::Shared;

/// The current job, and the credentials that its callers need.
#[derive(Clone)]
pub(crate) struct CurrentJob {
    pub(crate) slot: Slot,
    pub(crate) security: Security,
}

impl CurrentJob {
    /// Returns the job.
    pub(super) fn shared(&self) -> Result<Arc<Shared>, Status> {
        let active = self.slot.active().map_err(refused)?;
        Ok(active.shared)
    }

    /// Reads the origin of a call. Checks that its role may make the call, and that the caller's certificate has this
    /// role.
    pub(super) fn origin(&self, from: &CallOrigin<'_>) -> Result<Origin, Status> {
        let origin = Origin::read(from.origin, from.what).map_err(refused)?;
        let role = origin.task.id.role;
        if from.role.is_some_and(|expected| expected != role) && !planted!(AnyRole) {
            return Err(refused(not_for(from.what, &origin)));
        }
        self.security.check_role(from.extensions, role)?;
        Ok(origin)
    }
}

/// Wraps a call to the cluster. The wrapped call is refused unless its origin is a live member.
pub(super) fn of_member<T>(
    origin: Origin,
    mut ask: impl FnMut(&mut Cluster, Instant, &Origin) -> Result<T, Refusal>,
) -> impl FnMut(&mut Cluster, Instant) -> Result<T, Refusal> {
    move |cluster, now| {
        cluster.admit(&origin)?;
        cluster.catch_up_clock(&origin);
        ask(cluster, now, &origin)
    }
}

/// Returns a refusal as a status, and counts and logs it. A refusal because there is no job is neither counted nor
/// logged.
pub(super) fn refused(refusal: Refusal) -> Status {
    if refusal.reason == Reason::NoJob {
        // Members that wait for the next job ask again and again.
        return refusal.into();
    }
    counter!("flambeau_coordinator_refused_total", "reason" => refusal.label()).increment(1);
    static LOG: Quiet = Quiet::new();
    if let Some(left_out) = LOG.admit() {
        tracing::warn!(reason = refusal.label(), left_out, "refused: {refusal}");
    }
    refusal.into()
}
