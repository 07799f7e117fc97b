//! The pulls of a session that wait: for slower workers, for a commit, or for a newer view.

use std::sync::Arc;
use std::time::Duration;

use shared_proto::ids::{Origin, Task, names};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;
use shared_proto::wire::server_message::Kind as ServerKind;
use tokio::time::Instant;

use super::super::limits;
use super::{QUIET, Session, SessionEnd};
use crate::shard::{Followed, PullAnswer};

/// The most pulls of one session that may wait at a time. This is enough for a worker that pulls each block of a large
/// shard in a separate message.
const MOST_WAITING: usize = 65_536;

/// A pull that must wait.
pub(super) struct Waiting {
    pull: wire::Pull,
    origin: Origin,
    since: Instant,
    /// The tasks that the pull waits for. Pulls that wait for the same tasks share this memory.
    on: Arc<[Task]>,
    /// The time at which to tell the worker what the pull waits for; `None` once the worker has been told.
    pub(super) tell: Option<Instant>,
    /// The number of bytes that the pull takes while it waits.
    cost: usize,
}

impl Session {
    /// Answers a pull, or lets it wait.
    pub(super) async fn pull(
        &mut self,
        mut pull: wire::Pull,
        origin: Origin,
    ) -> Result<(), SessionEnd> {
        let followed = self.shard.followed();
        match self.shard.pull(&pull, &origin, &followed) {
            Ok(PullAnswer::Weights(weights)) => {
                let clock = origin.clock;
                self.send_weights(weights, clock, Duration::ZERO).await
            }
            Ok(PullAnswer::Wait(_)) if !self.has_room_for(&pull, &followed) => {
                let many = Refusal::new(
                    Reason::TooManyRequests,
                    format!(
                        "{} pulls of this session are waiting, as many as there is memory for; wait for answers",
                        self.waiting.len()
                    ),
                );
                self.refuse(origin.sequence.0, many).await
            }
            Ok(PullAnswer::Wait(on)) => {
                let on = self.shared(on);
                let now = Instant::now();
                limits::own_ids(&mut pull);
                self.let_wait(Waiting {
                    cost: size_of::<Waiting>() + limits::cost(&pull),
                    pull,
                    origin,
                    since: now,
                    on,
                    tell: Some(now + QUIET),
                });
                Ok(())
            }
            Err(refusal) => self.refuse(origin.sequence.0, refusal).await,
        }
    }

    fn has_room_for(&self, pull: &wire::Pull, followed: &Followed) -> bool {
        let cost = size_of::<Waiting>() + limits::cost(pull);
        let taken = self.waiting_cost + cost;
        self.waiting.len() < MOST_WAITING && taken <= limits::of_waiting(followed.store.as_ref())
    }

    fn let_wait(&mut self, waiting: Waiting) {
        self.waiting_cost += waiting.cost;
        self.waiting.push(waiting);
    }

    /// Returns these tasks. They share the memory of the newest waiting pull's tasks if they are the same.
    fn shared(&mut self, on: Vec<Task>) -> Arc<[Task]> {
        if on.is_empty() {
            return Arc::default();
        }
        if *self.waiting_on != *on {
            self.waiting_on = on.into();
        }
        Arc::clone(&self.waiting_on)
    }

    /// Answers the waiting pulls that a new view admits.
    pub(super) async fn retry_waiting(&mut self) -> Result<(), SessionEnd> {
        self.check_lease()?;
        let followed = self.followed.borrow_and_update().clone();
        self.waiting_cost = 0;
        for mut waiting in std::mem::take(&mut self.waiting) {
            let origin = &waiting.origin;
            match self.shard.pull(&waiting.pull, origin, &followed) {
                Ok(PullAnswer::Weights(weights)) => {
                    let (clock, waited) = (origin.clock, waiting.since.elapsed());
                    self.send_weights(weights, clock, waited).await?;
                }
                Ok(PullAnswer::Wait(on)) => {
                    if *on != *waiting.on {
                        waiting.on = self.shared(on);
                        waiting.tell = Some(waiting.tell.unwrap_or_else(Instant::now));
                    }
                    self.let_wait(waiting);
                }
                Err(refusal) => self.refuse(origin.sequence.0, refusal).await?,
            }
        }
        Ok(())
    }

    /// Tells the worker which tasks its pulls wait for, if that is due.
    pub(super) async fn tell(&mut self) -> Result<(), SessionEnd> {
        let now = Instant::now();
        let min_clock = self.shard.followed().view.min_clock;
        for index in 0..self.waiting.len() {
            let waiting = &mut self.waiting[index];
            if waiting.tell.take_if(|at| *at <= now).is_none() || planted!(SilentWaits) {
                continue;
            }
            let answer = wire::Waiting {
                request: waiting.origin.sequence.0,
                on: waiting.on.iter().copied().map(Into::into).collect(),
                min_clock: min_clock.0,
            };
            tracing::debug!(peer = %self.peer, on = names(&*waiting.on), "a pull waits");
            self.answer(ServerKind::Waiting(answer)).await?;
        }
        Ok(())
    }
}
