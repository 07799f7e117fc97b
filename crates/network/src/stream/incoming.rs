//! The messages that arrive on a body.

use std::future::poll_fn;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use bytes_utils::SegmentedBuf;
use http_body::{Body, Frame};
use prost::Message;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::PREFIX_BYTES;
use super::bounds::{Bounds, count_parts};

/// The size below which a frame is copied to those before it: each frame that is kept costs additional memory,
/// however few bytes it has.
const TINY_BYTES: usize = 1 << 10;

/// The number of times that a reader polls before its thread sleeps, if its last wait was short. A poll takes about a
/// microsecond.
pub(super) const POLLS: usize = 100;

/// The longest sleep of a short wait. A wait in which polls have found a frame is short too.
const SHORT: Duration = Duration::from_micros(100);

/// The longest usual time between two polls. After a longer one, another thread or task probably needs the core; it may
/// be the sender.
const UNDISTURBED: Duration = Duration::from_micros(50);

/// The time for which a reader does not poll repeatedly after an interval longer than [`UNDISTURBED`].
const CROWDED: Duration = Duration::from_millis(2);

/// Messages that arrive on a body.
pub struct Incoming<M> {
    body: tonic::body::Body,
    /// The bytes that have arrived and belong to no finished message.
    pieces: SegmentedBuf<Bytes>,
    /// The newest bytes, which arrived in tiny frames.
    tiny: BytesMut,
    bounds: Bounds,
    /// The length of the next message, once its prefix has arrived.
    length: Option<usize>,
    /// True if the last wait was short, so that the next one may be too.
    short_waits: bool,
    /// The time until which the reader does not poll repeatedly, because another thread or task needs the core.
    crowded: Option<Instant>,
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
            crowded: None,
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

    /// Returns the number of bytes that have arrived and belong to no finished message.
    fn remaining(&self) -> usize {
        self.pieces.remaining() + self.tiny.len()
    }

    fn gather(&mut self) {
        if !self.tiny.is_empty() {
            self.pieces.push(self.tiny.split().freeze());
        }
    }

    /// Returns the next message, or `None` at the end of the stream. A payload is copied only if it arrived in several
    /// frames. The future may be dropped, and the method called again.
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

    /// Returns the next frame. If waits are short, polls several times before it lets the thread sleep. If waits are
    /// long, or another thread needs the core, polls only once, to leave the core to threads that have work.
    async fn frame(&mut self) -> Option<Result<Frame<Bytes>, Status>> {
        let mut poll = |context: &mut Context<'_>| Pin::new(&mut self.body).poll_frame(context);
        let mut last = Instant::now();
        self.crowded.take_if(|until| *until <= last);
        let polls = match self.short_waits && self.crowded.is_none() {
            true => POLLS,
            false => 1,
        };
        for _ in 0..polls {
            if let Poll::Ready(frame) = poll_fn(|context| Poll::Ready(poll(context))).await {
                return frame;
            }
            tokio::task::yield_now().await;
            let now = Instant::now();
            if now - std::mem::replace(&mut last, now) > UNDISTURBED {
                self.crowded = Some(now + CROWDED);
                break;
            }
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
