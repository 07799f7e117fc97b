//! Trains the job of a file in simulated time, and prints a line of JSON for each evaluation and for the outcome (docs/strategies.md).
//! `scripts/measure-quality.py` runs it over many jobs.
//!
//! Coordinator, servers and workers are the real ones, with real models, in one thread. A step takes its worker 10 to 30 ms of simulated time, drawn
//! from the job's seed, and a message 1 to 2 ms. So the order of all updates follows from the job file alone, whatever the machine does.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../simulation/disk.rs"]
mod disk;
#[path = "../simulation/network.rs"]
mod network;
#[allow(dead_code)]
#[path = "../simulation/pause.rs"]
mod pause;
#[allow(dead_code)]
#[path = "../simulation/repeat.rs"]
mod repeat;
#[allow(dead_code)]
#[path = "../simulation/store.rs"]
mod store;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use candle_core::Device;
use collective::Exchange;
use daemon::membership::Coordinator;
use model::registry::Registry;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use replica::{
    Computed, Description, Evaluation, EvaluationPart, ModelReplica, Positions, Prepared, Replica,
    ReplicaError, Step,
};
use serde_json::{Value, json};
use shared_proto::ids::Role;
use shared_proto::job::Job;
use shared_proto::payload::Elements;
use shared_proto::step::Part;
use tokio_util::sync::CancellationToken;
use turmoil::Sim;
use worker::strategy::Stores;

use disk::Disk;
use network::{PORT, Simulated, incoming, registration};
use pause::Pause;

/// The simulated milliseconds that a step takes.
const STEP: std::ops::Range<f64> = 10.0..30.0;

/// The simulated time after which a run has failed.
const LONGEST: Duration = Duration::from_secs(100_000);

/// The simulated time for which a process waits for another.
const PATIENCE: Duration = Duration::from_secs(600);

fn main() {
    let given = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with('-'));
    let Some(file) = given else {
        eprintln!("Name a job file, or run scripts/measure-quality.py.");
        return;
    };
    match train(Path::new(&file)) {
        Ok(()) => {}
        Err(error) => {
            println!(
                "{}",
                json!({ "event": "ended", "error": error.to_string() })
            );
            std::process::exit(1);
        }
    }
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn train(file: &Path) -> Outcome {
    let mut job = Job::from_toml(&std::fs::read_to_string(file)?)?;
    // A simulated second is a moment.
    job.cluster.stall_seconds = LONGEST.as_secs_f64();
    job.cluster.lease_seconds = 60.0;
    job.validate()?;
    fastrand::seed(job.seed);
    let mut sim = turmoil::Builder::new()
        .rng_seed(job.seed)
        .tick_duration(Duration::from_millis(1))
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(Duration::from_millis(2))
        .simulation_duration(LONGEST)
        .tcp_capacity(1 << 16)
        .build();
    let world = World {
        stores: store::Stores::new(job.seed),
        job: Arc::new(job),
    };
    for index in 0..world.job.cluster.ps.unwrap_or(2) {
        world.server(&mut sim, format!("ps-{index}"));
    }
    for index in 0..world.job.cluster.workers.unwrap_or(2) {
        world.worker(&mut sim, index);
    }
    world.coordinator(&mut sim);
    sim.run()
}

/// A job, and what its simulated processes share.
struct World {
    job: Arc<Job>,
    stores: store::Stores,
}

impl World {
    /// Adds the coordinator. The simulation ends with it.
    fn coordinator(&self, sim: &mut Sim<'_>) {
        let (job, checkpoints) = (Job::clone(&self.job), self.stores.plain());
        // Others look for it at once.
        sim.client("coordinator", async move {
            let embedded = coordinator::embedded::Embedded {
                job,
                storage: Disk::default().open(),
                checkpoints,
                restore: false,
                run: "0".repeat(16),
            };
            let incoming = incoming(Pause::default(), None).await?;
            let summary = embedded.coordinate(incoming, tell).await?;
            match summary.error.is_empty() {
                true => Ok(()),
                false => Err(summary.error.into()),
            }
        });
    }

    fn server(&self, sim: &mut Sim<'_>, name: String) {
        let store = self.stores.plain();
        sim.host(name.clone(), move || {
            let (name, store) = (name.clone(), store.clone());
            async move {
                let embedded = ps_server::embedded::Embedded {
                    coordinator: find_coordinator()?,
                    registration: registration(Role::Ps, &name),
                    checkpoints: Arc::new(move |_| Ok(store.clone())),
                    rows: ps_server::RowStorage::default(),
                    drain: CancellationToken::new(),
                };
                Ok(embedded
                    .serve(incoming(Pause::default(), None).await?)
                    .await?)
            }
        });
    }

    fn worker(&self, sim: &mut Sim<'_>, index: u32) {
        let job = Arc::clone(&self.job);
        let name = format!("worker-{index}");
        sim.host(name.clone(), move || {
            let (job, name) = (Arc::clone(&job), name.clone());
            async move {
                let parts = worker::embedded::Parts {
                    coordinator: find_coordinator()?,
                    registration: registration(Role::Worker, &name),
                    network: Arc::new(Simulated::new(Pause::default())),
                    links: Exchange::default(),
                    stores: Stores::default(),
                    patience: PATIENCE,
                };
                let seed = job.seed ^ (u64::from(index) + 1) << 32;
                let model = ModelReplica::start(job, Registry::builtin(), Device::Cpu);
                let replica = Timed {
                    model: at_once(model)?,
                    times: RefCell::new(ChaCha8Rng::seed_from_u64(seed)),
                };
                let never = CancellationToken::new();
                let work = worker::embedded::work(parts, replica, &never, worker::strategy::join);
                Ok(work.await?)
            }
        });
    }
}

/// Prints the records that a measurement needs.
fn tell(record: Value) {
    if record["event"] == "evaluation" || record["event"] == "loss_rose" {
        println!("{record}");
    }
}

fn find_coordinator() -> Result<Coordinator, Box<dyn std::error::Error>> {
    let address = format!("coordinator:{PORT}");
    let network = Simulated::new(Pause::default());
    Ok(Coordinator::over(&network, &address, PATIENCE)?)
}

/// Waits for another thread's work, while simulated time stands still.
fn at_once<T>(work: impl Future<Output = T>) -> T {
    futures_executor::block_on(work)
}

/// A model that computes while simulated time stands still. Each step takes a time of its own afterwards.
struct Timed {
    model: ModelReplica,
    times: RefCell<ChaCha8Rng>,
}

#[async_trait(?Send)]
impl Replica for Timed {
    fn description(&self) -> &Description {
        self.model.description()
    }

    async fn prepare(&self, positions: Positions) -> Prepared {
        at_once(async {
            let mut prepared = self.model.prepare(positions).await;
            prepared.wants().await;
            prepared
        })
    }

    async fn load(&self, parts: Vec<Part>) {
        at_once(self.model.load(parts));
    }

    async fn compute(&self, positions: Positions, step: Step) -> Result<Computed, ReplicaError> {
        let computed = at_once(self.model.compute(positions, step));
        let milliseconds = self.times.borrow_mut().random_range(STEP);
        tokio::time::sleep(Duration::from_secs_f64(milliseconds / 1e3)).await;
        computed
    }

    async fn evaluate(&self, part: EvaluationPart) -> Result<Evaluation, ReplicaError> {
        at_once(self.model.evaluate(part))
    }

    async fn initial_values(&self) -> Result<Vec<Elements>, ReplicaError> {
        at_once(self.model.initial_values())
    }

    async fn save(&self, path: PathBuf) -> Result<(), ReplicaError> {
        at_once(self.model.save(path))
    }
}
