//! A block's entry in a pull, and its part of a variable's values.

use shared_proto::blocks::BlockId;
use shared_proto::payload::Elements;
use shared_proto::step::Want;
use shared_proto::wire;

use crate::error::ClientError;
use crate::shards::Shards;

impl Shards {
    /// Returns a block's entry of the pull for a step with these wants; none if the step does not want the block.
    pub(crate) fn wanted(&self, wants: &[Want], id: BlockId) -> Option<wire::WantedBlock> {
        let held = self.known.get(&id).copied().unwrap_or_default();
        wants.contains(&Want::Dense).then(|| wire::WantedBlock {
            block: Some(id.into()),
            epoch: held.epoch,
            version: held.version,
        })
    }

    /// Returns the part of all variables' values that belongs to a block.
    ///
    /// # Errors
    /// If the map has no such block.
    pub(crate) fn part(&self, values: &[Elements], id: BlockId) -> Result<Elements, ClientError> {
        Ok(values[id.variable as usize].slice(self.map.range(id)?))
    }
}
