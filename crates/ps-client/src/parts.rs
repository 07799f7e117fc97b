//! The part of a step's wants, and of a variable's values, that belongs to one block.

use shared_proto::blocks::{BlockId, VariableSpec};
use shared_proto::payload::Elements;
use shared_proto::step::Want;
use shared_proto::wire;

use crate::error::ClientError;
use crate::shards::Shards;

impl Shards {
    /// Returns a block's entry of the pull for a step with these wants; none if the step does not want the block.
    pub(crate) fn wanted(&self, wants: &[Want], id: BlockId) -> Option<wire::WantedBlock> {
        let nothing = wire::BlockVersion {
            block: Some(id.into()),
            ..wire::BlockVersion::default()
        };
        let held = self.known.get(&id).copied().unwrap_or(nothing);
        wants.contains(&Want::Dense).then(|| held.into())
    }

    /// Returns the part of all variables' values that belongs to a block.
    ///
    /// # Errors
    /// If the map has no such block.
    pub(crate) fn part(&self, values: &[Elements], id: BlockId) -> Result<Elements, ClientError> {
        Ok(values[id.variable as usize].slice(self.map.range(id)?))
    }
}

/// Checks that the values of a variable are all of it, or none if it is not sent.
///
/// # Errors
/// [`ClientError::WrongSize`].
pub(crate) fn check_size(
    variable: &VariableSpec,
    is_sent: bool,
    values: Option<&Elements>,
) -> Result<(), ClientError> {
    let found = values.map_or(0, Elements::len);
    let expected = if is_sent { variable.elements() } else { 0 };
    match found == expected {
        true => Ok(()),
        false => Err(ClientError::WrongSize {
            variable: variable.name.clone(),
            found,
            expected,
        }),
    }
}
