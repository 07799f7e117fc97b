//! The properties of a world of rings, by its seed.

use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::BATCH;
use super::values::Shape;

/// The properties of a world. Those of type `bool` are true if they apply.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The workers with which the job begins.
    pub(crate) workers: u32,
    /// The times at which other workers start.
    pub(crate) joiners: Vec<Duration>,
    pub(crate) shape: Shape,
    /// A worker dies for good.
    pub(crate) doomed: bool,
    /// All workers die at once.
    pub(crate) all_die: bool,
    /// Workers are told to stop, and some of them do not come back.
    pub(crate) departs: bool,
    /// The store of checkpoints fails, refuses, is full, or is slow.
    pub(crate) store: bool,
    /// The disk with the coordinator's state fails.
    pub(crate) disk: bool,
    /// Processes are stopped and continue.
    pub(crate) stops: bool,
    /// Calls to the coordinator arrive twice, or late.
    pub(crate) repeats: bool,
    /// The copies of each part of the optimizer's state; none if each worker has all of it.
    pub(crate) copies: Option<u32>,
    /// Gradients leave in several buckets.
    pub(crate) buckets: bool,
    /// Two workers hold the stages of a model together.
    pub(crate) groups: bool,
    /// A step does not wait for the slowest worker, and some passes take long.
    pub(crate) backups: bool,
    /// Servers have a table, in sync mode.
    pub(crate) servers: bool,
    /// Each worker has a GPU, and the GPUs add up gradients.
    pub(crate) gpus: bool,
}

/// The most samples of a step that may not count in a world with a backup worker: those of one worker.
pub(crate) const MOST_LATE: usize = BATCH as usize;

impl Plan {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 1);
        let workers = rng.random_range(2..=3);
        let most = rng.random_range(0..=4 - workers);
        let joiners = (0..most).map(|_| Duration::from_millis(rng.random_range(500..12_000)));
        let joiners = joiners.collect();
        let mut has = |share| rng.random_bool(share);
        let mut plan = Self {
            workers,
            joiners,
            shape: match has(0.25) {
                true => Shape::LARGE,
                false => Shape::SMALL,
            },
            doomed: has(0.2),
            all_die: has(0.35),
            departs: has(0.3),
            store: has(0.35),
            disk: has(0.2),
            stops: has(0.3),
            repeats: has(0.3),
            copies: has(0.5).then(|| if has(0.3) { 1 } else { 2 }),
            buckets: false,
            groups: false,
            backups: false,
            servers: false,
            gpus: false,
        };
        plan.buckets = plan.copies.is_none() && has(0.5);
        plan.groups = !plan.buckets && has(0.3);
        plan.backups = plan.copies.is_none() && !plan.buckets && !plan.groups && has(0.7);
        plan.servers = !plan.groups && !plan.backups && has(0.3);
        plan.gpus = plan.copies.is_none() && !plan.groups && !plan.backups && has(0.4);
        plan.buckets &= !plan.gpus;
        if plan.groups && plan.all_workers() < 3 {
            // Those that stay would wait for ever.
            (plan.doomed, plan.departs) = (false, false);
        }
        plan
    }

    /// Returns the most of so many samples that may not count after so many steps. A step counts the gradient of one of two workers at least.
    pub(crate) fn may_lack(&self, samples: u64, steps: u64) -> usize {
        match self.backups {
            true => (MOST_LATE * steps as usize).min(samples as usize / 2 + MOST_LATE),
            false => 0,
        }
    }

    /// Returns the number of all workers, those included that join later.
    pub(crate) fn all_workers(&self) -> u32 {
        self.workers + self.joiners.len() as u32
    }

    /// Returns the time at which a worker starts.
    pub(crate) fn start_of(&self, worker: u32) -> Duration {
        let joiner = worker.checked_sub(self.workers);
        let start = joiner.and_then(|joiner| self.joiners.get(joiner as usize));
        start.copied().unwrap_or_default()
    }
}
