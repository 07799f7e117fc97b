//! The text of candle's errors.

/// Returns the text of a candle error without the backtrace that `RUST_BACKTRACE` adds to it.
pub fn plain(error: &candle_core::Error) -> String {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => plain(inner),
        candle_core::Error::Context { inner, context } => format!("{context}: {}", plain(inner)),
        candle_core::Error::WithPath { inner, path } => {
            format!("{}: {}", path.display(), plain(inner))
        }
        error => error.to_string(),
    }
}
