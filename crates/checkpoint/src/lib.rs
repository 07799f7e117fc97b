//! Checkpoints: blocks as safetensors, a manifest with checksums, in a folder or an object store.
//!
//! ```text
//! LOCATION/                          a folder, or an URL as in s3://bucket/folder
//!   owner-000000000001               the run that owns the location; all roles check it
//!   pulse-000000000001               a counter that shows that this run is alive
//!   checkpoint-000000000012/
//!     shard-1-part-0000-RUN.safetensors  blocks of shard 1: values, optimizer state, versions, watermarks
//!     manifest.json                      written last: without it there is no checkpoint
//! ```
//!
//! A checkpoint's files are never changed once its manifest is there. `docs/checkpoints.md` has the
//! format.
//!
//! - `manifest`: the description of a checkpoint: job, progress, files and checksums
//! - `part`: blocks to safetensors and back
//! - `newest_first`: the newest version of each row, if a table's rows are in the files of several checkpoints
//! - `store`: writes, reads and finds checkpoints; `store/tidy`: lists and deletes them;
//!   `store/owner`: the run that owns a location
//! - `load`: whether a checkpoint's values can be loaded for a job; `wire`: files in messages
//! - `location`: the locations that a user may give, and their stores
//! - `format`: the version of the format, and the names of folders
//! - `files`: the files of a location, in a folder or a bucket
//! - `folder`: writes to a folder that survive a crash
//! - `fuzzing`: the driver of a fuzz target
//! - `error`: errors

mod error;
mod files;
mod folder;
mod format;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod load;
mod location;
mod manifest;
mod newest_first;
mod part;
mod store;
#[cfg(test)]
mod suite;
mod wire;

pub use error::CheckpointError;
pub use files::Files;
pub use format::{FORMAT, folder_name};
pub use load::{LoadError, Wanted};
pub use location::{load, resolve};
pub use manifest::{BlockRange, FileEntry, Manifest, SavedVariable, hexadecimal, sha256};
pub use newest_first::{NewestFirst, Piece};
pub use part::{FILE_BYTES, SavedBlock, SavedValues, Watermark, decode, encode, weights_header};
pub use store::{BEAT, Claim, DEAD_AFTER, Listed, Store};
