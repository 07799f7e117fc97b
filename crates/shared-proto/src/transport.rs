//! How both ends set up gRPC. The windows and frames are what makes a stream of blocks as fast as
//! plain TCP; ARCHITECTURE.md has the figures.

use std::time::Duration;

use tonic::transport::{Endpoint, Server};

/// Version of the protocol in `proto/`. Peers that speak another are refused.
pub const PROTOCOL_VERSION: u32 = 1;

/// The largest message of a session, in bytes: a block, or several small ones, and what names them.
pub const MAX_MESSAGE_BYTES: usize = 2 << 20;

/// Payload bytes that senders put into one message, as a rule.
pub const MESSAGE_PAYLOAD_BYTES: usize = 1 << 20;

/// HTTP/2 frames as large as a block.
const FRAME_BYTES: u32 = 1 << 20;

/// What may be under way in one direction of one stream without being read.
const WINDOW_BYTES: u32 = 16 << 20;

/// How long a connection may take to be set up.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a unary call may take. Calls that wait for something answer within half of it.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// How often a silent connection is probed, and how long the answer may take: a peer that is gone
/// without a word is noticed after both together.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(10));

/// A gRPC server with Flambeau's settings.
pub fn server() -> Server {
    Server::builder()
        .max_frame_size(FRAME_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE.0))
        .http2_keepalive_timeout(Some(KEEPALIVE.1))
        .tcp_nodelay(true)
}

/// The endpoint of a peer at `address`, given as host:port.
///
/// # Errors
/// If the address is none.
pub fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    Ok(Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .max_frame_size(FRAME_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE.0)
        .keep_alive_timeout(KEEPALIVE.1)
        .tcp_nodelay(true))
}
