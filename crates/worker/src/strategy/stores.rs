//! The stores of checkpoints, as a worker reaches them.

use std::fmt;
use std::sync::Arc;

use checkpoint::{CheckpointError, Store};
use daemon::Offload;

/// Opens the store at a location.
pub type Opener = Arc<dyn Fn(&str) -> Result<Store, CheckpointError> + Send + Sync>;

/// The way in which a worker opens stores of checkpoints, and the place where it writes to them.
#[derive(Clone)]
pub struct Stores {
    /// Opens a store.
    pub open: Opener,
    /// Encodes and writes checkpoints, off the caller's thread.
    pub offload: Offload,
}

impl Default for Stores {
    /// The stores of this system, written to by threads in the background.
    fn default() -> Self {
        Self {
            open: Arc::new(Store::open),
            offload: Offload::Threads,
        }
    }
}

impl fmt::Debug for Stores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let offload = &self.offload;
        f.debug_struct("Stores").field("offload", offload).finish()
    }
}
