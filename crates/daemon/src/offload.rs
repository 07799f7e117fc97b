//! Runs work on other threads, so that it does not delay a process's messages.

use std::sync::OnceLock;

use shared_proto::task;
use tokio::runtime::{Builder, Runtime};
use tokio::task::AbortHandle;

/// The place where work runs that would delay messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// A thread for blocking work.
    Threads,
    /// The calling task. For simulations, which have one thread and repeat exactly.
    Inline,
}

/// The niceness of threads in the background. On a busy processor such a thread gets about a tenth of the time.
const NICE: i32 = 10;

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

    /// Starts a task of low priority. On [`Self::Threads`] its blocking work has a low priority too.
    pub fn spawn_background(self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let background = match self {
            Self::Threads => background(),
            Self::Inline => None,
        };
        match background {
            Some(background) => background.spawn(task),
            None => task::spawn(task),
        }
        .abort_handle()
    }
}

/// Gives this thread, and the threads that it starts later, a low priority. On Linux, priorities belong to threads. If
/// the system refuses, the priority stays as it is.
pub fn lower_priority() {
    let _ = rustix::process::setpriority_process(None, NICE);
}

/// Returns the runtime for work in the background, which lives as long as the process; `None` if it could not be started.
fn background() -> Option<&'static Runtime> {
    static BACKGROUND: OnceLock<Option<Runtime>> = OnceLock::new();
    let start = || {
        let mut builder = Builder::new_multi_thread();
        builder
            .worker_threads(1)
            .thread_name("background")
            .enable_all();
        builder.on_thread_start(lower_priority);
        let built = builder.build();
        built
            .inspect_err(|error| tracing::warn!("no threads for work in the background: {error}"))
            .ok()
    };
    BACKGROUND.get_or_init(start).as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn background_work_has_a_low_priority_and_other_work_the_usual_one() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let usual = nice();
        assert!(usual < NICE, "run the tests at a niceness below {NICE}");
        let (tell, told) = tokio::sync::oneshot::channel();
        Offload::Threads.spawn_background(async move {
            let blocking = tokio::task::spawn_blocking(nice).await.unwrap();
            let _ = tell.send([nice(), blocking]);
        });
        assert_eq!(told.await.unwrap(), [NICE, NICE]);
        assert_eq!(Offload::Threads.run(nice).await, usual);
    }
}
