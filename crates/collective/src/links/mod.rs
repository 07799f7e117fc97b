//! Links between the ranks of a group.

mod memory;

use async_trait::async_trait;
use bytes::Bytes;

use crate::schedule::Rank;

pub use memory::MemoryLinks;

/// The links of one rank to the others. Pieces arrive in the order in which they were sent. When a link fails, the
/// owner of the group drops all its links, so that the peers notice the failure too.
#[async_trait(?Send)]
pub trait Links {
    /// Sends a piece. Waits while too many pieces are on their way.
    async fn send(&self, to: Rank, piece: Bytes) -> Result<(), LinkError>;

    /// Receives the next piece of a peer. If the future is dropped, no piece is lost.
    async fn receive(&self, from: Rank) -> Result<Bytes, LinkError>;
}

/// The failure of a link. The group cannot continue without the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} is lost: {reason}")]
pub struct LinkError {
    /// The peer.
    pub rank: Rank,
    /// What happened.
    pub reason: String,
}
