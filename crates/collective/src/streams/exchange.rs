//! The place where links from other processes arrive, and wait for the ring that they belong to.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use network::stream::{Incoming, Sender};
use shared_proto::ids::{Epoch, RunNumber, Task};
use shared_proto::protocol::PROTOCOL_VERSION;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::link::Link;

/// The most links that may wait for their ring. More are refused.
const MOST_WAITING: usize = 1024;

/// A process as its peers know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The name of the job.
    pub job: String,
    /// The run of which the process is a member.
    pub run: RunNumber,
    /// The task of the process.
    pub task: Task,
}

/// The place where links to this process arrive. Clones share one place.
#[derive(Clone, Default)]
pub struct Exchange(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// True if a task may open only one link of a ring.
    once: bool,
    state: Mutex<State>,
    /// Notified when a link has come.
    arrived: Notify,
}

#[derive(Default)]
struct State {
    identity: Option<Identity>,
    /// The ring that this process is in, or forms.
    ring: Epoch,
    waiting: BTreeMap<(Epoch, Task), Link>,
    /// Handles to the links that a ring has taken. A handle can end its link.
    taken: BTreeMap<(Epoch, Task), CancellationToken>,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Exchange")
            .field("identity", &state.identity)
            .field("ring", &state.ring)
            .field("waiting", &state.waiting.len())
            .finish()
    }
}

impl Exchange {
    /// Returns an exchange that accepts one link from each task in a ring. It is for tasks without generations: a restarted task is
    /// refused, and retries until this process has restarted too.
    #[must_use]
    pub fn once() -> Self {
        Self(Arc::new(Shared {
            once: true,
            ..Shared::default()
        }))
    }

    /// Accepts links to this process from now on. If the identity has changed, drops the waiting links.
    pub fn belong_to(&self, identity: Identity) {
        let mut state = self.state();
        if state.identity.as_ref() != Some(&identity) {
            *state = State {
                identity: Some(identity),
                ..State::default()
            };
        }
    }

    /// Begins a ring, and drops the links of earlier rings.
    pub(super) fn begin(&self, ring: Epoch) {
        let mut state = self.state();
        state.ring = ring;
        state.waiting.retain(|(of, _), _| *of >= ring);
        state.taken.retain(|(of, _), _| *of >= ring);
    }

    /// Returns the identity of this process, once it has one.
    pub(super) fn identity(&self) -> Option<Identity> {
        self.state().identity.clone()
    }

    /// Waits for the link that a task opens for a ring.
    pub(super) async fn take(&self, ring: Epoch, from: Task) -> Link {
        loop {
            let arrived = self.0.arrived.notified();
            tokio::pin!(arrived);
            // Registered before the look, so that no arrival is missed.
            arrived.as_mut().enable();
            if let Some(link) = self.state().take(ring, from) {
                return link;
            }
            arrived.await;
        }
    }

    /// Checks a greeting, answers it, and keeps its link for the ring.
    ///
    /// # Errors
    /// The status with which to end the link.
    pub(super) fn offer(
        &self,
        greeting: wire::Greeting,
        outgoing: Sender,
        incoming: Incoming<wire::LinkMessage>,
    ) -> Result<(), Status> {
        let mut state = self.state();
        let (from, ring) = state.check(&greeting)?;
        if state.waiting.len() >= MOST_WAITING {
            return Err(Status::resource_exhausted(
                "too many links wait for their ring",
            ));
        }
        match state.taken.get(&(ring, from)) {
            Some(_) if self.0.once => {
                return Err(Status::unavailable(format!(
                    "this process has had a link of {from} already; all processes must start again"
                )));
            }
            // The caller has closed its first link, but the end of that stream may be lost on the way.
            Some(taken) => taken.cancel(),
            None => {}
        }
        let link = Link::new(outgoing, incoming);
        link.admit();
        state.waiting.insert((ring, from), link);
        drop(state);
        self.0.arrived.notify_waiters();
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes the link that a task has opened for a ring, if it has come.
    fn take(&mut self, ring: Epoch, from: Task) -> Option<Link> {
        let link = self.waiting.remove(&(ring, from))?;
        self.taken.insert((ring, from), link.superseded());
        Some(link)
    }

    /// Checks a greeting. Returns the task that sent it, and the ring that it names.
    fn check(&self, greeting: &wire::Greeting) -> Result<(Task, Epoch), Status> {
        let version = greeting.protocol_version;
        if version != PROTOCOL_VERSION {
            return Err(Refusal::new(
                Reason::WrongProtocolVersion,
                format!("the caller speaks version {version}, this worker {PROTOCOL_VERSION}; use one release for all processes"),
            ).into());
        }
        let malformed = |what: &str| Status::from(Refusal::new(Reason::Malformed, what));
        let origin = greeting
            .origin
            .as_ref()
            .ok_or_else(|| malformed("the greeting has no origin"))?;
        let task = |task: Option<&wire::Task>| {
            let task = task.and_then(|task| Task::try_from(task).ok());
            task.ok_or_else(|| malformed("the greeting lacks a task"))
        };
        let (from, to) = (task(origin.task.as_ref())?, task(greeting.to.as_ref())?);
        let Some(own) = &self.identity else {
            return Err(Status::unavailable("this worker is not registered yet"));
        };
        if origin.job != own.job {
            return Err(Refusal::new(
                Reason::ForeignJob,
                format!("this worker works on another job than {:?}", origin.job),
            )
            .into());
        }
        if to != own.task || origin.run != own.run.0 {
            return Err(Refusal::new(
                Reason::Fenced,
                format!(
                    "{to} is meant, but this is {} of another run or generation",
                    own.task
                ),
            )
            .into());
        }
        let ring = Epoch(origin.epoch);
        if ring < self.ring {
            return Err(Refusal::new(
                Reason::Fenced,
                format!(
                    "ring {ring} is over, and this worker is in ring {}",
                    self.ring
                ),
            )
            .into());
        }
        Ok((from, ring))
    }
}
