//! `flambeau table NAME top` and `histogram`: the rows of a table in a checkpoint, by size.

use daemon::outln;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use checkpoint::{Manifest, Store, load};
use clap::{Args, ValueEnum};
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use shared_proto::blocks::BlockId;
use shared_proto::payload;
use shared_proto::table::{SavedRows, ids_of_bytes};

use crate::checkpoint::table_of;
use crate::error::CommandError;

/// The width of the longest bar of a histogram.
const BAR: u64 = 40;

#[derive(Args)]
pub(super) struct Top {
    #[command(flatten)]
    of: Of,
    /// The order of the rows.
    #[arg(long, value_enum, default_value_t = By::Norm)]
    by: By,
    /// The number of rows.
    #[arg(long, short = 'n', default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rows: u32,
}

#[derive(Args)]
pub(super) struct Histogram {
    #[command(flatten)]
    of: Of,
}

/// The checkpoint that is read.
#[derive(Args)]
struct Of {
    /// A run directory, a folder of checkpoints, a single checkpoint, or the URL of one of these.
    location: String,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// An order of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    /// The length of the vector of a row's values.
    Norm,
    /// The number of a row's updates, which a table counts if it evicts rows.
    Updates,
}

/// A row of a checkpoint.
struct Row {
    id: u64,
    norm: f64,
    /// The number of the row's updates; `None` if the table does not count them.
    updates: Option<u32>,
}

impl Of {
    /// Calls `each` with every row of a table in the checkpoint. Returns the checkpoint.
    async fn rows(
        &self,
        table: &str,
        mut each: impl FnMut(Row) -> Result<(), CommandError>,
    ) -> Result<(Store, Manifest), CommandError> {
        let (store, manifest) = load(&self.location).await?;
        let (variable, spec) = table_of(&store, &manifest, table)?;
        let take = |_, saved: SavedRows| rows(&saved, spec.dimension).try_for_each(&mut each);
        let wanted = |id: BlockId| id.variable == variable;
        store.read_rows(&manifest, wanted, take, |_| {}).await?;
        Ok((store, manifest))
    }
}

/// Returns the rows of a bucket.
fn rows(saved: &SavedRows, dimension: u32) -> impl Iterator<Item = Row> {
    let ids = ids_of_bytes(&saved.ids);
    let numbers = payload::elements(&saved.numbers);
    let width = numbers.len().checked_div(ids.len()).unwrap_or(0).max(1);
    let (histories, _) = saved.history.as_chunks::<8>();
    let rows = ids.into_iter().zip(numbers.chunks_exact(width));
    rows.enumerate().map(move |(place, (id, numbers))| {
        // The optimizer's state follows the values of a row.
        let values = &numbers[..width.min(dimension as usize)];
        let squares = values.iter().map(|value| f64::from(value.get()).powi(2));
        // The time of the last update, then the number of updates.
        let updates = histories
            .get(place)
            .map(|[.., a, b, c, d]| u32::from_le_bytes([*a, *b, *c, *d]));
        Row {
            id,
            norm: squares.sum::<f64>().sqrt(),
            updates,
        }
    })
}

impl Top {
    pub(super) async fn run(&self, table: &str) -> Result<(), CommandError> {
        // The smallest of the rows that are kept comes first. The bits of numbers that are not negative are in their order.
        let mut kept: BinaryHeap<Reverse<(u64, u64, Option<u32>)>> = BinaryHeap::new();
        let each = |row: Row| {
            let key = match (self.by, row.updates) {
                (By::Norm, _) => row.norm.to_bits(),
                (By::Updates, Some(updates)) => u64::from(updates),
                (By::Updates, None) => {
                    return Err(CommandError::NoUpdates {
                        table: table.to_owned(),
                    });
                }
            };
            kept.push(Reverse((key, row.id, row.updates)));
            if kept.len() > self.rows as usize {
                kept.pop();
            }
            Ok(())
        };
        let (store, manifest) = self.of.rows(table, each).await?;
        // Largest first.
        let kept = kept.into_sorted_vec().into_iter().map(|Reverse(row)| row);
        if self.of.json {
            let row = |(key, id, updates): (u64, u64, Option<u32>)| match self.by {
                By::Norm => json!({ "id": id, "norm": f64::from_bits(key), "updates": updates }),
                By::Updates => json!({ "id": id, "updates": updates }),
            };
            let rows: Vec<Value> = kept.map(row).collect();
            let of = store.checkpoint_location(manifest.number);
            outln!(
                "{}",
                json!({ "table": table, "checkpoint": of, "rows": rows })
            );
            return Ok(());
        }
        let mut shown = Table::new();
        let name = match self.by {
            By::Norm => "norm",
            By::Updates => "updates",
        };
        shown.load_preset(presets::NOTHING).set_header(["id", name]);
        for (key, id, _) in kept {
            let figure = match self.by {
                By::Norm => format!("{:.4}", f64::from_bits(key)),
                By::Updates => key.to_string(),
            };
            shown.add_row([id.to_string(), figure]);
        }
        outln!("{}", shown.trim_fmt());
        Ok(())
    }
}

