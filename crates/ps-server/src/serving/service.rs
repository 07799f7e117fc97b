//! The gRPC service: each stream is a session. It is written by hand, because generated services copy each message
//! once more on its way in and out (see `network::stream`).

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use network::security::Security;
use network::stream::{self, BodyKind, Incoming};
use shared_proto::ids::Role;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::body::Body;
use tower::Service;

use super::limits::Greeted;
use super::session::Session;
use crate::shard::Shard;

/// The number of answers of one session that may wait to be sent. A full block is about 1 MiB, and an answer shares the
/// block's memory until the block is updated. Together with the transport's window, this bounds the memory of a
/// session.
const ANSWERS: usize = 4;

/// The service `flambeau.v1.ParameterServer`.
#[derive(Clone)]
pub(crate) struct Sessions {
    pub(crate) shard: Arc<Shard>,
    pub(crate) running: TaskTracker,
    pub(crate) shutdown: CancellationToken,
    pub(crate) security: Security,
    pub(crate) greeted: Arc<Greeted>,
}

impl Service<Request<Body>> for Sessions {
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

impl Sessions {
    fn begin(&self, request: Request<Body>) -> Response<Body> {
        let path = stream::SESSION_PATH;
        let caller = match stream::admit(&request, path, &self.security, Role::Worker) {
            Ok(caller) => caller,
            Err(refused) => return *refused,
        };
        let (answers, body) = stream::body(ANSWERS, BodyKind::Response);
        let entrance = Arc::clone(&self.greeted).entrance(caller);
        let session = Session::new(Arc::clone(&self.shard), answers, entrance);
        let incoming = Incoming::new(request.into_body());
        self.running
            .spawn(session.serve(incoming, self.shutdown.clone()));
        stream::response(body)
    }
}
