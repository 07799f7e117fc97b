//! Checks the history of a run against the promises. The checker does not trust the system's own reports, except
//! reports of losses.

use std::collections::{BTreeMap, BTreeSet};

use replica::Positions;
use shared_proto::job::NonFinite;

use crate::history::{Event, History, Saved};
use crate::model::{EPOCHS, SAMPLES};
use crate::pairs::{self, Applied, Evicts};
use crate::plan::Plan;
use crate::runs::{Run, Update};

/// Returns all broken promises.
pub(crate) fn check(history: &History, sync: bool, plan: &Plan) -> Vec<String> {
    let (events, pushes) = history.events();
    let mut wrong = Vec::new();
    for (index, (_, event)) in events.iter().enumerate() {
        wrong.extend(fault(event, &events[..index], plan));
    }
    if job_failed(&events) {
        // The job had to fail; otherwise `fault` has found the error.
        return wrong;
    }
    let evaluated = events.iter().rev().find_map(|(_, event)| match event {
        Event::Evaluated {
            run,
            epoch,
            weights,
            ..
        } => Some((*run, *epoch, weights)),
        _ => None,
    });
    let Some((last, epoch, weights)) = evaluated else {
        wrong.push("nothing was evaluated".to_owned());
        return wrong;
    };
    let runs = Run::all(&events, history.shape());
    if last + 1 != runs.len() {
        wrong.push(format!("run {last} was evaluated last, of {}", runs.len()));
        return wrong;
    }
    for restored in runs.iter().filter_map(|run| run.restored) {
        let content = Content::of_checkpoint(restored, &runs);
        if !sync {
            content.check_each(pushes, &runs, &mut wrong);
            content.check_pairs(&runs, history.evicts(), &mut wrong);
        }
        content.check_earlier(&runs, &mut wrong);
    }
    let content = Content::of_model(last, epoch, weights);
    content.check_earlier(&runs, &mut wrong);
    if sync {
        check_sync(&content, &runs, pushes, &mut wrong);
    } else {
        content.check_each(pushes, &runs, &mut wrong);
        content.check_pairs(&runs, history.evicts(), &mut wrong);
        check_lacking(&events, &runs, &mut wrong);
        check_reports(&content, &runs, &mut wrong);
        check_visited(counted(&runs).into_iter(), &runs, &mut wrong);
    }
    check_last_checkpoint(&events, weights, &mut wrong);
    wrong
}

/// Returns the fault that an event shows by itself, after the events before it.
fn fault(event: &Event, before: &[(u64, Event)], plan: &Plan) -> Option<String> {
    match event {
        Event::Violation(what) => Some(what.clone()),
        Event::Ended {
            name,
            outcome: Err(error),
        } => {
            let mut before = before.iter().map(|(_, event)| event);
            let coordinator_has_ended = before
                .clone()
                .any(|event| matches!(event, Event::Ended { name, .. } if name == "coordinator"));
            let poisoned =
                before.any(|event| matches!(event, Event::Computed { finite: false, .. }));
            let failed = plan.non_finite == Some(NonFinite::Fail)
                && poisoned
                && error.contains("the gradient of variable \"v1\"");
            // A process that was cut off at the end of the job cannot learn of the end, because the others have gone.
            let unreachable = error.contains("could not be reached") && coordinator_has_ended;
            // Of two processes with one identity, the older one ends.
            let twins = ["ps-0", "ps-2"].contains(&name.as_str()) && plan.identity_twice;
            let superseded = error.contains("superseded") && twins;
            (!unreachable && !superseded && !failed).then(|| format!("{name}: {error}"))
        }
        Event::Second {
            refused,
            has_written,
        } => {
            let refusal = refused.as_deref().unwrap_or_default();
            // After the first run has ended and released the store, its checkpoints still do not belong to another run.
            let is_over = |(_, event): &(u64, Event)| matches!(event, Event::Ended { name, .. } if name == "coordinator");
            let of_earlier = refusal.contains("has checkpoints of an earlier run");
            let of_earlier = of_earlier && before.iter().any(is_over);
            let of_another = refusal.contains("another run is at work at");
            let right = (of_another || of_earlier) && !has_written;
            (!right).then(|| {
                format!(
                    "the second coordinator was refused with {refused:?}; it has written to the store: {has_written}"
                )
            })
        }
        _ => None,
    }
}

