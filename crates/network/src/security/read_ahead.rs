//! Large reads for TLS.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::forwarding::forward_writes;

/// The size of the buffer of a new connection, and its largest size, in bytes.
const FIRST: usize = 4 << 10;
const MOST: usize = 256 << 10;

/// A connection that reads more bytes than rustls asks for. rustls asks for 4 KiB at a time, and each read would cost a
/// system call. The buffer grows when one read fills it, so an idle connection has a small one.
#[derive(Debug)]
pub(super) struct ReadAhead<S> {
    io: S,
    buffer: Vec<u8>,
    /// The range of the buffer that has not been handed on.
    start: usize,
    end: usize,
}

impl<S> ReadAhead<S> {
    pub(super) fn new(io: S) -> Self {
        Self {
            io,
            buffer: vec![0; FIRST],
            start: 0,
            end: 0,
        }
    }

    /// Returns the connection. Bytes that were read ahead are lost.
    pub(super) fn into_inner(self) -> S {
        self.io
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadAhead<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.start == this.end {
            if this.end == this.buffer.len() && this.end < MOST {
                this.buffer.resize(2 * this.end, 0);
            }
            let mut arrived = ReadBuf::new(&mut this.buffer);
            ready!(Pin::new(&mut this.io).poll_read(context, &mut arrived))?;
            (this.start, this.end) = (0, arrived.filled().len());
        }
        let taken = into.remaining().min(this.end - this.start);
        into.put_slice(&this.buffer[this.start..this.start + taken]);
        this.start += taken;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadAhead<S> {
    forward_writes!(io);
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::{FIRST, MOST, ReadAhead};

    /// The bytes arrive unchanged, whatever the sizes of writes and reads, and the buffer grows up to its bound alone.
    #[tokio::test]
    async fn bytes_arrive_in_order_in_reads_of_any_size() {
        let sent: Vec<u8> = (0..3_000_000u32).map(|i| (i * 31 % 251) as u8).collect();
        let (reader, mut writer) = tokio::io::duplex(1 << 20);
        let bytes = sent.clone();
        let writing = tokio::spawn(async move {
            for (number, piece) in bytes.chunks(700_001).enumerate() {
                writer.write_all(piece).await.unwrap();
                assert!(number < 5);
            }
        });
        let mut reader = ReadAhead::new(reader);
        assert_eq!(reader.buffer.len(), FIRST);
        let mut arrived = Vec::new();
        let mut piece = vec![0; 300_000];
        for size in [1, 4096, 5, 16_384, 300_000].into_iter().cycle() {
            match reader.read(&mut piece[..size]).await.unwrap() {
                0 => break,
                read => arrived.extend_from_slice(&piece[..read]),
            }
        }
        writing.await.unwrap();
        assert!(arrived == sent);
        assert_eq!(reader.buffer.len(), MOST);
    }

    #[tokio::test]
    async fn a_connection_with_little_traffic_keeps_a_small_buffer() {
        let (reader, mut writer) = tokio::io::duplex(1 << 20);
        let mut reader = ReadAhead::new(reader);
        for _ in 0..100 {
            writer.write_all(&[7; 1000]).await.unwrap();
            reader.read_exact(&mut [0; 1000]).await.unwrap();
        }
        assert_eq!(reader.buffer.len(), FIRST);
    }
}
