//! The replicas of a model that compute a step together.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use candle_core::Result;

/// The replicas of a model that compute a step together. Each has its own samples.
pub trait Replicas: Send + Sync {
    /// Replaces each element by the sum of the elements at the same index on all replicas. All replicas get bitwise
    /// equal sums. All must make the same calls in the same order, with vectors of the same lengths.
    ///
    /// # Errors
    /// If another replica has failed or is gone.
    fn add_up(&self, values: &mut [f64]) -> Result<()>;
}

/// The part of this thread's replica in a step.
#[derive(Clone)]
pub(crate) struct Share {
    pub(crate) replicas: Arc<dyn Replicas>,
    /// The number of this replica's samples: its weight in the mean over all replicas.
    pub(crate) samples: f64,
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} samples among replicas", self.samples)
    }
}

thread_local! {
    /// The share of the replica that this thread computes.
    static SHARE: RefCell<Option<Share>> = const { RefCell::new(None) };
}

/// Calls `compute`, which makes the forward and the backward pass of a batch of `samples` samples. While it runs, each
/// [`BatchNorm`](crate::BatchNorm) in training on this thread normalises by the mean and the variance over the batches
/// of all `replicas`.
///
/// Each replica computes the gradient of its own loss, the mean over its own samples. The mean of all replicas'
/// gradients, weighted by their samples, is then the gradient of the mean loss over all samples. A replica without
/// samples makes no pass.
pub fn synchronised<R>(
    replicas: Arc<dyn Replicas>,
    samples: usize,
    compute: impl FnOnce() -> R,
) -> R {
    /// Sets the share back, after a panic too.
    struct Back(Option<Share>);
    impl Drop for Back {
        fn drop(&mut self) {
            SHARE.set(self.0.take());
        }
    }
    let share = Share {
        replicas,
        samples: samples as f64,
    };
    let _back = Back(SHARE.replace(Some(share)));
    compute()
}

/// Returns the share of this thread's replica, if it computes together with others.
pub(crate) fn share() -> Option<Share> {
    SHARE.with_borrow(Clone::clone)
}
