//! Whether what has happened in a run is what was promised. Nothing here goes by what the system says of
//! itself, except where it says that it has lost something.

use std::collections::{BTreeMap, BTreeSet};

use worker::replica::Positions;

use crate::history::{Event, History};
use crate::model::{EPOCHS, SAMPLES, VARIABLES};

/// How long before the last evaluation began to pull a restore may be told of for it to be open which
/// came first.
const CLOSE: u64 = 2_000;

/// All that was promised and is not so.
pub(crate) fn check(history: &History, sync: bool) -> Vec<String> {
    let (events, pushes) = history.events();
    let mut wrong: Vec<String> = events
        .iter()
        .filter_map(|(_, event)| fault(event))
        .collect();
    let evaluated = events
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
    let mut before = events[..index].iter().rev();
    let began = before.find_map(|(at, event)| match event {
        Event::Pulls(by) if by == name => Some(*at),
        _ => None,
    });
    let Some(began) = began else {
        wrong.push(format!("{name} has evaluated what it did not pull"));
        return wrong;
    };
    let applied = |variable: usize, push: usize| f64::from(-weights[variable][push]);
    let facts = Facts::of(&events[..index], began);
    if sync {
        facts.check_sync(pushes, applied, &mut wrong);
    } else {
        facts.check_each(pushes, applied, &mut wrong);
        facts.check_lacking(&events, &mut wrong);
        facts.check_reports(&events, applied, &mut wrong);
    }
    check_last_checkpoint(&events, weights, &mut wrong);
    wrong
}

/// What an event says is wrong by itself.
fn fault(event: &Event) -> Option<String> {
    match event {
        Event::Violation(what) => Some(what.clone()),
        Event::Ended {
            name,
            outcome: Err(error),
        } => {
            // A process that was cut off at the end of the job finds nobody who could tell it. Of two with
            // one identity, the older ends.
            let expected = ["could not be reached", "superseded"];
            let expected = expected.iter().any(|what| error.contains(what));
            (!expected).then(|| format!("{name}: {error}"))
        }
        _ => None,
    }
}

/// The last checkpoint and the last evaluation, with which the model is written, hold the same weights.
fn check_last_checkpoint(events: &[(u64, Event)], evaluated: &[Vec<f32>], wrong: &mut Vec<String>) {
    let saved = events.iter().find_map(|(_, event)| match event {
        Event::Checkpoint { number, weights } => Some((number, weights)),
        _ => None,
    });
    let Some((number, saved)) = saved else {
        wrong.push("there is no last checkpoint".to_owned());
        return;
    };
    for (variable, (saved, evaluated)) in saved.iter().zip(evaluated).enumerate() {
        let differ = saved.iter().zip(evaluated).filter(|(s, e)| s != e).count();
        if differ > 0 {
            wrong.push(format!(
                "the last checkpoint, {number}, differs from the model in {differ} elements of variable {variable}"
            ));
        }
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
                Event::Acknowledged { push, blocks, .. } => {
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

    /// What a pull lacked of acknowledged pushes was reported lost.
    fn check_lacking(&self, events: &[(u64, Event)], wrong: &mut Vec<String>) {
        for (at, event) in events {
            let Event::Lacks {
                name,
                clock,
                missing,
            } = event
            else {
                continue;
            };
            for (push, variable) in missing {
                let blocks = &self.acknowledged[push];
                let block = blocks.iter().find(|(id, _, _)| id == variable).copied();
                if block.map(|block| self.lost(block)) == Some(Some(false)) {
                    wrong.push(format!(
                        "at {at} ms {name} has pulled for clock {clock} what lacks the acknowledged push {push} on variable {variable}, {block:?}"
                    ));
                }
            }
        }
    }

    /// As many updates are reported lost as are missing of those that were acknowledged. What a worker had
    /// not told the coordinator of when it died, or was put out, may be left out: its samples are visited by another.
    fn check_reports(
        &self,
        events: &[(u64, Event)],
        applied: impl Fn(usize, usize) -> f64,
        wrong: &mut Vec<String>,
    ) {
        let reported: u64 = events
            .iter()
            .filter_map(|(_, event)| match event {
                Event::Recorded(record) if record["event"] == "lost" => record["updates"].as_u64(),
                _ => None,
            })
            .sum();
        let visited_again = |push: &usize| {
            let own = &self.positions[push];
            let mut others = self.acknowledged.keys().filter(|other| *other != push);
            others.any(|other| {
                let other = &self.positions[other];
                other.epoch == own.epoch && other.start < own.end && own.start < other.end
            })
        };
        // One that not all shards have acknowledged may have been lost by those that had.
        let partly = self.positions.keys();
        let partly = partly.filter(|push| !self.acknowledged.contains_key(push));
        let partly =
            partly.map(|push| (0..VARIABLES).filter(|v| applied(*v, *push) == 0.0).count());
        let partly: u64 = partly.map(|absent| absent as u64).sum();
        let (mut missing, mut untold) = (0, 0);
        for (push, blocks) in &self.acknowledged {
            let absent = |(variable, _, _): &&(usize, u64, u64)| applied(*variable, *push) == 0.0;
            let absent = blocks.iter().filter(absent).count() as u64;
            missing += absent;
            untold += if visited_again(push) { absent } else { 0 };
        }
        if reported > missing + partly || reported + untold < missing {
            wrong.push(format!(
                "{reported} updates were reported lost; {missing} that were acknowledged are missing, {untold} of them may be left out, {partly} more are missing that some shard may have acknowledged"
            ));
        }
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
