//! Links between processes: gRPC streams that do not copy their payload (`network::stream`).
//!
//! - `exchange`: the place where links from other processes arrive
//! - `service`: the gRPC service that takes them
//! - `dial`: the opening of a link
//! - `link`: an open link
//! - `links`: the links of a rank of a ring; `peer`: the other processes

mod dial;
mod exchange;
mod link;
mod links;
mod peer;
mod service;

pub use exchange::{Exchange, Identity};
pub use links::StreamLinks;
pub use peer::Peer;
pub use service::{LinkService, take_links};
