//! Runs work that would hold up a process's messages on a thread.

/// The place where such work runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// A thread for blocking work.
    Threads,
    /// The calling task. For simulations, which have one thread and repeat exactly.
    Inline,
}

impl Offload {
    /// Does some work. A panic of the work is passed on.
    pub async fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> T {
        match self {
            Self::Inline => work(),
            Self::Threads => match tokio::task::spawn_blocking(work).await {
                Ok(done) => done,
                Err(error) => match error.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    // The runtime is shutting down: no task waits for the result any more.
                    Err(_) => std::future::pending().await,
                },
            },
        }
    }
}
