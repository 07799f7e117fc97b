//! Listeners for streams of messages: a port, or a socket file for peers on the same host; and the service of their
//! connections.

mod serve;

use std::io;
use std::net::TcpStream as StdTcp;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream as StdUnix;
use std::path::PathBuf;

use tokio::net::{TcpListener, UnixListener};

use crate::connections::{Connections, Place};
use crate::transport::Listen;

pub use serve::{incoming, serve};

/// A connection on its way to the thread that will serve it.
pub enum Connection {
    /// To a port.
    Tcp(StdTcp, Place),
    /// To a socket file.
    Unix(StdUnix, Place),
}

/// Accepts connections.
pub enum Listener {
    /// A port.
    Tcp(TcpListener),
    /// A socket file. The field with the file comes first, so that the file is removed while the socket still listens.
    /// Otherwise another process could take the file for abandoned.
    Unix(SocketFile, UnixListener),
}

/// A socket file of this process, removed when this is dropped.
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Listener {
    /// Begins to listen. A socket file that a dead process has left is replaced.
    ///
    /// # Errors
    /// The system's; `AddrInUse` if another process listens there.
    pub async fn bind(listen: &Listen) -> io::Result<Self> {
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
                let listener = bound?;
                Ok(Self::Unix(SocketFile(path.clone()), listener))
            }
        }
    }

    /// Returns the address that it listens on.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> io::Result<Listen> {
        Ok(match self {
            Self::Tcp(listener) => Listen::Tcp(listener.local_addr()?),
            Self::Unix(file, _) => Listen::Unix(file.0.clone()),
        })
    }

    /// Accepts the next connection that finds a place.
    ///
    /// # Errors
    /// If the connection cannot be taken to another thread.
    pub async fn accept(&self, connections: &Connections) -> io::Result<Connection> {
        match self {
            Self::Tcp(listener) => {
                let (stream, place) = connections.accept(listener).await;
                Ok(Connection::Tcp(stream.into_std()?, place))
            }
            Self::Unix(_, listener) => {
                let (stream, place) = connections.accept(listener).await;
                Ok(Connection::Unix(stream.into_std()?, place))
            }
        }
    }
}

/// Returns whether a path is a socket file on which no process listens.
fn abandoned(path: &std::path::Path) -> bool {
    let is_socket = std::fs::metadata(path).is_ok_and(|m| m.file_type().is_socket());
    is_socket && StdUnix::connect(path).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connections::{Limits, Port};

    #[tokio::test]
    async fn a_socket_file_is_replaced_only_if_nobody_listens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ps.sock");
        let listen = Listen::Unix(path.clone());
        // A killed process leaves such a file behind.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&listen).await.unwrap();
        assert_eq!(listener.address().unwrap(), listen);
        let taken = Listener::bind(&listen).await.err().unwrap();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);

        let client = StdUnix::connect(&path).unwrap();
        let connections = Connections::new(Port::Data, Limits::new(8, None));
        let accepted = listener.accept(&connections).await.unwrap();
        assert!(matches!(accepted, Connection::Unix(..)));
        drop((client, listener));
        assert!(!path.exists());

        std::fs::write(&path, "not a socket").unwrap();
        assert!(Listener::bind(&listen).await.is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "not a socket");
    }
}
