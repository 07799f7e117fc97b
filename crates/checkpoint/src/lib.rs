//! Checkpoints: blocks as safetensors, a manifest with checksums, in a folder or an object store.
//!
//! ```text
//! LOCATION/                          a folder, or an URL as in s3://bucket/folder
//!   owner-000000000001               the run that writes here; by it all roles know the store again
//!   pulse-000000000001               shows that this run lives
//!   checkpoint-000000000012/
//!     shard-1-part-0000-RUN.safetensors  blocks of shard 1: weights, slots, versions, marks
//!     manifest.json                      written last: without it there is no checkpoint
//! ```
//!
//! A checkpoint's files are never changed once its manifest is there. `docs/checkpoints.md` has the
//! format.
//!
//! - `manifest`: what a checkpoint is of, and its files with their checksums
//! - `part`: blocks to safetensors and back
//! - `store`: where checkpoints lie: write, read, find; `store/tidy`: list, prune; `store/owner`: which
//!   run writes there
//! - `location`: what a person may give as a place, and which store that is
//! - `folder`: writes to a folder that survive a crash
//! - `error`: what can go wrong, and what a message must not show

mod error;
mod folder;
mod location;
mod manifest;
mod part;
mod store;
#[cfg(test)]
mod suite;

pub use error::CheckpointError;
pub use location::{load, resolve};
pub use manifest::{BlockRange, FORMAT, FileEntry, Manifest, SavedVariable};
pub use part::{Mark, SavedBlock, decode, encode, weights_header};
pub use store::{BEAT, Claim, DEAD_AFTER, Listed, Store, folder_name};
