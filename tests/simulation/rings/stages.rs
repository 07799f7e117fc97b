//! The passes of a replica that has half of a model. It checks that each message of the other half is of the same step.

use std::time::Duration;

use async_trait::async_trait;
use replica::{Begun, Computed, Neighbour, Neighbours, Positions, ReplicaError, StageSteps, Step};

use super::model::{Kept, of_values};

/// The micro-batches of a step.
const MICRO_BATCHES: usize = 3;

/// The variable "steps" belongs to the second stage, the others to the first.
const OF_THE_SECOND: usize = 2;

#[async_trait(?Send)]
impl StageSteps for Kept {
    fn devices(&self) -> usize {
        1
    }

    async fn take_place(&self, place: Option<usize>) -> Result<(), ReplicaError> {
        self.own.lock().unwrap().place = place;
        Ok(())
    }

    async fn compute_in_stages(
        &self,
        neighbours: Neighbours,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError> {
        let clock = step.clock.0;
        self.history.computed(&self.name, clock, positions);
        let Begun {
            before,
            next,
            others,
        } = neighbours.begin(MICRO_BATCHES);
        let place = self.own.lock().unwrap().place;
        let (is_second, other) = match (before, next) {
            (None, Some(next)) => (false, next),
            (Some(before), None) => (true, before),
            _ => panic!("one of two workers has one neighbour"),
        };
        if place != Some(usize::from(is_second)) {
            self.history
                .violation(format!("{} has the place {place:?}", self.name));
        }
        self.pass(other, clock, positions).await?;
        let sum = others.sum(vec![1.0]).await.ok_or_else(lost)?;
        if sum != [2.0] {
            let name = &self.name;
            self.history
                .violation(format!("the workers of {name}'s group add up to {sum:?}"));
        }
        let mut gradient = self.shape.gradient(clock, positions);
        for (variable, values) in gradient.iter_mut().enumerate() {
            if (variable == OF_THE_SECOND) != is_second {
                values.clear();
            }
        }
        Ok(of_values(gradient))
    }
}

impl Kept {
    /// Exchanges a message for each micro-batch with the other worker.
    async fn pass(
        &self,
        mut other: Neighbour,
        clock: u64,
        positions: Positions,
    ) -> Result<(), ReplicaError> {
        let pause: Duration = self.step / MICRO_BATCHES as u32;
        for micro_batch in 0..MICRO_BATCHES {
            let message = format!("micro-batch {micro_batch} after clock {clock} of {positions:?}");
            tokio::time::sleep(pause).await;
            // Some are longer than a piece of a link.
            let long = clock.is_multiple_of(8).then(|| " ".repeat(300_000));
            let message = message + &long.unwrap_or_default();
            let sent = other.to.send(message.clone().into()).await;
            sent.map_err(|_| lost())?;
            let came = other.from.recv().await.ok_or_else(lost)?;
            if came != message {
                let (name, came) = (&self.name, String::from_utf8_lossy(&came));
                self.history.violation(format!(
                    "{name} got {:?} for {:?}",
                    came.trim(),
                    message.trim()
                ));
            }
        }
        Ok(())
    }
}

fn lost() -> ReplicaError {
    ReplicaError::Panicked("the other stage is lost".to_owned())
}
