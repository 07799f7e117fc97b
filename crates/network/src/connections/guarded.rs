//! A connection that ends if it makes no request in time, or if a newer connection needs its place.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::pool::Standing;
use super::{Caller, FIRST_BYTES, IDLE, OPENING, Place};
use crate::forwarding::forward_flushes;

/// The most bytes read at a time from a newcomer's connection.
const PIECE_BYTES: usize = 4 << 10;

/// A connection with its place at a port.
pub struct Guarded<S> {
    io: S,
    place: Place,
    opened: Instant,
    /// A newcomer's timer for the next check whether it has made a request.
    alarm: Option<Pin<Box<Sleep>>>,
    /// The turn of the latest request, and the bytes read since.
    read: (u64, usize),
}

impl<S> Guarded<S> {
    /// Guards a connection that was accepted.
    pub fn new(io: S, place: Place) -> Self {
        Self {
            io,
            place,
            opened: Instant::now(),
            alarm: None,
            read: (0, 0),
        }
    }

    /// Returns the connection's caller.
    pub fn caller(&self) -> &Caller {
        &self.place.0
    }

    fn is_members(&self) -> bool {
        self.caller().connection.standing() == Standing::Member
    }

    /// Fails if the connection is over: its place was taken, or its time is up.
    fn check_deadline(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let Caller { connection, pool } = &self.place.0;
        connection.reader.register(context.waker());
        loop {
            if connection.is_dropped() {
                return Err(io::Error::new(
                    io::ErrorKind::ConnectionAborted,
                    "the connection has lost its place",
                ));
            }
            if connection.standing() == Standing::Member {
                self.alarm = None;
                return Ok(());
            }
            let deadline = match pool.idle(connection) {
                None => self.opened + OPENING,
                Some(idle) => Instant::now() + IDLE.saturating_sub(idle),
            };
            if deadline <= Instant::now() {
                pool.end_silent(connection);
                continue;
            }
            let alarm = self
                .alarm
                .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
            match alarm.as_mut().poll(context) {
                Poll::Pending => return Ok(()),
                Poll::Ready(()) => alarm.as_mut().reset(deadline),
            }
        }
    }

    /// Returns the number of bytes that a newcomer may still send before its next request.
    fn allowance(&mut self) -> usize {
        let Caller { connection, pool } = &self.place.0;
        let turn = connection.turn.load(Relaxed);
        if self.read.0 != turn {
            self.read = (turn, 0);
        }
        let most = match connection.standing() {
            Standing::Silent => FIRST_BYTES,
            Standing::Caller => pool.port.bytes_of_callers(),
            Standing::Member => usize::MAX,
        };
        most.saturating_sub(self.read.1)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_members() {
            return Pin::new(&mut self.io).poll_read(context, buffer);
        }
        self.check_deadline(context)?;
        let most = self.allowance().min(buffer.remaining()).min(PIECE_BYTES);
        if most == 0 && buffer.remaining() > 0 {
            // Admission, or the end of the connection, wakes the reader.
            return Poll::Pending;
        }
        let mut piece = [0; PIECE_BYTES];
        let mut piece = ReadBuf::new(&mut piece[..most]);
        ready!(Pin::new(&mut self.io).poll_read(context, &mut piece))?;
        buffer.put_slice(piece.filled());
        self.read.1 += piece.filled().len();
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !self.is_members() {
            self.check_deadline(context)?;
        }
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if !self.is_members() {
            self.check_deadline(context)?;
        }
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }

    forward_flushes!(io);
}
