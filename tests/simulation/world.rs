//! A cluster in a simulated world.

use std::collections::BTreeMap;

use bytes::Bytes;
use checkpoint::{NewestFirst, Piece, SavedValues};
use shared_proto::job::{Job, Mode, NonFinite, Optimizer, Sgd};
use shared_proto::payload;
use shared_proto::table::{SavedRows, ids_of_bytes};

use crate::checker::check;
use crate::disk::Disk;
use crate::drain::Drains;
use crate::history::{Event, History, Rules, Saved};
use crate::hosts::{SHARDS, WORKERS};
use crate::model::{EPOCHS, PUSHES, Shape};
use crate::pairs::Evicts;
use crate::pause::Pauses;
use crate::plan::Plan;
use crate::repeat::Repeats;
use crate::sim;
use crate::store::Stores;
use crate::trouble::{PATIENCE, TROUBLE, Trouble};

/// A simulation of one seed, with the data that outlives its processes.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) plan: Plan,
    pub(crate) job: Job,
    pub(crate) history: History,
    /// The disk with the coordinator's state.
    pub(crate) disk: Disk,
    pub(crate) stores: Stores,
    pub(crate) pauses: Pauses,
    pub(crate) drains: Drains,
    pub(crate) repeats: Repeats,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let plan = Plan::new(seed);
        let poisoned = plan.poisoned();
        // Large variables take longer.
        let (shape, batch_size) = match plan.many_blocks {
            true => (Shape::LARGE, 6),
            false => (Shape::SMALL, 2),
        };
        let mut job = Job {
            batch_size,
            non_finite: plan.non_finite.unwrap_or(NonFinite::Fail),
            epochs: EPOCHS,
            seed,
            optimizer: Optimizer::Sgd(Sgd {
                learning_rate: 1.0,
                ..Sgd::default()
            }),
            ..Job::default()
        };
        job.strategy.mode = [Mode::Async, Mode::Bounded, Mode::Sync][(seed % 3) as usize];
        job.strategy.staleness = seed / 3 % 4;
        // The weights count the pushes.
        job.strategy.correction.enabled = false;
        job.cluster.ps = Some(SHARDS);
        job.cluster.workers = Some(WORKERS);
        job.cluster.lease_seconds = 2.0;
        // The time-out is longer than any run may take, because it would hide a process that hangs.
        job.cluster.stall_seconds = 1000.0;
        job.checkpoint.every_seconds = 1.0;
        let may_lead = job.strategy.mode == Mode::Async || job.strategy.staleness > 0;
        if job.strategy.mode != Mode::Sync && may_lead && plan.computes_ahead {
            job.strategy.pipeline = 1;
        }
        if job.strategy.mode == Mode::Sync && seed / 3 % 5 == 4 {
            // Never reached, so that the checker knows each weight. The norm is measured all the same.
            job.clip_norm = Some(1e9);
        }
        let ahead = job.strategy.pipeline > 0;
        let bound = match job.strategy.mode {
            Mode::Async => None,
            Mode::Bounded => Some(job.strategy.staleness),
            Mode::Sync => Some(0),
        };
        let sync = job.strategy.mode == Mode::Sync;
        Self {
            seed,
            plan,
            job,
            history: History::under(Rules {
                bound,
                ahead,
                sync,
                shape,
                poisoned,
                evicts: match seed / 3 % 2 {
                    0 => Evicts::Surplus,
                    _ => Evicts::Aged,
                },
            }),
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
        let mut wrong = Vec::new();
        if let Err(error) = outcome {
            wrong.push(error);
        } else {
            let sync = self.job.strategy.mode == Mode::Sync;
            if let Some(saved) = sim::wait_for(self.newest()) {
                self.history.add_at(u64::MAX, Event::Checkpoint(saved));
            }
            wrong.extend(check(&self.history, sync, &self.plan));
        }
        (self.history, wrong)
    }

    /// Returns the id of a run of the job: the first one, or a later one that continues from its checkpoints.
    pub(crate) fn run_id(&self, number: usize) -> String {
        format!("{:012x}{number:04x}", self.seed)
    }

    /// Reads the newest checkpoint, in the same way as a process that restores it.
    pub(crate) async fn newest(&self) -> Option<Saved> {
        let store = self.stores.plain();
        let manifest = store.newest().await.ok()??;
        let shape = self.history.shape();
        let mut saved = Saved {
            number: manifest.number,
            run: usize::from_str_radix(&manifest.run[12..], 16).unwrap(),
            epoch: manifest.epoch,
            versions: vec![0; shape.all_blocks()],
            weights: vec![Vec::new(); shape.all_blocks()],
        };
        let mut rows: BTreeMap<usize, Vec<(u64, f32)>> = BTreeMap::new();
        let mut reading = NewestFirst::default();
        let values = |bytes: &Bytes| {
            let values = payload::elements(bytes).iter();
            values.map(|value| value.get()).collect::<Vec<f32>>()
        };
        let of_piece = |of: &SavedRows| {
            let ids = ids_of_bytes(&of.ids).into_iter();
            ids.zip(values(&of.numbers)).collect::<Vec<_>>()
        };
        for file in NewestFirst::files(&manifest) {
            for block in store.read_file(&manifest, file).await.ok()? {
                let number = shape.block(block.id.variable as usize, block.id.index as usize);
                match reading.take(&manifest, file, block) {
                    Ok(Some(Piece::Newest(block))) => {
                        saved.versions[number] = block.version.0;
                        match &block.values {
                            SavedValues::Dense { weights, .. } => {
                                saved.weights[number] = values(weights);
                                saved.weights[number].truncate(PUSHES);
                            }
                            SavedValues::Rows(of) => {
                                rows.insert(number, of_piece(of));
                            }
                        }
                    }
                    Ok(Some(Piece::Older(_, of))) => {
                        rows.entry(number).or_default().extend(of_piece(&of));
                    }
                    Ok(None) => {}
                    Err(wrong) => self.violated(&saved, &wrong),
                }
            }
        }
        for (number, rows) in rows {
            let counters = shape.saved_counters(number, &rows);
            saved.weights[number] = counters.unwrap_or_else(|wrong| {
                self.violated(&saved, &format!("block {number}: {wrong}"));
                vec![0.0; PUSHES]
            });
        }
        if let Err(wrong) = reading.finish(&manifest) {
            self.violated(&saved, &wrong);
        }
        Some(saved)
    }

    /// Notes that a checkpoint breaks a promise.
    fn violated(&self, saved: &Saved, wrong: &str) {
        let number = saved.number;
        self.history
            .violation(format!("checkpoint {number}: {wrong}"));
    }

    /// Notes that a process has ended by itself. If it ended because of the store or the disk, it is started again,
    /// as by a restart policy.
    pub(crate) fn ended(&self, name: &str, outcome: Result<(), String>) {
        let now = turmoil::sim_elapsed().unwrap_or_default();
        let excused = |error: &String| {
            let store = [": refused: ", ": no room: ", "the store/", "the store: "];
            let of_store = store.iter().any(|part| error.contains(part));
            let of_disk = error.contains("the coordinator's state");
            let other_run = [
                "the checkpoints of the coordinator cannot be seen",
                "the coordinator has another run now",
            ];
            let other_run = other_run.iter().any(|part| error.contains(part));
            let damaged = ["is damaged", "another writer's"];
            let damaged = damaged.iter().any(|part| error.contains(part));
            of_store && !damaged && self.stores.is_to_blame(name, now)
                || of_disk && name == "coordinator" && (self.disk.has_failed() || self.disk.repair())
                // A new run has begun. It may have claimed the store between a server's registration and its look.
                || other_run && self.plan.loses_state
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
