//! The content of a table: named columns of cells, independent of the format of the file.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use shared_proto::job::ColumnType;

use super::cell::Cell;
use super::header::{Gaps, Header, Role};
use super::texts::Texts;
use crate::error::InputError;
use crate::place::{Place, Unit};

/// The most elements that all lists of a column have together.
const MOST_ELEMENTS: usize = 1 << 28;

/// Stands for a missing number. All other numbers in a table are finite.
pub(crate) const GAP: f64 = f64::NAN;

/// The columns of a file, filled row by row or column by column.
pub(crate) struct Table {
    rows: Rows,
    columns: Vec<Named>,
    /// The index of the label's column; `None` if labels are not read.
    label: Option<usize>,
    gaps: Gaps,
}

/// The places of a table's samples in their file.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) file: Arc<Path>,
    pub(crate) unit: Unit,
    pub(crate) numbers: Numbers,
}

/// The line or row numbers of the samples.
#[derive(Debug)]
pub(crate) enum Numbers {
    /// Consecutive numbers: the first number and the count.
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
    /// Returns the place of a sample, or line or row 1 if no number is known for the sample.
    pub(crate) fn place(&self, sample: usize) -> Place {
        Place {
            file: self.file.clone(),
            unit: self.unit,
            number: self.numbers.get(sample).unwrap_or(1),
        }
    }
}

struct Named {
    name: String,
    role: Role,
    cells: Cells,
    /// True if the column is an input of numbers, not of dates, and not the weight.
    is_plain: bool,
}

/// The cells of a column, in the order of the samples.
pub(crate) enum Cells {
    /// Numbers, and dates as days since 1970; [`GAP`] where the value is missing.
    Numbers(Vec<f64>),
    /// Categories, labels, and ids in single cells.
    Texts(Texts),
    /// Ids in lists of any length.
    Lists(Lists),
}

/// Lists of texts. The samples of `texts` are the elements of all lists.
pub(crate) struct Lists {
    pub(crate) texts: Texts,
    /// The index in `texts.samples` of the end of each list.
    pub(crate) ends: Vec<usize>,
}

impl Lists {
    fn new() -> Self {
        Self {
            texts: Texts::default(),
            ends: Vec::new(),
        }
    }

    /// Returns the indices of a sample's elements.
    pub(crate) fn elements(&self, sample: usize) -> Range<usize> {
        let start = sample.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[sample]
    }

    /// Returns the lists of these samples, in this order.
    fn select(&self, samples: &[u32]) -> Self {
        let (mut elements, mut ends) = (Vec::new(), Vec::new());
        for sample in samples {
            let range = self.elements(*sample as usize);
            elements.extend(range.map(|element| element as u32));
            ends.push(elements.len());
        }
        Self {
            texts: self.texts.select(&elements),
            ends,
        }
    }
}

impl Cells {
    fn len(&self) -> usize {
        match self {
            Self::Numbers(numbers) => numbers.len(),
            Self::Texts(texts) => texts.samples.len(),
            Self::Lists(lists) => lists.ends.len(),
        }
    }

    /// Returns the cells of these samples. An ignored column has no cells.
    fn select(&self, samples: &[u32]) -> Self {
        match self {
            Self::Numbers(numbers) => {
                let number = |sample: &u32| numbers.get(*sample as usize).copied();
                Self::Numbers(samples.iter().filter_map(number).collect())
            }
            Self::Texts(texts) => Self::Texts(texts.select(samples)),
            Self::Lists(lists) => Self::Lists(lists.select(samples)),
        }
    }
}

impl Header {
    /// Returns a table of these samples, whose cells are still to be added.
    pub(crate) fn table(&self, rows: Rows) -> Table {
        let columns = self.names.iter().zip(&self.roles);
        Table {
            rows,
            columns: columns.map(|(name, role)| Named::new(name, role)).collect(),
            label: self.label,
            gaps: self.gaps.clone(),
        }
    }
}

impl Table {
    /// Returns whether the cells of a column are ignored.
    pub(crate) fn is_ignored(&self, column: usize) -> bool {
        matches!(self.columns[column].role, Role::Ignored)
    }

    /// Adds the next sample's cell to a column.
    ///
    /// # Errors
    /// [`InputError`] names file, place, column and value, and what was expected.
    pub(crate) fn push(&mut self, column: usize, value: Cell) -> Result<(), InputError> {
        let column = &mut self.columns[column];
        // Most cells are numbers, and are searched for no gap.
        if column.is_plain
            && let Cells::Numbers(numbers) = &mut column.cells
            && let Some(number) = value.number()
            && !(self.gaps.has_number && matches!(value, Cell::Text(_)))
        {
            numbers.push(number);
            return Ok(());
        }
        let sample = column.cells.len();
        let rows = &self.rows;
        let pushed = column.push(self.gaps.read(value), value, || rows.place(sample));
        pushed.map_err(|problem| rows.place(sample).wrong(problem))
    }

