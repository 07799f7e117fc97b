//! A block's entry in a pull, and its part of a variable's values.

use shared_proto::blocks::BlockId;
use shared_proto::payload::Elements;
use shared_proto::step::Want;
use shared_proto::wire;

use crate::error::ClientError;
use crate::shards::Shards;

impl Shards {
    /// Returns a block's entry of the pull with these wants; none if they do not include the block.
    pub(crate) fn wanted(&self, wants: &[Want], id: BlockId) -> Option<wire::WantedBlock> {
        let averages = wants.contains(&Want::Averages);
        if !averages && !wants.contains(&Want::Dense) {
            return None;
        }
        let average = averages && self.has_average(id);
        let held = self.known.get(&id).copied().filter(|_| !average);
        let held = held.unwrap_or_default();
        Some(wire::WantedBlock {
            block: Some(id.into()),
            epoch: held.epoch,
            version: held.version,
            average,
            ids: Default::default(),
        })
    }

    /// Returns whether a block has an average, if the job keeps averages.
    pub(crate) fn has_average(&self, id: BlockId) -> bool {
        let variable = self.map.variables.get(id.variable as usize);
        variable.is_some_and(|variable| variable.spec.kind.is_optimized())
    }

    /// Returns the part of all variables' values that belongs to a block.
    ///
    /// # Errors
    /// If the map has no such block.
    pub(crate) fn part(&self, values: &[Elements], id: BlockId) -> Result<Elements, ClientError> {
        Ok(values[id.variable as usize].slice(self.map.range(id)?))
    }
}
