//! The ways between the stages of a worker and those of its neighbours in a stage group. The replica has one end of each way. The
//! strategy, which knows the other workers, has the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::oneshot;

use super::rounds::{Others, Rounds, rounds};

/// The neighbours of a worker in a step of its stage group, as its replica sees them before its passes.
#[derive(Debug)]
pub struct Neighbours {
    has_before: bool,
    has_next: bool,
    carried: oneshot::Sender<Carried>,
    others: Others,
}

/// The neighbours during the passes.
#[derive(Debug)]
pub struct Begun {
    /// The worker with the stages before; none for the first worker.
    pub before: Option<Neighbour>,
    /// The worker with the stages behind; none for the last worker.
    pub next: Option<Neighbour>,
    /// All workers of the group. They add up numbers after their passes.
    pub others: Others,
}

/// The ways to and from a neighbour. If they close before a message comes, the neighbour is lost.
#[derive(Debug)]
pub struct Neighbour {
    /// Takes the messages for the neighbour.
    pub to: Sender<Bytes>,
    /// The messages of the neighbour.
    pub from: Receiver<Bytes>,
    /// The wait for the next message of the neighbour.
    pub waits: Wait,
}

/// The strategy's side of a step. If this is dropped, the pass of the replica fails.
#[derive(Debug)]
pub struct Carrier {
    /// The ends of the ways, once the replica begins its passes.
    pub carried: oneshot::Receiver<Carried>,
    /// The sums that the replica asks for after its passes.
    pub rounds: Rounds,
}

/// The strategy's ends of the ways.
#[derive(Debug)]
pub struct Carried {
    /// The ends of the ways to and from the worker with the stages before.
    pub before: Option<Ends>,
    /// The ends of the ways to and from the worker with the stages behind.
    pub next: Option<Ends>,
    /// The number of messages on each way: one for each micro-batch of the step.
    pub messages: usize,
}

/// The ends of the ways to and from a neighbour.
#[derive(Debug)]
pub struct Ends {
    /// The messages for the neighbour.
    pub outgoing: Receiver<Bytes>,
    /// Takes the messages of the neighbour.
    pub incoming: Sender<Bytes>,
    /// The wait of the replica for the next message of the neighbour.
    pub waits: Wait,
}

/// The wait of a thread for a message. Clones are of the same wait.
#[derive(Clone, Debug, Default)]
pub struct Wait(Arc<Mutex<Option<Instant>>>);

impl Wait {
    /// Returns whether the thread has waited for so long already.
    pub fn exceeds(&self, time: Duration) -> bool {
        self.0.lock().is_some_and(|since| since.elapsed() >= time)
    }

    /// Waits, and notes it meanwhile.
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

    /// Begins the passes of a step, in which so many messages go each way. Their queues have room for all, so no sender ever waits.
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
