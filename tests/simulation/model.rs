//! A model with weights that show which pushes were applied: push number p is a gradient of one in element
//! p of every block, so with a learning rate of one the element counts the times that it was applied. In every bucket
//! of a table it is a gradient of one for row p, and for a row that all pushes share. Another table has admission and
//! eviction (`pairs`).

use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use replica::{
    Computed, Computing, Description, Evaluation, EvaluationPart, Positions, Prepared, Replica,
    ReplicaError, Step,
};
use shared_proto::blocks::VariableSpec;
use shared_proto::ids::{Clock, ViewNumber};
use shared_proto::job::Sgd;
use shared_proto::payload::Elements;
use shared_proto::step::{Gradients, Part, PartOf, RowGradients, Want, WantedRows};
use shared_proto::table::hash::{bucket, hash};
use shared_proto::table::{RowOptimizer, TableSpec};
use tokio::time::{Instant, Sleep};
use worker::strategy::{
    Evaluated, Joining, ParameterServer, Pulled, Pushing, Reconciled, Strategy, StrategyError,
};

use crate::history::History;
use crate::pairs;

/// The number of variables.
pub(crate) const VARIABLES: usize = 4;

/// The size of variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// The number of blocks of each variable.
    blocks: usize,
    block_elements: usize,
}

impl Shape {
    /// One block each, all of them in one message.
    pub(crate) const SMALL: Self = Self {
        blocks: 1,
        block_elements: PUSHES,
    };

    /// Blocks of the size that the coordinator chooses for them, and more on each shard than a message holds.
    pub(crate) const LARGE: Self = Self {
        blocks: 3,
        block_elements: 1 << 16,
    };

    /// Returns the number of the blocks that count pushes: those of all variables, and of the table of rows.
    pub(crate) const fn counting(self) -> usize {
        VARIABLES * self.blocks + BUCKETS
    }

    /// Returns the number of the block of pairs.
    pub(crate) const fn pairs(self) -> usize {
        self.counting()
    }

    /// Returns the number of all blocks.
    pub(crate) const fn all_blocks(self) -> usize {
        self.counting() + 1
    }

    /// Returns the number of a block among all. The tables' numbers are those after the last variable.
    pub(crate) const fn block(self, variable: usize, index: usize) -> usize {
        match variable == VARIABLES + 1 {
            true => self.pairs(),
            false => variable * self.blocks + index,
        }
    }

    /// Returns the number of the block that begins with this element. For rows it is an element of the pulled list, and the
    /// number that of their bucket.
    pub(crate) const fn block_at(self, of: PartOf, start: usize) -> usize {
        match of {
            PartOf::Variable(variable) => self.block(variable, start / self.block_elements),
            PartOf::Table(0) => self.block(VARIABLES, start / (PUSHES + 1)),
            PartOf::Table(_) => self.pairs(),
        }
    }

    /// Returns the elements of a block that count pushes, or the rows of pairs. `values` are all of a dense block, or the rows
    /// of a bucket in the order in which they are pulled.
    ///
    /// # Errors
    /// If the row that all pushes share does not hold their sum.
    pub(crate) fn counters(self, block: usize, values: &Elements) -> Result<Vec<f32>, String> {
        let mut all = values.to_vec();
        if block == self.pairs() {
            return Ok(pairs::pulled(&all));
        }
        if block >= VARIABLES * self.blocks {
            return ROWS[block - VARIABLES * self.blocks].counters(|place| all[place]);
        }
        all.truncate(PUSHES);
        Ok(all)
    }

    /// Returns the counters of a bucket of which these rows were saved, or the rows of pairs.
    ///
    /// # Errors
    /// As for [`Self::counters`]; or if a row is there that no push has changed.
    pub(crate) fn saved_counters(
        self,
        block: usize,
        rows: &[(u64, f32)],
    ) -> Result<Vec<f32>, String> {
        if block == self.pairs() {
            return pairs::saved(rows);
        }
        let of = &ROWS[block - VARIABLES * self.blocks];
        if let Some((id, _)) = rows.iter().find(|(_, value)| *value == 0.0) {
            return Err(format!("row {id} is there, though no push has changed it"));
        }
        if let Some((id, _)) = rows.iter().find(|(id, _)| !of.ids.contains(id)) {
            return Err(format!(
                "row {id} is there, of which no push has a gradient"
            ));
        }
        let values: std::collections::BTreeMap<u64, f32> = rows.iter().copied().collect();
        of.counters(|place| values.get(&of.ids[place]).copied().unwrap_or(0.0))
    }

    /// Returns the number of elements of a variable.
    const fn elements(self) -> usize {
        self.blocks * self.block_elements
    }

