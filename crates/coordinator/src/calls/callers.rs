//! Marks a connection as a member's once a call that only members make has succeeded on it.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use network::connections::Caller;
use network::security::crowded;
use tonic::body::Body;
use tonic::codegen;
use tonic::{Code, Status};
use tower::Service;

/// The calls that do not mark a connection here. Any caller may make them, except `FinishSteps`, which only workers
/// make. `FinishSteps` is a stream whose reply begins before the first report is checked, so it marks the connection
/// itself after that report.
const OPEN: [&str; 6] = [
    "GetStatus",
    "GetJob",
    "GetShardMap",
    "ListJobs",
    "ReadRecords",
    "FinishSteps",
];

/// A service that distinguishes the connections of members from others.
#[derive(Clone)]
pub(crate) struct Counted<S>(pub(crate) S);

impl<S, B> Service<Request<Body>> for Counted<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
    S::Future: Send + 'static,
    B: codegen::Body<Data = codegen::Bytes> + Send + 'static,
    B::Error: Into<codegen::StdError>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let caller = Caller::of(request.extensions()).cloned();
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        let of_members = !OPEN.contains(&method);
        // Checked first, so that few calls are carried out and then refused: another caller may take the last place
        // meanwhile. A member that is refused calls again.
        let full = of_members && caller.as_ref().is_some_and(|caller| !caller.has_room());
        if full {
            return Box::pin(async { Ok(crowded().into_http()) });
        }
        let answer = self.0.call(request);
        Box::pin(async move {
            let response = answer.await?.map(Body::new);
            let good = Status::from_header_map(response.headers())
                .is_none_or(|status| status.code() == Code::Ok);
            match caller {
                Some(caller) if good && of_members && !caller.admit() => Ok(crowded().into_http()),
                Some(caller) if good => {
                    caller.record_request();
                    Ok(response)
                }
                _ => Ok(response),
            }
        })
    }
}