/// Returns whether the job has ended without a result.
fn job_failed(events: &[(u64, Event)]) -> bool {
    events.iter().any(|(_, event)| {
        matches!(event, Event::Ended { name, outcome: Err(_) } if name == "coordinator")
    })
}

/// Checks that the last checkpoint has the weights of the last evaluation, with which the model is written.
fn check_last_checkpoint(events: &[(u64, Event)], evaluated: &[Vec<f32>], wrong: &mut Vec<String>) {
    let saved = events.iter().find_map(|(_, event)| match event {
        Event::Checkpoint(saved) => Some(saved),
        _ => None,
    });
    let Some(saved) = saved else {
        wrong.push("there is no last checkpoint".to_owned());
        return;
    };
    for (block, (weights, evaluated)) in saved.weights.iter().zip(evaluated).enumerate() {
        let differ = weights
            .iter()
            .zip(evaluated)
            .filter(|(s, e)| s != e)
            .count();
        if differ > 0 {
            wrong.push(format!(
                "the last checkpoint, {}, differs from the model in {differ} elements of block {block}",
                saved.number
            ));
        }
    }
}

/// Weights, and the data from which their expected content follows.
struct Content<'a> {
    /// A description for people.
    what: String,
    /// The run and the epoch of the weights.
    run: usize,
    epoch: u64,
    /// The version of each block, if the weights are a checkpoint's.
    versions: Option<&'a [u64]>,
    /// The blocks that count pushes.
    weights: &'a [Vec<f32>],
    /// The rows of pairs.
    pairs: &'a [f32],
}

