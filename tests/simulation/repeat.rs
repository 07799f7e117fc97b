//! Calls that arrive twice, or late: over a connection that their caller has given up by then, or after the caller's
//! death.
//!
//! A proxy that understands HTTP/2 lies between the network and the called process. It forwards some calls twice, and
//! some only after a while, whether the caller still waits for the answer or not.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower::ServiceExt;

/// The number of bytes that may be under way between the proxy and its process.
const BUFFER: usize = 1 << 20;

/// The interval at which a connection is probed, and the time limit of an answer.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(10));

/// Calls that have one answer.
const UNARY: [&str; 10] = [
    "Register",
    "Heartbeat",
    "Leave",
    "GetShardMap",
    "RegisterVariables",
    "FinishInitialization",
    "JoinRing",
    "LeaseWork",
    "FinishStep",
    "Report",
];

/// The stream by which workers report finished steps. Its messages are those of the call FinishStep.
const STREAM_OF_REPORTS: &str = "FinishSteps";

#[derive(Clone, Copy, Debug)]
enum Fate {
    Once,
    /// The call is forwarded twice at once, before the first is answered.
    Twice,
    /// The call is forwarded at once, and again after this time.
    Again(Duration),
    /// The call is forwarded only after this time.
    Late(Duration),
}

/// Decides the fate of calls.
#[derive(Clone, Debug)]
pub(crate) struct Repeats(Arc<Mutex<ChaCha8Rng>>);

impl Repeats {
    pub(crate) fn new(seed: u64) -> Self {
        let rng = ChaCha8Rng::seed_from_u64(seed.rotate_left(32));
        Self(Arc::new(Mutex::new(rng)))
    }

    fn fate(&self, call: &str) -> Fate {
        let mut rng = self.0.lock().unwrap();
        let after = Duration::from_millis(rng.random_range(20..6000));
        match rng.random_range(0..40) {
            0..4 => Fate::Twice,
            // The last call of a dead process cannot be distinguished from the first call of its replacement.
            _ if call == "Register" => Fate::Once,
            4..6 => Fate::Again(after),
            6 => Fate::Late(after),
            _ => Fate::Once,
        }
    }

    /// Puts a proxy behind a connection. Returns the connection that the process uses instead.
    pub(crate) fn behind(
        &self,
        connection: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> DuplexStream {
        let (near, far) = tokio::io::duplex(BUFFER);
        let broken = CancellationToken::new();
        let onward = Onward {
            channel: over(far),
            broken: broken.clone(),
        };
        let repeats = self.clone();
        let service = tower::service_fn(move |request: Request<Incoming>| {
            let (onward, repeats) = (onward.clone(), repeats.clone());
            async move { Ok::<_, Infallible>(repeats.forward(onward, request).await) }
        });
        tokio::spawn(async move {
            let mut builder = Builder::new(TokioExecutor::new()).http2_only();
            // Like the process, the proxy probes its connections: a link that loses packets breaks them.
            builder
                .http2()
                .timer(TokioTimer::new())
                .keep_alive_interval(Some(KEEPALIVE.0))
                .keep_alive_timeout(KEEPALIVE.1);
            let service = TowerToHyperService::new(service);
            let served = builder.serve_connection(TokioIo::new(connection), service);
            // The proxy ends with either of the two connections.
            let _ = broken.run_until_cancelled(served).await;
        });
        near
    }

    /// Lets some messages of a stream of reports arrive a second time, at once or later, as calls of their own.
    fn repeated(self, onward: &Onward, request: Request<Incoming>) -> Request<Body> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path().replace(STREAM_OF_REPORTS, "FinishStep");
        let mut of_call = parts.clone();
        let mut uri = parts.uri.clone().into_parts();
        uri.path_and_query = Some(path.parse().unwrap());
        of_call.uri = Uri::from_parts(uri).unwrap();
        let onward = onward.clone();
        let body = body.map_frame(move |frame| {
            let whole_message = |data: &&Bytes| {
                let length = data
                    .get(1..5)
                    .map(|l| u32::from_be_bytes(l.try_into().unwrap()));
                length.is_some_and(|length| data.len() == length as usize + 5)
            };
            let again = match self.fate("FinishStep") {
                Fate::Once => None,
                Fate::Twice => Some(Duration::ZERO),
                Fate::Again(after) | Fate::Late(after) => Some(after),
            };
            if let (Some(after), Some(data)) = (again, frame.data_ref().filter(whole_message)) {
                let call = Request::from_parts(of_call.clone(), whole(data.clone()));
                let onward = onward.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(after).await;
                    onward.send(call).await
                });
            }
            frame
        });
        Request::from_parts(parts, Body::new(body))
    }

    async fn forward(self, onward: Onward, request: Request<Incoming>) -> Response<Body> {
        let name = request.uri().path().rsplit('/').next().unwrap_or_default();
        if name == STREAM_OF_REPORTS {
            let repeated = self.repeated(&onward, request);
            return onward.send(repeated).await;
        }
        if !UNARY.contains(&name) {
            return onward.send(request.map(Body::new)).await;
        }
        let fate = self.fate(name);
        let (parts, body) = request.into_parts();
        let Ok(body) = body.collect().await else {
            return unavailable();
        };
        let body = body.to_bytes();
        let call = move || {
            let request = Request::from_parts(parts.clone(), whole(body.clone()));
            onward.clone().send(request)
        };
        match fate {
            Fate::Once => call().await,
            Fate::Twice => {
                tokio::spawn(call());
                call().await
            }
            Fate::Again(after) => {
                let again = call();
                tokio::spawn(async move {
                    tokio::time::sleep(after).await;
                    again.await
                });
                call().await
            }
            Fate::Late(after) => {
                // The caller may be gone by then.
                let late = tokio::spawn(async move {
                    tokio::time::sleep(after).await;
                    call().await
                });
                late.await.unwrap_or_else(|_| unavailable())
            }
        }
    }
}

/// Returns a request's body with its end: gRPC has no trailers in that direction.
fn whole(body: Bytes) -> Body {
    Body::new(Full::new(body))
}

/// The connection from the proxy to its process.
#[derive(Clone)]
struct Onward {
    channel: Channel,
    /// Cancelled when the process has closed it.
    broken: CancellationToken,
}

impl Onward {
    async fn send(self, request: Request<Body>) -> Response<Body> {
        let answer = self.channel.oneshot(request).await;
        answer.unwrap_or_else(|_| {
            self.broken.cancel();
            unavailable()
        })
    }
}

fn unavailable() -> Response<Body> {
    tonic::Status::unavailable("the connection broke").into_http()
}

/// Returns a channel over one connection.
fn over(connection: DuplexStream) -> Channel {
    let connection = Mutex::new(Some(connection));
    let connector = tower::service_fn(move |_: Uri| {
        let connection = connection.lock().unwrap().take();
        let broken = || io::Error::from(io::ErrorKind::NotConnected);
        std::future::ready(connection.map(TokioIo::new).ok_or_else(broken))
    });
    Endpoint::from_static("http://coordinator").connect_with_connector_lazy(connector)
}
