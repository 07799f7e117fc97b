//! The agreement of a ring's members about buckets and devices, and what this member computes or waits for.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use collective::Rank;
use replica::Wait;
use variables::BucketPlan;

use super::open_step::OpenStep;

/// The state of a ring's buckets and devices, the same on all members, and what this member knows of the present step.
#[derive(Default)]
pub(super) struct Agreed {
    /// True if all members fill buckets. Otherwise each adds up whole gradients.
    pub(super) has_buckets: Cell<bool>,
    /// The number of steps that have begun in buckets.
    pub(super) steps: Cell<u64>,
    /// The number of steps with gradients that were added up again.
    pub(super) repeated: Cell<u64>,
    /// The bucket plan on which all members have agreed; `None` while there is no agreement.
    pub(super) plan: RefCell<Option<Arc<BucketPlan>>>,
    /// True if the members' devices are a group, which adds up gradients.
    pub(super) has_device_group: Cell<bool>,
    /// True while this member's replica computes.
    pub(super) computing: Cell<bool>,
    /// The waits for the neighbours in the stage group while the replica computes its stages.
    pub(super) in_stages: RefCell<Option<StageWaits>>,
    /// The step that is open, in a job with backup workers or with devices that add up.
    pub(super) open: OpenStep,
}

/// The waits of a member's replica for its neighbours.
pub(super) struct StageWaits {
    pub(super) before: Option<Wait>,
    pub(super) next: Option<Wait>,
}

impl StageWaits {
    /// Returns the neighbour of `rank` for which its replica has waited longer than `time`, if there is one.
    pub(super) fn longer_than(&self, time: Duration, rank: Rank) -> Option<Rank> {
        let exceeds = |wait: &Option<Wait>| wait.as_ref().is_some_and(|wait| wait.exceeds(time));
        match (exceeds(&self.before), exceeds(&self.next)) {
            (true, _) => rank.checked_sub(1),
            (false, true) => Some(rank + 1),
            (false, false) => None,
        }
    }
}
