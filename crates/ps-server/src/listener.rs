//! Where workers come in: a port, or a socket file for those on the same host.

use std::io;
use std::net::TcpStream as StdTcp;
use std::os::unix::net::UnixStream as StdUnix;
use std::path::PathBuf;

use shared_proto::transport::Listen;
use tokio::net::{TcpListener, UnixListener};

/// A connection on its way to the thread that will serve it.
pub(crate) enum Connection {
    Tcp(StdTcp),
    Unix(StdUnix),
}

/// Accepts connections.
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

/// A socket file that is ours; gone when this is dropped.
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Listener {
    /// Begins to listen. A socket file that a dead process has left is replaced.
    pub(crate) async fn bind(listen: &Listen) -> io::Result<Self> {
        match listen {
            Listen::Tcp(address) => Ok(Self::Tcp(TcpListener::bind(address).await?)),
            Listen::Unix(path) => {
                let bound = match UnixListener::bind(path) {
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse && abandoned(path) => {
                        std::fs::remove_file(path)?;
                        UnixListener::bind(path)
                    }
                    bound => bound,
                };
                Ok(Self::Unix(bound?, SocketFile(path.clone())))
            }
        }
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> io::Result<Listen> {
        Ok(match self {
            Self::Tcp(listener) => Listen::Tcp(listener.local_addr()?),
            Self::Unix(_, file) => Listen::Unix(file.0.clone()),
        })
    }

    pub(crate) async fn accept(&self) -> io::Result<Connection> {
        match self {
            Self::Tcp(listener) => {
                let stream = listener.accept().await?.0;
                stream.set_nodelay(true)?;
                stream.into_std().map(Connection::Tcp)
            }
            Self::Unix(listener, _) => listener.accept().await?.0.into_std().map(Connection::Unix),
        }
    }
}

/// Whether it is a socket file behind which nobody listens.
fn abandoned(path: &std::path::Path) -> bool {
    StdUnix::connect(path).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
}
