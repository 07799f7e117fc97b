//! The programs of the README, the book and the page on tables, compiled and run as documentation tests.
//! `tests/end_to_end/book.rs` runs the book's commands.

#[doc = include_str!("../../README.md")]
struct Readme;

#[doc = include_str!("../../docs/tables.md")]
struct TablesPage;

#[doc = include_str!("../../docs/book/src/ten-minutes.md")]
struct TenMinutes;

#[doc = include_str!("../../docs/book/src/own-model.md")]
struct OwnModel;

#[doc = include_str!("../../docs/book/src/own-data.md")]
struct OwnData;

#[doc = include_str!("../../docs/book/src/batch-normalisation-and-dropout.md")]
struct BatchNormalisationAndDropout;

#[doc = include_str!("../../docs/book/src/fine-tuning.md")]
struct FineTuning;

#[doc = include_str!("../../docs/book/src/embedding-tables.md")]
struct EmbeddingTables;

#[doc = include_str!("../../docs/book/src/metrics-and-callbacks.md")]
struct MetricsAndCallbacks;

#[doc = include_str!("../../docs/book/src/learning-rate.md")]
struct LearningRate;

#[doc = include_str!("../../docs/book/src/beside-the-training.md")]
struct BesideTheTraining;

#[doc = include_str!("../../docs/book/src/clusters.md")]
struct Clusters;

#[doc = include_str!("../../docs/book/src/predict-and-export.md")]
struct PredictAndExport;

#[doc = include_str!("../../docs/book/src/own-loops.md")]
struct OwnLoops;

#[doc = include_str!("../../docs/book/src/from-tf-distribute.md")]
struct FromTfDistribute;

#[doc = include_str!("../../docs/book/src/from-pytorch.md")]
struct FromPytorch;

#[doc = include_str!("../../docs/book/src/troubleshooting.md")]
struct Troubleshooting;
