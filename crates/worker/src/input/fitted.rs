//! The parameters of a table's columns, computed from the training samples: means, deviations, edges of buckets,
//! vocabularies, labels.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use shared_proto::job::ColumnType;

use super::column::Column;
use super::error::InputError;
use super::hash::Hasher;
use super::id_column::IdColumn;
use super::table::{Cells, NUMBERS, Table};
use super::target::Target;

/// The form of the file; another one is refused.
pub(super) const FORM: u32 = 1;

/// The parameters of a table's columns: means, deviations, edges of buckets, vocabularies, labels. Data of files or folders
/// for each class has labels alone, LIBSVM files have labels and the range of their features. Parameters of columns depend on the
/// training samples alone; labels are those of the whole file that is trained on. With the file that [`Self::save`] writes, later data
/// is read in the same way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitted {
    pub(super) form: u32,
    /// The inputs, in the order of the file.
    pub columns: Vec<FittedColumn>,
    /// The features of LIBSVM files; none for other data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) features: Option<Features>,
    /// The meaning of the labels.
    pub target: Target,
}

/// How the features of LIBSVM files become inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Features {
    /// The index of the first feature: 0 or 1.
    pub(super) first: u32,
    /// The number of features.
    pub(super) width: u64,
    /// True if inputs are indices and values instead of rows.
    pub(super) sparse: bool,
}

/// A column that is read, and the transform of its cells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FittedColumn {
    /// The column's name.
    pub name: String,
    /// True if its cells are dates, which count as days since 1970.
    pub date: bool,
    /// The transform from a cell to an input of the model.
    pub rule: Rule,
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
        /// The standard deviation, or 1 if the training samples have a single number.
        deviation: f64,
    },
    /// `sign(x) ln(1 + |x|)` less the mean, divided by the deviation.
    Log {
        /// The mean of the logarithms.
        mean: f64,
        /// The standard deviation of the logarithms, or 1 if the training samples have a single number.
        deviation: f64,
    },
    /// An id: the number of edges that are not above the number.
    Bucket {
        /// The edges, each above the one before.
        edges: Vec<f64>,
    },
    /// An id: the remainder of the text's hash by the number of ids.
    Hash {
        /// The number of ids.
        buckets: u64,
    },
    /// Ids below 2^63.
    Id {
        /// The seed of the texts' hash; none if ids are whole numbers as they are.
        seed: Option<u64>,
        /// The text between ids, if a cell has any number of them.
        separator: Option<String>,
    },
    /// An id: the text's place in the vocabulary, from 1; 0 for any other text.
    Vocabulary {
        /// The texts, in sorted order.
        texts: Vec<String>,
    },
}

impl Fitted {
    /// Returns the parameters of data without columns: the meaning of its labels.
    pub(super) fn of_target(target: Target) -> Self {
        Self {
            form: FORM,
            columns: Vec::new(),
            features: None,
            target,
        }
    }

    /// Returns the inputs of a table: those of ids, after the numbers together.
    ///
    /// # Errors
    /// If the table has other columns than that of training, in another order or of another type, or a number that
    /// leaves the range of `f32`.
    pub(super) fn inputs(&self, table: &Table) -> Result<Vec<Column>, InputError> {
        self.check_columns(table)?;
        let (mut numbers, mut inputs) = (Vec::new(), Vec::new());
        for ((name, _, cells), column) in table.inputs().zip(&self.columns) {
            match (&column.rule, cells) {
                (Rule::Id { seed, separator }, Cells::Texts(cells)) => {
                    let ids = IdColumn {
                        name,
                        seed: *seed,
                        separator: separator.as_deref(),
                    };
                    inputs.push(ids.read(cells)?);
                }
                (rule, cells) => match rule.categories(cells) {
                    Some((ids, count)) => inputs.push(Column::category(name, ids, count)),
                    None => numbers.push(column.numbers(cells, table)?),
                },
            }
        }
        if !numbers.is_empty() {
            let rows = (0..table.len()).flat_map(|row| numbers.iter().map(move |n| n[row]));
            let rows = rows.collect();
            inputs.insert(0, Column::numbers(NUMBERS, vec![numbers.len()], rows));
        }
        Ok(inputs)
    }

