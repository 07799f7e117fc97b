//! A pass through a model: training or evaluation, and where in the training it is.

use std::cell::Cell;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::objective::Objective;

/// A pass through a model.
#[derive(Debug)]
pub struct Pass<'a> {
    /// True in training, false in evaluation and prediction.
    pub training: bool,
    /// In training, the steps that this worker has finished.
    pub step: u64,
    /// This worker's number, from 0.
    pub rank: u32,
    /// The job's loss and metrics.
    pub objective: &'a Objective,
    seed: u64,
    streams: Cell<u64>,
}

impl<'a> Pass<'a> {
    /// Returns the pass of a training step. `seed` is the job's.
    pub fn training(objective: &'a Objective, seed: u64, step: u64, rank: u32) -> Self {
        Self {
            training: true,
            step,
            rank,
            objective,
            seed,
            streams: Cell::new(0),
        }
    }

    /// Returns a pass of evaluation or prediction.
    pub fn evaluation(objective: &'a Objective) -> Self {
        Self {
            training: false,
            ..Self::training(objective, 0, 0, 0)
        }
    }

    /// Returns a stream of random numbers, for example for dropout: another one with each call. It depends on the
    /// job's seed, the step, the rank and the number of the call alone, so a step that is repeated gets it again.
    pub fn random(&self) -> ChaCha8Rng {
        let call = self.streams.replace(self.streams.get() + 1);
        let mut key = [0; 32];
        let parts = [self.seed, self.step, u64::from(self.rank), call];
        for (place, part) in key.chunks_exact_mut(8).zip(parts) {
            place.copy_from_slice(&part.to_le_bytes());
        }
        ChaCha8Rng::from_seed(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::RngCore;

    #[test]
    fn a_repeated_step_gets_the_same_random_numbers() {
        let objective = Objective::default();
        let draw = |seed, step, rank| {
            let pass = Pass::training(&objective, seed, step, rank);
            [pass.random().next_u64(), pass.random().next_u64()]
        };
        let first = draw(1, 2, 3);
        assert_eq!(draw(1, 2, 3), first);
        assert_ne!(first[0], first[1]);
        for other in [draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4)] {
            assert_ne!(other[0], first[0]);
        }
    }
}
