//! The rows of embedding tables.
//!
//! A table is cut into buckets by the hash of the rows' ids. Buckets are the blocks of a table: servers hold, lock
//! and move them one by one.
//!
//! - [`bucket`]: a bucket: its rows, and the decisions which ids get a row and which rows are evicted
//! - `saved`: a bucket to bytes and back
//! - [`rows`]: the rows of a bucket, and the index that finds them
//! - [`disk`]: files for rows for which a server has no memory
//! - [`initial`]: the values of new rows
//! - `storage`: the forms in which rows hold their values
//! - [`sketch`]: approximate counts of ids

pub mod bucket;
mod chunks;
pub mod disk;
mod index;
pub mod initial;
pub mod rows;
mod saved;
pub mod sketch;
mod storage;

use shared_proto::table::hash;
