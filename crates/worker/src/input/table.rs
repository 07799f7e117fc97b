//! The content of a table: named columns of cells, whichever format they are read from.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use shared_proto::job::{ColumnType, Data, Transform};

use super::date;
use super::error::InputError;
use super::place::{Place, Unit};
use super::texts::Texts;

/// The name of the input that has the number columns.
pub(super) const NUMBERS: &str = "inputs";

/// The name of the target.
pub(super) const LABEL: &str = "label";

/// A file's columns, which are filled row by row or column by column.
pub(super) struct Table {
    rows: Rows,
    columns: Vec<Named>,
    /// The index of the label's column; none if labels are not read.
    label: Option<usize>,
}

/// The samples of a table: where they are in their file.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) file: Arc<Path>,
    pub(super) unit: Unit,
    pub(super) numbers: Numbers,
}

/// The number of each sample's line or row.
#[derive(Debug)]
pub(super) enum Numbers {
    /// So many in a row, from the first.
    From(u64, usize),
    Each(Vec<u64>),
}

impl Numbers {
    fn len(&self) -> usize {
        match self {
            Self::From(_, count) => *count,
            Self::Each(numbers) => numbers.len(),
        }
    }

    fn get(&self, sample: usize) -> Option<u64> {
        match self {
            Self::From(first, _) => Some(first + sample as u64),
            Self::Each(numbers) => numbers.get(sample).copied(),
        }
    }
}

impl Rows {
    /// Returns the place of a sample; the file's first, if it has none.
    pub(super) fn place(&self, sample: usize) -> Place {
        Place {
            file: self.file.clone(),
            unit: self.unit,
            number: self.numbers.get(sample).unwrap_or(1),
        }
    }
}

/// The part that labels have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LabelColumn {
    Read,
    /// The column may be missing.
    LeftOut,
}

struct Named {
    name: String,
    role: Role,
    cells: Cells,
}

#[derive(Clone, Debug)]
enum Role {
    Label,
    Ignored,
    Input {
        kind: ColumnType,
        /// False if the job says nothing about the column.
        given: bool,
    },
}

/// The cells of a column, in the order of the samples.
pub(super) enum Cells {
    /// Numbers, and dates as days since 1970.
    Numbers(Vec<f64>),
    /// Categories and labels.
    Texts(Texts),
}

impl Cells {
    fn len(&self) -> usize {
        match self {
            Self::Numbers(numbers) => numbers.len(),
            Self::Texts(texts) => texts.samples.len(),
        }
    }

    /// Returns the cells of these samples; a column that is ignored has none.
    fn select(&self, samples: &[u32]) -> Self {
        match self {
            Self::Numbers(numbers) => {
                let number = |sample: &u32| numbers.get(*sample as usize).copied();
                Self::Numbers(samples.iter().filter_map(number).collect())
            }
            Self::Texts(texts) => Self::Texts(texts.select(samples)),
        }
    }
}

/// A cell's value, as a file has it.
#[derive(Clone, Copy)]
pub(super) enum Value<'a> {
    Missing,
    Text(&'a str),
    Number(f64),
    Integer(i64),
    /// A date, as days since 1970.
    Days(f64),
}

/// The columns of a file: their names and what they are for.
#[derive(Clone, Debug)]
pub(super) struct Header {
    names: Vec<String>,
    roles: Vec<Role>,
    /// The index of the label's column; none if labels are not read.
    label: Option<usize>,
}

impl Header {
    /// Returns the columns of a file, which have these names.
    ///
    /// # Errors
    /// If a name occurs twice or is taken, the label is missing, no column is left to learn from, or the job names a
    /// column that the file does not have.
    pub(super) fn new(
        file: &Arc<Path>,
        unit: Unit,
        names: &[&str],
        settings: &Data,
        labels: LabelColumn,
    ) -> Result<Self, InputError> {
        let label = names.iter().position(|name| *name == settings.label);
        let header = Self {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            roles: names
                .iter()
                .map(|name| Role::new(name, settings, labels))
                .collect(),
            label: label.filter(|_| labels == LabelColumn::Read),
        };
        match header.problem(names, settings, labels) {
            None => Ok(header),
            Some(problem) => Err(Place {
                file: file.clone(),
                unit,
                number: 1,
            }
            .wrong(problem)),
        }
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Checks that another file to train on has the same columns in the same order.
    ///
    /// # Errors
    /// Names the columns of both.
    pub(super) fn check_same(&self, other: &Self, place: &Place) -> Result<(), InputError> {
        match self.names == other.names {
            true => Ok(()),
            false => Err(place.wrong(format!(
                "the columns {} were found; {} were expected, as in the first file",
                other.names.join(", "),
                self.names.join(", ")
            ))),
        }
    }

    /// Returns whether nothing reads the cells of a column.
    pub(super) fn is_ignored(&self, column: usize) -> bool {
        matches!(self.roles[column], Role::Ignored)
    }

    /// Returns a table of these samples, without their cells.
    pub(super) fn table(&self, rows: Rows) -> Table {
        let columns = self.names.iter().zip(&self.roles);
        Table {
            rows,
            columns: columns.map(|(name, role)| Named::new(name, role)).collect(),
            label: self.label,
        }
    }
}

impl Table {
    /// Returns whether nothing reads the cells of a column.
    pub(super) fn is_ignored(&self, column: usize) -> bool {
        matches!(self.columns[column].role, Role::Ignored)
    }

