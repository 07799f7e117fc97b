//! The properties of a world, by its seed. No world has all of them.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use shared_proto::job::NonFinite;

/// The properties of a world besides hosts that crash and networks that fail. Those of type `bool` are true if they
/// apply.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Two servers share an identity, instead of one being a spare.
    pub(crate) identity_twice: bool,
    /// A worker dies for good.
    pub(crate) doomed: bool,
    /// The store of checkpoints fails, refuses, is full, or is slow.
    pub(crate) store: bool,
    /// The disk with the coordinator's state fails.
    pub(crate) disk: bool,
    /// The files of the coordinator's state are damaged while no process has them open. The operator repairs what is refused.
    pub(crate) damages: bool,
    /// The coordinator's state is lost, and the job continues from its checkpoints.
    pub(crate) loses_state: bool,
    /// A second coordinator is started for the same store.
    pub(crate) second_coordinator: bool,
    /// Processes are stopped and continue.
    pub(crate) stops: bool,
    /// Calls to the coordinator arrive twice, or late.
    pub(crate) repeats: bool,
    /// A push has several messages, and a variable several blocks.
    pub(crate) many_blocks: bool,
    /// Workers compute ahead of the acknowledgement of their gradients, if the mode allows it.
    pub(crate) computes_ahead: bool,
    /// Servers are told to stop, and are started again once they have ended.
    pub(crate) drains: bool,
    /// The action on gradients that are NaN; none if there are no such gradients.
    pub(crate) non_finite: Option<NonFinite>,
}

impl Plan {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut has = |share| rng.random_bool(share);
        let (store, disk, loses_state) = (has(0.4), has(0.3), has(0.15));
        let (second, stops, repeats) = (has(0.1), has(0.35), has(0.3));
        let (many_blocks, skip, fail) = (has(0.05), has(0.15), has(0.03));
        let drains = has(0.3);
        let damages = has(0.4);
        // A run that cannot raise its counter for long may rightly lose its store.
        let second_coordinator = second && !loses_state;
        Self {
            identity_twice: seed % 5 == 3,
            // A new run waits for the job's number of workers.
            doomed: seed % 4 == 1 && !loses_state,
            store,
            disk,
            damages,
            loses_state,
            second_coordinator,
            stops,
            repeats,
            many_blocks,
            computes_ahead: seed / 12 % 2 == 1,
            drains,
            non_finite: match (fail, skip) {
                (true, _) => Some(NonFinite::Fail),
                (false, true) => Some(NonFinite::Skip),
                (false, false) => None,
            },
        }
    }

    /// Returns the interval between pushes that are NaN.
    pub(crate) fn poisoned(&self) -> Option<usize> {
        self.non_finite.map(|what| match what {
            NonFinite::Skip => 13,
            NonFinite::Fail => 60,
        })
    }
}
