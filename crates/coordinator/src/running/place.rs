//! Where a coordinator listens, also for browsers, and how `flambeau status` finds it.

use std::net::SocketAddr;
use std::path::Path;

use daemon::clusters::{self, Registered, RunningCluster};
use network::security::Security;
use tokio::net::TcpListener;

use super::error::CoordinatorError;

/// Where the coordinator listens.
pub(super) struct Place {
    pub(super) listener: TcpListener,
    pub(super) address: SocketAddr,
    /// The listener of the live page, if there is one. `page_address` is its address.
    pub(super) browsers: Option<TcpListener>,
    pub(super) page_address: Option<SocketAddr>,
}

/// Listens on the address of a setting.
///
/// # Errors
/// [`CoordinatorError::Listen`].
pub(super) async fn bind(
    address: SocketAddr,
    setting: &'static str,
) -> Result<(TcpListener, SocketAddr), CoordinatorError> {
    let failed = |error| CoordinatorError::Listen {
        address,
        setting,
        error,
    };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Returns the URL of the live page for browsers on this machine.
fn url(page: SocketAddr, security: &Security) -> String {
    let scheme = match security.is_listening_encrypted() {
        true => "https",
        false => "http",
    };
    format!("{scheme}://{}/", clusters::reachable(page))
}

/// Registers this coordinator for `flambeau status`. Returns `None` if there is no place to register, as in some
/// containers: then `flambeau status` needs the coordinator's address.
pub(super) fn register(
    address: SocketAddr,
    page: Option<SocketAddr>,
    dir: &Path,
    security: &Security,
) -> Option<Registered> {
    let cluster = RunningCluster {
        coordinator: address,
        run_dir: dir.to_owned(),
        page: page.map(|page| url(page, security)),
        encrypted: security.is_listening_encrypted(),
        token: security.demands_token(),
        process: std::process::id(),
        since: clusters::now(),
    };
    let registered = clusters::register(&clusters::folder(), &cluster);
    let tell = |error| {
        tracing::info!("`flambeau status` finds this cluster by its address alone: {error}")
    };
    registered.map_err(tell).ok()
}
