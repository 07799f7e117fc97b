//! The parameters of a table's columns, computed from the training samples as they pass by.

use std::collections::BTreeSet;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use shared_proto::job::{ColumnType, Missing, MissingRule, Transform};

use super::fitted::{FORM, Fitted, FittedColumn, Gap, Rule, log};
use super::moments::Moments;
use super::target::Target;
use crate::columns::cell::{known, number_text};
use crate::columns::table::{Cells, Table};
use crate::columns::texts::Texts;

/// The default number of buckets of a number column.
const BUCKETS: u64 = 10;

/// The most numbers from which the edges of buckets or a median are computed. If there are more, a random sample of
/// this size is used.
const NUMBERS: usize = 1 << 22;

/// Columns that are being fitted.
#[derive(Default)]
pub(crate) struct Fitting {
    columns: Vec<Column>,
}

/// A column that is being fitted.
struct Column {
    name: String,
    date: bool,
    seen: Seen,
    gaps: Option<GapFitting>,
}

/// The replacement for the missing numbers of a column, while it is being fitted.
struct GapFitting {
    missing: Missing,
    moments: Moments,
    /// The numbers whose median is the replacement; `None` for other rules.
    numbers: Option<Box<Reservoir>>,
}

impl GapFitting {
    fn new(missing: Missing) -> Self {
        let is_median = missing == Missing::Rule(MissingRule::Median);
        Self {
            missing,
            moments: Moments::default(),
            numbers: is_median.then(|| Box::new(Reservoir::new())),
        }
    }

    fn add(&mut self, cells: &Cells, training: &[u32]) {
        let Cells::Numbers(cells) = cells else {
            return;
        };
        for number in present(cells, training) {
            self.moments.add(number);
            if let Some(numbers) = &mut self.numbers {
                numbers.add(number);
            }
        }
    }

    fn finish(self) -> Gap {
        let value = match self.missing {
            Missing::Number(number) => number,
            Missing::Rule(MissingRule::Zero) => 0.0,
            Missing::Rule(MissingRule::Mean | MissingRule::Indicator) => self.moments.mean(),
            Missing::Rule(MissingRule::Median) => median(
                self.numbers
                    .map_or_else(Vec::new, |numbers| numbers.numbers),
            ),
        };
        Gap {
            value,
            indicator: self.missing == Missing::Rule(MissingRule::Indicator),
        }
    }
}

/// Returns the numbers of these samples that are not missing.
fn present(cells: &[f64], samples: &[u32]) -> impl Iterator<Item = f64> {
    let numbers = samples.iter().map(|sample| cells[*sample as usize]);
    numbers.filter(|number| !number.is_nan())
}

/// Returns the median, which is the mean of the two middle numbers if their count is even; 0 if there are no numbers.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    match numbers.len() {
        0 => 0.0,
        count if count % 2 == 1 => numbers[middle],
        _ => f64::midpoint(numbers[middle - 1], numbers[middle]),
    }
}

/// What is known of a column's cells so far, as far as the column's rule depends on them.
enum Seen {
    /// A rule that depends on no cell.
    Nothing(Rule),
    Standardise(Moments),
    Log(Moments),
    Bucket {
        buckets: u64,
        numbers: Box<Reservoir>,
    },
    /// A rule for texts, and whether all texts so far were numbers.
    Texts(TextRule, Numbers),
    Vocabulary(BTreeSet<String>),
}

/// A rule for texts that depends only on whether all texts are numbers.
enum TextRule {
    Hash {
        buckets: u64,
    },
    Id {
        seed: Option<u64>,
        separator: Option<String>,
    },
}

/// Whether some texts are numbers, and whether some are not. Empty texts do not count.
#[derive(Default)]
struct Numbers {
    some_are: bool,
    some_are_not: bool,
}

impl Numbers {
    fn add(&mut self, text: &str) {
        match (text.is_empty(), number_text(text)) {
            (true, _) => {}
            (_, Some(_)) => self.some_are = true,
            (_, None) => self.some_are_not = true,
        }
    }

    fn all_are(&self) -> bool {
        self.some_are && !self.some_are_not
    }
}

impl Fitting {
    /// Adds the samples of a table at the indices in `training`. All tables have the same columns.
    pub(crate) fn add(&mut self, table: &Table, training: &[u32]) {
        if self.columns.is_empty() {
            let column = |(name, kind, _): (&str, &ColumnType, &Cells)| Column {
                name: name.to_owned(),
                date: matches!(kind, ColumnType::Date { .. }),
                seen: Seen::nothing(kind),
                gaps: kind.missing().map(GapFitting::new),
            };
            self.columns = table.inputs().map(column).collect();
        }
        for (column, (_, _, cells)) in self.columns.iter_mut().zip(table.inputs()) {
            column.seen.add(cells, training);
            if let Some(gaps) = &mut column.gaps {
                gaps.add(cells, training);
            }
        }
    }

