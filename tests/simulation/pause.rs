//! Processes that are stopped for a while and continue, as with SIGSTOP and SIGCONT: their own work stands still, their
//! timers fire late, and the network keeps the messages that arrive meanwhile.
//!
//! Turmoil cannot stop a host. Instead, a host's own future is not polled while it is stopped, and none of its tasks
//! reads or writes a connection or the store. Tasks that it has spawned may continue, but have no effect outside.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};

#[derive(Debug, Default)]
struct Inner {
    stopped: bool,
    waiting: Vec<Waker>,
}

/// The state of a process: stopped or not.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pause(Arc<Mutex<Inner>>);

impl Pause {
    pub(crate) fn stop(&self) {
        self.0.lock().unwrap().stopped = true;
    }

    pub(crate) fn go_on(&self) {
        let mut inner = self.0.lock().unwrap();
        inner.stopped = false;
        inner.waiting.drain(..).for_each(Waker::wake);
    }

    /// Ready while the process is not stopped.
    pub(crate) fn poll_running(&self, context: &Context<'_>) -> Poll<()> {
        let mut inner = self.0.lock().unwrap();
        if !inner.stopped {
            return Poll::Ready(());
        }
        let waker = context.waker();
        if !inner.waiting.iter().any(|waiting| waiting.will_wake(waker)) {
            inner.waiting.push(waker.clone());
        }
        Poll::Pending
    }

    pub(crate) async fn running(&self) {
        std::future::poll_fn(|context| self.poll_running(context)).await;
    }

    /// Runs the work of a process, which stands still while the process is stopped.
    pub(crate) async fn over<F: Future>(&self, work: F) -> F::Output {
        let mut work = std::pin::pin!(work);
        std::future::poll_fn(|context| {
            ready!(self.poll_running(context));
            Pin::new(&mut work).poll(context)
        })
        .await
    }
}

/// The pauses of all hosts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pauses(Arc<Mutex<BTreeMap<String, Pause>>>);

impl Pauses {
    pub(crate) fn of(&self, host: &str) -> Pause {
        let mut all = self.0.lock().unwrap();
        all.entry(host.to_owned()).or_default().clone()
    }
}
