//! Embedding tables in a model: rows of numbers, found by id, that servers hold.
//!
//! A table has no size. A row is created by the first gradient of its id, on the server that holds the id's bucket; a step
//! pulls only the rows of its samples, and pushes only their gradients.
//!
//! - `settings`: [`Table`], the settings of a table
//! - `declared`: the tables that a model asks for; [`Embeddings`], a model's handle of one
//! - `local`: tables in the memory of one process
//! - `distinct`: the distinct ids of a step's batches, and the place of each id's row

mod declared;
mod distinct;
mod local;
mod settings;

pub use declared::{Embeddings, ModelTables, Pool, StepRows, Tables, gradients, wants};
pub use local::{LocalTables, RowSource, RowsOf, SavedTables, restored};
pub use settings::Table;
