//! The rows of worlds with servers. Each sample of each epoch has a row, and so has each step. A step subtracts one from its own row, and
//! 1/n from the row of each of its n samples. The dense variables say which samples and steps count, and in which step a sample does.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use replica::Positions;
use shared_proto::job::Sgd;
use shared_proto::step::{RowGradients, WantedRows};
use shared_proto::table::hash::hash;
use shared_proto::table::{RowOptimizer, TableSpec};

use super::values::{CLOSE, VISITS, Values, visits};

/// The number of the table's buckets: more than shards, so that a shard has two.
const BUCKETS: u32 = 3;

/// The ids of all rows: those of samples are their numbers, those of steps follow.
static ALL: LazyLock<Arc<WantedRows>> = LazyLock::new(|| rows_of(0..2 * VISITS as u64));

/// Returns the table.
pub(super) fn spec() -> TableSpec {
    TableSpec {
        name: "visits".to_owned(),
        dimension: 1,
        buckets: BUCKETS,
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

/// Checks the rows that a batch has pulled for the step after `clock`: those of all earlier steps have moved once, those of other steps and of
/// the batch's samples have not.
///
/// # Errors
/// Describes the first row that is wrong.
pub(super) fn check_pulled(clock: u64, wanted: &WantedRows, values: &[f32]) -> Result<(), String> {
    for (id, value) in wanted.ids.iter().zip(all_of(wanted, values)?) {
        let is_before = step_of(*id).is_some_and(|step| step < clock);
        let right = if is_before { -1.0 } else { 0.0 };
        if *value != right {
            return Err(format!("{} has {value}, and must have {right}", name(*id)));
        }
    }
    Ok(())
}

/// Returns the values of rows that were pulled.
///
/// # Errors
/// If there are more or fewer values than rows.
pub(super) fn all_of<'a>(wanted: &WantedRows, values: &'a [f32]) -> Result<&'a [f32], String> {
    let (found, expected) = (values.len(), wanted.ids.len());
    match found == expected {
        true => Ok(values),
        false => Err(format!("{found} have come, and {expected} were wanted")),
    }
}

/// Checks all rows against the dense values that belong to them. Rows that are absent have not moved.
///
/// # Errors
/// Describes the first row that is wrong.
pub(super) fn check(rows: &BTreeMap<u64, f32>, values: &Values) -> Result<(), String> {
    let right: Vec<f32> = values.parts().into_iter().chain(values.steps()).collect();
    if let Some(id) = rows.keys().find(|id| **id >= right.len() as u64) {
        return Err(format!("row {id} is of no sample and no step"));
    }
    for (id, right) in (0..).zip(right) {
        let value = rows.get(&id).copied().unwrap_or(0.0);
        if (value + right).abs() > CLOSE {
            return Err(format!("{} has {value}, and must have -{right}", name(id)));
        }
    }
    Ok(())
}

/// Returns the step of a row; none if the row is of a sample.
fn step_of(id: u64) -> Option<u64> {
    id.checked_sub(VISITS as u64)
}

fn name(id: u64) -> String {
    match step_of(id) {
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
