//! How the job makes steps, by its strategy and mode.

use shared_proto::job::Mode;
use shared_proto::staleness::StalenessBound;

use super::Cluster;

impl Cluster {
    /// Returns whether the workers form a ring.
    pub fn has_ring(&self) -> bool {
        self.job.strategy.name.has_ring()
    }

    /// Returns whether the job is in sync mode.
    pub(super) fn sync(&self) -> bool {
        self.job.strategy.mode == Mode::Sync
    }

    /// Returns whether each worker makes steps of its own. A report of steps then changes nothing for other workers
    /// except the min clock.
    pub fn steps_alone(&self) -> bool {
        !self.sync() && !self.has_ring()
    }

    /// Returns whether the workers make each step together: in sync mode, and in a ring.
    pub(super) fn in_lock_step(&self) -> bool {
        self.sync() || self.has_ring()
    }

    /// Returns whether servers stage the gradients of table rows, and apply them once the step is committed. They do so
    /// in the sync mode of a job with a ring and servers.
    pub(super) fn commits_rows(&self) -> bool {
        self.sync() && self.has_ring() && self.job.strategy.name.has_servers()
    }

    /// Returns the staleness bound: how many steps a worker may be ahead of the slowest one.
    pub(super) fn bound(&self) -> StalenessBound {
        self.job.strategy.bound()
    }
}
