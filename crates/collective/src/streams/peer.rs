//! The other processes of a ring.

use shared_proto::ids::Task;

/// A rank of a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The task.
    pub task: Task,
    /// The address at which it takes links.
    pub address: String,
}
