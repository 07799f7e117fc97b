//! The history of a run: the events that its processes observe.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};

use replica::Positions;
use serde_json::Value;
use shared_proto::ids::Epoch;
use shared_proto::step::Part;
use shared_proto::wire::BlockVersion;

use crate::model::{PUSHES, Shape};
use crate::pairs::{self, Evicts};

/// The content of a checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    pub(crate) number: u64,
    /// The run that has written it.
    pub(crate) run: usize,
    pub(crate) epoch: u64,
    /// The version of each block, in the order of `weights`.
    pub(crate) versions: Vec<u64>,
    pub(crate) weights: Vec<Vec<f32>>,
}

/// An event of a run.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A coordinator has begun a run of the job: with a checkpoint, or from the beginning.
    Run {
        number: usize,
        restored: Option<Saved>,
    },
    /// A worker has computed the gradient of this push, as a member of this run.
    Computed {
        push: usize,
        run: usize,
        positions: Positions,
        /// False if the gradient is NaN or infinite, so that it must not be pushed.
        finite: bool,
    },
    /// All shards have acknowledged a push as the gradient of the step after this clock, each block with an epoch and
    /// a version.
    Acknowledged {
        push: usize,
        #[allow(dead_code, reason = "for people, and for the hash")]
        clock: u64,
        blocks: Vec<(usize, u64, u64)>,
    },
    /// A worker has pulled weights that lack acknowledged pushes which they should hold: pairs of a push
    /// and a block.
    Lacks {
        name: String,
        run: usize,
        clock: u64,
        missing: Vec<(usize, usize)>,
    },
    /// A record of the coordinator.
    Recorded(Value),
    /// The number of lost updates in the coordinator's summary.
    Summary { lost: u64 },
    /// A worker has evaluated these weights. `epoch` is the lowest of the answers in which they came.
    Evaluated {
        name: String,
        run: usize,
        epoch: u64,
        weights: Vec<Vec<f32>>,
    },
    /// A fault that the simulation has caused or mended.
    Fault(#[allow(dead_code, reason = "for people, and for the hash")] String),
    /// The newest whole checkpoint after the end of all processes.
    Checkpoint(Saved),
    /// A process has ended by itself.
    Ended {
        name: String,
        outcome: Result<(), String>,
    },
    /// A process has ended because of the store or the disk, and is started again.
    Exited {
        #[allow(dead_code, reason = "for people, and for the hash")]
        name: String,
        #[allow(dead_code, reason = "for people, and for the hash")]
        error: String,
    },
    /// The second coordinator has ended: the refusal, and whether it has written to the store.
    Second {
        refused: Option<String>,
        has_written: bool,
    },
    /// A promise is broken.
    Violation(String),
}

#[derive(Debug, Default)]
struct Inner {
    /// The events, each with the simulated time in milliseconds.
    events: Vec<(u64, Event)>,
    pushes: usize,
    ended: BTreeSet<String>,
    exits: Vec<String>,
    /// The number of runs of the job so far.
    runs: usize,
    /// True if the coordinator has a run in its state.
    has_run: bool,
    /// True if the run has a checkpoint of its own.
    has_checkpoint: bool,
    /// True if training has begun.
    has_begun: bool,
    /// True if the job has ended, well or not.
    job_is_over: bool,
    /// The weights with which the run has begun, if it began with a checkpoint.
    base: Option<Vec<Vec<f32>>>,
    /// The run of each push.
    run_of: Vec<usize>,
    /// The run that each worker is a member of.
    member_of: BTreeMap<String, usize>,
    /// Each worker's pushes by their clocks. A push that was made again has taken the place of the earlier one.
    under_way: BTreeMap<(String, u64), usize>,
    /// The newest version that each worker has pulled: by worker and block.
    pulled: BTreeMap<(String, usize), (usize, u64, u64)>,
    /// The weights in each worker's model.
    held: BTreeMap<String, Vec<Vec<f32>>>,
    /// The acknowledged pushes, each with its worker, clock and run.
    acknowledged: BTreeMap<usize, (String, u64, usize)>,
    rules: Rules,
}

