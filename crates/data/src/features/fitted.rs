//! The parameters of a table's columns, computed from the training samples: means, deviations, edges of buckets,
//! vocabularies, labels.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use shared_proto::job::ColumnType;

use super::id_column::IdColumn;
use super::target::Target;
use crate::columns::cell::known;
use crate::columns::hash::Hasher;
use crate::columns::header::NUMBERS;
use crate::columns::table::{Cells, Table};
use crate::error::InputError;
use crate::features::shape::Shape;
use crate::samples::column::{Column, by_rows};

/// The version of the file's format. Files of another version are refused.
pub(crate) const FORM: u32 = 1;

/// Parameters that are computed from the data of a training: means, deviations, edges of buckets, vocabularies, labels.
/// Tables may have all of them. LIBSVM files have labels and the range of the features. Data with a file or a folder
/// for each class has labels; folders of pictures also have the shape of the pictures. The parameters of columns are
/// computed from the training samples alone; labels are collected from all samples, including those that are held out.
/// [`Self::save`] writes a file with which later data is read in the same way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitted {
    pub(crate) form: u32,
    /// The inputs, in the order of the file.
    pub columns: Vec<FittedColumn>,
    /// The features of LIBSVM files; `None` for other data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) features: Option<Features>,
    /// The shape of pictures; `None` for other data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pictures: Option<Shape>,
    /// The meaning of the labels.
    pub target: Target,
}

/// How the features of LIBSVM files become inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Features {
    /// The index of the first feature: 0 or 1.
    pub(crate) first: u32,
    /// The number of features.
    pub(crate) width: u64,
    /// True if inputs are indices and values instead of rows.
    pub(crate) sparse: bool,
}

/// An input column and the transform of its cells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FittedColumn {
    /// The column's name.
    pub name: String,
    /// True if the column has dates, which count as days since 1970.
    pub date: bool,
    /// The transform from a cell to an input of the model.
    pub rule: Rule,
    /// The replacement for a missing number; `None` if the job sets no replacement, and a missing number is an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gap: Option<Gap>,
}

/// The replacement for a missing number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gap {
    /// The replacement, before the transform of the column.
    pub value: f64,
    /// True if the column has a second input number, which is 1 where the number is missing and 0 elsewhere.
    #[serde(default, skip_serializing_if = "is_false")]
    pub indicator: bool,
}

/// The transform of a column's cells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Rule {
    /// The number, as it is.
    Number {},
    /// The number less the mean, divided by the deviation.
    Standardise {
        /// The mean.
        mean: f64,
        /// The standard deviation, or 1 if all training samples have the same number.
        deviation: f64,
    },
    /// `sign(x) ln(1 + |x|)` less the mean, divided by the deviation.
    Log {
        /// The mean of the logarithms.
        mean: f64,
        /// The standard deviation of the logarithms, or 1 if all training samples have the same number.
        deviation: f64,
    },
    /// An id: the number of edges that are less than or equal to the cell.
    Bucket {
        /// The edges, in strictly ascending order.
        edges: Vec<f64>,
    },
    /// An id: the hash of the text modulo the number of ids.
    Hash {
        /// The number of ids.
        buckets: u64,
        /// True if all texts of the training samples that are not missing are numbers. Texts that are equal as numbers
        /// then have the same id.
        #[serde(default, skip_serializing_if = "is_false")]
        numbers: bool,
    },
    /// Ids below 2^63.
    Id {
        /// The seed of the hash that turns texts into ids; `None` if the cells are whole numbers, which are the ids.
        seed: Option<u64>,
        /// The separator of the ids in a cell; `None` if each cell has exactly one id.
        separator: Option<String>,
        /// As in [`Self::Hash`].
        #[serde(default, skip_serializing_if = "is_false")]
        numbers: bool,
    },
    /// An id: the index of the text in the vocabulary, counted from 1, or 0 for a text that is not in the vocabulary.
    Vocabulary {
        /// The texts, in sorted order.
        texts: Vec<String>,
        /// As in [`Self::Hash`].
        #[serde(default, skip_serializing_if = "is_false")]
        numbers: bool,
    },
}

fn is_false(truth: &bool) -> bool {
    !truth
}

