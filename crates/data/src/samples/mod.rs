//! Samples: named columns of values, held in memory or read from their files in each pass.

pub(crate) mod column;
pub(crate) mod field;
pub(crate) mod memory;
pub(crate) mod stream;

use std::ops::Range;

use crate::error::InputError;
use memory::InMemory;

/// Samples that are read by position. The coordinator leases positions to workers. The implementation maps each
/// position of a pass to a sample, for example through a shuffled order, or as an index in a range of a file.
pub trait Samples: Send {
    /// Returns the number of samples, which is the number of positions in each pass.
    fn count(&self) -> u64;

    /// Reads the samples at these positions of a pass, in this order. In each pass, a sample has one position, which is
    /// the same on every worker.
    ///
    /// # Errors
    /// [`InputError`] names what cannot be read.
    fn read(&mut self, order: Order, positions: Range<u64>) -> Result<InMemory, InputError>;

    /// Passes the content of all samples to `hash`. Workers with different content do not train together. By default
    /// passes nothing, and the data is not compared.
    fn digest(&self, _hash: &mut dyn FnMut(&[u8])) {}
}

/// The order of a pass over samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The order in which the samples are stored, for evaluations and predictions.
    Stored,
    /// A shuffled order, which differs between passes, for training.
    Shuffled {
        /// The job's seed.
        seed: u64,
        /// The index of the pass.
        epoch: u32,
    },
}
