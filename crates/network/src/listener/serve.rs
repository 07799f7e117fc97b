//! Serves connections with hyper, on the thread of the caller. hyper and tonic are compiled here once, for one type of
//! connection and one type of service.

use std::convert::Infallible;

use futures_util::future::BoxFuture;
use futures_util::{Stream, StreamExt};
use http::{Request, Response};
use tokio::net::{TcpStream, UnixStream};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::transport::{Error, Server};
use tower::Service;
use tower::util::BoxCloneSyncService;

use super::Connection;
use crate::connections::{AcceptedStream, Guarded};
use crate::security::{HANDSHAKES, Security};
use crate::socket_file::SocketFileStream;

/// A service of gRPC calls.
type Calls = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

/// Returns the connections of a listener. If the process listens encrypted, a connection to a port is returned after
/// its handshake. A connection to a socket file has no handshake.
pub fn incoming(
    security: &Security,
    connections: impl Stream<Item = Connection> + Send + 'static,
) -> AcceptedStream {
    let security = security.clone();
    let greet = move |connection| {
        let security = security.clone();
        async move {
            match connection {
                Connection::Unix(stream, place) => {
                    Some(UnixStream::from_std(stream).map(|stream| {
                        let stream = SocketFileStream::accepted(stream);
                        Guarded::new(stream, place).into()
                    }))
                }
                Connection::Tcp(stream, place) => match TcpStream::from_std(stream) {
                    Ok(stream) => security.accept(Guarded::new(stream, place)).await.map(Ok),
                    Err(error) => Some(Err(error)),
                },
            }
        }
    };
    let greeted = connections.map(greet).buffer_unordered(HANDSHAKES);
    greeted.filter_map(std::future::ready).boxed()
}

/// Serves connections until `stop` is cancelled.
///
/// # Errors
/// hyper's.
pub fn serve<S>(
    server: Server,
    service: S,
    incoming: AcceptedStream,
    stop: CancellationToken,
) -> BoxFuture<'static, Result<(), Error>>
where
    S: Service<
            Request<Body>,
            Response = Response<Body>,
            Error = Infallible,
            Future: Send + 'static,
        > + Clone
        + Send
        + Sync
        + 'static,
{
    serve_calls(server, BoxCloneSyncService::new(service), incoming, stop)
}

fn serve_calls(
    server: Server,
    calls: Calls,
    incoming: AcceptedStream,
    stop: CancellationToken,
) -> BoxFuture<'static, Result<(), Error>> {
    Box::pin(server.serve_with_incoming_shutdown(calls, incoming, stop.cancelled_owned()))
}
