//! The parameters of a table's columns, computed from the training samples as they pass by.

use std::collections::BTreeSet;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use shared_proto::job::{ColumnType, Transform};

use super::fitted::{FORM, Fitted, FittedColumn, Rule, log};
use super::table::{Cells, Table};
use super::target::Target;

/// The buckets of a number column, unless the job says otherwise.
const BUCKETS: u64 = 10;

/// The numbers by which the edges of buckets are chosen. Of more, a random sample of this size is taken.
const NUMBERS: usize = 1 << 22;

/// Columns that are being fitted.
#[derive(Default)]
pub(super) struct Fitting {
    columns: Vec<Column>,
}

/// A column that is being fitted.
struct Column {
    name: String,
    date: bool,
    seen: Seen,
}

/// The part of a column's cells that its rule depends on.
enum Seen {
    /// A rule that depends on no cell.
    Nothing(Rule),
    Standardise(Moments),
    Log(Moments),
    Bucket {
        buckets: u64,
        numbers: Box<Reservoir>,
    },
    Vocabulary(BTreeSet<String>),
}

impl Fitting {
    /// Adds the samples of a table with these numbers. All tables have the same columns.
    pub(super) fn add(&mut self, table: &Table, training: &[u32]) {
        if self.columns.is_empty() {
            let column = |(name, kind, _): (&str, &ColumnType, &Cells)| Column {
                name: name.to_owned(),
                date: matches!(kind, ColumnType::Date { .. }),
                seen: Seen::nothing(kind),
            };
            self.columns = table.inputs().map(column).collect();
        }
        for (column, (_, _, cells)) in self.columns.iter_mut().zip(table.inputs()) {
            column.seen.add(cells, training);
        }
    }

    /// Returns what the columns are fitted to.
    pub(super) fn finish(self, target: Target) -> Fitted {
        let column = |column: Column| FittedColumn {
            name: column.name,
            date: column.date,
            rule: column.seen.rule(),
        };
        Fitted {
            form: FORM,
            columns: self.columns.into_iter().map(column).collect(),
            features: None,
            target,
        }
    }
}

impl Seen {
    /// Returns the state before the first cell of a column of this type.
    fn nothing(kind: &ColumnType) -> Self {
        match kind {
            ColumnType::Number { transform, buckets } | ColumnType::Date { transform, buckets } => {
                match transform {
                    Transform::None => Self::Nothing(Rule::Number {}),
                    Transform::Standardise => Self::Standardise(Moments::default()),
                    Transform::Log => Self::Log(Moments::default()),
                    Transform::Bucket => Self::Bucket {
                        buckets: buckets.unwrap_or(BUCKETS),
                        numbers: Box::new(Reservoir::new()),
                    },
                }
            }
            ColumnType::Category { buckets: Some(n) } => Self::Nothing(Rule::Hash { buckets: *n }),
            ColumnType::Id {
                hash,
                seed,
                separator,
            } => Self::Nothing(Rule::Id {
                seed: hash.then_some(*seed),
                separator: separator.clone(),
            }),
            ColumnType::Category { buckets: None } => Self::Vocabulary(BTreeSet::new()),
            ColumnType::Ignore {} => Self::Nothing(Rule::Number {}),
        }
    }

    fn add(&mut self, cells: &Cells, training: &[u32]) {
        match (self, cells) {
            (Self::Standardise(moments), Cells::Numbers(cells)) => {
                for sample in training {
                    moments.add(cells[*sample as usize]);
                }
            }
            (Self::Log(moments), Cells::Numbers(cells)) => {
                for sample in training {
                    moments.add(log(cells[*sample as usize]));
                }
            }
            (Self::Bucket { numbers, .. }, Cells::Numbers(cells)) => {
                for sample in training {
                    numbers.add(cells[*sample as usize]);
                }
            }
            (Self::Vocabulary(known), Cells::Texts(cells)) => {
                let mut occurs = vec![false; cells.texts.len()];
                for sample in training {
                    occurs[cells.samples[*sample as usize] as usize] = true;
                }
                for ((text, _), _) in cells.texts.iter().zip(occurs).filter(|(_, occurs)| *occurs) {
                    if !known.contains(text) {
                        known.insert(text.clone());
                    }
                }
            }
            _ => {}
        }
    }

    fn rule(self) -> Rule {
        match self {
            Self::Nothing(rule) => rule,
            Self::Standardise(moments) => {
                let (mean, deviation) = moments.finish();
                Rule::Standardise { mean, deviation }
            }
            Self::Log(moments) => {
                let (mean, deviation) = moments.finish();
                Rule::Log { mean, deviation }
            }
            Self::Bucket { buckets, numbers } => Rule::Bucket {
                edges: edges(numbers.numbers, buckets),
            },
            Self::Vocabulary(texts) => Rule::Vocabulary {
                texts: texts.into_iter().collect(),
            },
        }
    }
}

/// Mean and variance of numbers, updated number by number (Welford, "Note on a Method for Calculating Corrected Sums of
/// Squares and Products", 1962).
#[derive(Default)]
struct Moments {
    count: u64,
    mean: f64,
    /// The sum of the squared differences from the mean.
    squares: f64,
}

impl Moments {
    fn add(&mut self, number: f64) {
        self.count += 1;
        let before = number - self.mean;
        self.mean += before / self.count as f64;
        self.squares += before * (number - self.mean);
    }

    /// Returns the mean and the standard deviation. The deviation is 1 if all numbers are equal, or if the squares of their
    /// differences underflow to 0.
    fn finish(self) -> (f64, f64) {
        match (self.squares / self.count.max(1) as f64).sqrt() {
            0.0 => (self.mean, 1.0),
            deviation => (self.mean, deviation),
        }
    }
}

/// Numbers, or a random sample of them if there are many (Vitter, "Random Sampling with a Reservoir", 1985, algorithm R).
/// The random choices are always the same.
struct Reservoir {
    numbers: Vec<f64>,
    seen: u64,
    random: ChaCha8Rng,
}

impl Reservoir {
    fn new() -> Self {
        Self {
            numbers: Vec::new(),
            seen: 0,
            random: ChaCha8Rng::seed_from_u64(0),
        }
    }

    fn add(&mut self, number: f64) {
        self.seen += 1;
        if self.numbers.len() < NUMBERS {
            self.numbers.push(number);
            return;
        }
        let place = self.random.random_range(0..self.seen);
        if let Some(kept) = self.numbers.get_mut(place as usize) {
            *kept = number;
        }
    }
}

/// Returns the edges between so many buckets of about equally many numbers; fewer where numbers occur often.
fn edges(mut numbers: Vec<f64>, buckets: u64) -> Vec<f64> {
    numbers.sort_unstable_by(f64::total_cmp);
    let count = numbers.len() as u64;
    // More buckets than numbers would have no numbers between them.
    let buckets = buckets.min(count);
    let edge = |bucket: u64| {
        numbers[(u128::from(bucket) * u128::from(count) / u128::from(buckets)) as usize]
    };
    let mut edges: Vec<f64> = (1..buckets).map(edge).collect();
    edges.dedup();
    // An edge at the lowest number has nothing below it.
    edges.retain(|edge| *edge > numbers[0]);
    edges
}
