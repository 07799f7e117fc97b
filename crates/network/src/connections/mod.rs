//! Limits on the connections of a port: their number, their number from one address, and the time for which a
//! connection may stay idle. All listeners of all roles accept through [`Connections::accept`].
//!
//! A connection begins as a newcomer. Newcomers share a small part of the port's places. If that part is full, the
//! address with the most newcomers loses its newcomer that has been silent longest. So a flood displaces only its own
//! connections, and a caller that authenticates is admitted. [`Caller::admit`] makes a connection a member's. Members
//! are never displaced.

mod accepted;
mod guarded;
mod pool;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use http::Extensions;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

pub use accepted::{Accepted, AcceptedStream, Peer};
pub use guarded::Guarded;
use pool::{Connection, Dropped, Pool};

/// The longest time until a connection's first request. TLS, HTTP/2 and headers must fit into it.
pub const OPENING: Duration = Duration::from_secs(10);

/// The longest time between two requests of a caller that is no member.
const IDLE: Duration = Duration::from_secs(60);

/// The most bytes that a connection may send before its first request.
const FIRST_BYTES: usize = 64 << 10;

/// The shortest and the longest pause after a connection that could not be accepted.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A port of a process. Its name is a label in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// The coordinator's port for calls.
    Coordinator,
    /// The port at which a parameter server serves workers.
    Data,
    /// The port at which a parameter server answers lookups.
    Lookup,
    /// The port for metrics and health checks.
    Metrics,
    /// The coordinator's port for browsers.
    Page,
}

impl Port {
    fn label(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Data => "data",
            Self::Lookup => "lookup",
            Self::Metrics => "metrics",
            Self::Page => "page",
        }
    }

    /// Returns the most bytes that a caller without membership may send from one request to the next.
    fn bytes_of_callers(self) -> usize {
        match self {
            // A session is admitted by its first message.
            Self::Data => FIRST_BYTES,
            // Registering variables takes one large message.
            Self::Coordinator => 8 << 20,
            // A connection to one of these is for many requests of callers that are no members.
            Self::Lookup | Self::Metrics | Self::Page => usize::MAX,
        }
    }
}

/// The limits on the number of connections of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections in total.
    pub total: usize,
    /// Connections of newcomers. The other places are kept for members.
    pub newcomers: usize,
    /// Connections from one address.
    pub per_address: usize,
}

impl Limits {
    /// Returns the limits of a port that has `total` places. Without `per_address`, one address may take three quarters
    /// of them.
    pub fn new(total: usize, per_address: Option<usize>) -> Self {
        let total = total.max(2);
        Self {
            total,
            newcomers: (total / 4).clamp(1, 256),
            per_address: per_address.unwrap_or(total - total / 4).max(1),
        }
    }

    /// Returns the limits of a port that has no members, such as the port for metrics.
    pub fn without_members(total: usize) -> Self {
        Self {
            total,
            newcomers: total,
            per_address: usize::MAX,
        }
    }
}

/// A source of connections, such as a listening socket.
pub trait Door {
    /// A connection.
    type Io;

    /// Accepts the next connection. Returns the connection, and the address of its peer, if the peer has one.
    ///
    /// # Errors
    /// The system's error.
    fn accept(
        &self,
    ) -> impl Future<Output = io::Result<(Self::Io, Option<SocketAddr>)>> + Send + '_;
}

impl Door for TcpListener {
    type Io = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, Option<SocketAddr>)> {
        let (stream, peer) = Self::accept(self).await?;
        stream.set_nodelay(true)?;
        Ok((stream, Some(peer)))
    }
}

impl Door for UnixListener {
    type Io = UnixStream;

    async fn accept(&self) -> io::Result<(UnixStream, Option<SocketAddr>)> {
        Ok((Self::accept(self).await?.0, None))
    }
}

/// The connections of a port. Clones belong to the same port.
#[derive(Clone)]
pub struct Connections(Arc<Pool>);

impl Connections {
    /// Creates a port without connections.
    pub fn new(port: Port, limits: Limits) -> Self {
        Self(Arc::new(Pool::new(port, limits)))
    }

    /// Accepts the next connection that finds a place. Connections without a place are closed and
    /// counted. After an error of the system it tries again, with growing pauses.
    pub async fn accept<D: Door>(&self, door: &D) -> (D::Io, Place) {
        let mut pause = BACK_OFF.0;
        loop {
            match door.accept().await {
                Ok((io, peer)) => {
                    if let Some(place) = self.open(peer) {
                        return (io, place);
                    }
                    drop(io);
                    // Displaced connections close their sockets meanwhile.
                    tokio::task::yield_now().await;
                }
                // The caller hung up before it was accepted.
                Err(error) if has_gone(&error) => {}
                Err(error) => {
                    self.0.dropped(Dropped::Accept, None, Some(&error));
                    tokio::time::sleep(pause).await;
                    pause = (2 * pause).min(BACK_OFF.1);
                }
            }
        }
    }

    /// Returns the connections of a TCP port that find a place.
    pub fn incoming(self, listener: TcpListener) -> BoxStream<'static, Guarded<TcpStream>> {
        let accept = async |(connections, listener): (Self, TcpListener)| {
            let (stream, place) = connections.accept(&listener).await;
            Some((Guarded::new(stream, place), (connections, listener)))
        };
        futures_util::stream::unfold((self, listener), accept).boxed()
    }

    fn open(&self, peer: Option<SocketAddr>) -> Option<Place> {
        match self.0.open(peer) {
            Ok(connection) => Some(Place(Caller {
                connection,
                pool: Arc::clone(&self.0),
            })),
            Err(reason) => {
                self.0.dropped(reason, peer, None);
                None
            }
        }
    }
}

fn has_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, NotConnected};
    matches!(
        error.kind(),
        ConnectionAborted
            | ConnectionReset
            | Interrupted
            | NotConnected
            | io::ErrorKind::InvalidInput
    )
}

/// A connection's place at a port; free again when this is dropped.
pub struct Place(Caller);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.pool.close(&self.0.connection);
    }
}

/// The connection that a request came by, as an extension of the request.
#[derive(Clone)]
pub struct Caller {
    connection: Arc<Connection>,
    pool: Arc<Pool>,
}

impl Caller {
    /// Returns the caller of a request; `None` if connections are not counted, as in simulations.
    pub fn of(extensions: &Extensions) -> Option<&Self> {
        Peer::of(extensions)
            .and_then(Peer::caller)
            .or_else(|| extensions.get())
    }

    /// Returns the peer's address; `None` for a connection over a socket file.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.connection.peer
    }

    /// Records a valid request, after which the connection may stay idle for a while.
    pub fn record_request(&self) {
        self.pool.record_request(&self.connection);
    }

    /// Returns whether the connection is a member's, or the members have a place for it.
    pub fn has_room(&self) -> bool {
        self.pool.has_room(&self.connection)
    }

    /// Makes the connection a member's. Returns whether the members had a place for it; if they had
    /// none, the connection is closed.
    pub fn admit(&self) -> bool {
        self.pool.admit(&self.connection)
    }
}

#[cfg(test)]
mod tests;
