//! `/metrics` for Prometheus and `/healthz` for whoever restarts what is ill.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Histogram buckets for `_seconds`, from 10 microseconds to 100 seconds.
const SECONDS: [f64; 15] = [
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0,
];

/// Histogram buckets for `_steps` and `_updates`, which are small whole numbers.
const COUNTS: [f64; 12] = [
    0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 256.0,
];

/// How often samples of histograms are sorted into their buckets.
const UPKEEP: Duration = Duration::from_secs(5);

/// Makes this process record metrics.
///
/// # Errors
/// If it does so already.
pub fn install_recorder() -> Result<PrometheusHandle, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .set_buckets_for_metric(Matcher::Suffix("_steps".to_owned()), &COUNTS)?
        .set_buckets_for_metric(Matcher::Suffix("_updates".to_owned()), &COUNTS)?
        .install_recorder()
}

/// Serves `/metrics` and `/healthz` until `shutdown`; returns where.
///
/// # Errors
/// If the address cannot be had.
pub async fn serve(
    listen: SocketAddr,
    metrics: PrometheusHandle,
    shutdown: CancellationToken,
) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(listen).await?;
    let address = listener.local_addr()?;
    let upkeep = metrics.clone();
    let process = metrics_process::Collector::default();
    let render = move || {
        process.collect();
        metrics.render()
    };
    let app = Router::new()
        .route("/metrics", get(move || async move { render() }))
        .route("/healthz", get(|| async { "ok\n" }));
    let stop = shutdown.clone();
    tokio::spawn(async move {
        let serve = axum::serve(listener, app).with_graceful_shutdown(stop.cancelled_owned());
        if let Err(error) = serve.await {
            tracing::error!(%error, "the metrics endpoint has ended");
        }
    });
    tokio::spawn(async move {
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