impl<'a> Content<'a> {
    fn of_checkpoint(saved: &'a Saved, runs: &[Run<'_>]) -> Self {
        debug_assert!(saved.run < runs.len());
        Self {
            what: format!("checkpoint {}", saved.number),
            versions: Some(&saved.versions),
            ..Self::of_model(saved.run, saved.epoch, &saved.weights)
        }
    }

    /// `weights` has all blocks, with that of pairs at the end.
    fn of_model(run: usize, epoch: u64, weights: &'a [Vec<f32>]) -> Self {
        let (pairs, weights) = weights.split_last().unwrap();
        Self {
            what: "the model".to_owned(),
            run,
            epoch,
            versions: None,
            weights,
            pairs,
        }
    }

    fn applied(&self, block: usize, push: usize) -> f64 {
        f64::from(-self.weights[block][push])
    }

    /// Returns whether an acknowledged update must be absent: the block was reported to have gone back behind it, or
    /// the checkpoint is older. None if both are possible, because the block went back in an epoch that not all of
    /// these weights belong to.
    fn lacks(&self, run: &Run<'_>, update: Update) -> Option<bool> {
        let (block, epoch, version) = update;
        if let Some(versions) = self.versions
            && (epoch > self.epoch || version > versions[block])
        {
            return Some(true);
        }
        let loads = run.loads.iter();
        let mut behind = loads.filter(|(v, at, to)| *v == block && *at > epoch && *to < version);
        if behind.clone().any(|(_, at, _)| *at <= self.epoch) {
            return Some(true);
        }
        match behind.next().filter(|_| self.versions.is_none()) {
            Some(_) => None,
            None => Some(false),
        }
    }

    /// Checks that the weights have each acknowledged update of the run once, unless it was reported lost, and each
    /// other update at most once.
    fn check_each(&self, pushes: usize, runs: &[Run<'_>], wrong: &mut Vec<String>) {
        let run = &runs[self.run];
        for block in 0..self.weights.len() {
            let applied = self.has(block, run);
            for push in (0..pushes).filter(|push| run.positions.contains_key(push)) {
                let times = self.applied(block, push);
                let expected = applied[&push];
                let right = match expected {
                    Applied::Yes(_) => times == 1.0,
                    Applied::No => times == 0.0,
                    Applied::Maybe => times == 0.0 || times == 1.0,
                };
                if !right {
                    wrong.push(format!(
                        "in {} push {push} was applied {times} times to block {block}; it should be there: {expected:?}; acknowledged: {:?}",
                        self.what,
                        run.acknowledged.get(&push)
                    ));
                }
            }
        }
    }

    /// Returns whether a block has each push of its run.
    fn has(&self, block: usize, run: &Run<'_>) -> BTreeMap<usize, Applied> {
        let of = |push: &usize| {
            let acknowledged = run.acknowledged.get(push);
            let update =
                acknowledged.and_then(|(_, blocks)| blocks.iter().find(|(id, _, _)| *id == block));
            match update.map(|update| (self.lacks(run, *update), update.2)) {
                _ if run.poisoned.contains(push) => Applied::No,
                Some((Some(false), version)) => Applied::Yes(version),
                Some((Some(true), _)) => Applied::No,
                Some((None, _)) | None => Applied::Maybe,
            }
        };
        let pushes = run.positions.keys();
        pushes.map(|push| (*push, of(push))).collect()
    }

    /// Checks the rows of pairs.
    fn check_pairs(&self, runs: &[Run<'_>], evicts: Evicts, wrong: &mut Vec<String>) {
        let run = &runs[self.run];
        let base = run.restored.and_then(|saved| saved.weights.last());
        let applied = self.has(self.weights.len(), run);
        let found = pairs::check(evicts, self.pairs, base.map(Vec::as_slice), &applied);
        wrong.extend(
            found
                .iter()
                .map(|found| format!("in {} {found}", self.what)),
        );
    }

    /// Checks that the weights have those updates of earlier runs with which this run began, and none of later runs.
    fn check_earlier(&self, runs: &[Run<'_>], wrong: &mut Vec<String>) {
        let base = runs[self.run].restored;
        let others = runs.iter().enumerate().filter(|(run, _)| *run != self.run);
        let pushes = others.flat_map(|(run, of)| of.positions.keys().map(move |push| (run, *push)));
        for (run, push) in pushes {
            for block in 0..self.weights.len() {
                let times = self.applied(block, push);
                let base = base.filter(|_| run < self.run);
                let expected = base.map_or(0.0, |base| f64::from(-base.weights[block][push]));
                if times != expected {
                    wrong.push(format!(
                        "in {} push {push} of run {run} counts {times} on block {block}, and {expected} where run {} has begun",
                        self.what, self.run
                    ));
                }
            }
        }
    }
}

/// Checks that all acknowledged pushes that a pull lacked were reported lost.
fn check_lacking(events: &[(u64, Event)], runs: &[Run<'_>], wrong: &mut Vec<String>) {
    for (at, event) in events {
        let Event::Lacks {
            name,
            run,
            clock,
            missing,
        } = event
        else {
            continue;
        };
        let run = &runs[*run];
        for (push, block) in missing {
            let (_, blocks) = &run.acknowledged[push];
            let update = blocks.iter().find(|(id, _, _)| id == block);
            let is_behind = |(id, epoch, version): &Update| {
                let mut loads = run.loads.iter();
                loads.any(|(v, at, to)| v == id && at > epoch && to < version)
            };
            if !update.is_some_and(is_behind) {
                wrong.push(format!(
                    "at {at} ms {name} has pulled for clock {clock} what lacks the acknowledged push {push} on block {block}, {update:?}"
                ));
            }
        }
    }
}

/// Checks that the number of updates reported lost is that of the acknowledged updates that are missing. Steps that a
/// worker had not reported when it died, or was evicted, may be left out: another worker visits their samples.
fn check_reports(content: &Content<'_>, runs: &[Run<'_>], wrong: &mut Vec<String>) {
    let run = &runs[content.run];
    // The rows of pairs do not show what is missing.
    let of_pairs = content.has(content.weights.len(), run);
    let absent = |push: usize| {
        let absent = (0..content.weights.len()).filter(|v| content.applied(*v, push) == 0.0);
        absent.count() as u64 + u64::from(of_pairs[&push] == Applied::No)
    };
    let visited_again = |push: &usize| {
        let own = &run.positions[push];
        // A step that was left out because its gradient is not finite is a visit too.
        let others = run.acknowledged.keys().chain(&run.poisoned);
        let mut others = others.filter(|other| *other != push);
        others.any(|other| {
            let other = &run.positions[other];
            other.data_epoch == own.data_epoch && other.start < own.end && own.start < other.end
        })
    };
    // A push that only some shards have acknowledged may be lost on these.
    let partly = run.positions.keys();
    let partly = partly.filter(|push| !run.acknowledged.contains_key(push));
    let partly: u64 = partly.map(|push| absent(*push)).sum();
    let unknown = of_pairs.values().filter(|push| **push == Applied::Maybe);
    let partly = partly + unknown.count() as u64;
    let (mut missing, mut untold) = (0, 0);
    for push in run.acknowledged.keys() {
        missing += absent(*push);
        untold += if visited_again(push) {
            absent(*push)
        } else {
            0
        };
    }
    let reported = run.reported;
    if reported > missing + partly || reported + untold < missing {
        wrong.push(format!(
            "{reported} updates were reported lost; {missing} that were acknowledged are missing, {untold} of them may be left out, {partly} more are missing that some shard may have acknowledged"
        ));
    }
}

/// Checks that each step has the same contributors on all shards, with weights that sum up to one.
fn check_sync(content: &Content<'_>, runs: &[Run<'_>], pushes: usize, wrong: &mut Vec<String>) {
    let mut sum = 0.0;
    let mut done = Vec::new();
    for push in 0..pushes {
        let first = content.applied(0, push);
        sum += first;
        for block in 1..content.weights.len() {
            let other = content.applied(block, push);
            if other != first {
                wrong.push(format!(
                    "push {push} counts {first} on block 0, {other} on block {block}"
                ));
            }
        }
        if first > 0.0 {
            done.extend(runs.iter().find_map(|run| run.positions.get(&push)));
        }
    }
    let off = (sum - sum.round()).abs();
    if off > 1e-3 {
        wrong.push(format!(
            "the weights of all contributors sum up to {sum}, no whole number"
        ));
    }
    let samples: u64 = done.iter().map(|p: &&Positions| p.end - p.start).sum();
    let visited = visited(done.iter().copied());
    if samples != visited.len() as u64 {
        let once = visited.len();
        wrong.push(format!("{samples} samples count, {once} were to"));
    }
    check_visited(done.into_iter(), runs, wrong);
}

/// Returns the acknowledged pushes that count: all of the last run, and those of earlier runs that were acknowledged
/// before the checkpoint with which the next run began was whole.
fn counted<'a>(runs: &'a [Run<'_>]) -> Vec<&'a Positions> {
    let mut counted = Vec::new();
    let (mut run, mut until) = (runs.len() - 1, u64::MAX);
    loop {
        let of = &runs[run];
        let acknowledged = of.acknowledged.iter().filter(|(_, (at, _))| *at <= until);
        counted.extend(acknowledged.filter_map(|(push, _)| of.positions.get(push)));
        let Some(restored) = of.restored else {
            return counted;
        };
        run = restored.run;
        let whole = runs[run].checkpoints.get(&restored.number);
        until = whole.copied().unwrap_or(u64::MAX);
    }
}

/// Returns the samples of steps, by epoch and position.
fn visited<'a>(steps: impl Iterator<Item = &'a Positions>) -> BTreeSet<(u32, u64)> {
    let samples = |step: &'a Positions| (step.start..step.end).map(|p| (step.data_epoch, p));
    steps.flat_map(samples).collect()
}

/// Checks that each sample belongs to a step that counts, or to one that was left out because its gradient was NaN or
/// infinite.
fn check_visited<'a>(
    done: impl Iterator<Item = &'a Positions>,
    runs: &'a [Run<'_>],
    wrong: &mut Vec<String>,
) {
    let poisoned = |run: &'a Run<'_>| run.poisoned.iter().map(|push| &run.positions[push]);
    let visited = visited(done.chain(runs.iter().flat_map(poisoned)));
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
