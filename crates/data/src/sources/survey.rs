//! A survey of the columns of a table: types, missing values, ranges and examples.

use std::collections::BTreeMap;

use shared_proto::job::{ColumnType, Data, Missing, MissingRule, Transform};

use crate::columns::cell::{Cell, key};
use crate::columns::date;
use crate::columns::header::LabelColumn;
use crate::columns::table::{Cells, Table};
use crate::columns::texts::Texts;
use crate::error::InputError;
use crate::reading::chunks::Chunks;
use crate::source::{DataSetup, Purpose};

/// The number of rows after which no further chunk is read.
const ROWS: u64 = 100_000;

/// The most distinct texts of a column that are counted.
const MOST_DISTINCT: usize = 100_000;

/// The most examples of a column.
const EXAMPLES: usize = 3;

/// A column of texts is ignored if it has more distinct texts than this, and distinct texts in more than half of the
/// rows: its texts hardly occur again.
const FEW: usize = 50;

/// The survey of a column.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnSurvey {
    /// The name.
    pub name: String,
    /// The kind of the cells.
    pub looks: Looks,
    /// The number of rows that were read.
    pub rows: u64,
    /// The number of rows without a value; 0 for lists.
    pub missing: u64,
    /// The number of distinct values, of which at most 100,000 are counted.
    pub distinct: usize,
    /// The least and the greatest number; `None` if the column does not have numbers.
    pub range: Option<(f64, f64)>,
    /// Some values, in the order of the file.
    pub examples: Vec<String>,
    /// True if a number has a fraction.
    pub has_fractions: bool,
    /// The format of dates; `None` if they are in ISO 8601, or if the column does not have dates.
    pub format: Option<&'static str>,
}

/// The kind of a column's cells. Missing cells do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looks {
    /// All cells are missing.
    Nothing,
    /// Numbers.
    Numbers,
    /// Dates or times.
    Dates,
    /// Texts that are neither all numbers nor all dates.
    Texts,
    /// Lists.
    Lists,
}

/// What has been seen of a column.
#[derive(Default)]
struct Seen {
    /// How often each text occurs, in the order of the texts.
    counts: BTreeMap<String, u64>,
    examples: Vec<String>,
    is_list: bool,
}

/// Surveys the first rows of a table, which `cut` opens.
///
/// # Errors
/// Those of `cut`, or if the table has structures.
pub(crate) fn survey<C: Chunks<Parsed = Table>>(
    setup: &DataSetup,
    cut: impl Fn(&DataSetup, LabelColumn) -> Result<C, InputError>,
) -> Result<Vec<ColumnSurvey>, InputError> {
    let settings = Data {
        columns: BTreeMap::new(),
        ..setup.settings.clone()
    };
    let setup = DataSetup {
        settings: &settings,
        purpose: Purpose::Training,
        ..*setup
    };
    let files = cut(&setup, LabelColumn::Survey)?;
    let mut columns: Vec<(String, Seen)> = Vec::new();
    let mut rows = 0;
    for chunk in 0..files.chunks().len() {
        if rows >= ROWS {
            break;
        }
        let samples: Vec<u32> = (0..files.chunks()[chunk].samples).collect();
        let table = files.parse(&files.read(chunk)?, &samples)?;
        if columns.is_empty() {
            let names = table
                .inputs()
                .map(|(name, ..)| (name.to_owned(), Seen::default()));
            columns = names.collect();
        }
        for ((_, seen), (_, _, cells)) in columns.iter_mut().zip(table.inputs()) {
            seen.add(cells);
        }
        rows += samples.len() as u64;
    }
    Ok(columns
        .into_iter()
        .map(|(name, seen)| seen.finish(name, rows))
        .collect())
}

impl Seen {
    fn add(&mut self, cells: &Cells) {
        let (texts, is_list): (&Texts, bool) = match cells {
            Cells::Texts(texts) => (texts, false),
            Cells::Lists(lists) => (&lists.texts, true),
            Cells::Numbers(_) => return,
        };
        self.is_list |= is_list;
        let mut counts = vec![0; texts.texts.len()];
        for text in &texts.samples {
            counts[*text as usize] += 1;
        }
        for ((text, _), count) in texts.texts.iter().zip(counts) {
            if self.examples.len() < EXAMPLES && !text.is_empty() && !self.examples.contains(text) {
                self.examples.push(text.clone());
            }
            if let Some(known) = self.counts.get_mut(text) {
                *known += count;
            } else if self.counts.len() < MOST_DISTINCT {
                self.counts.insert(text.clone(), count);
            }
        }
    }

