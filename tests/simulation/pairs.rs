//! A table with admission and eviction. Two pushes share the id of a pair, which gets a row at its second sight (the
//! second update that contains it). One more id is in all pushes. The rows with the oldest last update are evicted.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use shared_proto::job::Sgd;
use shared_proto::step::WantedRows;
use shared_proto::table::hash::hash;
use shared_proto::table::{
    Admission, Age, Capacity, Eviction, EvictionOrder, RowOptimizer, TableSpec,
};

/// The number of pairs.
pub(crate) const PAIRS: usize = 2048;

/// The id that all pushes share. The id of a pair is its number.
const SHARED: u64 = PAIRS as u64;

/// The most rows of the table, and the rows that remain when it has had more.
const MOST: usize = 32;
const KEPT: usize = 30;

/// The updates after which a row is evicted, and the updates from one search for such rows to the next.
const AGE: u64 = 24;
const SEARCH: u32 = 4;

/// The presence of an update in the contents of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Applied {
    /// The update must be there. It was acknowledged with this version.
    Yes(u64),
    No,
    Maybe,
}

/// The reason for which rows are evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Evicts {
    /// The table has too many rows.
    #[default]
    Surplus,
    /// Rows have had no gradient for some updates.
    Aged,
}

/// Returns the table.
pub(crate) fn spec(evicts: Evicts) -> TableSpec {
    let eviction = match evicts {
        Evicts::Surplus => Eviction {
            capacity: Some(Capacity {
                rows: MOST as u64,
                order: EvictionOrder::Oldest,
            }),
            ..Eviction::default()
        },
        Evicts::Aged => Eviction {
            age: Some(Age::Updates(AGE as u32)),
            search_interval: SEARCH,
            ..Eviction::default()
        },
    };
    TableSpec {
        name: "pairs".to_owned(),
        dimension: 1,
        buckets: 1,
        optimizer: RowOptimizer::Sgd(Sgd {
            learning_rate: 1.0,
            ..Sgd::default()
        }),
        admission: Admission::Sights {
            count: 2,
            width: 1 << 12,
        },
        eviction,
        ..TableSpec::default()
    }
}

/// All ids of the table, as a step wants them.
pub(crate) static WANTED: LazyLock<Arc<WantedRows>> = LazyLock::new(|| {
    let mut ids: Vec<u64> = (0..=SHARED).collect();
    ids.sort_unstable_by_key(|id| hash(*id));
    Arc::new(WantedRows { table: 1, ids })
});

/// Returns the ids of a push.
pub(crate) fn of_push(push: usize) -> Vec<u64> {
    let mut ids = vec![push as u64 / 2, SHARED];
    ids.sort_unstable_by_key(|id| hash(*id));
    ids
}

/// Returns the values of all pairs, and then of the shared row, of rows that were pulled.
pub(crate) fn pulled(values: &[f32]) -> Vec<f32> {
    let mut all = vec![0.0; PAIRS + 1];
    for (id, value) in WANTED.ids.iter().zip(values) {
        all[*id as usize] = *value;
    }
    all
}

/// Returns the values of all pairs, and then of the shared row, of rows that were saved.
///
/// # Errors
/// If a row is there that no push has changed, or of an id of no push.
pub(crate) fn saved(rows: &[(u64, f32)]) -> Result<Vec<f32>, String> {
    let mut all = vec![0.0; PAIRS + 1];
    for (id, value) in rows {
        match all.get_mut(*id as usize) {
            Some(_) if *value == 0.0 => {
                return Err(format!("row {id} is there, though no push has changed it"));
            }
            Some(place) => *place = *value,
            None => {
                return Err(format!(
                    "row {id} is there, of which no push has a gradient"
                ));
            }
        }
    }
    Ok(all)
}

/// Checks rows that were pulled, or evaluated in sync mode. `weights` has the values by which each push has changed another
/// block: in sync mode all blocks have the same updates.
///
/// # Errors
/// If a row holds another value than its pushes can give it.
pub(crate) fn check_pulled(
    evicts: Evicts,
    rows: &[f32],
    sync: bool,
    weights: &[f32],
) -> Result<(), String> {
    for (pair, value) in rows[..PAIRS].iter().enumerate() {
        let of = &weights[2 * pair..2 * pair + 2];
        let right = match sync {
            _ if *value == 0.0 => true,
            // The row has the gradient of the pair's second step.
            true => of.contains(value) && !of.contains(&0.0),
            false => *value == -1.0,
        };
        if !right {
            return Err(format!(
                "the row of pair {pair} holds {value}, where its pushes count {of:?}"
            ));
        }
    }
    if sync {
        let steps = -weights.iter().sum::<f32>();
        check_shared(rows, [steps.round() as usize; 2])?;
    }
    check_count(evicts, rows)
}

