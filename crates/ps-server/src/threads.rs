//! The threads on which sessions live. A connection stays on the thread that it was given to: its
//! socket, its messages, its updates. Nothing is handed from thread to thread on the way, which costs
//! more than the work itself for small messages.

use std::net::TcpStream as StdStream;
use std::thread::JoinHandle;

use shared_proto::transport::{self, MAX_MESSAGE_BYTES};
use shared_proto::wire::parameter_server_server::ParameterServerServer;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::service::Service;

/// Connections that may wait for a thread to take them.
const WAITING: usize = 64;

/// Threads that serve sessions.
pub(crate) struct SessionThreads {
    connections: Vec<mpsc::Sender<StdStream>>,
    threads: Vec<JoinHandle<()>>,
}

impl SessionThreads {
    /// Starts `count` threads, which serve until `stop`.
    ///
    /// # Errors
    /// If the system has no more threads.
    pub(crate) fn start(
        count: usize,
        service: &Service,
        stop: &CancellationToken,
    ) -> std::io::Result<Self> {
        let (mut connections, mut threads) = (Vec::new(), Vec::new());
        for index in 0..count {
            let (sender, queue) = mpsc::channel(WAITING);
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let serve = serve(service.clone(), queue, stop.clone());
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
    pub(crate) async fn accept(self, listener: TcpListener, stop: CancellationToken) {
        let connections = self.connections;
        let accept = async {
            for thread in connections.iter().cycle() {
                match listener
                    .accept()
                    .await
                    .and_then(|(stream, _)| stream.into_std())
                {
                    // A thread ends only with all of them.
                    Ok(stream) => drop(thread.send(stream).await),
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    }
                }
            }
        };
        stop.run_until_cancelled(accept).await;
        let threads = self.threads;
        let join = move || threads.into_iter().for_each(|thread| drop(thread.join()));
        let _ = tokio::task::spawn_blocking(join).await;
    }
}

async fn serve(service: Service, queue: mpsc::Receiver<StdStream>, stop: CancellationToken) {
    let incoming = ReceiverStream::new(queue).map(|stream| {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        TcpStream::from_std(stream)
    });
    let service = ParameterServerServer::new(service).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let served = transport::server()
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "a thread of sessions has ended");
    }
}