impl Fitted {
    /// Returns the parameters of data without columns: the meaning of its labels.
    pub(crate) fn of_target(target: Target) -> Self {
        Self {
            form: FORM,
            columns: Vec::new(),
            features: None,
            pictures: None,
            target,
        }
    }

    /// Returns parameters with which columns are read as texts. The texts become no inputs.
    pub(crate) fn of_texts(names: &[String]) -> Self {
        let column = |name: &String| FittedColumn {
            name: name.clone(),
            date: false,
            rule: Rule::Vocabulary {
                texts: Vec::new(),
                numbers: false,
            },
            gap: None,
        };
        Self {
            columns: names.iter().map(column).collect(),
            ..Self::of_target(Target::Number { scale: None })
        }
    }

    /// Returns the inputs of a table: first one input with all numbers, if there are any, then one input for each
    /// column of ids.
    ///
    /// # Errors
    /// If the table lacks a column of the training, has a column of another type, or has a number that leaves the range
    /// of `f32`.
    pub(crate) fn inputs(&self, table: &Table) -> Result<Vec<Column>, InputError> {
        self.check_columns(table)?;
        let (mut numbers, mut inputs) = (Vec::new(), Vec::new());
        for column in &self.columns {
            let name = column.name.as_str();
            let Some((_, cells)) = table.input(name) else {
                continue;
            };
            match (&column.rule, cells) {
                (
                    Rule::Id {
                        seed,
                        separator,
                        numbers,
                    },
                    Cells::Texts(_) | Cells::Lists(_),
                ) => {
                    let ids = IdColumn {
                        name,
                        seed: *seed,
                        separator: separator.as_deref(),
                        numbers: *numbers,
                    };
                    inputs.push(match cells {
                        Cells::Lists(lists) => ids.read_lists(lists)?,
                        Cells::Texts(texts) => ids.read(texts)?,
                        Cells::Numbers(_) => unreachable!("ids are texts or lists"),
                    });
                }
                (rule, cells) => {
                    let missing = column.missing(cells);
                    let filled = column.filled(cells, table)?;
                    match rule.categories(filled.as_ref().unwrap_or(cells)) {
                        Some((ids, count)) => inputs.push(Column::category(name, ids, count)),
                        None => {
                            numbers.push(column.numbers(filled.as_ref().unwrap_or(cells), table)?);
                        }
                    }
                    numbers.extend(missing);
                }
            }
        }
        if !numbers.is_empty() {
            let rows = by_rows(&numbers, table.len());
            inputs.insert(0, Column::numbers(NUMBERS, vec![numbers.len()], rows));
        }
        Ok(inputs)
    }

