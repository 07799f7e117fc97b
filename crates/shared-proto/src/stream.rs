//! gRPC messages on an HTTP/2 body, without copies of their payloads.
//!
//! The bytes on the wire are those of any gRPC library. A library gathers each message in a buffer of
//! its own before it decodes or sends it, which costs a pass over every block. This module decodes a message
//! in the memory in which it arrived, and sends it in pieces that share the blocks' own memory.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use bytes_utils::SegmentedBuf;
use http::HeaderMap;
use http_body::{Body, Frame};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::stream::bounds::count_parts;
use crate::wire::{self, client_message, payload::Values, server_message};

mod bounds;

pub use bounds::Bounds;

/// The path of the method `Session` of the service `ParameterServer`.
pub const SESSION_PATH: &str = "/flambeau.v1.ParameterServer/Session";

/// The content type of gRPC's requests and responses.
pub const CONTENT_TYPE: &str = "application/grpc";

/// The size of the prefix of each message: a flag for compression, and the length.
const PREFIX_BYTES: usize = 5;

/// The size below which pieces are copied together: a frame of its own would cost more.
const SMALL_BYTES: usize = 64 << 10;

/// The size below which a frame is copied to those before it: each frame that is kept costs additional memory,
/// however few bytes it has.
const TINY_BYTES: usize = 1 << 10;

/// The number of times that a reader polls before its thread sleeps, after a short wait. A poll takes about a
/// microsecond.
const LOOKS: usize = 100;

/// The longest sleep of a short wait. A wait in which polls have found a frame is short too.
const SHORT: Duration = Duration::from_micros(100);

/// A message in the form in which it is sent. Clones share their memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded(VecDeque<Bytes>);

/// Builds an [`Encoded`] from bytes to be copied and payloads to be shared.
#[derive(Default)]
struct Pieces {
    done: VecDeque<Bytes>,
    open: BytesMut,
}

impl Pieces {
    fn share(&mut self, payload: Bytes) {
        if payload.len() < SMALL_BYTES {
            return self.open.put_slice(&payload);
        }
        self.done.push_back(self.open.split().freeze());
        self.done.push_back(payload);
    }

    fn finish(mut self) -> Encoded {
        if !self.open.is_empty() {
            self.done.push_back(self.open.freeze());
        }
        Encoded(self.done)
    }
}

impl Encoded {
    fn small(message: &impl Message) -> Self {
        let mut pieces = Pieces::default();
        prefix(message.encoded_len(), &mut pieces.open);
        message.encode_raw(&mut pieces.open);
        pieces.finish()
    }
}

impl From<client_message::Kind> for Encoded {
    fn from(kind: client_message::Kind) -> Self {
        const PUSH: u32 = 3;
        match kind {
            client_message::Kind::Push(mut push) => {
                let parts = std::mem::take(&mut push.gradients).into_iter();
                let parts = parts.map(|mut part| (part.payload.take(), part)).collect();
                Tags {
                    kind: PUSH,
                    parts: 2,
                    payload: 3,
                }
                .encode(&push, parts)
            }
            kind => Self::small(&wire::ClientMessage { kind: Some(kind) }),
        }
    }
}

impl From<server_message::Kind> for Encoded {
    fn from(kind: server_message::Kind) -> Self {
        const WEIGHTS: u32 = 3;
        match kind {
            server_message::Kind::Weights(mut weights) => {
                let parts = std::mem::take(&mut weights.blocks).into_iter();
                let parts = parts.map(|mut part| (part.payload.take(), part)).collect();
                Tags {
                    kind: WEIGHTS,
                    parts: 2,
                    payload: 2,
                }
                .encode(&weights, parts)
            }
            kind => Self::small(&wire::ServerMessage { kind: Some(kind) }),
        }
    }
}

/// Field numbers on the way from a message to its payloads.
struct Tags {
    /// The number of the oneof's case.
    kind: u32,
    /// The number of the repeated parts in it.
    parts: u32,
    /// The number of the payload in a part.
    payload: u32,
}

