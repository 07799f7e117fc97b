//! The threads that serve sessions. A connection stays on one thread, with its socket, its messages and its updates:
//! to hand small messages from thread to thread would cost more than the work itself.

use std::io;
use std::thread::JoinHandle;

use shared_proto::connections::{Connections, Guarded};
use shared_proto::transport;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use super::listener::{Connection, Listener};
use super::service::Sessions;

/// The number of connections that may wait for a thread to take them.
const WAITING: usize = 64;

/// The most concurrent streams of one connection. Workers open one.
const MOST_STREAMS: u32 = 4;

/// Threads that serve sessions.
pub(crate) struct SessionThreads {
    connections: Vec<mpsc::Sender<Connection>>,
    threads: Vec<JoinHandle<()>>,
}

impl SessionThreads {
    /// Starts `count` threads, which serve until `stop`.
    ///
    /// # Errors
    /// If the system has no more threads.
    pub(crate) fn start(
        count: usize,
        sessions: &Sessions,
        stop: &CancellationToken,
    ) -> io::Result<Self> {
        let (mut connections, mut threads) = (Vec::new(), Vec::new());
        for index in 0..count {
            let (sender, queue) = mpsc::channel(WAITING);
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let serve = serve(sessions.clone(), queue, stop.clone());
            let thread = std::thread::Builder::new()
                .name(format!("sessions-{index}"))
                .spawn(move || runtime.block_on(serve))?;
            threads.push(thread);
            connections.push(sender);
        }
        Ok(Self {
            connections,
            threads,
        })
    }

    /// Accepts connections, and gives them to the threads in turns, until `stop`; then waits for
    /// the threads to end.
    pub(crate) async fn accept(
        self,
        listener: Listener,
        places: Connections,
        stop: CancellationToken,
    ) {
        let connections = self.connections;
        let accept = async {
            for thread in connections.iter().cycle() {
                // A connection that cannot move to a thread is closed. The threads end only together.
                if let Ok(connection) = listener.accept(&places).await {
                    drop(thread.send(connection).await);
                }
            }
        };
        stop.run_until_cancelled(accept).await;
        let threads = self.threads;
        let join = move || threads.into_iter().for_each(|thread| drop(thread.join()));
        let _ = tokio::task::spawn_blocking(join).await;
    }
}

/// Serves the connections of one thread. All connections of a server are of one kind, TCP or Unix.
async fn serve(sessions: Sessions, mut queue: mpsc::Receiver<Connection>, stop: CancellationToken) {
    let Some(first) = stop.run_until_cancelled(queue.recv()).await.flatten() else {
        return;
    };
    let first_kind = matches!(first, Connection::Tcp(..));
    let connections = tokio_stream::once(first).chain(ReceiverStream::new(queue));
    let served = if first_kind {
        let incoming = connections.filter_map(|connection| match connection {
            Connection::Tcp(stream, place) => {
                Some(TcpStream::from_std(stream).map(|stream| Guarded::new(stream, place)))
            }
            Connection::Unix(..) => None,
        });
        if sessions.security.is_listening_encrypted() {
            let incoming = Box::pin(sessions.security.secured(incoming));
            serve_all(sessions, incoming, stop).await
        } else {
            serve_all(sessions, incoming, stop).await
        }
    } else {
        let incoming = connections.filter_map(|connection| match connection {
            Connection::Unix(stream, place) => {
                Some(UnixStream::from_std(stream).map(|stream| Guarded::new(stream, place)))
            }
            Connection::Tcp(..) => None,
        });
        serve_all(sessions, incoming, stop).await
    };
    if let Err(error) = served {
        tracing::error!(%error, "a thread of sessions has ended");
    }
}

pub(crate) async fn serve_all<S>(
    sessions: Sessions,
    incoming: impl Stream<Item = io::Result<S>>,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error>
where
    S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    transport::server()
        .max_concurrent_streams(MOST_STREAMS)
        .add_service(sessions)
        .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
        .await
}
