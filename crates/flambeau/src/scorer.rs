//! A trained model for online inference: its weights are in this process, the rows of its tables on running servers.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Error, Result};
use model::input::RowBatch;
use model::registry::Registry;
use model::tables::RowSource;
use network::security::Security;
use ps_client::lookup::Lookup;
use shared_proto::step::WantedRows;
use shared_proto::table::TableSpec;
use shared_proto::task;
use tokio::runtime::{Builder, Runtime};
use worker::alone::local::Trained;

use crate::command::{FinishedRun, Weights};

/// The files and servers of a [`Scorer`].
#[derive(Clone, Debug, Default)]
pub struct Scoring {
    /// The run directory, of which job.toml and, for data with columns, transforms.json are read.
    pub run_dir: PathBuf,
    /// The data with the samples to score, as for `flambeau predict`; `None` for the held-out samples of generated data.
    pub data: Option<PathBuf>,
    /// The safetensors file of the weights. `flambeau checkpoint export` writes it for a run that has not ended.
    pub weights: PathBuf,
    /// The addresses at which servers answer lookups.
    pub servers: Vec<String>,
    /// The credentials for the servers.
    pub security: Security,
    /// The longest time for which a call waits for rows of a lost server.
    pub patience: Duration,
}

/// A trained model that scores samples one request at a time, with rows from running servers.
///
/// `examples/score.rs` measures how long that takes.
pub struct Scorer(worker::alone::predict::Scorer);

impl Scorer {
    pub(crate) fn open(scoring: &Scoring, registry: &Registry) -> Result<Self> {
        let finished = FinishedRun::read(&scoring.run_dir, Weights::Last, scoring.data.as_deref());
        let finished = finished.map_err(Error::wrap)?;
        let trained = Trained {
            weights: &scoring.weights,
            rows: Box::new(|specs| Ok(Box::new(ServedRows::new(scoring, specs)?))),
            ..finished.trained()
        };
        let scorer = worker::alone::predict::Scorer::open(&trained, registry, Device::Cpu);
        Ok(Self(scorer.map_err(Error::wrap)?))
    }

    /// Returns the number of samples in the data.
    pub fn samples(&self) -> u64 {
        self.0.samples()
    }

    /// Returns the model's outputs for a range of the data's samples: probabilities for a binary target, otherwise the
    /// outputs as they are.
    ///
    /// # Errors
    /// If the samples or the rows of tables cannot be read, or the model fails.
    pub fn scores(&mut self, samples: Range<u64>) -> Result<Vec<f32>> {
        self.0.scores(samples).map_err(Error::wrap)
    }

    /// Returns the model's outputs for rows that come with a request, as [`scores`](Self::scores) does.
    ///
    /// # Errors
    /// If a row does not fit the columns of the training, or for the reasons of [`scores`](Self::scores).
    pub fn scores_of_rows(&mut self, rows: impl RowBatch) -> Result<Vec<f32>> {
        self.0.scores_of_rows(rows).map_err(Error::wrap)
    }
}

/// Rows on running servers.
struct ServedRows {
    lookup: Lookup,
    tables: Vec<String>,
    runtime: Runtime,
}

impl ServedRows {
    fn new(scoring: &Scoring, specs: Vec<TableSpec>) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let lookup = {
            let _within = runtime.enter();
            Lookup::new(&scoring.servers, &scoring.security, scoring.patience)
        };
        Ok(Self {
            lookup: lookup.map_err(Error::wrap)?,
            tables: specs.into_iter().map(|spec| spec.name).collect(),
            runtime,
        })
    }
}

impl RowSource for ServedRows {
    fn read(&mut self, rows: &[Arc<WantedRows>]) -> Result<Vec<Vec<f32>>> {
        let (lookup, tables) = (&mut self.lookup, &self.tables);
        task::block_on(&self.runtime, async {
            let mut all = Vec::with_capacity(rows.len());
            for (table, rows) in tables.iter().zip(rows) {
                let found = lookup.rows(table, &rows.ids).await;
                all.push(found.map_err(Error::wrap)?.values);
            }
            Ok(all)
        })
    }
}