/// The rules of a world, which the checker applies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// The staleness bound, if there is one.
    pub(crate) bound: Option<u64>,
    /// True if workers compute ahead of the acknowledgement of their gradients.
    pub(crate) ahead: bool,
    pub(crate) sync: bool,
    pub(crate) shape: Shape,
    /// The interval between pushes that are NaN; none if there are no such pushes.
    pub(crate) poisoned: Option<usize>,
    /// The reason for which rows of pairs are evicted.
    pub(crate) evicts: Evicts,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            bound: None,
            ahead: false,
            sync: false,
            shape: Shape::SMALL,
            poisoned: None,
            evicts: Evicts::default(),
        }
    }
}

/// The history, shared by all processes.
#[derive(Clone, Debug, Default)]
pub(crate) struct History(Arc<Mutex<Inner>>);

impl History {
    pub(crate) fn under(rules: Rules) -> Self {
        let history = Self::default();
        history.0.lock().unwrap().rules = rules;
        history
    }

    pub(crate) fn shape(&self) -> Shape {
        self.0.lock().unwrap().rules.shape
    }

    pub(crate) fn evicts(&self) -> Evicts {
        self.0.lock().unwrap().rules.evicts
    }

    pub(crate) fn add(&self, event: Event) {
        let at = turmoil::sim_elapsed().unwrap_or_default().as_millis() as u64;
        self.add_at(at, event);
    }

    pub(crate) fn add_at(&self, at: u64, event: Event) {
        let mut inner = self.0.lock().unwrap();
        match &event {
            Event::Ended { name, .. } => drop(inner.ended.insert(name.clone())),
            Event::Recorded(record) if record["event"] == "checkpoint" => {
                inner.has_checkpoint = true;
            }
            Event::Recorded(record) if record["event"] == "began" => inner.has_begun = true,
            Event::Recorded(record) if record["event"] == "ended" => inner.job_is_over = true,
            _ => {}
        }
        inner.events.push((at, event));
    }

    pub(crate) fn violation(&self, what: String) {
        self.add(Event::Violation(what));
    }

    /// Notes that a process has ended because of the store or the disk.
    pub(crate) fn exited(&self, name: &str, error: String) {
        self.0.lock().unwrap().exits.push(name.to_owned());
        let name = name.to_owned();
        self.add(Event::Exited { name, error });
    }

