//! What has happened in a run, and whether it is what was promised.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};

use ps_client::{Acknowledgement, PulledBlock};
use serde_json::Value;
use worker::replica::Positions;

use crate::model::{EPOCHS, PUSHES, SAMPLES, VARIABLES};

/// How long before the last evaluation began to pull a restore may be told of for it to be open which
/// came first.
const CLOSE: u64 = 2_000;

/// Something that has happened.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A worker has computed a gradient, that of this push.
    Computed { push: usize, positions: Positions },
    /// All shards have acknowledged it: epoch and version of each block.
    Acknowledged {
        push: usize,
        blocks: Vec<(usize, u64, u64)>,
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
    bound: Option<u64>,
}

/// Shared by all who take part.
#[derive(Clone, Debug, Default)]
pub(crate) struct History(Arc<Mutex<Inner>>);

impl History {
    pub(crate) fn with_bound(bound: Option<u64>) -> Self {
        let history = Self::default();
        history.0.lock().unwrap().bound = bound;
        history
    }

    pub(crate) fn bound(&self) -> Option<u64> {
        self.0.lock().unwrap().bound
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

    pub(crate) fn acknowledged(&self, worker: &str, acknowledgement: &Acknowledgement) {
        let push = self.0.lock().unwrap().under_way[worker];
        let block = |version: &shared_proto::wire::BlockVersion| {
            let id = version.block.unwrap_or_default();
            (id.variable as usize, version.epoch, version.version)
        };
        let blocks = acknowledgement.blocks.iter().map(block).collect();
        self.add(Event::Acknowledged { push, blocks });
    }

    pub(crate) fn pulled(&self, worker: &str, block: &PulledBlock) {
        let version = (block.epoch.0, block.version.0);
        let key = (worker.to_owned(), block.variable);
        let before = self.0.lock().unwrap().pulled.insert(key, version);
        if before.is_some_and(|before| before.0 == version.0 && before.1 > version.1) {
            self.violation(format!(
                "{worker} has pulled variable {} in version {version:?} after {before:?}",
                block.variable
            ));
        }
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
            event => format!("{at} ms: {event:?}\n"),
        };
        inner.events[from..].iter().map(line).collect()
    }

    /// All that was promised and is not so.
    pub(crate) fn check(&self, sync: bool) -> Vec<String> {
        let inner = self.0.lock().unwrap();
        let mut wrong: Vec<String> = inner
            .events
            .iter()
            .filter_map(|(_, event)| match event {
                Event::Violation(what) => Some(what.clone()),
                // Who was cut off at the end of the job finds nobody who could tell.
                Event::Ended {
                    outcome: Err(error),
                    ..
                } if error.contains("could not be reached") => None,
                Event::Ended {
                    name,
                    outcome: Err(error),
                } => Some(format!("{name}: {error}")),
                _ => None,
            })
            .collect();
        let evaluated = inner
            .events
            .iter()
            .enumerate()
            .rev()
            .find_map(|(index, (_, event))| match event {
                Event::Evaluated { name, weights } => Some((index, name, weights)),
                _ => None,
            });
        let Some((index, name, weights)) = evaluated else {
            wrong.push("nothing was evaluated".to_owned());
            return wrong;
        };
        // One shard's weights may have come long before another's.
        let mut before = inner.events[..index].iter().rev();
        let began = before.find_map(|(at, event)| match event {
            Event::Pulls(by) if by == name => Some(*at),
            _ => None,
        });
        let Some(began) = began else {
            wrong.push(format!("{name} has evaluated what it did not pull"));
            return wrong;
        };
        let applied = |variable: usize, push: usize| f64::from(-weights[variable][push]);
        let facts = Facts::of(&inner.events[..index], began);
        if sync {
            facts.check_sync(inner.pushes, applied, &mut wrong);
        } else {
            facts.check_each(inner.pushes, applied, &mut wrong);
        }
        wrong
    }
}

/// What a history comes to.
#[derive(Default)]
struct Facts {
    positions: BTreeMap<usize, Positions>,
    /// Epoch and version of each block.
    acknowledged: BTreeMap<usize, Vec<(usize, u64, u64)>>,
    /// Variable, epoch, version that it went back to, and whether this was close to the evaluation.
    loads: Vec<(usize, u64, u64, bool)>,
}

