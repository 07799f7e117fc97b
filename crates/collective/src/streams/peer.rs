//! The other processes of a ring.

use shared_proto::ids::Task;

/// A rank of a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The task.
    pub task: Task,
    /// The address at which the task accepts links.
    pub address: String,
}