/// The number of rows by their norms.
#[derive(Default)]
struct Counts {
    rows: u64,
    /// The number of rows whose values are all zero.
    zeros: u64,
    /// The number of rows whose norm is NaN or infinite.
    not_finite: u64,
    sum: f64,
    largest: f64,
    /// By exponent: the number of rows with a norm from this power of two up to the next.
    powers: BTreeMap<i32, u64>,
}

impl Counts {
    fn add(&mut self, norm: f64) {
        self.rows += 1;
        if !norm.is_finite() {
            self.not_finite += 1;
            return;
        }
        self.sum += norm;
        self.largest = self.largest.max(norm);
        match norm {
            0.0 => self.zeros += 1,
            norm => *self.powers.entry(norm.log2().floor() as i32).or_default() += 1,
        }
    }

    fn mean(&self) -> f64 {
        self.sum / (self.rows - self.not_finite).max(1) as f64
    }

    fn json(&self) -> Value {
        let bin = |(power, rows): (&i32, &u64)| {
            let from = f64::from(*power).exp2();
            json!({ "from": from, "to": 2.0 * from, "rows": rows })
        };
        json!({
            "rows": self.rows,
            "zeros": self.zeros,
            "not_finite": self.not_finite,
            "mean": self.mean(),
            "largest": self.largest,
            "bins": self.powers.iter().map(bin).collect::<Vec<Value>>(),
        })
    }

    fn shown(&self) -> Table {
        let mut table = Table::new();
        table
            .load_preset(presets::NOTHING)
            .set_header(["norm", "rows", ""]);
        let most = self.powers.values().chain([&self.zeros]).max();
        let most = most.copied().unwrap_or(0).max(1);
        let mut add = |norm: String, rows: u64| {
            let bar = "#".repeat((rows * BAR).div_ceil(most) as usize);
            table.add_row([norm, rows.to_string(), bar]);
        };
        if self.zeros > 0 {
            add("0".to_owned(), self.zeros);
        }
        if let (Some((first, _)), Some((last, _))) =
            (self.powers.first_key_value(), self.powers.last_key_value())
        {
            for power in *first..=*last {
                let from = f64::from(power).exp2();
                let rows = self.powers.get(&power).copied().unwrap_or(0);
                add(format!("{from:.2e} to {:.2e}", 2.0 * from), rows);
            }
        }
        if self.not_finite > 0 {
            add("not finite".to_owned(), self.not_finite);
        }
        table
    }
}

impl Histogram {
    pub(super) async fn run(&self, table: &str) -> Result<(), CommandError> {
        let mut counts = Counts::default();
        let each = |row: Row| {
            counts.add(row.norm);
            Ok(())
        };
        let (store, manifest) = self.of.rows(table, each).await?;
        let of = store.checkpoint_location(manifest.number);
        if self.of.json {
            let mut value = counts.json();
            value["table"] = table.into();
            value["checkpoint"] = of.into();
            outln!("{value}");
            return Ok(());
        }
        outln!("{}", counts.shown().trim_fmt());
        let (rows, mean, largest) = (counts.rows, counts.mean(), counts.largest);
        outln!("{rows} rows of {of}; mean norm {mean:.4}, largest {largest:.4}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::table::ids_to_bytes;

    #[test]
    fn rows_have_norms_and_updates() {
        let numbers: [f32; 6] = [3.0, 4.0, 99.0, 0.0, 0.0, 98.0];
        let history: [u32; 4] = [1, 7, 2, 8];
        let saved = SavedRows {
            ids: ids_to_bytes(&[5, u64::MAX]),
            numbers: numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
            history: history.iter().flat_map(|x| x.to_le_bytes()).collect(),
            ..SavedRows::default()
        };
        let found: Vec<_> = rows(&saved, 2)
            .map(|row| (row.id, row.norm, row.updates))
            .collect();
        assert_eq!(found, [(5, 5.0, Some(7)), (u64::MAX, 0.0, Some(8))]);
        let saved = SavedRows {
            history: bytes::Bytes::new(),
            ..saved
        };
        assert!(rows(&saved, 2).all(|row| row.updates.is_none()));
    }

    #[test]
    fn a_histogram_counts_each_row_once() {
        let mut counts = Counts::default();
        for norm in [0.0, 0.0, 1.0, 1.99, 2.0, 0.25, f64::NAN] {
            counts.add(norm);
        }
        let value = counts.json();
        assert_eq!(value["bins"].as_array().unwrap().len(), 3);
        assert_eq!(
            value["bins"][1],
            json!({ "from": 1.0, "to": 2.0, "rows": 2 })
        );
        assert_eq!(
            (counts.zeros, counts.not_finite, counts.largest),
            (2, 1, 2.0)
        );
        let shown = counts.shown().trim_fmt();
        // The powers in between without rows are shown, too.
        assert_eq!(shown.lines().count(), 1 + 1 + 4 + 1, "{shown}");
    }
}