impl Facts {
    fn of(events: &[(u64, Event)], evaluation: u64) -> Self {
        let mut facts = Self::default();
        for (at, event) in events {
            match event {
                Event::Computed { push, positions } => {
                    facts.positions.insert(*push, *positions);
                }
                Event::Acknowledged { push, blocks } => {
                    facts.acknowledged.insert(*push, blocks.clone());
                }
                Event::Recorded(record) if record["event"] == "loaded" => {
                    let epoch = record["epoch"].as_u64().unwrap();
                    for range in record["versions"].as_array().unwrap() {
                        let number = |i: usize| range[i].as_u64().unwrap();
                        let close = at + CLOSE >= evaluation;
                        facts
                            .loads
                            .push((number(0) as usize, epoch, number(3), close));
                    }
                }
                _ => {}
            }
        }
        facts
    }

    /// Whether an acknowledged update was reported lost; none where that is open.
    fn lost(&self, (variable, epoch, version): (usize, u64, u64)) -> Option<bool> {
        let mut by = self
            .loads
            .iter()
            .filter(|(loaded, at, to, _)| *loaded == variable && *at > epoch && *to < version);
        match by.clone().any(|(_, _, _, close)| !close) {
            true => Some(true),
            false if by.next().is_some() => None,
            false => Some(false),
        }
    }

    /// Each acknowledged update is there once, unless it was reported lost; each other one once at
    /// the most.
    fn check_each(
        &self,
        pushes: usize,
        applied: impl Fn(usize, usize) -> f64,
        wrong: &mut Vec<String>,
    ) {
        for push in 0..pushes {
            for variable in 0..VARIABLES {
                let times = applied(variable, push);
                let acknowledged = self
                    .acknowledged
                    .get(&push)
                    .and_then(|blocks| blocks.iter().find(|(id, _, _)| *id == variable).copied());
                let lost = acknowledged.map(|block| self.lost(block));
                let right = match lost {
                    Some(Some(false)) => times == 1.0,
                    Some(Some(true)) => times == 0.0,
                    Some(None) | None => times == 0.0 || times == 1.0,
                };
                if !right {
                    wrong.push(format!(
                        "push {push} was applied {times} times to variable {variable}; acknowledged as {acknowledged:?}, reported lost: {lost:?}"
                    ));
                }
            }
        }
        let done = self
            .acknowledged
            .keys()
            .filter_map(|push| self.positions.get(push));
        self.check_visited(done, wrong);
    }

    /// Each step has the same contributors on all shards, and their weights sum up to one.
    fn check_sync(
        &self,
        pushes: usize,
        applied: impl Fn(usize, usize) -> f64,
        wrong: &mut Vec<String>,
    ) {
        let mut sum = 0.0;
        let mut done = Vec::new();
        for push in 0..pushes {
            let first = applied(0, push);
            sum += first;
            for variable in 1..VARIABLES {
                let other = applied(variable, push);
                if other != first {
                    wrong.push(format!(
                        "push {push} counts {first} on variable 0, {other} on variable {variable}"
                    ));
                }
            }
            if first > 0.0 {
                done.extend(self.positions.get(&push));
            }
        }
        let off = (sum - sum.round()).abs();
        if off > 1e-3 {
            wrong.push(format!(
                "the weights of all contributors sum up to {sum}, no whole number"
            ));
        }
        let samples: u64 = done.iter().map(|p: &&Positions| p.end - p.start).sum();
        let expected = SAMPLES as u64 * u64::from(EPOCHS);
        if samples != expected {
            wrong.push(format!("{samples} samples count, {expected} were to"));
        }
        self.check_visited(done.into_iter(), wrong);
    }

    fn check_visited<'a>(
        &self,
        done: impl Iterator<Item = &'a Positions>,
        wrong: &mut Vec<String>,
    ) {
        let mut visited = BTreeSet::new();
        for positions in done {
            visited.extend((positions.start..positions.end).map(|p| (positions.epoch, p)));
        }
        for epoch in 0..EPOCHS {
            for position in 0..SAMPLES as u64 {
                if !visited.contains(&(epoch, position)) {
                    wrong.push(format!(
                        "sample {position} of epoch {epoch} was not visited"
                    ));
                }
            }
        }
    }
}
