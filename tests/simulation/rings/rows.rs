//! The rows of worlds with servers. Each sample of each epoch has a row, and each step one. A step moves the row of the step, and those of its
//! samples, as it moves the counters of the dense variables: by one for the step, and by the same part of one for each sample. The dense
//! variables say which rows must have moved, and none may have moved twice.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use shared_proto::job::Sgd;
use shared_proto::step::{RowGradients, WantedRows};
use shared_proto::table::hash::hash;
use shared_proto::table::{Initializer, RowOptimizer, TableSpec};
use worker::replica::Positions;

use super::plan::MOST_SAMPLES;
use super::values::{CLOSE, VISITS, Values, visits};

/// The number of the table's buckets: more than servers, so that some have rows of two.
const BUCKETS: u32 = 3;

/// The ids of all rows: those of samples are their numbers, those of steps follow.
static ALL: LazyLock<Arc<WantedRows>> = LazyLock::new(|| rows_of(0..2 * VISITS as u64));

/// Returns the table.
pub(super) fn spec() -> TableSpec {
    TableSpec {
        name: "visits".to_owned(),
        dimension: 1,
        buckets: BUCKETS,
        initializer: Initializer::Zeros,
        optimizer: RowOptimizer::Sgd(Sgd {
            learning_rate: 1.0,
            ..Sgd::default()
        }),
        ..TableSpec::default()
    }
}

/// Returns all rows.
pub(super) fn all() -> Arc<WantedRows> {
    Arc::clone(&ALL)
}

/// Returns the rows that a batch wants: those of its samples, and those of all steps.
pub(super) fn wanted(positions: Positions) -> Arc<WantedRows> {
    let steps = VISITS as u64..2 * VISITS as u64;
    rows_of(visits(positions).map(|visit| visit as u64).chain(steps))
}

/// Returns the gradients of rows in the step after `clock`. Their mean over all samples of a step has the same number for each sample, and
/// a one for the step.
pub(super) fn gradients(clock: u64, positions: Positions) -> RowGradients {
    let step = VISITS as u64 + clock % VISITS as u64;
    let samples = visits(positions).map(|visit| visit as u64);
    let each = 1.0 / samples.len() as f32;
    let rows = rows_of(samples.chain([step]));
    let of = |id: &u64| if *id == step { 1.0 } else { each };
    let values: Vec<f32> = rows.ids.iter().map(of).collect();
    RowGradients {
        values: values.into(),
        rows,
    }
}

/// Checks the rows that a batch has pulled for the step after `clock`: all steps before have moved theirs, and no others; the samples of
/// the batch have not.
///
/// # Errors
/// Describes the first row that is wrong.
pub(super) fn check_pulled(clock: u64, wanted: &WantedRows, values: &[f32]) -> Result<(), String> {
    // A pull that was given up may have left more.
    if values.len() < wanted.ids.len() {
        let (found, expected) = (values.len(), wanted.ids.len());
        return Err(format!("{found} of {expected} rows have come"));
    }
    for (id, value) in wanted.ids.iter().zip(values) {
        let step = id.checked_sub(VISITS as u64);
        let right = if step.is_some_and(|step| step < clock) {
            -1.0
        } else {
            0.0
        };
        if *value != right {
            return Err(format!("{} has {value}, and must have {right}", name(*id)));
        }
    }
    Ok(())
}

/// Checks all rows against the dense values that belong to them. Rows that are absent have not moved.
///
/// # Errors
/// Describes the first row that is wrong.
pub(super) fn check(rows: &BTreeMap<u64, f32>, values: &Values) -> Result<(), String> {
    let counters = values.samples().chain(values.steps());
    for (id, times) in (0..).zip(counters) {
        let value = rows.get(&id).copied().unwrap_or(0.0);
        let right = match times {
            0.0 => value == 0.0,
            _ if id < VISITS as u64 => is_part(-value),
            _ => value == -1.0,
        };
        if !right {
            let row = name(id);
            return Err(format!("{row} has {value}, and counts {times} times"));
        }
    }
    Ok(())
}

/// Returns whether a number is the part of one sample in a step.
fn is_part(value: f32) -> bool {
    let samples = (1.0 / value).round();
    (1.0..=MOST_SAMPLES).contains(&samples) && (1.0 / value - samples).abs() < CLOSE
}

fn name(id: u64) -> String {
    match id.checked_sub(VISITS as u64) {
        Some(step) => format!("the row of step {step}"),
        None => format!("the row of sample {id}"),
    }
}

/// Returns rows in the order of the hashes of their ids.
fn rows_of(ids: impl Iterator<Item = u64>) -> Arc<WantedRows> {
    let mut ids: Vec<u64> = ids.collect();
    ids.sort_unstable_by_key(|id| hash(*id));
    Arc::new(WantedRows { table: 0, ids })
}
