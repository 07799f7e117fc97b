//! A parameter server: holds a shard's blocks, applies gradients in place, gates pulls.
//!
//! The modules, those of the data path first:
//! - [`run`]: the process; [`embedded`]: a server without a process, for simulations; `server`: what both have in
//!   common
//! - `serving`: messages between workers and the shard
//! - `shard`: pushes and pulls, and the blocks that they read and change
//! - `following`: views, and the work that they order: checkpoints are loaded and written while training continues
//! - `lookup`: reads of rows for online inference
//! - `counters`: metrics
//! - `fuzzing`: the driver of a fuzz target
//! - the crate `optimizer`: how a gradient changes weights, and how fast

mod counters;
pub mod embedded;
mod error;
mod following;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod lookup;
mod row_settings;
mod run;
mod server;
mod serving;
mod shard;

pub use error::PsError;
pub use lookup::LookupSettings;
pub use row_settings::{RowSettings, RowStorage};
pub use run::{Settings, run};