    /// Returns the columns in which most cells have a category that the training did not have: the name, the share of
    /// these cells, and up to three of their texts.
    pub(crate) fn mostly_unknown<'a>(
        &'a self,
        table: &Table,
    ) -> impl Iterator<Item = (&'a str, f64, Vec<String>)> {
        self.columns
            .iter()
            .filter_map(|column| {
                let (Rule::Vocabulary { texts, numbers }, Some((_, Cells::Texts(cells)))) =
                    (&column.rule, table.input(&column.name))
                else {
                    return None;
                };
                let is_unknown = |text: &str| {
                    let known = known(text, *numbers);
                    !text.is_empty() && texts.binary_search_by(|t| t.as_str().cmp(&known)).is_err()
                };
                let unknown = cells.each(is_unknown);
                let count = unknown.iter().filter(|unknown| **unknown).count();
                let examples = cells.texts.iter().map(|(text, _)| text);
                let examples = examples.filter(|text| is_unknown(text)).take(3);
                let examples: Vec<String> = examples.map(|text| format!("{text:?}")).collect();
                (2 * count > unknown.len()).then(|| {
                    let share = count as f64 / unknown.len() as f64;
                    (column.name.as_str(), share, examples)
                })
            })
            .collect::<Vec<_>>()
            .into_iter()
    }

    /// Checks that a table has exactly the columns that were fitted, with the same types. Their order may differ.
    fn check_columns(&self, table: &Table) -> Result<(), InputError> {
        let wrong = |what: String| Err(table.header_place().wrong(what));
        let mut expected = self.columns.iter();
        if let Some(absent) = expected.find(|column| table.input(&column.name).is_none()) {
            let found: Vec<&str> = table.inputs().map(|(name, ..)| name).collect();
            return wrong(format!(
                "there is no column {:?}, which the training had; the file has {}",
                absent.name,
                found.join(", ")
            ));
        }
        if let Some((other, ..)) = table.inputs().find(|(name, ..)| !self.has_column(name)) {
            return wrong(format!("the training had no column {other:?}"));
        }
        let reads = |column: &&FittedColumn| {
            let input = table.input(&column.name);
            input.is_some_and(|(kind, cells)| column.reads(kind, cells))
        };
        match self.columns.iter().find(|column| !reads(column)) {
            Some(column) => wrong(format!(
                "column {:?} has another type in `data.columns` than in training",
                column.name
            )),
            None => Ok(()),
        }
    }

    /// Returns whether the training had a column of this name.
    pub(crate) fn has_column(&self, name: &str) -> bool {
        self.columns.iter().any(|column| column.name == name)
    }

    /// Writes a JSON file atomically.
    ///
    /// # Errors
    /// [`InputError::Unwritable`].
    pub fn save(&self, path: &Path) -> Result<(), InputError> {
        let write = || {
            let mut text = serde_json::to_string_pretty(self).map_err(io::Error::other)?;
            text.push('\n');
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            // Another worker may write the same file at the same time.
            let mut partial = OsString::from(path);
            partial.push(format!(".{:016x}.partial", fastrand::u64(..)));
            std::fs::write(&partial, text)?;
            std::fs::File::open(&partial)?.sync_all()?;
            std::fs::rename(&partial, path)
        };
        write().map_err(|source| InputError::Unwritable {
            path: path.to_owned(),
            source,
        })
    }

    /// Reads a file that [`Self::save`] has written.
    ///
    /// # Errors
    /// [`InputError::Unreadable`]; [`InputError::Invalid`] names the file and what is wrong in it.
    pub fn load(path: &Path) -> Result<Self, InputError> {
        let wrong = |problem: String| {
            InputError::Invalid(format!(
                "{}: {problem}; copy the file from the run directory of the training again, or train again",
                path.display()
            ))
        };
        let text = std::fs::read(path).map_err(|source| InputError::Unreadable {
            path: path.to_owned(),
            source,
        })?;
        let mut fitted: Self = serde_json::from_slice(&text)
            .map_err(|error| wrong(format!("it is no file of fitted columns ({error})")))?;
        fitted.target.name_numbers();
        fitted.check().map_err(wrong)?;
        Ok(fitted)
    }

    /// Checks the values that were read from a file. The error is the problem in words.
    fn check(&self) -> Result<(), String> {
        if self.form != FORM {
            return Err(format!(
                "it has form {}, but this release reads {FORM}",
                self.form
            ));
        }
        let in_range = |features: Features| features.first <= 1 && features.width > 0;
        if !self.features.is_none_or(in_range) {
            return Err("the first index or the number of its features is out of range".to_owned());
        }
        if !self.pictures.is_none_or(Shape::is_possible) {
            return Err("its pictures have an impossible shape".to_owned());
        }
        let mut names = HashSet::new();
        for FittedColumn {
            name, rule, gap, ..
        } in &self.columns
        {
            let fits = gap.is_none_or(|gap| gap.value.is_finite())
                && match rule {
                    Rule::Number {} => true,
                    Rule::Standardise { mean, deviation } | Rule::Log { mean, deviation } => {
                        mean.is_finite() && deviation.is_finite() && *deviation > 0.0
                    }
                    Rule::Bucket { edges } => edges.is_sorted_by(|a, b| a < b),
                    Rule::Hash { buckets, .. } => (1..=u64::from(u32::MAX)).contains(buckets),
                    Rule::Id { separator, .. } => separator.as_deref() != Some(""),
                    Rule::Vocabulary { texts, .. } => texts.is_sorted_by(|a, b| a < b),
                };
            if !fits {
                return Err(format!(
                    "the numbers or texts of column {name:?} are not those of its rule"
                ));
            }
            if !names.insert(name) {
                return Err(format!("column {name:?} occurs twice"));
            }
        }
        match self.target.is_whole() {
            true => Ok(()),
            false => Err("the classes or values of its target are out of range".to_owned()),
        }
    }
}

