//! The content of a table: named columns of cells, whichever format they are read from.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::LazyLock;

use shared_proto::job::{ColumnType, Data, Transform};

use super::date;
use super::error::InputError;
use super::texts::Texts;

/// The name of the input that has the number columns.
pub(super) const NUMBERS: &str = "inputs";

/// The name of the target.
pub(super) const LABEL: &str = "label";

/// A file's columns, which are filled row by row or column by column.
pub(super) struct Table {
    path: PathBuf,
    places: Places,
    columns: Vec<Named>,
    /// The index of the label's column; none if labels are not read.
    label: Option<usize>,
}

/// The part that labels have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Labels {
    Read,
    /// The column may be missing.
    LeftOut,
}

/// The numbers that the format gives to its samples.
#[derive(Clone, Copy)]
pub(super) enum Places {
    /// Lines of a text.
    Lines,
    /// Rows, from 1.
    Rows,
}

struct Named {
    name: String,
    role: Role,
    cells: Cells,
}

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

impl Table {
    /// Returns a table without samples, for a file with columns of these names.
    ///
    /// # Errors
    /// If a name occurs twice or is taken, the label is missing, no column is left to learn from, or the job names a
    /// column that the file does not have.
    pub(super) fn new(
        path: PathBuf,
        places: Places,
        names: &[&str],
        settings: &Data,
        labels: Labels,
    ) -> Result<Self, InputError> {
        let label = names.iter().position(|name| *name == settings.label);
        let table = Self {
            path,
            places,
            columns: names
                .iter()
                .map(|name| Named::new(name, settings, labels))
                .collect(),
            label: label.filter(|_| labels == Labels::Read),
        };
        match problem(names, settings, &table.columns, labels) {
            Some(problem) => Err(table.wrong(1, problem)),
            None => Ok(table),
        }
    }

    /// Returns whether nothing reads the cells of a column.
    pub(super) fn is_ignored(&self, column: usize) -> bool {
        self.columns[column].is_ignored()
    }

    /// Adds the next sample's cell to a column.
    ///
    /// # Errors
    /// [`InputError`] names file, place, column and value, and what was expected.
    pub(super) fn push(
        &mut self,
        column: usize,
        value: Value,
        place: u64,
    ) -> Result<(), InputError> {
        let pushed = self.columns[column].push(value, place);
        pushed.map_err(|problem| self.wrong(place, problem))
    }

    /// Returns the number of samples.
    pub(super) fn len(&self) -> usize {
        let mut read = self.columns.iter().filter(|column| !column.is_ignored());
        read.next().map_or(0, |column| column.cells.len())
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

    /// Returns the error of a problem at a place of the file.
    pub(super) fn wrong(&self, place: u64, problem: String) -> InputError {
        let path = self.path.clone();
        match self.places {
            Places::Lines => InputError::Line {
                path,
                line: place,
                problem,
            },
            Places::Rows => InputError::Row {
                path,
                row: place,
                problem,
            },
        }
    }
}

/// Returns what is wrong with the names of a file's columns.
fn problem(names: &[&str], settings: &Data, columns: &[Named], labels: Labels) -> Option<String> {
    let label = &settings.label;
    let mut seen = HashSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(**name)) {
        return Some(format!(
            "two columns are called {twice:?}; rename one of them"
        ));
    }
    if labels == Labels::Read && !names.contains(&label.as_str()) {
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
    let is_input = |column: &&Named| matches!(column.role, Role::Input { .. });
    let mut inputs = columns.iter().filter(is_input).peekable();
    if inputs.peek().is_none() {
        return Some(format!(
            "{label:?} is the only column that is read; there is nothing to learn from"
        ));
    }
    let taken = inputs.find(|column| column.is_ids() && [NUMBERS, LABEL].contains(&&*column.name));
    taken.map(|column| {
        format!(
            "a column of ids cannot be called {:?}, which is the name of the number columns together (\"{NUMBERS}\") or of the target (\"{LABEL}\"); rename it",
            column.name
        )
    })
}

impl Named {
    fn new(name: &str, settings: &Data, labels: Labels) -> Self {
        let role = match settings.columns.get(name) {
            _ if name == settings.label => match labels {
                Labels::Read => Role::Label,
                Labels::LeftOut => Role::Ignored,
            },
            Some(ColumnType::Ignore {}) => Role::Ignored,
            kind => Role::Input {
                given: kind.is_some(),
                kind: kind.cloned().unwrap_or(ColumnType::Number {
                    transform: Transform::default(),
                    buckets: None,
                }),
            },
        };
        let texts = match &role {
            Role::Label => true,
            Role::Input { kind, .. } => matches!(kind, ColumnType::Category { .. }),
            Role::Ignored => false,
        };
        Self {
            name: name.to_owned(),
            role,
            cells: match texts {
                true => Cells::Texts(Texts::default()),
                false => Cells::Numbers(Vec::new()),
            },
        }
    }

    fn is_ignored(&self) -> bool {
        matches!(self.role, Role::Ignored)
    }

    /// Returns whether the column is an input of ids, with a name of its own.
    fn is_ids(&self) -> bool {
        let Role::Input { kind, .. } = &self.role else {
            return false;
        };
        match kind {
            ColumnType::Category { .. } => true,
            ColumnType::Number { transform, .. } | ColumnType::Date { transform, .. } => {
                *transform == Transform::Bucket
            }
            ColumnType::Ignore {} => false,
        }
    }

    /// Adds a cell. The error is a problem in words.
    fn push(&mut self, value: Value, place: u64) -> Result<(), String> {
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
                        "column {name:?} holds a date; a category was expected: set its type to \"date\""
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