    fn finish(self, name: String, rows: u64) -> ColumnSurvey {
        let texts = || self.counts.keys().filter(|text| !text.is_empty());
        let number = |text: &String| Cell::Text(text).number();
        let all = |is: &dyn Fn(&String) -> bool| texts().next().is_some() && texts().all(is);
        let is_written_as_date = |text: &String| date::days(text).is_some();
        let format = match self.is_list || texts().next().is_none() || all(&is_written_as_date) {
            true => None,
            false => date::format_of(self.counts.keys().filter(|text| !text.is_empty())),
        };
        let looks = if self.is_list {
            Looks::Lists
        } else if texts().next().is_none() {
            Looks::Nothing
        } else if format.is_some() || all(&is_written_as_date) {
            Looks::Dates
        } else if all(&|text| number(text).is_some()) {
            Looks::Numbers
        } else {
            Looks::Texts
        };
        let numbers = || {
            texts()
                .filter_map(number)
                .filter(|_| looks == Looks::Numbers)
        };
        let range = numbers().fold(None, |range: Option<(f64, f64)>, number| {
            let (least, greatest) = range.unwrap_or((number, number));
            Some((least.min(number), greatest.max(number)))
        });
        ColumnSurvey {
            looks,
            rows,
            missing: self
                .counts
                .get("")
                .copied()
                .filter(|_| !self.is_list)
                .unwrap_or(0),
            distinct: texts().count(),
            range,
            has_fractions: numbers().any(|number| number.fract() != 0.0),
            examples: self.examples,
            format,
            name,
        }
    }
}

impl ColumnSurvey {
    /// Returns the type that the column could have as an input of a model.
    pub fn suggestion(&self) -> ColumnType {
        let missing = (self.missing > 0).then_some(Missing::Rule(MissingRule::Mean));
        let (transform, buckets) = (Transform::default(), None);
        match self.looks {
            Looks::Nothing => ColumnType::Ignore {},
            Looks::Numbers => ColumnType::Number {
                transform,
                buckets,
                missing,
            },
            Looks::Dates => ColumnType::Date {
                format: self.format.map(str::to_owned),
                transform,
                buckets,
                missing,
            },
            Looks::Texts if self.distinct > FEW && 2 * self.distinct as u64 > self.rows => {
                ColumnType::Ignore {}
            }
            Looks::Texts => ColumnType::Category { buckets: None },
            Looks::Lists => ColumnType::Id {
                hash: true,
                seed: 0,
                separator: None,
            },
        }
    }

    /// Returns the line of `[data.columns]` that the column needs; `None` for numbers without missing values.
    pub fn line(&self) -> Option<String> {
        let missing = match self.missing {
            0 => "",
            _ => ", missing = \"mean\"",
        };
        let kind = match self.suggestion() {
            ColumnType::Number { .. } if missing.is_empty() => return None,
            ColumnType::Number { .. } => format!("type = \"number\"{missing}"),
            ColumnType::Date { format: None, .. } => format!("type = \"date\"{missing}"),
            ColumnType::Date {
                format: Some(format),
                ..
            } => {
                format!("type = \"date\", format = {format:?}{missing}")
            }
            ColumnType::Category { .. } => "type = \"category\"".to_owned(),
            ColumnType::Id { .. } => "type = \"id\"".to_owned(),
            ColumnType::Ignore {} => "type = \"ignore\"".to_owned(),
        };
        Some(format!("{} = {{ {kind} }}", key(&self.name)))
    }
}

/// Adds the lines that columns need to the error of a table, if several columns need one. People can then write all
/// lines at once.
pub(crate) fn with_all_lines<C: Chunks<Parsed = Table>>(
    error: InputError,
    setup: &DataSetup,
    cut: impl Fn(&DataSetup, LabelColumn) -> Result<C, InputError>,
) -> InputError {
    if !error.to_string().contains("[data.columns]") {
        return error;
    }
    let settings = setup.settings;
    let is_open = |column: &ColumnSurvey| {
        column.name != settings.label && !settings.columns.contains_key(&column.name)
    };
    let columns = survey(setup, cut).unwrap_or_default();
    let lines = columns.iter().filter(|column| is_open(column));
    let lines: Vec<String> = lines.filter_map(ColumnSurvey::line).collect();
    match lines.len() {
        0 | 1 => error,
        _ => InputError::Invalid(format!(
            "{error}\nThese columns need a line in [data.columns]; the types are a suggestion:\n{}",
            lines.join("\n")
        )),
    }
}
