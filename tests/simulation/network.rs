//! The simulated network, as the roles see networks.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::rt::TokioIo;
use shared_proto::security::Security;
use shared_proto::transport::{Connecting, Network};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint};
use turmoil::net::{TcpListener, TcpStream};

/// The port on which every role listens.
pub(crate) const PORT: u16 = 7000;

/// Connections that may wait to be accepted.
const WAITING: usize = 64;

#[derive(Clone, Debug, Default)]
pub(crate) struct Simulated {
    security: Security,
}

async fn open(uri: Uri) -> io::Result<TokioIo<TcpStream>> {
    let address = (
        uri.host().unwrap_or_default(),
        uri.port_u16().unwrap_or(PORT),
    );
    TcpStream::connect(address).await.map(TokioIo::new)
}

impl Network for Simulated {
    fn connect(&self, endpoint: Endpoint) -> Connecting {
        Box::pin(async move {
            endpoint
                .connect_with_connector(tower::service_fn(open))
                .await
        })
    }

    fn connect_lazily(&self, endpoint: Endpoint) -> Channel {
        endpoint.connect_with_connector_lazy(tower::service_fn(open))
    }

    fn security(&self) -> &Security {
        &self.security
    }
}

/// Connections that come in on this host.
pub(crate) async fn incoming() -> io::Result<ReceiverStream<io::Result<Connection>>> {
    let listener = TcpListener::bind(("0.0.0.0", PORT)).await?;
    let (sender, queue) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if sender.send(Ok(Connection(stream))).await.is_err() {
                return;
            }
        }
    });
    Ok(ReceiverStream::new(queue))
}

pub(crate) struct Connection(TcpStream);

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
