//! The data of a step: samples that become the tensors of a batch.
//!
//! - `batch`: samples that are computed together
//! - `assemble`: makes a batch of samples
//!
//! The crate `data` provides the samples. This module re-exports the public items of that crate.

mod assemble;
mod batch;

pub use assemble::{BatchError, read};
pub use batch::{Batch, Feature, Ragged};
pub use data::{
    BatchColumn, Cell, CellWriter, Cifar10, Clicks, Column, ColumnSurvey, Criteo, Csv, DataSetup,
    Dataset, Digits, Field, Fitted, FittedColumn, Gap, Idx, Images, InMemory, InputError, LibSvm,
    Looks, Npy, Order, OwnCell, Parquet, Purpose, Random, RowBatch, Rule, Samples, Scale,
    Signature, Source, TableRows, Target, ValueType, Values, category_id, open_batches, survey,
};
