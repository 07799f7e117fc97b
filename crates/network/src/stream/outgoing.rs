//! The body on which messages are sent.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame};
use tokio::sync::mpsc;
use tonic::Status;

use super::SMALL_BYTES;
use super::encoded::Encoded;

/// The kind of a body, which decides how it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyKind {
    /// A client's body ends without trailers.
    Request,
    /// A server's body ends with a status.
    Response,
}

/// The sender of the messages of a [`body`].
pub type Sender = mpsc::Sender<Result<Encoded, Status>>;

/// Returns a body and the sender of its messages. At most `waiting` messages wait to be sent. The body ends with the
/// status that the sender sends, or with OK once the sender is dropped.
pub fn body(waiting: usize, kind: BodyKind) -> (Sender, tonic::body::Body) {
    let (sender, queue) = mpsc::channel(waiting);
    let outgoing = Outgoing {
        queue,
        pieces: VecDeque::new(),
        kind: Some(kind),
        status: None,
    };
    (sender, tonic::body::Body::new(outgoing))
}

struct Outgoing {
    queue: mpsc::Receiver<Result<Encoded, Status>>,
    /// The pieces of the messages taken from the queue.
    pieces: VecDeque<Bytes>,
    /// The kind of the body, which decides its last frame; `None` once that has been sent.
    kind: Option<BodyKind>,
    /// The status to end with, once there is one.
    status: Option<Status>,
}

impl Outgoing {
    /// Takes messages until there are enough bytes for a frame. Returns `Pending` if there are none.
    fn poll_take(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while self.status.is_none()
            && self.pieces.iter().map(Bytes::len).sum::<usize>() < SMALL_BYTES
        {
            match self.queue.poll_recv(context) {
                Poll::Ready(Some(Ok(message))) => self.pieces.extend(message.into_pieces()),
                Poll::Ready(Some(Err(status))) => self.status = Some(status),
                Poll::Ready(None) => self.status = Some(Status::ok("")),
                Poll::Pending if self.pieces.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready(())
    }

    /// Returns the next frame's data: a large piece, or several small ones.
    fn next_data(&mut self) -> Option<Bytes> {
        let first = self.pieces.pop_front()?;
        let (mut size, mut more) = (first.len(), 0);
        for piece in &self.pieces {
            if size + piece.len() > SMALL_BYTES {
                break;
            }
            (size, more) = (size + piece.len(), more + 1);
        }
        if more == 0 {
            return Some(first);
        }
        let mut data = BytesMut::with_capacity(size);
        data.put(first);
        self.pieces.drain(..more).for_each(|piece| data.put(piece));
        Some(data.freeze())
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        ready!(self.poll_take(context));
        if let Some(data) = self.next_data() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if self.kind.take() != Some(BodyKind::Response) {
            return Poll::Ready(None);
        }
        let mut trailers = HeaderMap::new();
        if let Some(status) = &self.status {
            status.add_header(&mut trailers)?;
        }
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }
}