    /// Fast path of [`Self::push`] for many samples: appends the values if the column is an input of numbers (not dates, and
    /// not the weight) and each value is a finite number. A text such as "3" does not count as a number here. Otherwise
    /// appends nothing and returns false.
    pub(crate) fn extend<'v>(
        &mut self,
        column: usize,
        values: impl Iterator<Item = Option<Cell<'v>>>,
    ) -> bool {
        let column = &mut self.columns[column];
        let Cells::Numbers(numbers) = &mut column.cells else {
            return false;
        };
        if !column.is_plain {
            return false;
        }
        let before = numbers.len();
        let number = |value: Option<Cell>| match value {
            None | Some(Cell::Text(_)) => None,
            Some(value) => value.number(),
        };
        // What is no number is found below.
        numbers.extend(values.map(|value| number(value).unwrap_or(GAP)));
        let all = numbers[before..].iter().all(|number| !number.is_nan());
        if !all {
            numbers.truncate(before);
        }
        all
    }

    /// Adds an element to the list of a column's next sample. Skips an element that is missing.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub(crate) fn push_element(&mut self, column: usize, value: Cell) -> Result<(), InputError> {
        let column = &mut self.columns[column];
        let (rows, value) = (&self.rows, self.gaps.read(value));
        let sample = column.cells.len();
        let Cells::Lists(lists) = &mut column.cells else {
            return Err(rows.place(sample).wrong(format!(
                "column {:?} has single cells, and an element of a list was added",
                column.name
            )));
        };
        let place = || rows.place(sample);
        if lists.texts.samples.len() >= MOST_ELEMENTS {
            return Err(place().wrong(format!(
                "column {:?} has more than {MOST_ELEMENTS} elements in its lists; give smaller batches",
                column.name
            )));
        }
        {
            match value.text() {
                Some(text) if !text.is_empty() => lists.texts.push(&text, place),
                Some(_) => {}
                None => {
                    return Err(place().wrong(format!(
                        "column {:?} holds a date beyond the calendar",
                        column.name
                    )));
                }
            }
        }
        Ok(())
    }

    /// Ends the list of a column's next sample.
    pub(crate) fn end_list(&mut self, column: usize) {
        if let Cells::Lists(lists) = &mut self.columns[column].cells {
            lists.ends.push(lists.texts.samples.len());
        }
    }

    /// Passes all cells to `hash`.
    pub(crate) fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        let texts = |texts: &Texts, hash: &mut dyn FnMut(&[u8])| {
            for text in &texts.samples {
                hash(texts.texts[*text as usize].0.as_bytes());
                // No text has this byte.
                hash(&[0xff]);
            }
        };
        for column in &self.columns {
            match &column.cells {
                Cells::Numbers(numbers) => numbers.iter().for_each(|n| hash(&n.to_le_bytes())),
                Cells::Texts(cells) => texts(cells, hash),
                Cells::Lists(lists) => {
                    texts(&lists.texts, hash);
                    lists
                        .ends
                        .iter()
                        .for_each(|end| hash(&(*end as u64).to_le_bytes()));
                }
            }
        }
    }

    /// Returns the number of cells of a column.
    pub(crate) fn cells(&self, column: usize) -> usize {
        self.columns[column].cells.len()
    }

    /// Returns the samples with a label.
    pub(crate) fn labelled(&self) -> Vec<u32> {
        let labels = self.labels();
        let labels = (0..)
            .zip(&labels.samples)
            .map(|(sample, text)| (sample, &labels.texts[*text as usize].0));
        labels
            .filter(|(_, text)| !text.is_empty())
            .map(|(sample, _)| sample)
            .collect()
    }

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        self.rows.numbers.len()
    }

    /// Returns the samples at these indices in this order, or all samples if there are no indices.
    pub(crate) fn selected(self, samples: Option<&[u32]>) -> Self {
        match samples {
            Some(samples) => self.select(samples),
            None => self,
        }
    }

    /// Returns the samples at these indices, in this order.
    pub(crate) fn select(&self, samples: &[u32]) -> Self {
        let column = |column: &Named| Named {
            name: column.name.clone(),
            role: column.role.clone(),
            cells: column.cells.select(samples),
            is_plain: column.is_plain,
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
            gaps: self.gaps.clone(),
        }
    }

    /// Returns the place of the columns' names.
    pub(crate) fn header_place(&self) -> Place {
        Place {
            number: 1,
            ..self.rows.place(0)
        }
    }

    /// Returns the place of a sample in its file.
    pub(crate) fn place(&self, sample: usize) -> Place {
        self.rows.place(sample)
    }

    /// Returns the labels; no texts if labels are not read.
    pub(crate) fn labels(&self) -> &Texts {
        static NONE: LazyLock<Texts> = LazyLock::new(Texts::default);
        match self.label.map(|label| &self.columns[label].cells) {
            Some(Cells::Texts(labels)) => labels,
            Some(_) => unreachable!("labels are read as texts"),
            None => &NONE,
        }
    }

    /// Returns the weight of each sample. Returns `None` if the table has no column of weights; all samples then count alike.
    pub(crate) fn weights(&self) -> Option<Vec<f32>> {
        let is_weight = |column: &&Named| matches!(column.role, Role::Weight);
        match self
            .columns
            .iter()
            .find(is_weight)
            .map(|column| &column.cells)
        {
            Some(Cells::Numbers(weights)) => {
                Some(weights.iter().map(|weight| *weight as f32).collect())
            }
            _ => None,
        }
    }

    /// Returns the type and the cells of an input; `None` if the table has no input of this name.
    pub(crate) fn input(&self, name: &str) -> Option<(&ColumnType, &Cells)> {
        let mut inputs = self.inputs();
        let input = inputs.find(|(own, ..)| *own == name);
        input.map(|(_, kind, cells)| (kind, cells))
    }

    /// Returns the inputs: name, type and cells of each, in the order of the file.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = (&str, &ColumnType, &Cells)> {
        self.columns.iter().filter_map(|column| match &column.role {
            Role::Input { kind, .. } => Some((column.name.as_str(), kind, &column.cells)),
            Role::Label { .. } | Role::Weight | Role::Ignored => None,
        })
    }
}

