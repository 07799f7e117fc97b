//! The data of a step: samples that become the tensors of a batch.
//!
//! - `batch`: samples that are computed together
//! - `assemble`: makes a batch of samples
//!
//! The crate `data` makes the samples. This module exports its public items again.

mod assemble;
mod batch;

pub(crate) use assemble::{BatchError, read};
pub use batch::{Batch, Feature, Ragged};
pub use data::{
    BatchColumn, Cifar10, Clicks, Column, ColumnSurvey, Criteo, Csv, DataSetup, Dataset, Digits,
    Field, Fitted, FittedColumn, Gap, Idx, Images, InMemory, InputError, LibSvm, Looks, Npy, Order,
    Parquet, Purpose, Random, Rule, Samples, Signature, Source, Target, ValueType, Values,
    category_id, survey,
};
