//! What columns become, fitted to the training samples.

pub(crate) mod fitted;
pub(crate) mod fitting;
pub(crate) mod id_column;
pub(crate) mod moments;
pub(crate) mod shape;
pub(crate) mod target;
