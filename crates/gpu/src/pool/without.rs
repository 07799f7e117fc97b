use super::Usage;
use crate::Error;

/// Keeps the memory of a GPU's current pool when it is free.
///
/// # Errors
/// [`Error::NotBuilt`].
pub fn retain(_gpu: usize) -> Result<(), Error> {
    Err(Error::NotBuilt)
}

/// Makes a pool of at most so many bytes a GPU's current pool.
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