impl Named {
    fn new(name: &str, role: &Role) -> Self {
        let cells = match role {
            Role::Input { list: true, .. } => Cells::Lists(Lists::new()),
            Role::Label { .. }
            | Role::Input {
                kind: ColumnType::Category { .. } | ColumnType::Id { .. },
                ..
            } => Cells::Texts(Texts::default()),
            Role::Input { .. } | Role::Weight | Role::Ignored => Cells::Numbers(Vec::new()),
        };
        Self {
            name: name.to_owned(),
            role: role.clone(),
            cells,
            is_plain: matches!(
                role,
                Role::Input {
                    kind: ColumnType::Number { .. },
                    ..
                }
            ),
        }
    }

    /// Adds a cell. `found` is the value as the file has it, for messages. The error is the problem in words.
    fn push(&mut self, value: Cell, found: Cell, place: impl Fn() -> Place) -> Result<(), String> {
        let name = &self.name;
        match (&self.role, &mut self.cells) {
            (Role::Ignored, _) => {}
            (Role::Label { may_lack }, Cells::Texts(texts)) => match value.text() {
                Some(text) if !text.is_empty() || *may_lack => texts.push_label(&text, place),
                Some(_) => {
                    return Err(format!(
                        "the label, column {name:?}, is missing ({found}); correct it, or set data.missing_label to \"skip\" to leave such samples out"
                    ));
                }
                None => {
                    return Err(format!(
                        "the label, column {name:?}, is a date beyond the calendar"
                    ));
                }
            },
            (_, Cells::Texts(texts)) => match value.text() {
                Some(text) => texts.push(&text, place),
                None => {
                    return Err(format!("column {name:?} holds a date beyond the calendar"));
                }
            },
            (Role::Input { kind, .. }, Cells::Numbers(numbers))
                if value == Cell::Missing && kind.missing().is_some() =>
            {
                numbers.push(GAP);
            }
            (Role::Input { kind, given, .. }, Cells::Numbers(numbers)) => {
                let (number, expected) = match kind {
                    ColumnType::Date { format, .. } => (
                        value.days(format.as_deref()),
                        match format {
                            Some(_) => "a date in the column's format",
                            None => "a date as in 2024-03-01 or 2024-03-01T12:30:00",
                        },
                    ),
                    _ => (value.number(), "a finite number"),
                };
                let Some(number) = number else {
                    let advice = match (given, value) {
                        (true, Cell::Missing) => "; add what takes its place to the column, as in missing = \"mean\" (or \"median\", \"zero\", \"indicator\" or a number)".to_owned(),
                        (true, _) => String::new(),
                        (false, value) => value.advice(name),
                    };
                    return Err(format!(
                        "column {name:?} holds {found}; {expected} was expected{advice}"
                    ));
                };
                numbers.push(number);
            }
            (Role::Weight, Cells::Numbers(weights)) => {
                match value.number().filter(|weight| *weight >= 0.0) {
                    Some(weight) => weights.push(weight),
                    None => {
                        return Err(format!(
                            "the weight, column {name:?}, is {found}; a finite number was expected, at least 0"
                        ));
                    }
                }
            }
            (Role::Label { .. }, _) => unreachable!("labels are read as texts"),
            (_, Cells::Lists(_)) => {
                return Err(format!(
                    "column {name:?} has lists, and a single cell was added; add elements, and end each list"
                ));
            }
        }
        Ok(())
    }
}
