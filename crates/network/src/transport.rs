//! The gRPC settings of both ends. With these windows and frames a stream of blocks is as fast as plain TCP;
//! docs/design/data-plane.md has the figures.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use shared_proto::protocol::{MAX_MESSAGE_BYTES, UNIX};
use tonic::transport::{Endpoint, Server};

/// The size of HTTP/2 frames: as large as a message, so that a piece arrives in one frame.
const FRAME_BYTES: u32 = MAX_MESSAGE_BYTES as u32;

/// The most unread bytes in one direction of one stream.
const WINDOW_BYTES: u32 = 8 << 20;

/// The time limit for setting up a connection.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The time limit of a unary call. Calls that wait for an event answer within half of it.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The interval at which a silent connection is probed, and the time limit of the answer. The loss of a peer is noticed
/// after both together.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(10));

/// Returns a gRPC server with Flambeau's settings.
pub fn server() -> Server {
    Server::builder()
        .max_frame_size(FRAME_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE.0))
        .http2_keepalive_timeout(Some(KEEPALIVE.1))
        .tcp_nodelay(true)
}

/// Returns the path of a socket file, if a peer's address is one.
pub(crate) fn socket_file(address: &str) -> Option<&Path> {
    address.strip_prefix(UNIX).map(Path::new)
}

/// Returns the endpoint of a peer at `address`, given as host:port or as unix:PATH.
/// [`Security::endpoint`](crate::security::Security::endpoint) adds encryption.
pub(crate) fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    let uri = match address.strip_prefix(UNIX) {
        // tonic removes exactly this prefix again.
        Some(path) => format!("{UNIX}//{path}"),
        // The connector adds TLS, not tonic.
        None => format!("http://{address}"),
    };
    Ok(Endpoint::from_shared(uri)?
        .connect_timeout(CONNECT_TIMEOUT)
        .max_frame_size(FRAME_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE.0)
        .keep_alive_timeout(KEEPALIVE.1)
        .tcp_nodelay(true))
}

/// The address on which a process listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A TCP port; port 0 means any free one.
    Tcp(SocketAddr),
    /// A socket file, for peers on the same host.
    Unix(PathBuf),
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix(UNIX) {
            Some("") => Err(format!("{UNIX} needs the path of a socket file behind it")),
            // Other processes use the path too, and may have another working directory.
            Some(path) => std::path::absolute(path)
                .map(Self::Unix)
                .map_err(|error| format!("{path:?} is no path of a socket file: {error}")),
            None => socket_address(text)
                .map(Self::Tcp)
                .map_err(|error| format!("{error}, or {UNIX}PATH")),
        }
    }
}

/// Reads an address to listen on: `IP:PORT`, `NAME:PORT` with a name of this host, or `:PORT` for all interfaces.
///
/// # Errors
/// If `text` is not such an address. The error says what was expected.
pub fn socket_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let wrong = |why: &str| {
        format!(
            "{text:?} is no address to listen on{why}; expected IP:PORT, such as 0.0.0.0:7001, NAME:PORT or :PORT"
        )
    };
    let (host, port) = text.rsplit_once(':').ok_or_else(|| wrong(""))?;
    let port = port.parse::<u16>().map_err(|_| wrong(""))?;
    if host.is_empty() {
        return Ok((Ipv4Addr::UNSPECIFIED, port).into());
    }
    let found = (host, port).to_socket_addrs();
    let found = found.map_err(|error| wrong(&format!(" ({error})")))?;
    // IPv4 first, as in the other addresses that are defaults.
    let first = found.min_by_key(SocketAddr::is_ipv6);
    first.ok_or_else(|| wrong(" (the name has no address)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_to_listen_is_read_back() {
        for text in ["127.0.0.1:0", "[::1]:7001", "unix:/run/flambeau/ps-0.sock"] {
            assert_eq!(text.parse::<Listen>().unwrap().to_string(), text);
        }
        let relative = "unix:ps.sock".parse::<Listen>().unwrap();
        assert!(matches!(relative, Listen::Unix(path) if path.is_absolute()));
        for wrong in [
            "",
            "7001",
            "unix:",
            "localhost:",
            "localhost:99999",
            "a b:1",
        ] {
            assert!(wrong.parse::<Listen>().is_err(), "{wrong}");
        }
        for (text, address) in [
            (":7001", "0.0.0.0:7001"),
            ("localhost:7001", "127.0.0.1:7001"),
        ] {
            assert_eq!(socket_address(text).unwrap().to_string(), address);
        }
    }
}
