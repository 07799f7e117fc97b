//! The signals to a process that trains.

use tokio::signal::unix::{self, SignalKind};

use crate::error::CommandError;

/// A signal that ends a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// SIGINT: the job ends early, and in good order.
    Interrupt,
    /// SIGTERM: the job ends at once.
    Terminate,
}

/// The signals to this process; `None` if they are not obeyed.
pub(super) struct Signals(Option<[unix::Signal; 2]>);

impl Signals {
    /// Listens to signals if `obeyed` is true. Otherwise [`Self::next`] waits for ever.
    pub(super) fn new(obeyed: bool) -> Result<Self, CommandError> {
        let listen = |kind| unix::signal(kind).map_err(CommandError::file("signals"));
        Ok(Self(match obeyed {
            true => Some([
                listen(SignalKind::interrupt())?,
                listen(SignalKind::terminate())?,
            ]),
            false => None,
        }))
    }

    /// Waits for the next signal.
    pub(super) async fn next(&mut self) -> Signal {
        let Some([interrupt, terminate]) = &mut self.0 else {
            return std::future::pending().await;
        };
        tokio::select! {
            _ = interrupt.recv() => Signal::Interrupt,
            _ = terminate.recv() => Signal::Terminate,
        }
    }
}
