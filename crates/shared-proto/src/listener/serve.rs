//! The service of connections by hyper, on the thread of the caller.

use std::convert::Infallible;
use std::io;

use futures_util::{Stream, StreamExt};
use http::{Request, Response};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::server::Connected;
use tower::Service;

use super::Connection;
use crate::connections::Guarded;
use crate::security::Security;
use crate::socket_file::SocketFileStream;
use crate::transport;

/// A gRPC service that is written by hand.
pub trait StreamService:
    Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send + 'static>
    + NamedService
    + Clone
    + Send
    + Sync
    + 'static
{
}

impl<S> StreamService for S where
    S: Service<
            Request<Body>,
            Response = Response<Body>,
            Error = Infallible,
            Future: Send + 'static,
        > + NamedService
        + Clone
        + Send
        + Sync
        + 'static
{
}

/// Serves connections of one listener until `stop`. A connection may have `streams` streams at a time.
///
/// # Errors
/// hyper's.
pub async fn serve<S: StreamService>(
    service: S,
    streams: u32,
    security: &Security,
    connections: impl Stream<Item = Connection> + Send + Unpin,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let mut connections = connections;
    let first = stop.run_until_cancelled(connections.next()).await;
    let Some(first) = first.flatten() else {
        return Ok(());
    };
    // All connections of a listener are of one kind.
    let is_tcp = matches!(first, Connection::Tcp(..));
    let connections = futures_util::stream::once(std::future::ready(first)).chain(connections);
    if !is_tcp {
        let incoming = connections.filter_map(|connection| {
            std::future::ready(match connection {
                Connection::Unix(stream, place) => Some(
                    UnixStream::from_std(stream)
                        .map(|stream| Guarded::new(SocketFileStream::accepted(stream), place)),
                ),
                Connection::Tcp(..) => None,
            })
        });
        return serve_incoming(service, streams, incoming, stop).await;
    }
    let incoming = connections.filter_map(|connection| {
        std::future::ready(match connection {
            Connection::Tcp(stream, place) => {
                Some(TcpStream::from_std(stream).map(|stream| Guarded::new(stream, place)))
            }
            Connection::Unix(..) => None,
        })
    });
    match security.is_listening_encrypted() {
        true => {
            let incoming = Box::pin(security.secured(incoming));
            serve_incoming(service, streams, incoming, stop).await
        }
        false => serve_incoming(service, streams, incoming, stop).await,
    }
}

/// Serves connections of any kind until `stop`. A connection may have `streams` streams at a time.
///
/// # Errors
/// hyper's.
pub async fn serve_incoming<S: StreamService, C>(
    service: S,
    streams: u32,
    incoming: impl Stream<Item = io::Result<C>>,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error>
where
    C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    transport::server()
        .max_concurrent_streams(streams)
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
        .await
}
