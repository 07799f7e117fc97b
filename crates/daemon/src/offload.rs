//! Work that would hold up a process's messages goes to a thread.

/// Where such work goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// To a thread for blocking work.
    Threads,
    /// Nowhere: it is done at once. For simulations, which have one thread and repeat exactly.
    Inline,
}

impl Offload {
    /// Does some work. Where it panics, so does this.
    pub async fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> T {
        match self {
            Self::Inline => work(),
            Self::Threads => match tokio::task::spawn_blocking(work).await {
                Ok(done) => done,
                Err(error) => match error.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    // The runtime is shutting down: nobody waits for the result any more.
                    Err(_) => std::future::pending().await,
                },
            },
        }
    }
}
