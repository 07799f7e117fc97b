//! The simulated network, behind the interface of networks.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use daemon::membership::Registration;
use http::Uri;
use hyper_util::rt::TokioIo;
use network::connections::{Accepted, AcceptedStream};
use network::security::{Remote, Security};
use network::{Connecting, Network};
use shared_proto::ids::Role;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use turmoil::net::{TcpListener, TcpStream};

use crate::pause::Pause;
use crate::repeat::Repeats;

/// The port on which every role listens.
pub(crate) const PORT: u16 = 7000;

/// The number of connections that may wait to be accepted.
const WAITING: usize = 64;

/// The network by which a host reaches other hosts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Simulated {
    security: Security,
    pause: Pause,
}

impl Simulated {
    pub(crate) fn new(pause: Pause) -> Self {
        Self {
            pause,
            ..Self::default()
        }
    }

    fn connector(
        &self,
    ) -> impl tower::Service<Uri, Response = TokioIo<Connection>, Error = io::Error, Future: Send>
    + Send
    + 'static {
        let pause = self.pause.clone();
        tower::service_fn(move |uri: Uri| {
            let pause = pause.clone();
            async move {
                let host = uri.host().unwrap_or_default();
                let address = (host, uri.port_u16().unwrap_or(PORT));
                pause.running().await;
                let stream = TcpStream::connect(address).await?;
                let stream = Box::new(stream);
                Ok(TokioIo::new(Connection { stream, pause }))
            }
        })
    }
}

impl Network for Simulated {
    fn connect(&self, remote: Remote) -> Connecting {
        let connector = self.connector();
        Box::pin(async move { remote.endpoint().connect_with_connector(connector).await })
    }

    fn connect_lazily(&self, remote: Remote) -> Channel {
        remote
            .endpoint()
            .connect_with_connector_lazy(self.connector())
    }

    fn security(&self) -> &Security {
        &self.security
    }
}

/// Returns the incoming connections of this host.
pub(crate) async fn incoming(pause: Pause, repeats: Option<Repeats>) -> io::Result<AcceptedStream> {
    let listener = TcpListener::bind(("0.0.0.0", PORT)).await?;
    let (sender, queue) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let pause = pause.clone();
            let connection = Connection {
                stream: Box::new(stream),
                pause: pause.clone(),
            };
            let connection = match &repeats {
                Some(repeats) => Connection {
                    stream: Box::new(repeats.behind(connection)),
                    pause,
                },
                None => connection,
            };
            if sender
                .send(Ok(Accepted::uncounted(connection)))
                .await
                .is_err()
            {
                return;
            }
        }
    });
    Ok(Box::pin(ReceiverStream::new(queue)))
}

/// Returns the registration of a process on this host.
pub(crate) fn registration(role: Role, name: &str) -> Registration {
    Registration {
        role,
        identity: name.to_owned(),
        address: format!("{name}:{PORT}"),
        metrics_address: String::new(),
        holding: None,
        capacity_bytes: 0,
    }
}

/// A stream of bytes in both directions.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection of a process, which is silent while the process is stopped.
pub(crate) struct Connection {
    stream: Box<dyn Stream>,
    pause: Pause,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.pause.poll_running(context));
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.pause.poll_running(context));
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.pause.poll_running(context));
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
