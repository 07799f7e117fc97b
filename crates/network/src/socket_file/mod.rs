//! Connections over socket files. Both processes are on one host, so the bytes go through memory that they share. A
//! process makes a system call only to wake the other process when that one waits.
//!
//! The caller creates the memory, and passes it through the socket as a file before its first byte. A caller without
//! such memory sends its bytes through the socket. Any process that can open the socket file can send arbitrary bytes.
//! The memory adds no risk: its size is fixed, it cannot be truncated, and a process copies bytes out of it before it
//! interprets them.

#[cfg(target_os = "linux")]
mod file;
#[cfg(not(target_os = "linux"))]
#[path = "no_file.rs"]
mod file;
mod memory;
mod shared;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, IoSlice};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

use self::shared::{Shared, Tasks};

/// The bytes that a caller sends together with the memory. HTTP/2 begins with other bytes.
const OFFER: [u8; 16] = *b"flambeau memory\n";

/// A connection over a socket file.
pub struct SocketFileStream {
    socket: UnixStream,
    state: State,
    tasks: Arc<Tasks>,
}

/// The state of a connection.
enum State {
    /// The caller has not sent its first bytes yet.
    Accepted,
    /// Bytes go through the socket. The vector has those that have arrived and are not read yet.
    Socket(Vec<u8>),
    /// Bytes go through memory.
    Shared(Shared),
}

impl SocketFileStream {
    /// Connects.
    ///
    /// # Errors
    /// The system's.
    pub async fn connect(path: &Path) -> io::Result<Self> {
        let socket = UnixStream::connect(path).await?;
        let state = match share(&socket).await {
            Ok(shared) => State::Shared(shared),
            Err(error) => {
                tracing::info!(%error, "no memory can be shared, so all bytes go through the socket");
                State::Socket(Vec::new())
            }
        };
        Ok(Self::new(socket, state))
    }

    /// Returns the connection of a socket that a listener has accepted.
    pub fn accepted(socket: UnixStream) -> Self {
        Self::new(socket, State::Accepted)
    }

    fn new(socket: UnixStream, state: State) -> Self {
        Self {
            socket,
            state,
            tasks: Arc::default(),
        }
    }

    /// Reads the first bytes of an accepted connection. They show whether all further bytes go through memory or
    /// through the socket.
    fn poll_way(&mut self) -> Poll<io::Result<()>> {
        let waker = Waker::from(Arc::clone(&self.tasks));
        let mut first = [0; OFFER.len()];
        let (count, file) = loop {
            ready!(
                self.socket
                    .poll_read_ready(&mut Context::from_waker(&waker))
            )?;
            let receive = || file::receive(&self.socket, &mut first);
            match self.socket.try_io(Interest::READABLE, receive) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => break received?,
            }
        };
        self.state = match (first[..count] == OFFER, file) {
            (true, Some(file)) => {
                let (writer, reader) = memory::open(file)?;
                State::Shared(Shared::new(writer, reader))
            }
            (true, None) => {
                let lost = "the memory that the caller shares did not arrive; this process may have too many open files";
                return Poll::Ready(Err(io::Error::other(lost)));
            }
            (false, _) => State::Socket(first[..count].to_vec()),
        };
        Poll::Ready(Ok(()))
    }
}

/// Creates memory, and passes it to the other side.
async fn share(socket: &UnixStream) -> io::Result<Shared> {
    let (writer, reader, file) = memory::create()?;
    pass(socket, &file).await?;
    Ok(Shared::new(writer, reader))
}

/// Passes the file of memory to the other side.
async fn pass(socket: &UnixStream, file: &File) -> io::Result<()> {
    let send = || file::send(socket, &OFFER, file);
    loop {
        socket.writable().await?;
        match socket.try_io(Interest::WRITABLE, send) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            sent => return sent,
        }
    }
}

impl AsyncRead for SocketFileStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let State::Accepted = this.state {
            this.tasks.reader.register(context.waker());
            ready!(this.poll_way())?;
        }
        let socket = &mut this.socket;
        match &mut this.state {
            State::Shared(shared) => shared.poll_read(socket, &this.tasks, context, into),
            State::Socket(first) if !first.is_empty() => {
                let count = first.len().min(into.remaining());
                into.put_slice(&first[..count]);
                first.drain(..count);
                Poll::Ready(Ok(()))
            }
            _ => Pin::new(socket).poll_read(context, into),
        }
    }
}

impl AsyncWrite for SocketFileStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let State::Accepted = this.state {
            this.tasks.writer.register(context.waker());
            ready!(this.poll_way())?;
        }
        let socket = &mut this.socket;
        match &mut this.state {
            State::Shared(shared) => shared.poll_write(socket, &this.tasks, context, slices),
            _ => Pin::new(socket).poll_write_vectored(context, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}
