//! Methods with streams of messages in both directions: their calls, their admission and their responses.

use http::{HeaderValue, Request, Response, header};
use prost::Message;
use tonic::body::Body;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tower::{Service, ServiceExt};

use super::{CONTENT_TYPE, Incoming};
use crate::connections::Caller;
use crate::security::{Credentials, Security, chain_of};
use shared_proto::ids::Role;

/// Calls the method with this path. `body` has the messages to send. Returns the messages of the peer.
///
/// # Errors
/// The status with which the peer refuses the call, or `Unavailable` if it cannot be reached.
pub async fn call<M: Message + Default>(
    mut channel: Channel,
    path: &'static str,
    body: Body,
    credentials: &Credentials,
) -> Result<Incoming<M>, Status> {
    let mut request = Request::post(path)
        .header(header::CONTENT_TYPE, CONTENT_TYPE)
        .header(header::TE, "trailers")
        .body(body)
        .map_err(|error| Status::internal(error.to_string()))?;
    credentials.add(request.headers_mut());
    let ready = channel.ready().await;
    let response = ready.map_err(|error| Status::unavailable(chain_of(&error)))?;
    let response = response.call(request).await;
    let response = response.map_err(|error| Status::unavailable(chain_of(&error)))?;
    match Status::from_header_map(response.headers()) {
        Some(status) if status.code() != Code::Ok => Err(status),
        _ if !response.status().is_success() => {
            let code = response.status();
            Err(Status::unknown(format!(
                "it answers with HTTP status {code}"
            )))
        }
        _ => Ok(Incoming::new(response.into_body())),
    }
}

/// Checks that a request is for the method with this path, and that its caller has the token and a certificate of this
/// role. Returns the caller's place at the port; `None` if connections are not counted, as in simulations.
///
/// # Errors
/// The response to a request that is refused.
pub fn admit(
    request: &Request<Body>,
    path: &str,
    security: &Security,
    role: Role,
) -> Result<Option<Caller>, Box<Response<Body>>> {
    let check = || {
        let found = request.uri().path();
        if found != path {
            return Err(Status::unimplemented(format!("there is no method {found}")));
        }
        let extensions = request.extensions();
        security.check_token(request.headers(), extensions)?;
        security.check_role(extensions, role)?;
        let caller = Caller::of(extensions).cloned();
        caller.iter().for_each(Caller::record_request);
        Ok(caller)
    };
    check().map_err(|status: Status| Box::new(status.into_http()))
}

/// Returns the response to an admitted call. `body` has the messages to send.
pub fn response(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let content = HeaderValue::from_static(CONTENT_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, content);
    response
}
