//! Embedding tables of a model. Servers hold the rows of a table, which are vectors of numbers found by id.
//!
//! A table has no fixed size. The first gradient of an id creates its row, on the server that holds the id's bucket. A
//! step pulls only the rows of its samples, and pushes only the gradients of these rows.
//!
//! - `settings`: [`Table`], the settings of a table
//! - `declared`: the tables that a model asks for; [`Embeddings`], a model's handle to a table
//! - `local`: tables in the memory of one process
//! - `distinct`: the distinct ids of a step's batches, and the index of each id's row

mod declared;
mod distinct;
mod local;
mod settings;

pub use declared::{Embeddings, ModelTables, Pool, StepRows, Tables, gradients, wants};
pub use local::{LocalTables, RowSource, RowsOf, SavedTables, restored};
pub use settings::Table;
