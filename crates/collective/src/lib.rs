//! Collective operations among ranks: all-reduce, reduce-scatter, all-gather, broadcast, barrier.
//!
//! - `schedule`: what each rank sends and receives, as plain data
//! - `group`: a rank of a group, which plays schedules over its links
//! - `links`: the interface of links between ranks, and links within a process; `streams`: links between processes
//! - `pieces`: a schedule cut into pieces, so that sending, receiving and adding overlap
//! - `numbers`: the format of numbers on the wire, and their sums
//!
//! The sums do not depend on timing: all ranks of a group end with the same bits, and so does a repeated run.

mod group;
mod links;
mod numbers;
mod pieces;
mod schedule;
mod streams;

pub use group::{CollectiveError, Group, Traffic};
pub use links::{LinkError, Links, MemoryLinks};
pub use schedule::{Algorithm, DOUBLING_BYTES, Rank, kept_segments, segment};
pub use streams::{Exchange, Identity, LinkService, Peer, StreamLinks, take_links};
