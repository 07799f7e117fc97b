//! A pass of a batch through a model, in training, evaluation or prediction.

use std::cell::Cell;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::objective::Objective;

/// A pass of a batch through a model.
#[derive(Debug)]
pub struct Pass<'a> {
    /// True in training, false in evaluation and prediction.
    pub training: bool,
    /// In training, the number of steps that this worker has finished.
    pub step: u64,
    /// This worker's rank, from 0.
    pub rank: u32,
    /// The job's loss and metrics.
    pub objective: &'a Objective,
    seed: u64,
    /// The block that is computed, from 1; 0 for the whole model.
    block: u32,
    /// The index of the batch, or of the micro-batch, in the step.
    batch: u32,
    streams: Cell<u32>,
    batches: Cell<u32>,
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
            block: 0,
            batch: 0,
            streams: Cell::new(0),
            batches: Cell::new(0),
        }
    }

    /// Returns the pass of a block for a batch, or a micro-batch, of the step.
    #[doc(hidden)]
    pub fn of_block(&self, block: usize, batch: u32) -> Self {
        Self {
            block: block as u32 + 1,
            ..self.of_batch(batch)
        }
    }

    /// Returns the pass of the whole model for a batch, or a micro-batch, of the step.
    #[doc(hidden)]
    pub fn of_batch(&self, batch: u32) -> Self {
        Self {
            training: self.training,
            batch,
            ..Self::training(self.objective, self.seed, self.step, self.rank)
        }
    }

    /// Returns the job's seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the index of the next batch, which differs with each call.
    #[doc(hidden)]
    pub fn next_batch(&self) -> u32 {
        self.batches.replace(self.batches.get().wrapping_add(1))
    }

    /// Returns a pass of evaluation or prediction.
    pub fn evaluation(objective: &'a Objective) -> Self {
        Self {
            training: false,
            ..Self::training(objective, 0, 0, 0)
        }
    }

    /// Returns a stream of random numbers, for example for dropout. Each call returns a different stream. The stream
    /// depends only on the job's seed, the step, the rank, the block, the index of the batch in the step, and the
    /// number of earlier calls. So a repeated step gets the same streams, however the model is cut into stages.
    pub fn random(&self) -> ChaCha8Rng {
        let call = self.streams.replace(self.streams.get().wrapping_add(1));
        let mut key = [0; 32];
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let (place, call) = (pair(self.block, self.rank), pair(self.batch, call));
        let parts = [self.seed, self.step, place, call];
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

    #[test]
    fn each_block_and_batch_has_random_numbers_of_its_own() {
        let objective = Objective::default();
        let pass = Pass::training(&objective, 1, 2, 3);
        let mut drawn = vec![pass.random().next_u64(), pass.random().next_u64()];
        for (block, batch) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            let draw = || pass.of_block(block, batch).random().next_u64();
            assert_eq!(draw(), draw());
            drawn.push(draw());
        }
        drawn.push(pass.of_batch(1).random().next_u64());
        let count = drawn.len();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), count);
    }
}
