//! Macros that forward the methods of `AsyncWrite` from a connection to the connection inside it.

/// Forwards all methods of `AsyncWrite` to a field.
macro_rules! forward_writes {
    ($io:ident) => {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.$io).poll_write(context, bytes)
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            slices: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.$io).poll_write_vectored(context, slices)
        }

        $crate::forwarding::forward_flushes!($io);
    };
}

/// Forwards the methods of `AsyncWrite` that take no bytes to a field.
macro_rules! forward_flushes {
    ($io:ident) => {
        fn is_write_vectored(&self) -> bool {
            self.$io.is_write_vectored()
        }

        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.$io).poll_flush(context)
        }

        fn poll_shutdown(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.$io).poll_shutdown(context)
        }
    };
}

pub(crate) use {forward_flushes, forward_writes};
