//! The differences between kinds of variables: how a block stores its values, and how an update changes them.

use std::fmt::Debug;

use bytes::Bytes;
use optimizer::{Update, VariableRule};
use shared_proto::payload::Elements;
use shared_proto::wire;

/// The values of a block, with the optimizer's state for them. The [`Block`](super::Block) around them has the version,
/// the watermarks and the staged gradients. There is one implementation today; rows of tables will be the next.
pub(crate) trait Contents: Debug + Send {
    /// Sets initial values, over earlier ones too.
    fn initialize(&mut self, values: &Elements, rule: &VariableRule);

    /// Returns whether there are values.
    fn initialized(&self) -> bool;

    /// Returns the values that a pull wants, as they are now, as `f32`.
    fn values(&self, wanted: &wire::WantedBlock, rule: &VariableRule) -> Elements;

    /// Applies the sum of gradients, each times its factor, as one update. `sum` is scratch memory. Returns whether
    /// all values that it has changed are finite.
    fn update(
        &mut self,
        gradients: &[(f32, &Elements)],
        rule: &VariableRule,
        update: Update,
        sum: &mut Vec<f32>,
    ) -> bool;

    /// Returns whether all values are finite.
    fn all_finite(&self) -> bool;

    /// Returns the bytes of values and state.
    fn bytes(&self) -> usize;

    /// Returns values and state in the form of a checkpoint. They are shared, not copied.
    fn save(&self) -> (Bytes, Bytes);
}
