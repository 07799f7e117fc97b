//! The threads that serve sessions. A connection stays on one thread, with its socket, its messages and its updates:
//! to hand small messages from thread to thread would cost more than the work itself.

use std::io;
use std::thread::JoinHandle;

use futures_util::future::BoxFuture;
use network::connections::{AcceptedStream, Connections};
use network::listener::{self, Connection, Listener};
use network::transport;
use shared_proto::task::block_on;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

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
            let serve = serve_queue(sessions.clone(), queue, stop.clone());
            let thread = std::thread::Builder::new()
                .name(format!("sessions-{index}"))
                .spawn(move || block_on(&runtime, serve))?;
            threads.push(thread);
            connections.push(sender);
        }
        Ok(Self {
            connections,
            threads,
        })
    }

    /// Accepts connections until `stop` is cancelled, and gives them to the threads in turn. Then waits for the threads
    /// to end.
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

/// Serves the connections of one thread.
async fn serve_queue(
    sessions: Sessions,
    queue: mpsc::Receiver<Connection>,
    stop: CancellationToken,
) {
    let incoming = listener::incoming(&sessions.security, ReceiverStream::new(queue));
    if let Err(error) = serve(sessions, incoming, stop).await {
        tracing::error!(%error, "a thread of sessions has ended");
    }
}

/// Serves sessions on these connections until `stop`.
pub(crate) fn serve(
    sessions: Sessions,
    incoming: AcceptedStream,
    stop: CancellationToken,
) -> BoxFuture<'static, Result<(), tonic::transport::Error>> {
    let server = transport::server().max_concurrent_streams(MOST_STREAMS);
    listener::serve(server, sessions, incoming, stop)
}
