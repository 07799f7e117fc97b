//! The gRPC face: one session a stream.

use std::sync::Arc;

use shared_proto::wire;
use shared_proto::wire::parameter_server_server::ParameterServer;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use crate::session::Session;
use crate::shard::Shard;

/// Answers of one session that may wait to be sent. With messages of about 1 MiB, and the window of
/// the transport, this bounds what a slow reader costs.
const ANSWERS: usize = 8;

#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) shard: Arc<Shard>,
    pub(crate) sessions: TaskTracker,
    pub(crate) shutdown: CancellationToken,
}

#[tonic::async_trait]
impl ParameterServer for Service {
    type SessionStream = ReceiverStream<Result<wire::ServerMessage, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<wire::ClientMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (answers, stream) = mpsc::channel(ANSWERS);
        let session = Session::new(Arc::clone(&self.shard), answers);
        self.sessions
            .spawn(session.serve(request.into_inner(), self.shutdown.clone()));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}