    /// Returns a gradient of one in the push's element of every block.
    fn gradient(self, push: usize) -> Elements {
        let mut gradient = vec![0.0; self.elements()];
        for block in gradient.chunks_mut(self.block_elements) {
            block[push] = 1.0;
        }
        gradient.into()
    }
}

/// The number of the table's buckets: more than shards, so that some messages have rows of two.
const BUCKETS: usize = 3;

/// The rows of the table's buckets.
static ROWS: LazyLock<Vec<BucketRows>> = LazyLock::new(|| {
    let of = |number: usize| BucketRows::new(number as u32);
    (0..BUCKETS).map(of).collect()
});

/// All rows of the table, as a step wants them.
static WANTED: LazyLock<Arc<WantedRows>> = LazyLock::new(|| {
    let ids = ROWS.iter().flat_map(|bucket| bucket.ids.iter().copied());
    Arc::new(WantedRows {
        table: 0,
        ids: ids.collect(),
    })
});

/// Returns the wants of all rows of all tables.
fn all_rows() -> [Want; 2] {
    [&WANTED, &pairs::WANTED].map(|rows| Want::Rows(Arc::clone(rows)))
}

/// The rows of a bucket: one for each push, and one that all pushes share.
struct BucketRows {
    /// The ids in ascending order of their hash.
    ids: Vec<u64>,
    /// The place of each push's id, then that of the shared one.
    places: Vec<usize>,
}

impl BucketRows {
    fn new(number: u32) -> Self {
        let own = |id: &u64| bucket(*id, BUCKETS as u32) == number;
        let by_push: Vec<u64> = (1..).filter(own).take(PUSHES + 1).collect();
        let mut ids = by_push.clone();
        ids.sort_unstable_by_key(|id| hash(*id));
        let place = |id: &u64| ids.binary_search_by_key(&hash(*id), |id| hash(*id));
        let places = by_push.iter().map(|id| place(id).unwrap()).collect();
        Self { ids, places }
    }

    /// Returns the ids of a push: its own, and the shared one.
    fn of_push(&self, push: usize) -> [u64; 2] {
        let mut places = [self.places[push], self.places[PUSHES]];
        places.sort_unstable();
        places.map(|place| self.ids[place])
    }

    /// Returns the counters of the pushes. `value` has the value of the row at each place.
    fn counters(&self, value: impl Fn(usize) -> f32) -> Result<Vec<f32>, String> {
        let mut counters: Vec<f32> = self.places.iter().map(|place| value(*place)).collect();
        let shared = counters.pop().unwrap_or_default();
        let sum: f32 = counters.iter().sum();
        match (sum - shared).abs() < 1e-2 {
            true => Ok(counters),
            false => Err(format!(
                "the row that all pushes share holds {shared}, their own rows {sum}"
            )),
        }
    }
}

/// The most pushes in a run.
pub(crate) const PUSHES: usize = 2 * pairs::PAIRS;

/// The number of training samples.
pub(crate) const SAMPLES: usize = 300;

/// The number of passes over the samples.
pub(crate) const EPOCHS: u32 = 2;

/// A worker's replica of the model.
pub(crate) struct Counting {
    name: String,
    history: History,
    step: Duration,
    /// The time at which it will have done all computations that have begun.
    free_at: Mutex<Instant>,
    description: Description,
}

impl Counting {
    pub(crate) fn new(name: &str, history: &History, step: Duration) -> Self {
        let spec = |index| VariableSpec {
            name: format!("v{index}"),
            shape: vec![history.shape().elements()],
            ..VariableSpec::default()
        };
        Self {
            name: name.to_owned(),
            history: history.clone(),
            step,
            free_at: Mutex::new(Instant::now()),
            description: Description {
                variables: (0..VARIABLES).map(spec).collect(),
                tables: vec![
                    TableSpec {
                        name: "counts".to_owned(),
                        dimension: 1,
                        buckets: BUCKETS as u32,
                        optimizer: RowOptimizer::Sgd(Sgd {
                            learning_rate: 1.0,
                            ..Sgd::default()
                        }),
                        ..TableSpec::default()
                    },
                    pairs::spec(history.evicts()),
                ],
                training_samples: SAMPLES as u64,
                evaluation_samples: 1,
                data_digest: Default::default(),
            },
        }
    }

    /// Waits for the end of a computation, which begins after all others.
    fn next_computation(&self) -> Sleep {
        let mut free_at = self.free_at.lock().unwrap();
        *free_at = Instant::now().max(*free_at) + self.step;
        tokio::time::sleep_until(*free_at)
    }
}

#[async_trait(?Send)]
impl Replica for Counting {
    fn description(&self) -> &Description {
        &self.description
    }

    async fn prepare(&self, positions: Positions) -> Prepared {
        let wants = [Want::Dense].into_iter().chain(all_rows());
        Prepared::new(positions, wants.collect())
    }

