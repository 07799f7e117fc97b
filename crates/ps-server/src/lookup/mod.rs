//! Reads of rows for online inference. They are a separate service with its own port and its own thread, so that
//! readers take no more processor time from training than their share.
//!
//! - `service`: the calls, and the reads that they ask for
//! - `pace`: the share of a processor's time that readers may take

mod pace;
mod service;

use std::net::{SocketAddr, TcpListener as StdListener};
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::Response;
use network::connections::{AcceptedStream, Caller, Connections, Limits, Port};
use network::listener;
use network::security::Security;
use network::transport;
use shared_proto::task::block_on;
use shared_proto::wire::lookup_server::LookupServer;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::service::interceptor::{InterceptedService, ResponseBody};
use tower::util::MapResponse;

use self::service::Lookups;
use crate::error::PsError;

pub(crate) use self::pace::Pace;
pub(crate) use self::service::Served;

/// The most concurrent calls of one connection.
const MOST_STREAMS: u32 = 2;

/// The size in bytes of the largest request: room for 65,536 ids and the table's name. The unread bytes of a connection
/// have the same limit.
const MOST_REQUEST_BYTES: u32 = 1 << 20;

/// The settings of lookups.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Lookups")]
pub struct LookupSettings {
    /// Answer reads of rows of tables here, for online inference: IP:PORT, where port 0 takes a free one. Default: no
    /// reads are answered.
    #[arg(long, env = "FLAMBEAU_LOOKUP_LISTEN", value_name = "IP:PORT")]
    pub lookup_listen: Option<SocketAddr>,
    /// The address by which readers reach this server, as host:port. Default: the address on which it listens for
    /// lookups, or if that is 0.0.0.0, the address by which it reaches the coordinator.
    #[arg(
        long,
        env = "FLAMBEAU_LOOKUP_ADVERTISE",
        value_name = "HOST:PORT",
        requires = "lookup_listen"
    )]
    pub lookup_advertise: Option<String>,
    /// The share of one processor's time that reads may take at most, from 0.01 to 1.
    #[arg(long, env = "FLAMBEAU_LOOKUP_SHARE", default_value_t = 0.25, value_name = "X", value_parser = share)]
    pub lookup_share: f64,
    /// The most connections of readers at a time.
    #[arg(long, env = "FLAMBEAU_LOOKUP_CONNECTIONS", default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub lookup_connections: u32,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok();
    let share = share.filter(|share| (0.01..=1.0).contains(share));
    share.ok_or_else(|| format!("{text:?} is no share of a processor, which is from 0.01 to 1"))
}

impl LookupSettings {
    /// Begins to listen for lookups. Returns `None` if the settings name no address to listen on.
    ///
    /// # Errors
    /// If the address is taken.
    pub(crate) fn bind(&self) -> Result<Option<Listening>, PsError> {
        let Some(address) = self.lookup_listen else {
            return Ok(None);
        };
        let failed = |error| PsError::LookupListen { address, error };
        let listener = StdListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Some(Listening { listener, address }))
    }
}

/// The port on which a server listens for lookups.
pub(crate) struct Listening {
    listener: StdListener,
    pub(crate) address: SocketAddr,
}

/// A thread that answers lookups.
pub(crate) struct LookupThread(JoinHandle<()>);

impl LookupThread {
    /// Starts a thread that answers lookups until `stop` is cancelled. Calls in progress then have the time `drain` to
    /// finish.
    ///
    /// # Errors
    /// If the system has no more threads.
    pub(crate) fn start(
        settings: &LookupSettings,
        listening: Listening,
        served: Served,
        stop: CancellationToken,
        drain: Duration,
    ) -> Result<Self, PsError> {
        let Listening { listener, address } = listening;
        let failed = |error| PsError::LookupListen { address, error };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(failed)?;
        // Readers with a token or a certificate become members; without either demanded, they stay newcomers.
        let most = settings.lookup_connections as usize;
        let limits = Limits {
            total: 2 * most,
            newcomers: most,
            per_address: usize::MAX,
        };
        let lookups = Lookups::new(served, Pace::new(settings.lookup_share));
        let thread = std::thread::Builder::new()
            .name("lookups".to_owned())
            .spawn(move || {
                let connections = Connections::new(Port::Lookup, limits);
                let drained = async {
                    stop.cancelled().await;
                    tokio::time::sleep(drain).await;
                };
                let served = accept(lookups, listener, connections, stop.clone());
                // An unfinished call must not delay the end of the process.
                block_on(&runtime, async {
                    tokio::select! {
                        () = served => {}
                        () = drained => {}
                    }
                });
            })
            .map_err(failed)?;
        Ok(Self(thread))
    }

    /// Waits until the thread has ended.
    pub(crate) async fn join(self) {
        let _ = tokio::task::spawn_blocking(move || self.0.join()).await;
    }
}

/// Answers lookups until `stop`.
async fn accept(
    lookups: Lookups,
    listener: StdListener,
    connections: Connections,
    stop: CancellationToken,
) {
    let served = async {
        let listener = TcpListener::from_std(listener)?;
        let incoming = lookups.security().accepted(connections.incoming(listener));
        let served = serve(lookups, incoming, stop).await;
        served.map_err(std::io::Error::other)
    };
    if let Err(error) = served.await {
        tracing::error!(%error, "lookups are not answered any more");
    }
}

fn serve(
    lookups: Lookups,
    incoming: AcceptedStream,
    stop: CancellationToken,
) -> BoxFuture<'static, Result<(), tonic::transport::Error>> {
    let security: Security = lookups.security().clone();
    let service = LookupServer::new(lookups).max_decoding_message_size(MOST_REQUEST_BYTES as usize);
    let admitted = InterceptedService::new(service, move |request: tonic::Request<()>| {
        security.check_token(request.metadata().as_ref(), request.extensions())?;
        // A connection may stay for as long as requests come.
        let caller = Caller::of(request.extensions());
        caller.into_iter().for_each(Caller::record_request);
        Ok(request)
    });
    let whole = |answer: Response<ResponseBody<Body>>| answer.map(Body::new);
    let admitted = MapResponse::new(admitted, whole);
    let server = transport::server()
        .max_concurrent_streams(MOST_STREAMS)
        .initial_stream_window_size(MOST_REQUEST_BYTES)
        .initial_connection_window_size(MOST_REQUEST_BYTES);
    listener::serve(server, admitted, incoming, stop)
}