    /// Adds the next sample's cell to a column.
    ///
    /// # Errors
    /// [`InputError`] names file, place, column and value, and what was expected.
    pub(super) fn push(&mut self, column: usize, value: Value) -> Result<(), InputError> {
        let column = &mut self.columns[column];
        let sample = column.cells.len();
        let rows = &self.rows;
        let pushed = column.push(value, || rows.place(sample));
        pushed.map_err(|problem| rows.place(sample).wrong(problem))
    }

    /// Returns the number of samples.
    pub(super) fn len(&self) -> usize {
        self.rows.numbers.len()
    }

    /// Returns the samples with these numbers, in this order.
    pub(super) fn select(&self, samples: &[u32]) -> Self {
        let column = |column: &Named| Named {
            name: column.name.clone(),
            role: column.role.clone(),
            cells: column.cells.select(samples),
        };
        let number = |sample: &u32| self.rows.numbers.get(*sample as usize).unwrap_or(1);
        Self {
            rows: Rows {
                file: self.rows.file.clone(),
                unit: self.rows.unit,
                numbers: Numbers::Each(samples.iter().map(number).collect()),
            },
            columns: self.columns.iter().map(column).collect(),
            label: self.label,
        }
    }

    /// Returns the place of the columns' names.
    pub(super) fn header_place(&self) -> Place {
        Place {
            number: 1,
            ..self.rows.place(0)
        }
    }

    /// Returns the place of a sample in its file.
    pub(super) fn place(&self, sample: usize) -> Place {
        self.rows.place(sample)
    }

    /// Returns the labels; none if they are not read.
    pub(super) fn labels(&self) -> &Texts {
        static NONE: LazyLock<Texts> = LazyLock::new(Texts::default);
        match self.label.map(|label| &self.columns[label].cells) {
            Some(Cells::Texts(labels)) => labels,
            Some(Cells::Numbers(_)) => unreachable!("labels are read as texts"),
            None => &NONE,
        }
    }

    /// Returns the inputs: name, type and cells of each, in the order of the file.
    pub(super) fn inputs(&self) -> impl Iterator<Item = (&str, &ColumnType, &Cells)> {
        self.columns.iter().filter_map(|column| match &column.role {
            Role::Input { kind, .. } => Some((column.name.as_str(), kind, &column.cells)),
            Role::Label | Role::Ignored => None,
        })
    }
}

impl Header {
    /// Returns what is wrong with the names of the columns.
    fn problem(&self, names: &[&str], settings: &Data, labels: LabelColumn) -> Option<String> {
        let label = &settings.label;
        let mut seen = HashSet::new();
        if let Some(twice) = names.iter().find(|name| !seen.insert(**name)) {
            return Some(format!(
                "two columns are called {twice:?}; rename one of them"
            ));
        }
        if labels == LabelColumn::Read && !names.contains(&label.as_str()) {
            return Some(format!(
                "no column is called {label:?}; let `data.label` name one of {names:?}"
            ));
        }
        if settings.columns.contains_key(label) {
            return Some(format!(
                "`data.columns` has {label:?}, the label; `data.target` says what the label is, so leave it out there"
            ));
        }
        let absent = |name: &&String| !names.contains(&name.as_str());
        if let Some(absent) = settings.columns.keys().find(absent) {
            return Some(format!(
                "`data.columns` has {absent:?}, which is no column of the file; it has {names:?}"
            ));
        }
        let is_input = |(_, role): &(&&str, &Role)| matches!(role, Role::Input { .. });
        let mut inputs = names.iter().zip(&self.roles).filter(is_input).peekable();
        if inputs.peek().is_none() {
            return Some(format!(
                "{label:?} is the only column that is read; there is nothing to learn from"
            ));
        }
        let taken = inputs.find(|(name, role)| role.is_ids() && [NUMBERS, LABEL].contains(name));
        taken.map(|(name, _)| {
        format!(
            "a column of ids cannot be called {:?}, which is the name of the number columns together (\"{NUMBERS}\") or of the target (\"{LABEL}\"); rename it",
            name
        )
    })
    }
}

impl Role {
    fn new(name: &str, settings: &Data, labels: LabelColumn) -> Self {
        match settings.columns.get(name) {
            _ if name == settings.label => match labels {
                LabelColumn::Read => Role::Label,
                LabelColumn::LeftOut => Role::Ignored,
            },
            Some(ColumnType::Ignore {}) => Role::Ignored,
            kind => Role::Input {
                given: kind.is_some(),
                kind: kind.cloned().unwrap_or(ColumnType::Number {
                    transform: Transform::default(),
                    buckets: None,
                }),
            },
        }
    }