impl Tags {
    /// Encodes a message of this kind: `rest` is all but its parts, and each part all but its
    /// payload.
    fn encode<P: Message>(
        &self,
        rest: &impl Message,
        parts: Vec<(Option<wire::Payload>, P)>,
    ) -> Encoded {
        const DENSE: u32 = 2;
        let field = |tag, length: usize| key_len(tag) + encoded_len_varint(length as u64) + length;
        let parts: Vec<_> = parts
            .into_iter()
            .map(|(mut payload, part)| {
                let values = payload.as_mut().and_then(|payload| payload.values.take());
                let dense = match (values, &mut payload) {
                    (Some(Values::Dense(bytes)), _) => Some(bytes),
                    (rows, Some(payload)) => {
                        payload.values = rows;
                        None
                    }
                    (_, None) => None,
                };
                let dense_field = dense.as_ref().map_or(0, |bytes| field(DENSE, bytes.len()));
                let of_payload = payload.as_ref().map(|p| p.encoded_len() + dense_field);
                let of_part =
                    part.encoded_len() + of_payload.map_or(0, |length| field(self.payload, length));
                (part, of_part, payload.zip(of_payload), dense)
            })
            .collect();
        let of_parts: usize = parts.iter().map(|part| field(self.parts, part.1)).sum();
        let of_kind = rest.encoded_len() + of_parts;

        let mut pieces = Pieces::default();
        prefix(field(self.kind, of_kind), &mut pieces.open);
        open(self.kind, of_kind, &mut pieces.open);
        rest.encode_raw(&mut pieces.open);
        for (part, of_part, payload, dense) in parts {
            open(self.parts, of_part, &mut pieces.open);
            part.encode_raw(&mut pieces.open);
            if let Some((around, of_payload)) = payload {
                open(self.payload, of_payload, &mut pieces.open);
                around.encode_raw(&mut pieces.open);
            }
            if let Some(bytes) = dense {
                open(DENSE, bytes.len(), &mut pieces.open);
                pieces.share(bytes);
            }
        }
        pieces.finish()
    }
}

fn prefix(length: usize, buffer: &mut BytesMut) {
    buffer.put_u8(0);
    // A message has 2 MiB at the most.
    buffer.put_u32(length as u32);
}

fn open(tag: u32, length: usize, buffer: &mut BytesMut) {
    encode_key(tag, WireType::LengthDelimited, buffer);
    encode_varint(length as u64, buffer);
}

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

/// Returns a body and the sender of its messages, of which `waiting` may wait to be sent. The body ends
/// with a status that is sent, or with OK once the sender is dropped.
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
    /// The kind of its last frame; none once that has been sent.
    kind: Option<BodyKind>,
    /// The status to end with, once there is one.
    status: Option<Status>,
}

