//! The live page of a cluster (`--http`): curves, workers, servers, checkpoints. One file without anything from elsewhere,
//! which fetches `status.json` while it is visible. Nothing is computed between requests.
//!
//! - `template`: the page as one file, also as a report of a run that has ended

mod template;

use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use parking_lot::Mutex;
use serde_json::{Value, json};
use shared_proto::security::Security;

pub use self::template::report;
use crate::keeping::history::History;
use crate::keeping::shared::Shared;

/// The page has its styles and program in itself, and fetches from its own server alone.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// What the page shows.
pub(crate) struct Shown {
    job: Mutex<Option<ShownJob>>,
    security: Security,
}

/// The parts of a job that the page shows.
#[derive(Clone)]
pub(crate) struct ShownJob {
    pub(crate) shared: Arc<Shared>,
    pub(crate) history: Arc<Mutex<History>>,
    pub(crate) run_dir: PathBuf,
}

/// Returns the application that serves the page.
pub(crate) fn app(shown: Arc<Shown>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/status.json", get(status))
        .with_state(shown)
}

/// The page itself tells nothing of the cluster, so it needs no token.
async fn page(State(shown): State<Arc<Shown>>) -> Response {
    let page = template::live(shown.security.demands_token());
    answer(StatusCode::OK, "text/html; charset=utf-8", page)
}

async fn status(State(shown): State<Arc<Shown>>, request: Request) -> Response {
    let (headers, extensions) = (request.headers(), request.extensions());
    let (code, value) = match shown.security.check_token(headers, extensions) {
        Ok(()) => (StatusCode::OK, shown.to_json()),
        Err(refused) => {
            let code = match refused.code() {
                tonic::Code::Unauthenticated => StatusCode::UNAUTHORIZED,
                _ => StatusCode::SERVICE_UNAVAILABLE,
            };
            (code, json!({ "error": refused.message() }))
        }
    };
    answer(code, "application/json", value.to_string())
}

impl Shown {
    pub(crate) fn new(security: Security) -> Self {
        Self {
            job: Mutex::new(None),
            security,
        }
    }

    /// Shows this job from now on.
    pub(crate) fn show(&self, job: Option<ShownJob>) {
        *self.job.lock() = job;
    }

    fn to_json(&self) -> Value {
        let job = self.job.lock().clone();
        job.map_or_else(|| json!({ "status": null }), |job| job.to_json())
    }
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
