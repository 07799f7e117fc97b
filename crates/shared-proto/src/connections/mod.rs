//! The connections of a port: how many there may be, of whom, and how long one may stay that asks
//! for nothing. All listeners of all roles accept through [`Connections::accept`].
//!
//! A connection begins as a newcomer. Newcomers share a small part of the port's places: where that
//! is full, the longest silent one of the address that has the most makes room. So a flood displaces
//! itself, and a caller that shows who it is gets in. [`Caller::admit`] makes a connection
//! a member's; members are never displaced.

mod guarded;
mod pool;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use http::Extensions;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tonic::transport::server::TlsConnectInfo;

pub use guarded::Guarded;
use pool::{Connection, Dropped, Pool};

/// How long a connection may stay that has made no request: the time for TLS, HTTP/2 and headers.
pub const OPENING: Duration = Duration::from_secs(10);

/// How long a connection may stay whose caller has made a request, but is no member.
const IDLE: Duration = Duration::from_secs(60);

/// What a connection may send before it has made a request, in bytes.
const FIRST_BYTES: usize = 64 << 10;

/// The shortest and the longest pause after a connection that could not be accepted.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Which port of a process: a label in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// The coordinator's.
    Coordinator,
    /// Where a parameter server serves workers.
    Data,
    /// Where metrics are served.
    Metrics,
}

impl Port {
    fn label(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Data => "data",
            Self::Metrics => "metrics",
        }
    }

    /// What a caller that is no member may send, in bytes, beyond what it has sent in its last call.
    fn bytes_of_callers(self) -> usize {
        match self {
            // A session is admitted by its first message.
            Self::Data => FIRST_BYTES,
            // Registering variables takes one large message.
            Self::Coordinator => 8 << 20,
            Self::Metrics => usize::MAX,
        }
    }
}

/// How many connections a port takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// All of them.
    pub total: usize,
    /// Those that are no members' at present. The rest is kept for members.
    pub newcomers: usize,
    /// Those of one address.
    pub per_address: usize,
}

impl Limits {
    /// The limits of a port that has `total` places.
    pub fn of(total: usize, per_address: Option<usize>) -> Self {
        let total = total.max(2);
        Self {
            total,
            newcomers: (total / 4).clamp(1, 256),
            per_address: per_address.unwrap_or(total - total / 4).max(1),
        }
    }

    /// The limits of a port at which nobody becomes a member.
    pub fn without_members(total: usize) -> Self {
        Self {
            total,
            newcomers: total,
            per_address: usize::MAX,
        }
    }
}

/// Something that connections come from.
pub trait Door {
    /// A connection.
    type Io;

    /// Accepts the next connection; says whose it is, where that is known.
    ///
    /// # Errors
    /// What the system says.
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

/// The connections of a port. Clones are the same port.
#[derive(Clone)]
pub struct Connections(Arc<Pool>);

impl Connections {
    /// A port without connections.
    pub fn new(port: Port, limits: Limits) -> Self {
        Self(Arc::new(Pool::new(port, limits)))
    }

    /// Accepts the next connection that there is a place for. Those without a place are closed and
    /// counted; where the system cannot accept any, it is asked again after a growing pause.
    pub async fn accept<D: Door>(&self, door: &D) -> (D::Io, Place) {
        let mut pause = BACK_OFF.0;
        loop {
            match door.accept().await {
                Ok((io, peer)) => {
                    if let Some(place) = self.open(peer) {
                        return (io, place);
                    }
                    drop(io);
                    // Those that made room close their ends meanwhile.
                    tokio::task::yield_now().await;
                }
                // The caller has gone before it was accepted.
                Err(error) if has_gone(&error) => {}
                Err(error) => {
                    self.0.dropped(Dropped::Accept, None, Some(&error));
                    tokio::time::sleep(pause).await;
                    pause = (2 * pause).min(BACK_OFF.1);
                }
            }
        }
    }

    /// All connections that there is a place for, of a TCP port.
    pub fn incoming(
        self,
        listener: TcpListener,
    ) -> impl Stream<Item = io::Result<Guarded<TcpStream>>> {
        futures_util::stream::unfold((self, listener), async |(connections, listener)| {
            let (stream, place) = connections.accept(&listener).await;
            let next = Ok(Guarded::new(stream, place));
            Some((next, (connections, listener)))
        })
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

/// Whose connection a request came by: an extension of the request.
#[derive(Clone)]
pub struct Caller {
    connection: Arc<Connection>,
    pool: Arc<Pool>,
}

impl Caller {
    /// The caller of a request; none where connections are not counted, as in simulations.
    pub fn of(extensions: &Extensions) -> Option<&Self> {
        let secured = extensions.get::<TlsConnectInfo<Self>>();
        secured
            .map(TlsConnectInfo::get_ref)
            .or_else(|| extensions.get())
    }

    /// Its address; none through a socket file.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.connection.peer
    }

    /// Notes a request that makes sense: the connection may stay a while longer.
    pub fn called(&self) {
        self.pool.called(&self.connection);
    }

    /// Makes the connection a member's. Says whether there was a place among the members; if not,
    /// the connection is closed.
    pub fn admit(&self) -> bool {
        self.pool.admit(&self.connection)
    }
}

#[cfg(test)]
mod tests;
