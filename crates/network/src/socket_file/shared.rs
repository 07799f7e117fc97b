//! A connection whose bytes go through memory that both sides share. The socket carries only wake-ups, and the end of
//! the connection.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker, ready};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::UnixStream;
use tokio::task::coop::poll_proceed;

use super::memory::{Reader, Writer};

/// The most wake-ups that are read at a time.
const WAKE_UPS: usize = 64;

/// A connection's ends of both rings. Once the other side has ended its stream, this side can write no more either.
pub(super) struct Shared {
    writer: Writer,
    reader: Reader,
    /// True if the other side has ended its stream.
    ended: bool,
    /// The number of times that this side has asked to be woken, and the number of wake-ups that it has read. The other
    /// side sends at most one wake-up for each request.
    asked: u64,
    woken: u64,
}

/// The tasks that read and write. Both wait for the same socket to become readable.
#[derive(Default)]
pub(super) struct Tasks {
    pub(super) reader: AtomicWaker,
    pub(super) writer: AtomicWaker,
}

impl Wake for Tasks {
    fn wake(self: Arc<Self>) {
        self.reader.wake();
        self.writer.wake();
    }
}

impl Shared {
    pub(super) fn new(writer: Writer, reader: Reader) -> Self {
        Self {
            writer,
            reader,
            ended: false,
            asked: 0,
            woken: 0,
        }
    }

    pub(super) fn poll_read(
        &mut self,
        socket: &mut UnixStream,
        tasks: &Arc<Tasks>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if into.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        // A connection on which bytes come without end leaves room for other tasks.
        let progress = ready!(poll_proceed(context));
        loop {
            // The bytes before the end are read first.
            let ended = self.ended;
            if self.reader.read(into)? > 0 {
                progress.made_progress();
                if self.reader.take_question()? {
                    wake_peer(socket);
                }
                return Poll::Ready(Ok(()));
            }
            if ended {
                return Poll::Ready(Ok(()));
            }
            self.asked += 1;
            if self.reader.ask()? {
                tasks.reader.register(context.waker());
                ready!(self.poll_woken(socket, tasks))?;
            }
        }
    }

    pub(super) fn poll_write(
        &mut self,
        socket: &mut UnixStream,
        tasks: &Arc<Tasks>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if slices.iter().all(|slice| slice.is_empty()) {
            return Poll::Ready(Ok(0));
        }
        let progress = ready!(poll_proceed(context));
        loop {
            if self.ended {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let count = self.writer.write(slices)?;
            if count > 0 {
                progress.made_progress();
                if self.writer.take_question()? {
                    wake_peer(socket);
                }
                return Poll::Ready(Ok(count));
            }
            self.asked += 1;
            if self.writer.ask()? {
                tasks.writer.register(context.waker());
                ready!(self.poll_woken(socket, tasks))?;
            }
        }
    }

    /// Waits until the other side wakes this one, or ends its stream.
    fn poll_woken(&mut self, socket: &mut UnixStream, tasks: &Arc<Tasks>) -> Poll<io::Result<()>> {
        let waker = Waker::from(Arc::clone(tasks));
        let mut bytes = [0; WAKE_UPS];
        let mut bytes = ReadBuf::new(&mut bytes);
        let read = Pin::new(socket).poll_read(&mut Context::from_waker(&waker), &mut bytes);
        match ready!(read) {
            Ok(()) => self.ended = bytes.filled().is_empty(),
            // The other side has closed the socket without reading its last wake-ups.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => self.ended = true,
            Err(error) => return Poll::Ready(Err(error)),
        }
        self.woken += bytes.filled().len() as u64;
        if self.woken > self.asked {
            let flood = "the peer sends through the socket, although it shares memory";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, flood)));
        }
        Poll::Ready(Ok(()))
    }
}

/// Wakes the other side. If the socket is full, it already holds wake-ups for the other side. If the other side has
/// ended, this side's next read finds out.
fn wake_peer(socket: &UnixStream) {
    let _ = socket.try_write(&[0]);
}