    /// Checks that a table has the columns that were fitted, in the same order and of the same types.
    fn check_columns(&self, table: &Table) -> Result<(), InputError> {
        let found: Vec<&str> = table.inputs().map(|(name, ..)| name).collect();
        let expected: Vec<&str> = self.columns.iter().map(|column| &*column.name).collect();
        if found != expected {
            let (found, expected) = (found.join(", "), expected.join(", "));
            let what =
                format!("the columns {found} were found; {expected} were expected, as in training");
            return Err(table.header_place().wrong(what));
        }
        let mut columns = table.inputs().zip(&self.columns);
        match columns.find(|((_, kind, cells), column)| !column.reads(kind, cells)) {
            Some(((name, ..), _)) => Err(table.header_place().wrong(format!(
                "column {name:?} has another type in `data.columns` than in training"
            ))),
            None => Ok(()),
        }
    }

    /// Writes a JSON file, which appears whole or not at all.
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
            partial.push(format!(".{:016x}.partial", rand::random::<u64>()));
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
        let fitted: Self = serde_json::from_slice(&text)
            .map_err(|error| wrong(format!("it is no file of fitted columns ({error})")))?;
        fitted.check().map_err(wrong)?;
        Ok(fitted)
    }

    /// Checks what a file says. The error is a problem in words.
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
        let mut names = HashSet::new();
        for FittedColumn { name, rule, .. } in &self.columns {
            let fits = match rule {
                Rule::Number {} => true,
                Rule::Standardise { mean, deviation } | Rule::Log { mean, deviation } => {
                    mean.is_finite() && deviation.is_finite() && *deviation > 0.0
                }
                Rule::Bucket { edges } => edges.is_sorted_by(|a, b| a < b),
                Rule::Hash { buckets } => (1..=u64::from(u32::MAX)).contains(buckets),
                Rule::Id { separator, .. } => separator.as_deref() != Some(""),
                Rule::Vocabulary { texts } => texts.is_sorted_by(|a, b| a < b),
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
    /// Returns whether this was fitted to a column of this type.
    fn reads(&self, kind: &ColumnType, cells: &Cells) -> bool {
        let texts = matches!(
            self.rule,
            Rule::Hash { .. } | Rule::Vocabulary { .. } | Rule::Id { .. }
        );
        texts == matches!(cells, Cells::Texts(_))
            && self.date == matches!(kind, ColumnType::Date { .. })
    }

    /// Returns the numbers of the cells.
    fn numbers(&self, cells: &Cells, table: &Table) -> Result<Vec<f32>, InputError> {
        let Cells::Numbers(cells) = cells else {
            unreachable!("texts become ids");
        };
        let number = |(sample, cell): (usize, &f64)| {
            let number = self.rule.number(*cell) as f32;
            match number.is_finite() {
                true => Ok(number),
                false => Err(table.place(sample).wrong(format!(
                    "column {:?} holds {cell}, which is too far from the training samples to be standardised; check it, or set the column's transform to \"log\" or \"none\"",
                    self.name
                ))),
            }
        };
        cells.iter().enumerate().map(number).collect()
    }
}

impl Rule {
    /// Returns a number as the model gets it.
    fn number(&self, number: f64) -> f64 {
        match self {
            Self::Standardise { mean, deviation } => (number - mean) / deviation,
            Self::Log { mean, deviation } => (log(number) - mean) / deviation,
            _ => number,
        }
    }

    /// Returns the category of each cell and the number of categories, if the rule makes categories.
    fn categories(&self, cells: &Cells) -> Option<(Vec<u32>, u64)> {
        match (self, cells) {
            (Self::Bucket { edges }, Cells::Numbers(cells)) => {
                let id = |cell: &f64| edges.partition_point(|edge| edge <= cell) as u32;
                Some((cells.iter().map(id).collect(), edges.len() as u64 + 1))
            }
            (Self::Hash { buckets }, Cells::Texts(cells)) => {
                let hasher = Hasher::of(0);
                let id = |text: &str| (hasher.hash(text) % buckets) as u32;
                Some((cells.each(id), *buckets))
            }
            (Self::Vocabulary { texts }, Cells::Texts(cells)) => {
                let place = |text: &str| texts.binary_search_by(|known| known.as_str().cmp(text));
                let id = |text: &str| place(text).map_or(0, |place| place as u32 + 1);
                Some((cells.each(id), texts.len() as u64 + 1))
            }
            _ => None,
        }
    }
}

/// Returns the logarithm that [`Rule::Log`] takes.
pub(super) fn log(number: f64) -> f64 {
    number.signum() * number.abs().ln_1p()
}
