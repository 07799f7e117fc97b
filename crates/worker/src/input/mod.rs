//! Data: the sources that a job can name, and samples that become batches.
//!
//! Everything here is deterministic: with the same files and seed, each position of a pass holds the same sample on
//! every worker. Files are not trusted: an error names the file and the place in it.
//!
//! - `source`: the interface of data sources; [`Digits`], [`Idx`], [`Csv`] and [`Random`] are those that ship
//! - `dataset`: a data set and its samples, read by position
//! - `memory`: samples that are held in memory
//! - `error`: the errors of all of these

mod csv;
mod dataset;
mod digits;
mod error;
mod idx;
mod memory;
mod random;
mod source;

pub use csv::Csv;
pub(crate) use dataset::read;
pub use dataset::{Dataset, Pass, Samples};
pub use digits::Digits;
pub use error::InputError;
pub use idx::Idx;
pub use memory::InMemory;
pub use random::Random;
pub use source::{DataSetup, Source};
