//! The ways between the ranks of a group.

mod memory;

use async_trait::async_trait;
use bytes::Bytes;

use crate::schedule::Rank;

pub use memory::MemoryLinks;

/// The links of one rank to the others. Pieces arrive in the order in which they were sent. The links of a group are dropped
/// when one of them fails, so that the peers notice it too.
#[async_trait(?Send)]
pub trait Links {
    /// Sends a piece. Returns once a limited number of pieces is on its way.
    async fn send(&self, to: Rank, piece: Bytes) -> Result<(), LinkError>;

    /// Receives the next piece of a peer. If the future is dropped, no piece of less than 16 KiB is lost.
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