impl FittedColumn {
    /// Returns whether the parameters were fitted to a column of this type.
    fn reads(&self, kind: &ColumnType, cells: &Cells) -> bool {
        let texts = matches!(
            self.rule,
            Rule::Hash { .. } | Rule::Vocabulary { .. } | Rule::Id { .. }
        );
        let fits = match cells {
            Cells::Texts(_) => texts,
            Cells::Lists(_) => matches!(self.rule, Rule::Id { .. }),
            Cells::Numbers(_) => !texts,
        };
        fits && self.date == matches!(kind, ColumnType::Date { .. })
    }

    /// Returns 1 for each missing cell and 0 for all others; `None` if the column has no indicator.
    fn missing(&self, cells: &Cells) -> Option<Vec<f32>> {
        let Cells::Numbers(cells) = cells else {
            return None;
        };
        self.gap.filter(|gap| gap.indicator)?;
        let missing = |cell: &f64| if cell.is_nan() { 1.0 } else { 0.0 };
        Some(cells.iter().map(missing).collect())
    }

    /// Returns the cells with the replacement in place of each missing number; `None` if no number is missing.
    ///
    /// # Errors
    /// If a number is missing and the training set no replacement.
    fn filled(&self, cells: &Cells, table: &Table) -> Result<Option<Cells>, InputError> {
        let Cells::Numbers(numbers) = cells else {
            return Ok(None);
        };
        let Some(first) = numbers.iter().position(|number| number.is_nan()) else {
            return Ok(None);
        };
        let Some(gap) = self.gap else {
            return Err(table.place(first).wrong(format!(
                "column {:?} holds no value, and the training did not say what takes its place",
                self.name
            )));
        };
        let fill = |number: &f64| if number.is_nan() { gap.value } else { *number };
        Ok(Some(Cells::Numbers(numbers.iter().map(fill).collect())))
    }

    /// Returns the transformed numbers of the cells.
    fn numbers(&self, cells: &Cells, table: &Table) -> Result<Vec<f32>, InputError> {
        let Cells::Numbers(cells) = cells else {
            unreachable!("texts become ids");
        };
        let numbers = self.rule.numbers(cells);
        match numbers.iter().position(|number| !number.is_finite()) {
            None => Ok(numbers),
            Some(sample) => Err(table.place(sample).wrong(format!(
                "column {:?} holds {}, which is too far from the training samples to be standardised; check it, or set the column's transform to \"log\" or \"none\"",
                self.name, cells[sample]
            ))),
        }
    }
}

impl Rule {
    /// Returns the transformed numbers, as the model receives them.
    fn numbers(&self, numbers: &[f64]) -> Vec<f32> {
        let each = numbers.iter();
        match self {
            Self::Standardise { mean, deviation } => {
                each.map(|n| ((n - mean) / deviation) as f32).collect()
            }
            Self::Log { mean, deviation } => each
                .map(|n| ((log(*n) - mean) / deviation) as f32)
                .collect(),
            _ => each.map(|n| *n as f32).collect(),
        }
    }

    /// Returns the category of each cell and the number of categories; `None` if the rule does not produce categories.
    fn categories(&self, cells: &Cells) -> Option<(Vec<u32>, u64)> {
        match (self, cells) {
            (Self::Bucket { edges }, Cells::Numbers(cells)) => {
                let id = |cell: &f64| edges.partition_point(|edge| edge <= cell) as u32;
                Some((cells.iter().map(id).collect(), edges.len() as u64 + 1))
            }
            (Self::Hash { buckets, numbers }, Cells::Texts(cells)) => {
                let hasher = Hasher::new(0);
                let id = |text: &str| (hasher.hash(&known(text, *numbers)) % buckets) as u32;
                Some((cells.each(id), *buckets))
            }
            (Self::Vocabulary { texts, numbers }, Cells::Texts(cells)) => {
                let place = |text: &str| texts.binary_search_by(|known| known.as_str().cmp(text));
                let id =
                    |text: &str| place(&known(text, *numbers)).map_or(0, |place| place as u32 + 1);
                Some((cells.each(id), texts.len() as u64 + 1))
            }
            _ => None,
        }
    }
}

/// Returns `sign(x) ln(1 + |x|)`, the logarithm of [`Rule::Log`].
pub(crate) fn log(number: f64) -> f64 {
    number.signum() * number.abs().ln_1p()
}
