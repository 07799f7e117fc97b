//! Jobs in which workers form rings, under the same network, clock and faults.
//!
//! - `rows`: the rows of worlds with servers
//! - `values`, `model`: values that show the steps and samples in them, and the replica that keeps them; `stages`: its passes of some stages
//! - `gpus`: GPUs that add up gradients
//! - `plan`, `trouble`: the properties of a world, and its faults
//! - `hosts`: the processes
//! - `history`: what they do, with checks of each change; `saved`: checkpoints; `checker`: the checks at the end

mod checker;
mod gpus;
mod history;
mod hosts;
mod model;
mod plan;
mod rows;
mod saved;
mod stages;
mod trouble;
mod values;

use shared_proto::job::{CrossDevice, Job, Mode, Momentum, Optimizer, StrategyName};

use crate::disk::Disk;
use crate::drain::Drains;
use crate::hosts::SHARDS;
use crate::pause::Pauses;
use crate::repeat::Repeats;
use crate::sim;
use crate::store::Stores;
use checker::check;
use gpus::Gpus;
use history::{Event, History};
use plan::Plan;
use saved::Saved;
use trouble::{PATIENCE, TROUBLE, Trouble};
use values::EPOCHS;

/// The samples of a worker in a step.
const BATCH: u32 = 2;

/// A simulation of one seed, with the data that outlives its processes.
#[derive(Clone)]
pub(crate) struct World {
    seed: u64,
    plan: Plan,
    job: Job,
    history: History,
    gpus: Gpus,
    /// The disk with the coordinator's state.
    disk: Disk,
    stores: Stores,
    pauses: Pauses,
    drains: Drains,
    repeats: Repeats,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let plan = Plan::new(seed);
        let mut job = Job {
            batch_size: BATCH,
            epochs: EPOCHS,
            seed,
            // Its state has one slot for each weight.
            optimizer: Optimizer::Momentum(Momentum::default()),
            ..Job::default()
        };
        (job.strategy.name, job.strategy.mode) = (StrategyName::MultiWorkerMirrored, Mode::Sync);
        job.strategy.optimizer_copies = plan.copies;
        if plan.servers {
            job.strategy.name = StrategyName::Hybrid;
            job.cluster.ps = Some(SHARDS);
        }
        if plan.groups {
            job.strategy.name = StrategyName::ModelParallel;
            (job.strategy.stages, job.strategy.stage_workers) = (Some(2), Some(2));
        }
        // Of a thousand elements, so each variable leaves in a bucket of its own, or almost.
        job.strategy.bucket_mebibytes = plan.buckets.then_some(0.004);
        job.strategy.cross_device = plan.gpus.then_some(CrossDevice::Nccl);
        job.strategy.backup_workers = plan.backups.then_some(1);
        job.cluster.workers = Some(plan.workers);
        job.cluster.lease_seconds = 2.0;
        // The time-out is longer than any run may take, because it would hide a process that hangs.
        job.cluster.stall_seconds = 1000.0;
        job.checkpoint.every_seconds = 1.0;
        Self {
            seed,
            job,
            history: History::new(plan.shape, plan.backups),
            gpus: Gpus::new(seed),
            plan,
            disk: Disk::default(),
            stores: Stores::new(seed),
            pauses: Pauses::default(),
            drains: Drains::default(),
            repeats: Repeats::new(seed),
        }
    }

    /// Runs the simulation. Returns the history and all broken promises.
    pub(crate) fn run(self) -> (History, Vec<String>) {
        let mut sim = sim::make(self.seed, TROUBLE + 2 * PATIENCE);
        let names = self.hosts(&mut sim);
        let outcome = Trouble::new(&self, names).run(&mut sim);
        drop(sim);
        if let Err(error) = outcome {
            let mut wrong = check(&self.history, &[], &self.plan);
            wrong.push(error);
            return (self.history, wrong);
        }
        let store = self.stores.plain();
        let wrong = match sim::wait_for(Saved::all(&store, &self.plan)) {
            Ok(saved) => check(&self.history, &saved, &self.plan),
            Err(wrong) => vec![wrong],
        };
        (self.history, wrong)
    }

    /// Notes that a process has ended by itself. If it ended because of the store or the disk, it is started again,
    /// as by a restart policy.
    fn ended(&self, name: &str, outcome: Result<(), String>) {
        let now = turmoil::sim_elapsed().unwrap_or_default();
        let excused = |error: &String| {
            let store = [": refused: ", ": no room: ", "the store/", "the store: "];
            let of_store = store.iter().any(|part| error.contains(part));
            let of_disk = error.contains("the coordinator's state");
            let damaged = error.contains("is damaged");
            of_store && !damaged && self.stores.is_to_blame(name, now)
                || of_disk && name == "coordinator" && self.disk.has_failed()
        };
        match outcome {
            Err(error) if excused(&error) => self.history.exited(name, error),
            outcome => self.history.add(Event::Ended {
                name: name.to_owned(),
                outcome,
            }),
        }
    }
}