    /// Returns the fitted parameters of the columns, together with the target.
    pub(crate) fn finish(self, target: Target) -> Fitted {
        let column = |column: Column| FittedColumn {
            name: column.name,
            date: column.date,
            rule: column.seen.rule(),
            gap: column.gaps.map(GapFitting::finish),
        };
        Fitted {
            form: FORM,
            columns: self.columns.into_iter().map(column).collect(),
            features: None,
            pictures: None,
            target,
        }
    }
}

impl Seen {
    /// Returns the state before the first cell of a column of this type.
    fn nothing(kind: &ColumnType) -> Self {
        match kind {
            ColumnType::Number {
                transform, buckets, ..
            }
            | ColumnType::Date {
                transform, buckets, ..
            } => match transform {
                Transform::None => Self::Nothing(Rule::Number {}),
                Transform::Standardise => Self::Standardise(Moments::default()),
                Transform::Log => Self::Log(Moments::default()),
                Transform::Bucket => Self::Bucket {
                    buckets: buckets.unwrap_or(BUCKETS),
                    numbers: Box::new(Reservoir::new()),
                },
            },
            ColumnType::Category { buckets: Some(n) } => {
                Self::Texts(TextRule::Hash { buckets: *n }, Numbers::default())
            }
            ColumnType::Id {
                hash,
                seed,
                separator,
            } => {
                let rule = TextRule::Id {
                    seed: hash.then_some(*seed),
                    separator: separator.clone(),
                };
                Self::Texts(rule, Numbers::default())
            }
            ColumnType::Category { buckets: None } => Self::Vocabulary(BTreeSet::new()),
            ColumnType::Ignore {} => Self::Nothing(Rule::Number {}),
        }
    }

    fn add(&mut self, cells: &Cells, training: &[u32]) {
        match (self, cells) {
            (Self::Standardise(moments), Cells::Numbers(cells)) => {
                present(cells, training).for_each(|number| moments.add(number));
            }
            (Self::Log(moments), Cells::Numbers(cells)) => {
                present(cells, training).for_each(|number| moments.add(log(number)));
            }
            (Self::Bucket { numbers, .. }, Cells::Numbers(cells)) => {
                present(cells, training).for_each(|number| numbers.add(number));
            }
            (Self::Vocabulary(known), Cells::Texts(cells)) => {
                for text in occurring(cells, training) {
                    if !known.contains(text) {
                        known.insert(text.to_owned());
                    }
                }
            }
            (Self::Texts(_, numbers), Cells::Lists(lists)) => {
                let elements = training.iter().flat_map(|s| lists.elements(*s as usize));
                let elements: Vec<u32> = elements.map(|element| element as u32).collect();
                for text in occurring(&lists.texts, &elements) {
                    if numbers.some_are_not {
                        break;
                    }
                    numbers.add(text);
                }
            }
            (Self::Texts(rule, numbers), Cells::Texts(cells)) => {
                for text in occurring(cells, training) {
                    // Once a text is no number, nothing more is learned.
                    if numbers.some_are_not {
                        break;
                    }
                    match rule.separator() {
                        Some(separator) => {
                            text.split(separator)
                                .for_each(|part| numbers.add(part.trim()));
                        }
                        None => numbers.add(text),
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
            Self::Texts(TextRule::Hash { buckets }, numbers) => Rule::Hash {
                buckets,
                numbers: numbers.all_are(),
            },
            Self::Texts(TextRule::Id { seed, separator }, numbers) => Rule::Id {
                seed,
                separator,
                numbers: numbers.all_are(),
            },
            Self::Vocabulary(texts) => {
                let mut numbers = Numbers::default();
                texts.iter().for_each(|text| numbers.add(text));
                let numbers = numbers.all_are();
                let texts = texts.iter().map(|text| known(text, numbers).into_owned());
                let texts: BTreeSet<String> = texts.collect();
                Rule::Vocabulary {
                    texts: texts.into_iter().collect(),
                    numbers,
                }
            }
        }
    }
}

impl TextRule {
    /// Returns the separator of the ids in a cell; `None` if a cell has a single text.
    fn separator(&self) -> Option<&str> {
        match self {
            Self::Id { separator, .. } => separator.as_deref(),
            Self::Hash { .. } => None,
        }
    }
}

/// Returns the distinct texts of these samples.
fn occurring<'a>(cells: &'a Texts, samples: &[u32]) -> impl Iterator<Item = &'a str> {
    let mut occurs = vec![false; cells.texts.len()];
    for sample in samples {
        occurs[cells.samples[*sample as usize] as usize] = true;
    }
    let texts = cells.texts.iter().zip(occurs).filter(|(_, occurs)| *occurs);
    texts.map(|((text, _), _)| text.as_str())
}

/// All numbers seen, or a random sample of [`NUMBERS`] if there are more (Vitter, "Random Sampling with a Reservoir",
/// 1985, algorithm R). The random choices are the same in each run.
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

/// Returns the edges between `buckets` buckets with about equally many numbers each. There are fewer edges if some
/// numbers occur often, or if there are fewer numbers than buckets.
fn edges(mut numbers: Vec<f64>, buckets: u64) -> Vec<f64> {
    numbers.sort_unstable_by(f64::total_cmp);
    let count = numbers.len() as u64;
    if count == 0 {
        return Vec::new();
    }
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
