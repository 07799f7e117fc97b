//! The live page of a cluster (`--http`): curves, workers, servers, checkpoints. The page is one self-contained file,
//! which fetches `status.json` while it is visible. The coordinator computes nothing for it between requests.
//!
//! - `template`: the page as one file, also as a report of a run that has ended

mod template;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use daemon::http::serve_pages;
use network::security::Security;
use parking_lot::Mutex;
use serde_json::{Value, json};
use shared_proto::task;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::template::report;
use crate::keeping::history::History;
use crate::keeping::shared::Shared;

/// The page's content security policy: styles and scripts are inline, and the page fetches only from its own server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The time within which a page that is visible fetches its data again.
const AGAIN: Duration = Duration::from_secs(2);

/// The time to wait for an answer to reach the page.
const ARRIVAL: Duration = Duration::from_millis(100);

/// The parts of a job that the page shows.
#[derive(Clone)]
pub(crate) struct ShownJob {
    pub(crate) shared: Arc<Shared>,
    pub(crate) history: Arc<Mutex<History>>,
    pub(crate) run_dir: PathBuf,
}

/// The page of a coordinator. It is served until this value is dropped.
pub(crate) struct Page {
    served: Arc<Served>,
    _stop: Option<DropGuard>,
}

impl Page {
    /// Serves the page on `listener`. Without a listener, the page is not served. At first it shows no job.
    pub(crate) fn serve(security: &Security, listener: Option<TcpListener>) -> Self {
        let address = listener.as_ref().and_then(|l| l.local_addr().ok());
        let is_local = address.is_some_and(|address| address.ip().is_loopback());
        let served = Arc::new(Served {
            job: Mutex::new(None),
            security: security.clone(),
            fetched: watch::channel(None).0,
            is_private: is_local && !security.demands_token(),
        });
        let serve = |listener| {
            let app = Router::new()
                .route("/", get(page))
                .route("/status.json", get(status))
                .with_state(Arc::clone(&served));
            let stop = CancellationToken::new();
            task::spawn(serve_pages(listener, app, security.clone(), stop.clone()));
            stop.drop_guard()
        };
        Self {
            _stop: listener.map(serve),
            served,
        }
    }

    /// Shows `job` from now on; `None`: no job.
    pub(crate) fn show(&self, job: Option<ShownJob>) {
        *self.served.job.lock() = job;
    }

    /// If a page is visible, waits until it has fetched its data once more, so that it shows the end of the job.
    pub(crate) async fn show_end(&self) {
        let mut fetched = self.served.fetched.subscribe();
        let last = *fetched.borrow_and_update();
        if last.is_some_and(|last| last.elapsed() < AGAIN) {
            let _ = timeout(AGAIN, fetched.changed()).await;
            sleep(ARRIVAL).await;
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // Connections that are still open hold the state of the application.
        self.show(None);
    }
}

/// The state that the handlers of requests share.
struct Served {
    job: Mutex<Option<ShownJob>>,
    security: Security,
    /// The time at which a page last fetched the data; `None` before that.
    fetched: watch::Sender<Option<Instant>>,
    /// True if only this machine can reach the page, and there is no token.
    is_private: bool,
}

/// Returns the page. It reveals nothing about the cluster, so the request needs no token.
async fn page(State(served): State<Arc<Served>>, request: Request) -> Response {
    if let Err((code, why)) = served.check_host(&request) {
        return answer(code, "text/plain; charset=utf-8", why);
    }
    let page = template::live(served.security.demands_token());
    answer(StatusCode::OK, "text/html; charset=utf-8", page)
}

async fn status(State(served): State<Arc<Served>>, request: Request) -> Response {
    let (code, value) = match served.check(&request) {
        Ok(()) => {
            served.fetched.send_replace(Some(Instant::now()));
            (StatusCode::OK, served.to_json())
        }
        Err((code, why)) => (code, json!({ "error": why })),
    };
    answer(code, "application/json", value.to_string())
}

impl Served {
    fn to_json(&self) -> Value {
        let job = self.job.lock().clone();
        job.map_or_else(|| json!({ "status": null }), |job| job.to_json())
    }

    /// If the page is private to this machine, checks that the request's host is a name of this machine.
    fn check_host(&self, request: &Request) -> Result<(), (StatusCode, String)> {
        if self.is_private && !names_this_machine(request) {
            let why = "this page is for browsers of this machine; open it as http://127.0.0.1 or http://localhost";
            return Err((StatusCode::FORBIDDEN, why.to_owned()));
        }
        Ok(())
    }

    /// Checks that the caller may have the data.
    fn check(&self, request: &Request) -> Result<(), (StatusCode, String)> {
        self.check_host(request)?;
        let checked = self
            .security
            .check_token(request.headers(), request.extensions());
        checked.map_err(|refused| {
            let code = match refused.code() {
                tonic::Code::Unauthenticated => StatusCode::UNAUTHORIZED,
                _ => StatusCode::SERVICE_UNAVAILABLE,
            };
            (code, refused.message().to_owned())
        })
    }
}

/// Returns whether the request's host is an IP address or `localhost`. Otherwise, a website that resolves its own name
/// to 127.0.0.1 (DNS rebinding) could read a page that needs no token.
fn names_this_machine(request: &Request) -> bool {
    let header = request.headers().get(header::HOST);
    let authority = header.and_then(|host| host.to_str().ok()?.parse::<Authority>().ok());
    let authority = request.uri().authority().cloned().or(authority);
    authority.is_some_and(|authority| {
        let host = authority
            .host()
            .trim_start_matches('[')
            .trim_end_matches(']');
        host == "localhost" || host.parse::<IpAddr>().is_ok()
    })
}

impl ShownJob {
    fn to_json(&self) -> Value {
        let (status, settings) = self
            .shared
            .look(|cluster, now| (cluster.status(now), cluster.job().to_toml()));
        json!({
            "status": daemon::status::json(&status),
            "history": self.history.lock().to_json(),
            "settings": settings,
            "run_dir": self.run_dir.display().to_string(),
            "version": env!("CARGO_PKG_VERSION"),
        })
    }
}

fn answer(code: StatusCode, kind: &'static str, body: String) -> Response {
    let mut answer = Response::new(Body::from(body));
    *answer.status_mut() = code;
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    for (name, value) in headers {
        answer
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    answer
}
