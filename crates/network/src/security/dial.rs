//! Connections to peers. Each handshake uses the newest credentials. If tonic made the handshakes, a channel would keep
//! the credentials with which it was created.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{Error as TlsError, InvalidMessage};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Error};
use tower::{Service, ServiceExt};

use super::material::H2;
use super::{Mismatch, ReadAhead, Security, name_of};
use crate::socket_file::SocketFileStream;
use crate::transport::CONNECT_TIMEOUT;
use shared_proto::ids::Role;

/// The first byte of the TLS records that a listener sends to a caller that does not speak TLS: an alert, or a
/// handshake. An HTTP/2 frame that begins with one of these bytes is larger than the first frame of a connection.
const RECORDS: [u8; 2] = [0x15, 0x16];

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A peer, and the way to reach it.
#[derive(Clone, Debug)]
pub struct Remote {
    endpoint: Endpoint,
    way: Way,
}

#[derive(Clone, Debug)]
enum Way {
    SocketFile(PathBuf),
    Plain,
    Secured(Security, Role),
}

impl Remote {
    pub(super) fn at_socket_file(endpoint: Endpoint, path: PathBuf) -> Self {
        let way = Way::SocketFile(path);
        Self { endpoint, way }
    }

    pub(super) fn in_the_clear(endpoint: Endpoint) -> Self {
        let way = Way::Plain;
        Self { endpoint, way }
    }

    pub(super) fn secured(endpoint: Endpoint, security: Security, role: Role) -> Self {
        let way = Way::Secured(security, role);
        Self { endpoint, way }
    }

    /// Returns the peer's address and the settings of its connections, for a network that makes its own connections.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Connects.
    ///
    /// # Errors
    /// If the peer cannot be reached, or one side does not trust the other.
    pub async fn connect(&self) -> Result<Channel, Error> {
        let endpoint = &self.endpoint;
        match &self.way {
            Way::SocketFile(path) => endpoint.connect_with_connector(local(path)).await,
            Way::Plain => endpoint.connect_with_connector(plain()).await,
            Way::Secured(security, role) => {
                let connector = encrypted(security.clone(), *role);
                endpoint.connect_with_connector(connector).await
            }
        }
    }

    /// Returns a channel that connects when it is used, and again after the connection breaks.
    pub fn connect_lazy(&self) -> Channel {
        let endpoint = &self.endpoint;
        match &self.way {
            Way::SocketFile(path) => endpoint.connect_with_connector_lazy(local(path)),
            Way::Plain => endpoint.connect_with_connector_lazy(plain()),
            Way::Secured(security, role) => {
                let connector = encrypted(security.clone(), *role);
                endpoint.connect_with_connector_lazy(connector)
            }
        }
    }
}

fn tcp() -> HttpConnector {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp
}

fn local(
    path: &Path,
) -> impl Service<Uri, Response = TokioIo<SocketFileStream>, Error = BoxError, Future: Send>
+ Send
+ 'static {
    let path = path.to_owned();
    tower::service_fn(move |_| {
        let path = path.clone();
        async move { Ok(TokioIo::new(SocketFileStream::connect(&path).await?)) }
    })
}

fn plain()
-> impl Service<Uri, Response = TokioIo<Plain>, Error = BoxError, Future: Send> + Send + 'static {
    let tcp = tcp();
    tower::service_fn(move |uri| {
        let tcp = tcp.clone();
        async move {
            let stream = tcp.oneshot(uri).await?.into_inner();
            let begun = false;
            Ok(TokioIo::new(Plain { stream, begun }))
        }
    })
}

fn encrypted(
    security: Security,
    role: Role,
) -> impl Service<
    Uri,
    Response = TokioIo<TlsStream<ReadAhead<TcpStream>>>,
    Error = BoxError,
    Future: Send,
> + Send
+ 'static {
    let tcp = tcp();
    tower::service_fn(move |uri| {
        let (tcp, security) = (tcp.clone(), security.clone());
        async move {
            let stream = tcp.oneshot(uri).await?.into_inner();
            let name = ServerName::try_from(name_of(role))?;
            let connector = security.material().caller.clone();
            // A process that has an authority keeps having one.
            let connector = connector.ok_or("there is no authority to recognise the peer by")?;
            let stream = connector.connect(name, ReadAhead::new(stream));
            let stream = stream.await.map_err(explained)?;
            match stream.get_ref().1.alpn_protocol() {
                Some(H2) => Ok(TokioIo::new(stream)),
                _ => Err(BoxError::from("the other side speaks TLS, but not HTTP/2")),
            }
        }
    })
}

/// Returns the error of a failed handshake, with an explanation.
fn explained(error: io::Error) -> BoxError {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref());
    match tls {
        Some(TlsError::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            Mismatch::OnlyThis.into()
        }
        _ => error.into(),
    }
}

/// A connection in the clear, which fails if the other side answers with TLS.
pub(super) struct Plain {
    stream: TcpStream,
    /// True once bytes have arrived that are not TLS.
    begun: bool,
}

impl AsyncRead for Plain {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        if !self.begun
            && let Some(first) = buffer.filled().get(before)
        {
            if RECORDS.contains(first) {
                return Poll::Ready(Err(io::Error::other(Mismatch::OnlyTheOther)));
            }
            self.begun = true;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Plain {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
