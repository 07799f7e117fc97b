//! The identification of a message by sequence number and clock, and the versions of the weights with which its
//! gradients were computed.

use shared_proto::blocks::BlockId;
use shared_proto::ids::{Clock, Origin};
use shared_proto::planted;

use crate::shards::Shards;

impl Shards {
    /// Records that the gradients of the next push are computed with the weights that the model has now. Must be called
    /// before the weights of the step after that one are taken.
    pub fn computes(&mut self) {
        self.computed_with = Some(self.held.clone());
    }

    /// Returns the version of the weights with which the gradients of a block were computed; 0 if the model does not
    /// have the block.
    pub(crate) fn based_on(&self, id: BlockId) -> u64 {
        let before = self.computed_with.as_ref();
        let before = before.filter(|_| !planted!(LaterWeights));
        let held = before.unwrap_or(&self.held);
        held.get(&id).map_or(0, |held| held.version.version)
    }

    pub(crate) fn next_origin(&mut self, clock: Clock) -> Origin {
        self.origin.sequence = self.origin.sequence.next();
        self.origin.clock = clock;
        self.origin.clone()
    }
}
