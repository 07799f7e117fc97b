//! The gRPC service that takes links from other processes. It is written by hand, because generated services copy each
//! message once more (see `network::stream`).

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::unfold;
use http::{Request, Response};
use network::connections::{AcceptedStream, Caller, Connections};
use network::listener::{self, Listener};
use network::security::{Security, crowded};
use network::stream::{self, BodyKind, Bounds, Incoming, Sender};
use network::transport;
use shared_proto::ids::Role;
use shared_proto::task::{self, boxed};
use shared_proto::wire::{self, link_message::Kind};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tower::Service;

use super::exchange::Exchange;
use super::link::OUTGOING;

/// The most concurrent streams of one connection. Workers open one, and another for the next ring.
const MOST_STREAMS: u32 = 4;

/// The bounds on a greeting, the only message before a link is admitted.
const GREETING: Bounds = Bounds {
    bytes: 16 << 10,
    parts: 64,
};

/// The time in which a caller must greet.
const GREET: Duration = Duration::from_secs(10);

/// The time for which a refusal waits for a caller that does not read.
const TELL: Duration = Duration::from_millis(100);

/// The service `flambeau.v1.Collective`.
#[derive(Clone)]
pub struct LinkService {
    /// The place where the links arrive.
    pub exchange: Exchange,
    /// The credentials that callers must have.
    pub security: Security,
}

impl Service<Request<Body>> for LinkService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        ready(Ok(self.begin(request)))
    }
}

impl LinkService {
    /// Takes links of these connections until `stop`.
    ///
    /// # Errors
    /// hyper's.
    pub fn serve(
        self,
        incoming: AcceptedStream,
        stop: CancellationToken,
    ) -> BoxFuture<'static, Result<(), tonic::transport::Error>> {
        let server = transport::server().max_concurrent_streams(MOST_STREAMS);
        listener::serve(server, self, incoming, stop)
    }

    fn begin(&self, request: Request<Body>) -> Response<Body> {
        let path = stream::LINK_PATH;
        let caller = match stream::admit(&request, path, &self.security, Role::Worker) {
            Ok(caller) => caller,
            Err(refused) => return *refused,
        };
        let (outgoing, body) = stream::body(OUTGOING, BodyKind::Response);
        let incoming = Incoming::new(request.into_body());
        task::spawn(greet(self.exchange.clone(), caller, outgoing, incoming));
        stream::response(body)
    }
}

/// Takes links on the thread of the caller until `stop`.
#[boxed]
pub async fn take_links(
    service: LinkService,
    listener: Listener,
    places: Connections,
    stop: CancellationToken,
) {
    let accept = async |(listener, places): (Listener, Connections)| {
        loop {
            // A connection that the runtime cannot take is closed.
            if let Ok(connection) = listener.accept(&places).await {
                return Some((connection, (listener, places)));
            }
        }
    };
    let connections = unfold((listener, places), accept);
    let incoming = listener::incoming(&service.security, connections);
    if let Err(error) = service.serve(incoming, stop).await {
        tracing::error!(%error, "no more links are taken");
    }
}

/// Reads the greeting of a link, and hands the link to its ring.
async fn greet(
    exchange: Exchange,
    caller: Option<Caller>,
    outgoing: Sender,
    mut incoming: Incoming<wire::LinkMessage>,
) {
    incoming.bound(GREETING);
    let late = |_| Err(Status::deadline_exceeded("no greeting has come"));
    let greeting = timeout(GREET, incoming.message())
        .await
        .unwrap_or_else(late);
    let refused = match greeting {
        Ok(Some(wire::LinkMessage {
            kind: Some(Kind::Greeting(greeting)),
        })) => {
            incoming.bound(Bounds::default());
            match caller.is_some_and(|caller| !caller.admit()) {
                true => Err(crowded()),
                false => exchange.offer(greeting, outgoing.clone(), incoming),
            }
        }
        Ok(Some(_)) => Err(Status::invalid_argument("the first message is a greeting")),
        // The caller is gone.
        Ok(None) => return,
        Err(status) => Err(status),
    };
    if let Err(status) = refused {
        tracing::debug!(%status, "a link is refused");
        let _ = timeout(TELL, outgoing.send(Err(status))).await;
    }
}
