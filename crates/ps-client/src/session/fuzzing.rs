//! The reading end of a session without a stream, for the fuzz target `members`.

use std::sync::Arc;

use shared_proto::ids::{Epoch, Task};
use shared_proto::wire;
use tokio::sync::{Notify, watch};

use super::driver::Driver;
use super::{ClientKind, Session, Target};
use crate::connection::StreamEnd;
use crate::error::ClientError;

/// The reading end of a session.
pub(crate) struct Reader(Driver);

impl Session {
    /// Returns a reading end of this session.
    pub(crate) fn reader(&self, target: Target) -> Reader {
        Reader(Driver {
            target,
            tell: watch::channel(Vec::<Task>::new()).0,
            state: Arc::clone(&self.state),
            reconcile: Arc::new(watch::channel(Ok(Epoch(0))).0),
            answered: Notify::new(),
        })
    }
}

impl Reader {
    /// Takes a message from the server.
    pub(crate) fn take(&self, message: wire::ServerMessage, epoch: Epoch) {
        if let Err(StreamEnd::Fatal(error)) = self.0.take_answer(message, epoch) {
            self.0.fail(&error);
        }
    }

    /// Returns the oldest request that is not answered, and its number.
    pub(crate) fn oldest(&self) -> Option<(u64, ClientKind)> {
        let state = self.0.state.lock();
        let oldest = state.in_flight.first_key_value();
        oldest.map(|(sequence, request)| (*sequence, request.message.clone()))
    }

    /// Asks which pushes the blocks of a restored shard have taken. Returns the blocks of each question.
    pub(crate) fn ask(&self) -> Vec<Vec<wire::BlockId>> {
        let mut state = self.0.state.lock();
        let ask = state.acknowledged.to_ask();
        state.open_questions = ask.len();
        ask
    }

    /// Ends the session, so that no request stays without an answer.
    pub(crate) fn end(&self) {
        self.0.fail(&ClientError::Closed(self.0.target.shard));
    }
}
