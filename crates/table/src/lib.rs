//! The rows of embedding tables in memory.
//!
//! A table is cut into virtual buckets by the hash of the rows' ids. Buckets are the blocks of a table: servers hold, lock
//! and move them one by one.
//!
//! - [`hash`]: the hash of an id, and the bucket that it chooses
//! - [`bucket`]: a bucket, and the decisions which ids get a row and which rows are removed
//! - [`rows`]: the rows of a bucket, and the index that finds them
//! - [`initial`]: the values of new rows
//! - [`sketch`]: approximate counts of ids

pub mod bucket;
mod chunks;
pub mod hash;
pub mod initial;
pub mod rows;
pub mod sketch;
