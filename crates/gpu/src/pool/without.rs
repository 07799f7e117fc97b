use super::Usage;
use crate::Error;

/// Lets a GPU's current pool keep freed memory for later allocations of this process.
///
/// # Errors
/// [`Error::NotBuilt`].
pub fn retain(_gpu: usize) -> Result<(), Error> {
    Err(Error::NotBuilt)
}

/// Makes a new pool of at most `bytes` bytes the GPU's current pool.
///
/// # Errors
/// [`Error::NotBuilt`].
pub fn limit(_gpu: usize, _bytes: u64, _reserve: bool) -> Result<(), Error> {
    Err(Error::NotBuilt)
}

/// Returns the memory of a GPU's current pool.
///
/// # Errors
/// [`Error::NotBuilt`].
pub fn usage(_gpu: usize) -> Result<Usage, Error> {
    Err(Error::NotBuilt)
}
