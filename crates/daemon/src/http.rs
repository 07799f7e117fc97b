//! The HTTP servers of a process: `/metrics` for Prometheus, `/healthz` for supervisors that restart an
//! unhealthy process, and `/readyz` for rolling upgrades that wait until a process is ready; and pages for browsers.

use std::io::{self, Read, Write};
use std::net::{self, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::get;
use futures_util::StreamExt;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use metrics::gauge;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use network::connections::{Accepted, AcceptedStream, Connections, Limits, Port};
use network::security::Security;
use shared_proto::task::{self, boxed};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::clusters::reachable;

/// Histogram buckets for `_seconds`, from 10 microseconds to 100 seconds.
const SECONDS: [f64; 15] = [
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0,
];

/// Histogram buckets for `_steps` and `_updates`, which are small whole numbers.
const COUNTS: [f64; 12] = [
    0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 256.0,
];

/// Histogram buckets for `_factor`, from 0 to 1.
const FACTORS: [f64; 10] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.999, 1.0];

/// Histogram buckets for `_norm`: norms of steps, relative to the norm of the weights.
const NORMS: [f64; 11] = [
    1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0,
];

/// The interval at which samples of histograms are sorted into their buckets.
const UPKEEP: Duration = Duration::from_secs(5);

/// The longest wait of a health check.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(3);

/// The most connections for metrics and health at a time. A connection that makes no request gives way to newer ones.
pub const CONNECTIONS: usize = 64;

/// The most connections of browsers at a time.
const BROWSERS: usize = 32;

/// The most requests at a time of one HTTP/2 connection.
const MOST_STREAMS: u32 = 16;

/// The longest time until the next request of a connection.
const NEXT_REQUEST: Duration = Duration::from_secs(30);

/// The readiness of a process: it is in the cluster, and has all that it needs there.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<AtomicBool>);

impl Readiness {
    /// Sets whether the process is ready.
    pub fn set(&self, ready: bool) {
        self.0.store(ready, Relaxed);
    }

    fn answer(&self) -> (StatusCode, &'static str) {
        match self.0.load(Relaxed) {
            true => (StatusCode::OK, "ready\n"),
            false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
        }
    }
}

/// Asks the process that listens at `listen` for its health.
///
/// # Errors
/// If the process does not answer in time that it is healthy.
pub fn ask_health(listen: SocketAddr) -> io::Result<()> {
    let mut stream = net::TcpStream::connect_timeout(&reachable(listen), HEALTH_TIMEOUT)?;
    stream.set_read_timeout(Some(HEALTH_TIMEOUT))?;
    stream.write_all(b"GET /healthz HTTP/1.0\r\n\r\n")?;
    let mut answer = [0; 64];
    let length = stream.read(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer[..length]);
    let line = answer.lines().next().unwrap_or_default();
    if line.split(' ').nth(1) == Some("200") {
        return Ok(());
    }
    Err(io::Error::other(format!("it answered {line:?}")))
}

/// Returns the memory in bytes that this process may use: its container's limit, or the machine's memory if that is
/// less.
pub fn memory_limit() -> u64 {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let container = system.cgroup_limits().map(|limits| limits.total_memory);
    container.map_or(system.total_memory(), |limit| {
        limit.min(system.total_memory())
    })
}

/// Makes this process record metrics.
///
/// # Errors
/// If the process already records metrics.
pub fn install_recorder() -> Result<PrometheusHandle, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .set_buckets_for_metric(Matcher::Suffix("_steps".to_owned()), &COUNTS)?
        .set_buckets_for_metric(Matcher::Suffix("_updates".to_owned()), &COUNTS)?
        .set_buckets_for_metric(Matcher::Suffix("_factor".to_owned()), &FACTORS)?
        .set_buckets_for_metric(Matcher::Suffix("_norm".to_owned()), &NORMS)?
        .install_recorder()
}

