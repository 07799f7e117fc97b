//! One type for all accepted connections, so that the code that serves them is compiled once.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::stream::BoxStream;
use http::Extensions;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

use super::{Caller, Guarded};
use crate::forwarding::forward_writes;

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Io for S {}

/// An accepted connection.
pub struct Accepted {
    io: Box<dyn Io>,
    peer: Peer,
}

/// The connections of a port, after their handshakes.
pub type AcceptedStream = BoxStream<'static, io::Result<Accepted>>;

/// The peer of a connection. Each request of the connection has it as an extension.
#[derive(Clone, Default)]
pub struct Peer {
    caller: Option<Caller>,
    /// The chain of certificates that the peer has shown.
    certificates: Option<Arc<[CertificateDer<'static>]>>,
}

impl Peer {
    /// Returns the peer that has sent a request; `None` if the request did not come over an [`Accepted`] connection.
    pub(crate) fn of(extensions: &Extensions) -> Option<&Self> {
        extensions.get()
    }

    /// Returns the peer's place at the port; `None` if no port has counted the connection.
    pub(crate) fn caller(&self) -> Option<&Caller> {
        self.caller.as_ref()
    }

    /// Returns the certificate that names the peer.
    pub(crate) fn certificate(&self) -> Option<&CertificateDer<'static>> {
        self.certificates.as_ref()?.first()
    }
}

impl Accepted {
    /// Wraps a connection after its TLS handshake. `certificates` is the chain that the peer has shown.
    pub(crate) fn secured(
        io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        caller: Caller,
        certificates: Option<&[CertificateDer<'static>]>,
    ) -> Self {
        let peer = Peer {
            caller: Some(caller),
            certificates: certificates.map(Arc::from),
        };
        Self {
            io: Box::new(io),
            peer,
        }
    }

    /// Wraps a connection that no port has counted, as in simulations.
    pub fn uncounted(io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let peer = Peer::default();
        Self {
            io: Box::new(io),
            peer,
        }
    }

    /// Returns the connection's place at its port; `None` if no port has counted the connection.
    pub fn caller(&self) -> Option<&Caller> {
        self.peer.caller()
    }
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin + 'static> From<Guarded<S>> for Accepted {
    fn from(connection: Guarded<S>) -> Self {
        let peer = Peer {
            caller: Some(connection.caller().clone()),
            certificates: None,
        };
        Self {
            io: Box::new(connection),
            peer,
        }
    }
}

impl Connected for Accepted {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl AsyncWrite for Accepted {
    forward_writes!(io);
}