impl Outgoing {
    /// Takes messages until there are enough bytes for a frame. Pending if there are none.
    fn poll_take(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while self.status.is_none()
            && self.pieces.iter().map(Bytes::len).sum::<usize>() < SMALL_BYTES
        {
            match self.queue.poll_recv(context) {
                Poll::Ready(Some(Ok(message))) => self.pieces.extend(message.0),
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

/// Messages that arrive on a body.
pub struct Incoming<M> {
    body: tonic::body::Body,
    /// The bytes that have come and belong to no finished message.
    pieces: SegmentedBuf<Bytes>,
    /// The newest bytes, which came in tiny frames.
    tiny: BytesMut,
    bounds: Bounds,
    /// The length of the next message, once its prefix has come.
    length: Option<usize>,
    /// True if the last wait was short, so that the next one may be too.
    short_waits: bool,
    messages: PhantomData<M>,
}

impl<M: Message + Default> Incoming<M> {
    /// Reads from a body.
    pub fn new(body: tonic::body::Body) -> Self {
        Self {
            body,
            pieces: SegmentedBuf::new(),
            tiny: BytesMut::new(),
            bounds: Bounds::default(),
            length: None,
            short_waits: true,
            messages: PhantomData,
        }
    }

    /// Sets the bounds of all further messages, including those that were read ahead.
    pub fn bound(&mut self, bounds: Bounds) {
        self.bounds = bounds;
    }

    fn take(&mut self, data: Bytes) {
        // A message that has come whole in its frame is decoded there.
        if data.len() < TINY_BYTES && self.remaining() > 0 {
            return self.tiny.put(data);
        }
        self.gather();
        self.pieces.push(data);
    }

    /// Returns the number of bytes that have come and belong to no finished message.
    fn remaining(&self) -> usize {
        self.pieces.remaining() + self.tiny.len()
    }

    fn gather(&mut self) {
        if !self.tiny.is_empty() {
            self.pieces.push(self.tiny.split().freeze());
        }
    }

    /// Returns the next message; none at the end. A payload is copied only if it came in several frames. The
    /// future may be dropped and the method called again.
    ///
    /// # Errors
    /// The status with which the stream ended; `OutOfRange` for a message that is too large, and
    /// `Internal` for bytes that are no message.
    pub async fn message(&mut self) -> Result<Option<M>, Status> {
        loop {
            if let Some(message) = self.decode()? {
                return Ok(Some(message));
            }
            let frame = self.frame().await;
            match frame {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.take(data),
                    Err(frame) => {
                        let trailers = frame.into_trailers().unwrap_or_default();
                        match Status::from_header_map(&trailers) {
                            Some(status) if status.code() != Code::Ok => return Err(status),
                            _ => {}
                        }
                    }
                },
                Some(Err(status)) => return Err(status),
                None if self.remaining() > 0 || self.length.is_some() => {
                    return Err(Status::internal("the stream ended within a message"));
                }
                None => return Ok(None),
            }
        }
    }

    /// Returns the next frame. If waits are short, it polls several times before it lets the thread sleep. If they are
    /// long, that would take the core from threads that compute.
    async fn frame(&mut self) -> Option<Result<Frame<Bytes>, Status>> {
        let mut poll = |context: &mut Context<'_>| Pin::new(&mut self.body).poll_frame(context);
        let looks = if self.short_waits { LOOKS } else { 1 };
        for _ in 0..looks {
            if let Poll::Ready(frame) = poll_fn(|context| Poll::Ready(poll(context))).await {
                return frame;
            }
            tokio::task::yield_now().await;
        }
        let asleep = Instant::now();
        // A wait that is given up counts as long.
        self.short_waits = false;
        let frame = poll_fn(poll).await;
        self.short_waits = asleep.elapsed() < SHORT;
        frame
    }

    fn decode(&mut self) -> Result<Option<M>, Status> {
        let length = match self.length {
            Some(length) => length,
            None if self.remaining() < PREFIX_BYTES => return Ok(None),
            None => {
                self.gather();
                if self.pieces.get_u8() != 0 {
                    return Err(Status::internal(
                        "a message is compressed; send it as it is",
                    ));
                }
                let length = self.pieces.get_u32() as usize;
                if length > self.bounds.bytes {
                    return Err(Status::out_of_range(format!("it has {length} bytes")));
                }
                *self.length.insert(length)
            }
        };
        if self.remaining() < length {
            return Ok(None);
        }
        self.gather();
        self.length = None;
        if self.bounds.parts < usize::MAX {
            count_parts(self.pieces.clone().take(length), self.bounds.parts)?;
        }
        // A message in one piece is decoded faster.
        let message = match self.pieces.chunk().len() >= length {
            true => M::decode(self.pieces.copy_to_bytes(length)),
            false => M::decode((&mut self.pieces).take(length)),
        };
        message
            .map(Some)
            .map_err(|error| Status::internal(error.to_string()))
    }
}

#[cfg(test)]
mod tests;