    /// Takes the names of the processes that are to be started again.
    pub(crate) fn take_exits(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().exits)
    }

    /// Returns whether a coordinator that starts now has no run to resume, and the number of the run that it would
    /// begin.
    pub(crate) fn next_run(&self) -> (bool, usize) {
        let inner = self.0.lock().unwrap();
        (!inner.has_run, inner.runs)
    }

    /// Notes that a coordinator has begun a run.
    pub(crate) fn begin_run(&self, number: usize, restored: Option<Saved>) {
        {
            let mut inner = self.0.lock().unwrap();
            inner.runs = number + 1;
            inner.has_run = true;
            inner.has_checkpoint = false;
            inner.base = restored.as_ref().map(|saved| saved.weights.clone());
        }
        self.add(Event::Run { number, restored });
    }

    /// Notes that the coordinator's state is lost.
    pub(crate) fn lose_run(&self) {
        self.0.lock().unwrap().has_run = false;
    }

    /// Returns whether training has begun.
    pub(crate) fn has_begun(&self) -> bool {
        self.0.lock().unwrap().has_begun
    }

    /// Returns whether the job has ended, well or not.
    pub(crate) fn job_is_over(&self) -> bool {
        self.0.lock().unwrap().job_is_over
    }

    /// Returns whether the run has a checkpoint of its own.
    pub(crate) fn has_checkpoint(&self) -> bool {
        self.0.lock().unwrap().has_checkpoint
    }

    /// Notes that a worker has registered with the present run.
    pub(crate) fn registered(&self, worker: &str) {
        let mut inner = self.0.lock().unwrap();
        let run = inner.runs.saturating_sub(1);
        inner.member_of.insert(worker.to_owned(), run);
    }

    /// Notes that a worker has computed the gradient of the step after `clock`. Returns the number of its push, and whether it is to be
    /// finite.
    pub(crate) fn computed(&self, worker: &str, clock: u64, positions: Positions) -> (usize, bool) {
        let (push, run, finite) = {
            let mut inner = self.0.lock().unwrap();
            inner.pushes += 1;
            let push = inner.pushes - 1;
            inner.under_way.insert((worker.to_owned(), clock), push);
            let run = inner.member_of[worker];
            inner.run_of.push(run);
            let poisoned = inner.rules.poisoned;
            let finite = poisoned.is_none_or(|every| push % every + 1 != every);
            (push, run, finite)
        };
        assert!(
            push < PUSHES,
            "the run has more pushes than can be told apart"
        );
        self.add(Event::Computed {
            push,
            run,
            positions,
            finite,
        });
        (push, finite)
    }

    pub(crate) fn acknowledged(&self, worker: &str, clock: u64, blocks: &[BlockVersion]) {
        let push = {
            let mut inner = self.0.lock().unwrap();
            let push = inner.under_way[&(worker.to_owned(), clock)];
            let by = (worker.to_owned(), clock, inner.member_of[worker]);
            inner.acknowledged.insert(push, by);
            push
        };
        let shape = self.shape();
        let block = |version: &BlockVersion| {
            let id = version.block.unwrap_or_default();
            let block = shape.block(id.variable as usize, id.index as usize);
            (block, version.epoch, version.version)
        };
        let blocks = blocks.iter().map(block).collect();
        self.add(Event::Acknowledged {
            push,
            clock,
            blocks,
        });
    }

    pub(crate) fn pulled(&self, worker: &str, parts: &[Part]) {
        for part in parts {
            self.pulled_block(worker, part);
        }
    }

    fn pulled_block(&self, worker: &str, part: &Part) {
        let pulled = part.version.expect("servers have all values");
        let number = self.shape().block_at(part.of, part.start);
        let counters = match self.shape().counters(number, &part.values) {
            Ok(counters) => counters,
            Err(wrong) => {
                return self.violation(format!("{worker} has pulled block {number}: {wrong}"));
            }
        };
        let key = (worker.to_owned(), number);
        let (before, version) = {
            let mut inner = self.0.lock().unwrap();
            let run = inner.member_of[worker];
            let version = (run, pulled.epoch.0, pulled.version.0);
            let blocks = inner.rules.shape.all_blocks();
            let empty = || vec![vec![0.0; PUSHES]; blocks];
            let held = inner.held.entry(worker.to_owned()).or_insert_with(empty);
            held[number] = counters;
            (inner.pulled.insert(key, version), version)
        };
        if before.is_some_and(|before| before > version) {
            self.violation(format!(
                "{worker} has pulled block {number} in version {version:?} after {before:?}"
            ));
        }
    }

    /// Notes that a worker has pulled all weights for the step after `clock`, and checks their content: they must hold
    /// its own acknowledged pushes, except the newest one of a worker that computes ahead, and those of other workers that are older
    /// than the bound allows.
    pub(crate) fn pulled_all(&self, worker: &str, clock: u64) {
        let (missing, run, wrong) = {
            let inner = self.0.lock().unwrap();
            let Some(held) = inner.held.get(worker) else {
                return;
            };
            let run = inner.member_of[worker];
            let wrong = inner.wrong_in(held, run);
            (inner.missing_in(held, worker, run, clock), run, wrong)
        };
        if let Some(wrong) = wrong {
            self.violation(format!("{worker} has pulled for clock {clock}: {wrong}"));
        }
        if !missing.is_empty() {
            self.add(Event::Lacks {
                name: worker.to_owned(),
                run,
                clock,
                missing,
            });
        }
    }

    /// Notes that a worker has evaluated the weights in its model, which belong to this epoch.
    pub(crate) fn evaluated(&self, worker: &str, epoch: Epoch) {
        let (run, weights, wrong) = {
            let inner = self.0.lock().unwrap();
            let weights = inner.held[worker].clone();
            let run = inner.member_of[worker];
            let wrong = inner.wrong_in(&weights, run);
            (run, weights, wrong)
        };
        if let Some(wrong) = wrong {
            self.violation(format!("{worker} has pulled to evaluate: {wrong}"));
        }
        let (name, epoch) = (worker.to_owned(), epoch.0);
        self.add(Event::Evaluated {
            name,
            run,
            epoch,
            weights,
        });
    }

    /// Returns the events, each with the simulated time in milliseconds, and the number of pushes.
    pub(crate) fn events(&self) -> (Vec<(u64, Event)>, usize) {
        let inner = self.0.lock().unwrap();
        (inner.events.clone(), inner.pushes)
    }

    /// Returns whether a process has ended by itself.
    pub(crate) fn has_ended(&self, name: &str) -> bool {
        self.0.lock().unwrap().ended.contains(name)
    }

    /// Returns a hash of the history. Equal histories have equal hashes.
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for event in &self.0.lock().unwrap().events {
            format!("{event:?}").hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Describes the last events for people.
    pub(crate) fn tail(&self, count: usize) -> String {
        let inner = self.0.lock().unwrap();
        let from = inner.events.len().saturating_sub(count);
        let line = |(at, event): &(u64, Event)| match event {
            Event::Evaluated { name, epoch, .. } => {
                format!("{at} ms: {name} has evaluated in epoch {epoch}\n")
            }
            Event::Checkpoint(saved) => {
                format!("{at} ms: checkpoint {} is the last\n", saved.number)
            }
            Event::Run { number, restored } => {
                let from = restored.as_ref().map(|saved| (saved.run, saved.number));
                format!("{at} ms: run {number} has begun, with checkpoint {from:?}\n")
            }
            event => format!("{at} ms: {event:?}\n"),
        };
        inner.events[from..].iter().map(line).collect()
    }
}