    async fn load(&self, parts: Vec<Part>) {
        self.history.pulled(&self.name, &parts);
    }

    async fn compute(&self, positions: Positions, step: Step) -> Result<Computed, ReplicaError> {
        self.next_computation().await;
        Ok(computed(&self.name, &self.history, positions, step))
    }

    async fn begin(&self, positions: Positions, step: Step) -> Option<Computing> {
        let done = self.next_computation();
        let (name, history) = (self.name.clone(), self.history.clone());
        Some(Computing::new(positions, step, async move {
            done.await;
            Ok(computed(&name, &history, positions, step))
        }))
    }

    async fn evaluate(&self, part: EvaluationPart) -> Result<Evaluation, ReplicaError> {
        Ok(match part {
            EvaluationPart::First => Evaluation::Wants(all_rows().into()),
            EvaluationPart::Next => Evaluation::Done([("loss".to_owned(), 0.0)].into()),
        })
    }

    async fn initial_values(&self) -> Result<Vec<Elements>, ReplicaError> {
        let zeros = vec![0.0; self.history.shape().elements()];
        Ok(vec![zeros.into(); VARIABLES])
    }

    async fn save(&self, _: PathBuf) -> Result<(), ReplicaError> {
        Ok(())
    }
}

/// Returns the gradients of a step, which show the number of its push.
fn computed(name: &str, history: &History, positions: Positions, step: Step) -> Computed {
    let (push, finite) = history.computed(name, step.clock.0, positions);
    let shape = history.shape();
    let mut values = vec![shape.gradient(push); VARIABLES];
    if !finite {
        values[1] = vec![f32::NAN; shape.elements()].into();
    }
    let norm = if finite { 2.0 } else { f64::NAN };
    let ids = ROWS.iter().flat_map(|rows| rows.of_push(push)).collect();
    let rows = [ids, pairs::of_push(push)].into_iter().enumerate();
    let rows = rows.map(|(table, ids)| RowGradients {
        values: vec![1.0; ids.len()].into(),
        rows: Arc::new(WantedRows { table, ids }),
    });
    let gradients = Gradients {
        values,
        rows: rows.collect(),
        norm,
    };
    Computed::new(0.0, gradients)
}

/// The strategy of parameter servers, which records its observations in the history.
pub(crate) struct Observed {
    inner: ParameterServer,
    name: String,
    history: History,
}

impl Observed {
    /// Joins the cluster for a worker that has just registered.
    pub(crate) async fn join(
        joining: &Joining<'_>,
        replica: &dyn Replica,
        name: &str,
        history: &History,
    ) -> Result<Box<dyn Strategy>, StrategyError> {
        let inner = ParameterServer::join(joining, replica).await?;
        history.registered(name);
        Ok(Box::new(Self {
            inner,
            name: name.to_owned(),
            history: history.clone(),
        }))
    }
}

#[async_trait(?Send)]
impl Strategy for Observed {
    async fn pull(
        &mut self,
        clock: Clock,
        batch: &mut Prepared,
        replica: &dyn Replica,
    ) -> Result<Pulled, StrategyError> {
        let pulled = self.inner.pull(clock, batch, replica).await?;
        self.history.pulled_all(&self.name, clock.0);
        Ok(pulled)
    }

    async fn compute(
        &mut self,
        positions: Positions,
        step: Step,
        next: Option<&mut Prepared>,
        replica: &dyn Replica,
    ) -> Result<Computed, StrategyError> {
        self.inner.compute(positions, step, next, replica).await
    }

    async fn push(
        &mut self,
        clock: Clock,
        gradients: Gradients,
        samples: u64,
        next: Option<&mut Prepared>,
        replica: &dyn Replica,
    ) -> Result<Pushing, StrategyError> {
        let pushing = self.inner.push(clock, gradients, samples, next, replica);
        let mut pushing = pushing.await?;
        let (name, history) = (self.name.clone(), self.history.clone());
        Ok(Pushing::until(async move {
            let pushed = pushing.acknowledged().await?;
            history.acknowledged(&name, clock.0, &pushed.blocks);
            Ok(pushed)
        }))
    }

    async fn evaluate(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        replica: &dyn Replica,
    ) -> Result<Evaluated, StrategyError> {
        let evaluated = self.inner.evaluate(clock, view, replica).await?;
        self.history.evaluated(&self.name, evaluated.epoch);
        Ok(evaluated)
    }

    async fn save(&mut self, path: PathBuf, replica: &dyn Replica) -> Result<(), StrategyError> {
        self.inner.save(path, replica).await
    }

    fn reconciled(&self) -> Box<dyn Reconciled> {
        self.inner.reconciled()
    }
}