    /// Returns whether the column is an input of ids, with a name of its own.
    fn is_ids(&self) -> bool {
        let Role::Input { kind, .. } = self else {
            return false;
        };
        match kind {
            ColumnType::Category { .. } | ColumnType::Id { .. } => true,
            ColumnType::Number { transform, .. } | ColumnType::Date { transform, .. } => {
                *transform == Transform::Bucket
            }
            ColumnType::Ignore {} => false,
        }
    }
}

impl Named {
    fn new(name: &str, role: &Role) -> Self {
        let texts = match role {
            Role::Label => true,
            Role::Input { kind, .. } => {
                matches!(kind, ColumnType::Category { .. } | ColumnType::Id { .. })
            }
            Role::Ignored => false,
        };
        Self {
            name: name.to_owned(),
            role: role.clone(),
            cells: match texts {
                true => Cells::Texts(Texts::default()),
                false => Cells::Numbers(Vec::new()),
            },
        }
    }

    /// Adds a cell. The error is a problem in words.
    fn push(&mut self, value: Value, place: impl Fn() -> Place) -> Result<(), String> {
        let name = &self.name;
        match (&self.role, &mut self.cells) {
            (Role::Ignored, _) => {}
            (Role::Label, Cells::Texts(texts)) => match value.text() {
                Some(text) if !text.is_empty() => texts.push_label(&text, place),
                Some(_) => return Err(format!("the label, column {name:?}, is empty")),
                None => {
                    return Err(format!(
                        "the label, column {name:?}, is a date; it may be a class or a number"
                    ));
                }
            },
            (_, Cells::Texts(texts)) => match value.text() {
                Some(text) => texts.push(&text, place),
                None => {
                    return Err(format!(
                        "column {name:?} holds a date; a category or an id was expected: set its type to \"date\""
                    ));
                }
            },
            (Role::Input { kind, given }, Cells::Numbers(numbers)) => {
                let (number, expected) = match kind {
                    ColumnType::Date { .. } => (
                        value.days(),
                        "a date as in 2024-03-01 or 2024-03-01T12:30:00",
                    ),
                    _ => (value.number(), "a finite number"),
                };
                let Some(number) = number else {
                    let advice = match given {
                        true => String::new(),
                        false => value.advice(name),
                    };
                    return Err(format!(
                        "column {name:?} holds {value}; {expected} was expected{advice}"
                    ));
                };
                numbers.push(number);
            }
            (Role::Label, Cells::Numbers(_)) => unreachable!("labels are read as texts"),
        }
        Ok(())
    }
}

impl Value<'_> {
    /// Returns the number, if it is one that is finite as `f32`.
    fn number(self) -> Option<f64> {
        let number = match self {
            Self::Text(text) => text.parse().ok()?,
            Self::Number(number) => number,
            Self::Integer(number) => number as f64,
            Self::Missing | Self::Days(_) => return None,
        };
        Some(number).filter(|number: &f64| (*number as f32).is_finite())
    }

    /// Returns a date as days since 1970.
    fn days(self) -> Option<f64> {
        match self {
            Self::Text(text) => date::days(text),
            Self::Days(days) => Some(days),
            Self::Missing | Self::Number(_) | Self::Integer(_) => None,
        }
    }

    /// Returns the text of a label or a category, which a date is not.
    fn text(&self) -> Option<Cow<'_, str>> {
        Some(match self {
            Self::Missing => Cow::Borrowed(""),
            Self::Text(text) => Cow::Borrowed(text),
            Self::Number(number) => Cow::Owned(number.to_string()),
            Self::Integer(number) => Cow::Owned(number.to_string()),
            Self::Days(_) => return None,
        })
    }

    /// Returns the line of a job that lets a column with this value be read.
    fn advice(self, column: &str) -> String {
        let kind = match self.days() {
            Some(_) => "date",
            None => match self {
                Self::Text(_) => "category",
                _ => "ignore",
            },
        };
        let bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let key = match !column.is_empty() && column.chars().all(bare) {
            true => column.to_owned(),
            false => format!("{column:?}"),
        };
        let other = match self {
            Self::Missing => ", or \"category\" if its other cells are texts",
            _ if kind == "ignore" => "",
            _ => ", or \"ignore\"",
        };
        format!("; add this line to [data.columns]: {key} = {{ type = \"{kind}\" }}{other}")
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("no value (\"\")"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Days(_) => f.write_str("a date"),
        }
    }
}
