//! The channels between the stages of a worker and those of its neighbours in a stage group. The replica has one end of
//! each channel. The strategy, which has the links to the other workers, has the other end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::oneshot;

use super::rounds::{Others, Rounds, rounds};

/// The replica's side of a step in a stage group, before the passes begin.
#[derive(Debug)]
pub struct Neighbours {
    has_before: bool,
    has_next: bool,
    carried: oneshot::Sender<Carried>,
    others: Others,
}

/// The replica's side of a step in a stage group, during the passes.
#[derive(Debug)]
pub struct Begun {
    /// The worker with the preceding stages; `None` for the first worker.
    pub before: Option<Neighbour>,
    /// The worker with the following stages; `None` for the last worker.
    pub next: Option<Neighbour>,
    /// All other workers of the group, with which this one adds up numbers after the passes.
    pub others: Others,
}

/// The channels to and from a neighbour. If they close before an expected message arrives, the neighbour is lost.
#[derive(Debug)]
pub struct Neighbour {
    /// Takes the messages for the neighbour.
    pub to: Sender<Bytes>,
    /// The messages from the neighbour.
    pub from: Receiver<Bytes>,
    /// The replica's wait for the neighbour's next message.
    pub waits: Wait,
}

/// The strategy's side of a step. If this is dropped, the replica's pass fails.
#[derive(Debug)]
pub struct Carrier {
    /// The strategy's ends of the channels. They arrive when the replica begins its passes.
    pub carried: oneshot::Receiver<Carried>,
    /// The sums that the replica requests after its passes.
    pub rounds: Rounds,
}

/// The strategy's ends of all channels of a step.
#[derive(Debug)]
pub struct Carried {
    /// The channels to and from the worker with the preceding stages; `None` for the first worker.
    pub before: Option<Ends>,
    /// The channels to and from the worker with the following stages; `None` for the last worker.
    pub next: Option<Ends>,
    /// The number of messages in each channel: one for each micro-batch of the step.
    pub messages: usize,
}

/// The strategy's ends of the channels to and from a neighbour.
#[derive(Debug)]
pub struct Ends {
    /// The replica's messages for the neighbour.
    pub outgoing: Receiver<Bytes>,
    /// Takes the neighbour's messages for the replica.
    pub incoming: Sender<Bytes>,
    /// The replica's wait for the neighbour's next message.
    pub waits: Wait,
}

/// The time since which a thread waits for a message, if it does. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Wait(Arc<Mutex<Option<Instant>>>);

impl Wait {
    /// Returns true if the thread is waiting, and has waited for at least `time`.
    pub fn exceeds(&self, time: Duration) -> bool {
        self.0.lock().is_some_and(|since| since.elapsed() >= time)
    }

    /// Calls `wait`, and records the wait until it returns.
    pub(super) fn during<T>(&self, wait: impl FnOnce() -> T) -> T {
        *self.0.lock() = Some(Instant::now());
        let done = wait();
        *self.0.lock() = None;
        done
    }
}

impl Neighbours {
    /// Returns both sides of a step for a worker that has these neighbours.
    pub fn new(has_before: bool, has_next: bool) -> (Self, Carrier) {
        let (send, carried) = oneshot::channel();
        let (others, rounds) = rounds();
        let neighbours = Self {
            has_before,
            has_next,
            carried: send,
            others,
        };
        (neighbours, Carrier { carried, rounds })
    }

    /// Begins the passes of a step with this number of messages in each channel. A channel has room for all of them, so
    /// no sender ever waits.
    pub fn begin(self, messages: usize) -> Begun {
        let (before, to_before) = ways(self.has_before, messages);
        let (next, to_next) = ways(self.has_next, messages);
        // A strategy that is gone closes the ways.
        let _ = self.carried.send(Carried {
            before: to_before,
            next: to_next,
            messages,
        });
        Begun {
            before,
            next,
            others: self.others,
        }
    }
}

fn ways(exist: bool, messages: usize) -> (Option<Neighbour>, Option<Ends>) {
    if !exist {
        return (None, None);
    }
    let room = messages.max(1);
    let ((to, outgoing), (incoming, from)) = (channel(room), channel(room));
    let waits = Wait::default();
    let ends = Ends {
        outgoing,
        incoming,
        waits: waits.clone(),
    };
    (Some(Neighbour { to, from, waits }), Some(ends))
}