impl Inner {
    /// Describes updates in a worker's pulled weights that cannot be right, whatever else the weights hold.
    fn wrong_in(&self, held: &[Vec<f32>], run: usize) -> Option<String> {
        let (pairs, held) = held.split_last()?;
        for push in 0..self.pushes {
            let first = held[0][push];
            // The weights must have the pushes of earlier runs with which this one has begun, and no others of them.
            if self.run_of[push] < run && run + 1 == self.runs {
                let base = |v: usize| self.base.as_ref().map_or(0.0, |base| base[v][push]);
                if let Some(block) = (0..held.len()).find(|v| held[*v][push] != base(*v)) {
                    return Some(format!(
                        "push {push} of an earlier run counts {} on block {block}, and {} in the checkpoint that the run has begun with",
                        held[block][push],
                        base(block)
                    ));
                }
            }
            for (block, values) in held.iter().enumerate() {
                let value = values[push];
                if self.rules.sync && value != first {
                    return Some(format!(
                        "push {push} counts {first} on block 0, {value} on block {block}"
                    ));
                }
                if !self.rules.sync && value != 0.0 && value != -1.0 {
                    return Some(format!(
                        "push {push} was applied {} times to block {block}",
                        -value
                    ));
                }
            }
        }
        pairs::check_pulled(self.rules.evicts, pairs, self.rules.sync, &held[0]).err()
    }

    /// Returns the updates that the weights must hold and do not: pairs of a push and a block.
    fn missing_in(
        &self,
        held: &[Vec<f32>],
        worker: &str,
        run: usize,
        clock: u64,
    ) -> Vec<(usize, usize)> {
        if self.rules.sync {
            return Vec::new();
        }
        let due = |(by, made, of): &(String, u64, usize)| {
            *of == run
                && (by == worker && !(self.rules.ahead && made + 1 == clock)
                    || self.rules.bound.is_some_and(|bound| made + bound < clock))
        };
        let acknowledged = self.acknowledged.iter().filter(|(_, by)| due(by));
        let blocks = self.rules.shape.counting();
        let updates = acknowledged.flat_map(|(push, _)| (0..blocks).map(|v| (*push, v)));
        updates.filter(|(push, v)| held[*v][*push] == 0.0).collect()
    }
}
