//! From bytes to typed columns: cells in the types of their file.

pub(crate) mod cell;
pub(crate) mod date;
pub(crate) mod hash;
pub(crate) mod header;
pub(crate) mod table;
pub(crate) mod texts;
