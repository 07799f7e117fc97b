//! The files of a data set, and the chunks and rows in which they are read.

pub(crate) mod chunks;
pub(crate) mod file_rows;
pub(crate) mod held_out;
pub(crate) mod lines;
pub(crate) mod parts;
pub(crate) mod rows;
