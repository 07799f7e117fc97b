//! Work with the other members of a ring: sums in the middle of the passes of a step, and reports of long waits.

use std::convert::Infallible;
use std::time::Instant;

use replica::{Computed, Mirror, Positions, Rounds, Step, rounds};

use super::ring::{Lost, Ring};
use super::{LOOK, LOOKS, Mirrored, QUIET};
use crate::strategy::StrategyError;

impl Mirrored {
    /// Does work with the other members. If the work waits for long, reports the members that it waits for. If the ring
    /// is lost, leaves it.
    pub(super) async fn in_ring<T>(
        &mut self,
        work: impl AsyncFnOnce(&Ring) -> Result<T, Lost>,
    ) -> Result<T, StrategyError> {
        let Some(ring) = &self.ring else {
            let why = "this worker is in no ring";
            return Err(StrategyError::Abandoned(why.to_owned()));
        };
        let done = tokio::select! {
            biased;
            done = work(ring) => done,
            never = self.report_waits(ring) => match never {},
        };
        self.waiting_on
            .send_if_modified(|known| !std::mem::take(known).is_empty());
        self.counters.moved(ring.take_traffic());
        let lost = match done {
            Ok(done) => return Ok(done),
            Err(lost) => lost,
        };
        self.counters.abandoned(&lost);
        if let Lost::Replica(error) = lost {
            self.leave_ring(Lost::Over);
            return Err(error.into());
        }
        let why = lost.to_string();
        self.leave_ring(lost);
        Err(StrategyError::Abandoned(why))
    }

    /// Reports the members that this one waits for, if it waits for long.
    async fn report_waits(&self, ring: &Ring) -> Infallible {
        let mut found = 0;
        loop {
            let before = Instant::now();
            tokio::time::sleep(LOOK).await;
            let mut on = ring.waiting_on();
            // What it waits for may have arrived while this process itself was stopped.
            let was_stopped = before.elapsed() > QUIET;
            found = match on.is_empty() || was_stopped {
                true => 0,
                false => found + 1,
            };
            if found < LOOKS {
                on.clear();
            }
            self.waiting_on.send_if_modified(|known| {
                let changed = *known != on;
                *known = on;
                changed
            });
        }
    }

    /// Computes a step together with the other members: while the replica computes, its layers add up numbers over the samples of
    /// all members. A member without samples computes nothing, and adds nothing.
    pub(super) async fn compute_together(
        &mut self,
        positions: Positions,
        step: Step,
        mirror: &dyn Mirror,
    ) -> Result<Computed, StrategyError> {
        let (others, rounds) = rounds();
        let compute = async {
            if positions.is_empty() {
                drop(others);
                return Ok(Computed::nothing());
            }
            mirror.compute_with(others, positions, step).await
        };
        let computed = self.in_ring(async |ring| {
            // A replica ends its pass if its rounds get no answer.
            let (summed, computed) = tokio::join!(ring.sum_rounds(rounds), compute);
            summed.map(|()| computed)
        });
        Ok(computed.await??)
    }

    /// Leaves the ring. Its links are closed, so that the other members notice it.
    pub(super) fn leave_ring(&mut self, lost: Lost) {
        self.ring = None;
        self.counters.left();
        self.lost = match lost {
            Lost::Member(task, reason) => {
                tracing::info!(%task, reason, "a member of the ring is lost");
                Some(task)
            }
            Lost::Devices(failure) => {
                self.device_failures.push(failure);
                None
            }
            Lost::Over | Lost::Replica(_) => None,
        };
    }
}

impl Ring {
    /// Adds up a replica's vectors with those of the other members, round by round. After its pass this member adds nothing, until a
    /// round in which no member has numbers: all have then ended their passes.
    async fn sum_rounds(&self, mut rounds: Rounds) -> Result<(), Lost> {
        loop {
            let (values, waiting) = match rounds.next().await {
                Some(round) => (round.values, Some(round.sum)),
                None => (Vec::new(), None),
            };
            let sum = self.sum_short(values).await?;
            match waiting {
                // A pass that has failed does not need the sum.
                Some(waiting) => drop(waiting.send(sum)),
                None if sum.is_empty() => return Ok(()),
                None => {}
            }
        }
    }
}