/// Checks the rows of a model or checkpoint in modes other than sync. `run` has the pushes of the run, and `base` the rows at its
/// beginning.
pub(crate) fn check(
    evicts: Evicts,
    rows: &[f32],
    base: Option<&[f32]>,
    run: &BTreeMap<usize, Applied>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    let of = |push: usize| run.get(&push).copied().unwrap_or(Applied::No);
    let known = |pair: usize| [of(2 * pair), of(2 * pair + 1)];
    // Each pair with two pushes in this run, by the version of the second.
    let (mut present, mut evicted) = (BTreeMap::new(), BTreeMap::new());
    for (pair, value) in rows[..PAIRS].iter().enumerate() {
        let pushes = known(pair);
        let is_there = *value != 0.0;
        let was_there = base.is_some_and(|base| base[pair] != 0.0);
        // A pair may have had its first push in an earlier run.
        let seen = base.is_some() && pushes.iter().any(|push| *push != Applied::No);
        if is_there && !was_there && !seen && pushes.contains(&Applied::No) {
            wrong.push(format!("pair {pair} has a row after the pushes {pushes:?}"));
        }
        if let [Applied::Yes(one), Applied::Yes(other)] = pushes {
            let by_version = if is_there { &mut present } else { &mut evicted };
            by_version.insert(one.max(other), pair);
        }
    }
    check_evicted(evicts, count(rows), [&present, &evicted], run, &mut wrong);
    let times = |which: fn(&Applied) -> bool| run.values().filter(|push| which(push)).count();
    let (certain, possible) = (
        times(|push| matches!(push, Applied::Yes(_))),
        times(|push| *push != Applied::No),
    );
    let [least, most] = base.map_or([0, 0], updates);
    wrong.extend(check_shared(rows, [least + certain, most + possible]).err());
    wrong.extend(check_count(evicts, rows).err());
    wrong
}

/// Checks that the table has evicted the oldest rows, and no more than it should. `present` and `evicted` have pairs by the version of
/// their last update, and `rows` is the number of rows that are there.
fn check_evicted(
    evicts: Evicts,
    rows: usize,
    [present, evicted]: [&BTreeMap<u64, usize>; 2],
    run: &BTreeMap<usize, Applied>,
    wrong: &mut Vec<String>,
) {
    if let (Some((last, pair)), Some((first, other))) =
        (evicted.last_key_value(), present.first_key_value())
        && last > first
    {
        wrong.push(format!(
            "pair {pair} of version {last} has no row, and pair {other} of version {first} has one"
        ));
    }
    let versions = run.values().filter_map(|push| match push {
        Applied::Yes(version) => Some(*version),
        _ => None,
    });
    let newest = versions.max().unwrap_or_default();
    match evicts {
        Evicts::Surplus if !evicted.is_empty() && rows < KEPT => wrong.push(format!(
            "pairs {:?} have no rows, though only {} rows are there",
            evicted.values(),
            rows
        )),
        Evicts::Aged => {
            // Updates that were not acknowledged may have made the table older than its newest known version.
            let unknown = run.values().filter(|push| **push == Applied::Maybe).count() as u64;
            let young = evicted
                .iter()
                .filter(|(last, _)| *last + AGE > newest + unknown);
            wrong.extend(young.map(|(last, pair)| {
                format!("pair {pair} of version {last} has no row at version {newest}")
            }));
            let old = present
                .iter()
                .filter(|(last, _)| *last + AGE + u64::from(SEARCH) < newest);
            wrong.extend(old.map(|(last, pair)| {
                format!("pair {pair} of version {last} still has a row at version {newest}")
            }));
        }
        Evicts::Surplus => {}
    }
}

/// Returns the least and the most updates that the shared row shows.
fn updates(rows: &[f32]) -> [usize; 2] {
    match rows[PAIRS] {
        0.0 => [0, 1],
        value => [(1.0 - value).round() as usize; 2],
    }
}

/// Checks that the shared row has had so many updates. It was created by the second one.
fn check_shared(rows: &[f32], [least, most]: [usize; 2]) -> Result<(), String> {
    let [fewest, highest] = updates(rows);
    match fewest <= most && least <= highest {
        true => Ok(()),
        false => Err(format!(
            "the row that all pairs share holds {}, after {least} to {most} updates",
            rows[PAIRS]
        )),
    }
}

/// Checks that a table of limited size has no more rows.
fn check_count(evicts: Evicts, rows: &[f32]) -> Result<(), String> {
    match count(rows) {
        count if count > MOST && evicts == Evicts::Surplus => {
            Err(format!("there are {count} rows of pairs, more than {MOST}"))
        }
        _ => Ok(()),
    }
}

fn count(rows: &[f32]) -> usize {
    rows.iter().filter(|value| **value != 0.0).count()
}
