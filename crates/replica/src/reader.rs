//! Reads the batches of steps on a thread of its own, while the model computes on another thread.

use std::sync::Arc;
use std::thread::JoinHandle;

use candle_core::Device;
use model::input::{Order, Samples, read};
use model::tables::{self, ModelTables};
use model::{Batch, Model};
use parking_lot::RwLock;
use shared_proto::job::Job;
use shared_proto::step::{EVERY_BATCH, Want, WantedRows};
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::oneshot;

use super::error::ReplicaError;
use super::step::Positions;

/// The batches of a step, or the reason why they cannot be read.
pub(super) type Batches = Result<Assembled, ReplicaError>;

/// The batches of a step, with the rows of tables that they want.
pub(super) struct Assembled {
    pub(super) batches: Vec<Batch>,
    /// The rows that the batches want of each table.
    pub(super) rows: Vec<Arc<WantedRows>>,
}

/// A request for the batches of a step.
pub(super) struct Request {
    pub(super) positions: Positions,
    /// Takes the values that the batches want; an empty list if the batches cannot be read.
    pub(super) wants: oneshot::Sender<Vec<Want>>,
    pub(super) batches: oneshot::Sender<Batches>,
}

/// The model of a replica. It may be replaced by a new one while the reader uses it.
#[derive(Clone)]
pub(super) struct SharedModel(Arc<RwLock<Arc<dyn Model>>>);

impl SharedModel {
    pub(super) fn new(model: Arc<dyn Model>) -> Self {
        Self(Arc::new(RwLock::new(model)))
    }

    pub(super) fn get(&self) -> Arc<dyn Model> {
        Arc::clone(&self.0.read())
    }

    pub(super) fn replace(&self, model: Arc<dyn Model>) {
        *self.0.write() = model;
    }
}

/// The number of requests that may wait for the thread.
const REQUESTS: usize = 4;

/// The state of the reader's thread.
struct Reader {
    job: Arc<Job>,
    training: Box<dyn Samples>,
    model: SharedModel,
    tables: ModelTables,
}

/// Starts the reader's thread. It ends when the sender of requests is dropped.
///
/// # Errors
/// [`ReplicaError::Thread`].
pub(super) fn start(
    job: Arc<Job>,
    training: Box<dyn Samples>,
    model: SharedModel,
    tables: ModelTables,
) -> Result<(Sender<Request>, JoinHandle<()>), ReplicaError> {
    let (requests, queue) = mpsc::channel(REQUESTS);
    let mut reader = Reader {
        job,
        training,
        model,
        tables,
    };
    let thread = std::thread::Builder::new()
        .name("reader".to_owned())
        .spawn(move || reader.serve(queue))
        .map_err(ReplicaError::Thread)?;
    Ok((requests, thread))
}

impl Reader {
    fn serve(&mut self, mut queue: Receiver<Request>) {
        while let Some(request) = queue.blocking_recv() {
            // The membership that asked for the batch may have ended.
            if request.batches.is_closed() {
                continue;
            }
            let batches = self.batches(request.positions);
            let wants = batches.as_ref().map(|assembled| self.wants(assembled));
            let _ = request.wants.send(wants.unwrap_or_default());
            let _ = request.batches.send(batches);
        }
    }

    fn batches(&mut self, positions: Positions) -> Batches {
        let order = Order::Shuffled {
            seed: self.job.seed,
            epoch: positions.data_epoch,
        };
        // The workers of a stage group compute their batches as one.
        let workers = self.job.strategy.stage_groups().workers;
        let size = u64::from(self.job.batch_size).saturating_mul(workers.into());
        let (training, end) = (&mut *self.training, positions.end);
        let starts = (positions.start..end).step_by(size as usize);
        let batch = |start: u64| {
            let positions = start..end.min(start.saturating_add(size));
            Ok(read(training, order, positions, &Device::Cpu)?)
        };
        let mut batches = starts
            .map(batch)
            .collect::<Result<Vec<_>, ReplicaError>>()?;
        let rows = self.tables.distinct(&mut batches)?;
        Ok(Assembled { batches, rows })
    }

    /// Returns all values that the batches of a step want, without repetition.
    fn wants(&self, assembled: &Assembled) -> Vec<Want> {
        // A pull also waits for slower workers, so each step has one.
        let mut wants = EVERY_BATCH.to_vec();
        let batches = &assembled.batches;
        let model = self.model.get();
        for want in batches.iter().flat_map(|batch| model.wants(batch)) {
            if !wants.contains(&want) {
                wants.push(want);
            }
        }
        wants.extend(tables::wants(&assembled.rows));
        wants
    }
}
