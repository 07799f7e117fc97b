//! What happens in a run, written down as those who take part see it.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};

use ps_client::PulledBlock;
use serde_json::Value;
use shared_proto::wire::BlockVersion;
use worker::replica::Positions;

use crate::model::{PUSHES, VARIABLES};

/// Something that has happened.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A worker has computed a gradient, that of this push.
    Computed { push: usize, positions: Positions },
    /// All shards have acknowledged it, as the gradient of the step after this clock: epoch and version
    /// of each block.
    Acknowledged {
        push: usize,
        #[allow(dead_code, reason = "for people, and for the hash")]
        clock: u64,
        blocks: Vec<(usize, u64, u64)>,
    },
    /// A worker has pulled weights that lack acknowledged pushes which they should hold: pairs of a push
    /// and a variable.
    Lacks {
        name: String,
        clock: u64,
        missing: Vec<(usize, usize)>,
    },
    /// What the coordinator has recorded.
    Recorded(Value),
    /// A worker pulls all weights, to evaluate them.
    Pulls(String),
    /// The weights that it has evaluated.
    Evaluated {
        name: String,
        weights: Vec<Vec<f32>>,
    },
    /// What was done to the run.
    Fault(#[allow(dead_code, reason = "for people, and for the hash")] String),
    /// The weights of the newest checkpoint that is whole, when everything has ended.
    Checkpoint { number: u64, weights: Vec<Vec<f32>> },
    /// A process has ended by itself.
    Ended {
        name: String,
        outcome: Result<(), String>,
    },
    /// Something that was promised is not so.
    Violation(String),
}

#[derive(Debug, Default)]
struct Inner {
    /// With the simulated time, in milliseconds.
    events: Vec<(u64, Event)>,
    pushes: usize,
    /// Each worker's push that is under way.
    under_way: BTreeMap<String, usize>,
    /// The newest version that each worker has pulled: by worker and variable.
    pulled: BTreeMap<(String, usize), (u64, u64)>,
    /// What each worker's model holds.
    held: BTreeMap<String, Vec<Vec<f32>>>,
    /// Acknowledged pushes: who made them, and the clock.
    acknowledged: BTreeMap<usize, (String, u64)>,
    bound: Option<u64>,
    sync: bool,
}

/// Shared by all who take part.
#[derive(Clone, Debug, Default)]
pub(crate) struct History(Arc<Mutex<Inner>>);

impl History {
    pub(crate) fn with_bound(bound: Option<u64>, sync: bool) -> Self {
        let history = Self::default();
        {
            let mut inner = history.0.lock().unwrap();
            (inner.bound, inner.sync) = (bound, sync);
        }
        history
    }

    pub(crate) fn add(&self, event: Event) {
        let at = turmoil::sim_elapsed().unwrap_or_default().as_millis() as u64;
        self.0.lock().unwrap().events.push((at, event));
    }

    pub(crate) fn add_at(&self, at: u64, event: Event) {
        self.0.lock().unwrap().events.push((at, event));
    }

    pub(crate) fn violation(&self, what: String) {
        self.add(Event::Violation(what));
    }

    pub(crate) fn computed(&self, worker: &str, positions: Positions) -> usize {
        let push = {
            let mut inner = self.0.lock().unwrap();
            inner.pushes += 1;
            let push = inner.pushes - 1;
            inner.under_way.insert(worker.to_owned(), push);
            push
        };
        assert!(
            push < PUSHES,
            "the run has more pushes than can be told apart"
        );
        self.add(Event::Computed { push, positions });
        push
    }

    pub(crate) fn acknowledged(&self, worker: &str, clock: u64, blocks: &[BlockVersion]) {
        let push = {
            let mut inner = self.0.lock().unwrap();
            let push = inner.under_way[worker];
            let by = (worker.to_owned(), clock);
            inner.acknowledged.insert(push, by);
            push
        };
        let block = |version: &BlockVersion| {
            let id = version.block.unwrap_or_default();
            (id.variable as usize, version.epoch, version.version)
        };
        let blocks = blocks.iter().map(block).collect();
        self.add(Event::Acknowledged {
            push,
            clock,
            blocks,
        });
    }

    pub(crate) fn pulled(&self, worker: &str, block: &PulledBlock) {
        let version = (block.epoch.0, block.version.0);
        let key = (worker.to_owned(), block.variable);
        let before = {
            let mut inner = self.0.lock().unwrap();
            let empty = || vec![vec![0.0; PUSHES]; VARIABLES];
            let held = inner.held.entry(worker.to_owned()).or_insert_with(empty);
            block.values.copy_to(&mut held[block.variable]);
            inner.pulled.insert(key, version)
        };
        if before.is_some_and(|before| before > version) {
            self.violation(format!(
                "{worker} has pulled variable {} in version {version:?} after {before:?}",
                block.variable
            ));
        }
    }

    /// A worker has all weights for the step after `clock`. They hold its own acknowledged pushes, and
    /// those of others that are older than the bound allows: judged by what is in them.
    pub(crate) fn pulled_all(&self, worker: &str, clock: u64) {
        let missing: Vec<(usize, usize)> = {
            let inner = self.0.lock().unwrap();
            let Some(held) = inner.held.get(worker).filter(|_| !inner.sync) else {
                return;
            };
            let due = |(by, made): &(String, u64)| {
                by == worker || inner.bound.is_some_and(|bound| made + bound < clock)
            };
            let acknowledged = inner.acknowledged.iter().filter(|(_, by)| due(by));
            let pairs = acknowledged.flat_map(|(push, _)| (0..VARIABLES).map(|v| (*push, v)));
            pairs.filter(|(push, v)| held[*v][*push] == 0.0).collect()
        };
        if !missing.is_empty() {
            self.add(Event::Lacks {
                name: worker.to_owned(),
                clock,
                missing,
            });
        }
    }

    /// What has happened, with the simulated time in milliseconds, and how many pushes there were.
    pub(crate) fn events(&self) -> (Vec<(u64, Event)>, usize) {
        let inner = self.0.lock().unwrap();
        (inner.events.clone(), inner.pushes)
    }

    /// Those that have ended by themselves.
    pub(crate) fn ended(&self) -> BTreeSet<String> {
        let inner = self.0.lock().unwrap();
        let ended = inner.events.iter().filter_map(|(_, event)| match event {
            Event::Ended { name, .. } => Some(name.clone()),
            _ => None,
        });
        ended.collect()
    }

    /// Equal histories have equal ones.
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for event in &self.0.lock().unwrap().events {
            format!("{event:?}").hash(&mut hasher);
        }
        hasher.finish()
    }

    /// The last events, for people.
    pub(crate) fn tail(&self, count: usize) -> String {
        let inner = self.0.lock().unwrap();
        let from = inner.events.len().saturating_sub(count);
        let line = |(at, event): &(u64, Event)| match event {
            Event::Evaluated { name, .. } => format!("{at} ms: {name} has evaluated\n"),
            Event::Checkpoint { number, .. } => {
                format!("{at} ms: checkpoint {number} is the last\n")
            }
            event => format!("{at} ms: {event:?}\n"),
        };
        inner.events[from..].iter().map(line).collect()
    }
}
