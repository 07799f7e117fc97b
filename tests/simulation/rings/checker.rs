//! Checks a world at its end. The history has checked each change of a replica before.

use super::history::{Event, History};
use super::plan::Plan;
use super::saved::Saved;
use super::values::{VISITS, Values};

/// Returns all broken promises.
pub(crate) fn check(history: &History, saved: &[Saved], plan: &Plan) -> Vec<String> {
    let events = history.events();
    let mut wrong = Vec::new();
    let mut coordinator_has_ended = false;
    let mut summary = None;
    for (_, event) in &events {
        match event {
            Event::Violation(what) => wrong.push(what.clone()),
            Event::Ended {
                name,
                outcome: Err(error),
            } => {
                // A worker that was cut off at the end of the job cannot learn of the end, because the coordinator has gone.
                let unreachable = error.contains("could not be reached") && coordinator_has_ended;
                if !unreachable {
                    wrong.push(format!("{name}: {error}"));
                }
            }
            Event::Ended { name, .. } if name == "coordinator" => coordinator_has_ended = true,
            Event::Summary { steps, samples } => summary = Some((*steps, *samples)),
            _ => {}
        }
    }
    let Some((steps, samples)) = summary else {
        wrong.push("the coordinator has no summary".to_owned());
        return wrong;
    };
    if samples != VISITS as u64 {
        wrong.push(format!("the summary has {samples} samples, not {VISITS}"));
    }
    wrong.extend(saved.iter().filter_map(|saved| saved.check(plan).err()));
    check_values(
        history,
        saved,
        steps,
        plan.may_lack(VISITS as u64, steps),
        &mut wrong,
    );
    wrong
}

/// Checks that the last checkpoint and the members of the last ring lack at most `may_lack` samples, and have made so many steps.
fn check_values(
    history: &History,
    saved: &[Saved],
    steps: u64,
    may_lack: usize,
    wrong: &mut Vec<String>,
) {
    let whole = |what: &str, values: &Values| {
        let (missing, made) = (values.missing(), values.updates);
        let right = missing <= may_lack && made == steps;
        (!right).then(|| {
            format!("{what} lacks {missing} samples, and has {made} steps, of which {steps} count")
        })
    };
    match saved.last() {
        Some(last) => wrong.extend(whole("the last checkpoint", &last.values)),
        None => wrong.push("there is no last checkpoint".to_owned()),
    }
    let newest = history.newest_ring();
    for (name, held) in history.held() {
        if held.made.is_some_and(|made| made.ring.0 == newest) {
            wrong.extend(whole(&name, &held.values));
        }
    }
}
