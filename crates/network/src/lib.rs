//! How processes reach each other: connections, their security, and streams of messages.
//!
//! - [`Network`]: the network by which peers are reached: the system's, or a simulated one
//! - [`connections`]: limits on the connections of a port; [`listener`]: a port or a socket file
//! - [`security`]: certificates and the job's token
//! - [`socket_file`]: connections between processes of one host, through memory that both share
//! - [`stream`]: messages on an HTTP/2 body, without copies of their payloads
//! - [`transport`]: addresses, and the gRPC settings of both ends

pub mod connections;
mod forwarding;
pub mod listener;
pub mod security;
pub mod socket_file;
pub mod stream;
pub mod transport;

use std::fmt;
use std::pin::Pin;

use tonic::transport::Channel;

use crate::security::{Remote, Security};

/// The network by which peers are reached: the system's, or a simulated one.
pub trait Network: fmt::Debug + Send + Sync {
    /// Connects to a peer.
    fn connect(&self, remote: Remote) -> Connecting;

    /// Returns a channel that connects when it is used, and again after the connection breaks.
    fn connect_lazily(&self, remote: Remote) -> Channel;

    /// Returns the credentials of this process, and those that it demands of its peers.
    fn security(&self) -> &Security;
}

/// A pending connection.
pub type Connecting =
    Pin<Box<dyn Future<Output = Result<Channel, tonic::transport::Error>> + Send>>;

/// The system's network.
#[derive(Clone, Debug, Default)]
pub struct SystemNetwork {
    security: Security,
}

impl SystemNetwork {
    /// Creates the network with these credentials.
    pub fn new(security: Security) -> Self {
        Self { security }
    }
}

impl Network for SystemNetwork {
    fn connect(&self, remote: Remote) -> Connecting {
        Box::pin(async move { remote.connect().await })
    }

    fn connect_lazily(&self, remote: Remote) -> Channel {
        remote.connect_lazy()
    }

    fn security(&self) -> &Security {
        &self.security
    }
}