/// Serves `/metrics`, `/healthz` and `/readyz` until `shutdown`. Returns the address.
///
/// # Errors
/// If the address is not available.
#[boxed]
pub async fn serve(
    listen: SocketAddr,
    metrics: PrometheusHandle,
    readiness: Readiness,
    shutdown: CancellationToken,
) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(listen).await?;
    let address = listener.local_addr()?;
    gauge!("flambeau_memory_limit_bytes").set(memory_limit() as f64);
    let upkeep = metrics.clone();
    let process = metrics_process::Collector::default();
    let render = move || {
        process.collect();
        metrics.render()
    };
    let connections = Connections::new(Port::Metrics, Limits::without_members(CONNECTIONS));
    let incoming = connections.incoming(listener).map(Accepted::from).map(Ok);
    let incoming = incoming.boxed();
    let app = Router::new()
        .route("/metrics", get(move || async move { render() }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(move || async move { readiness.answer() }));
    let http = builder().http1_only();
    task::spawn(answer_all(incoming, (http, app), shutdown.clone()));
    task::spawn(async move {
        let upkeep = async {
            loop {
                tokio::time::sleep(UPKEEP).await;
                upkeep.run_upkeep();
            }
        };
        shutdown.run_until_cancelled(upkeep).await;
    });
    Ok(address)
}

/// Serves pages to browsers until `shutdown`, over TLS if `security` has a certificate. A request has its
/// [`Caller`](network::connections::Caller) as an extension, so that the application can check the token.
#[boxed]
pub async fn serve_pages(
    listener: TcpListener,
    app: Router,
    security: Security,
    shutdown: CancellationToken,
) {
    let connections = Connections::new(Port::Page, Limits::new(BROWSERS, None));
    let incoming = security.accepted_from_browsers(connections.incoming(listener));
    answer_all(incoming, (builder(), app), shutdown).await;
}

/// Returns the settings of HTTP connections.
fn builder() -> Builder<TokioExecutor> {
    let mut http = Builder::new(TokioExecutor::new());
    http.http1()
        .timer(TokioTimer::new())
        .header_read_timeout(NEXT_REQUEST);
    http.http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MOST_STREAMS)
        .keep_alive_interval(NEXT_REQUEST);
    http
}

/// Serves connections until `shutdown`.
async fn answer_all(
    mut incoming: AcceptedStream,
    (http, app): (Builder<TokioExecutor>, Router),
    shutdown: CancellationToken,
) {
    let accept = async {
        while let Some(stream) = incoming.next().await {
            // Errors of the system are counted where connections are accepted.
            let Ok(stream) = stream else { continue };
            let caller = stream.caller().cloned();
            let app = app.clone().map_request(move |mut request: Request<_>| {
                if let Some(caller) = &caller {
                    caller.record_request();
                    request.extensions_mut().insert(caller.clone());
                }
                request.map(Body::new)
            });
            let service = TowerToHyperService::new(app);
            let serve = http.serve_connection(TokioIo::new(stream), service);
            let serve = shutdown
                .clone()
                .run_until_cancelled_owned(serve.into_owned());
            // A bad request, or a broken connection, concerns its caller alone.
            task::spawn(async { drop(serve.await) });
        }
    };
    shutdown.run_until_cancelled(accept).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn health_is_what_the_process_says() {
        let stop = CancellationToken::new();
        let recorder = PrometheusBuilder::new().build_recorder();
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        let address = serve(any, recorder.handle(), Readiness::default(), stop.clone());
        let address = address.await.unwrap();
        let ask = async |address| {
            tokio::task::spawn_blocking(move || ask_health(address))
                .await
                .unwrap()
        };
        ask(address).await.unwrap();
        // A listener that gives another answer, and none at all.
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let elsewhere = other.local_addr().unwrap();
        let answer = std::thread::spawn(move || {
            let (mut stream, _) = other.accept().unwrap();
            stream.write_all(b"HTTP/1.0 503 busy\r\n\r\n").unwrap();
        });
        let error = ask(elsewhere).await.unwrap_err();
        assert!(error.to_string().contains("503"), "{error}");
        answer.join().unwrap();
        assert!(ask(elsewhere).await.is_err());
    }

    #[test]
    fn the_memory_limit_is_known() {
        assert!(memory_limit() > 1 << 20);
    }
}
