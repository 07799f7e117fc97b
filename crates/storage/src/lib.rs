//! Folders and object stores, by the location that a user gives.
//!
//! - [`Location`]: a folder, or a part of a bucket as in `s3://bucket/folder`
//! - [`AllowedLocations`]: the places that a submitted job may use
//! - [`Bucket`]: the objects of a bucket, with the settings that the environment gives
//! - [`Secrets`]: the keys that no message shows; [`StorageError`]: what a person or a program does about an error

mod allowed;
mod bucket;
mod error;
mod location;
mod secrets;
#[cfg(feature = "testing")]
pub mod testing;

pub use allowed::AllowedLocations;
pub use bucket::{Bucket, Variables, environment};
pub use error::StorageError;
pub use location::Location;
pub use secrets::{Secrets, without_user};
