//! The agreement of a ring's members about buckets.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use crate::variables::BucketPlan;

/// The state of a ring's buckets, the same on all members except for `computing`.
#[derive(Default)]
pub(super) struct Agreed {
    /// True if all members fill buckets. Otherwise each adds up whole gradients.
    pub(super) has_buckets: Cell<bool>,
    /// The number of steps that have begun in buckets.
    pub(super) steps: Cell<u64>,
    /// The number of steps with gradients that were added up again.
    pub(super) repeated: Cell<u64>,
    /// The plan that all members have; none until they have an order.
    pub(super) plan: RefCell<Option<Arc<BucketPlan>>>,
    /// True while this member's replica computes.
    pub(super) computing: Cell<bool>,
}
