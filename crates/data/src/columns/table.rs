//! The content of a table: named columns of cells, whichever format they are read from.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use shared_proto::job::{ColumnType, Data, MissingLabel, Transform};

use super::texts::Texts;
use super::value::Value;
use crate::error::InputError;
use crate::place::{Place, Unit};

/// The name of the input that has the number columns.
pub(crate) const NUMBERS: &str = "inputs";

/// The name of the target.
pub(crate) const LABEL: &str = "label";

/// Stands for a missing number. All others are finite.
pub(crate) const GAP: f64 = f64::NAN;

/// A file's columns, which are filled row by row or column by column.
pub(crate) struct Table {
    rows: Rows,
    columns: Vec<Named>,
    /// The index of the label's column; none if labels are not read.
    label: Option<usize>,
    gaps: Gaps,
}

/// The samples of a table: where they are in their file.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) file: Arc<Path>,
    pub(crate) unit: Unit,
    pub(crate) numbers: Numbers,
}

/// The number of each sample's line or row.
#[derive(Debug)]
pub(crate) enum Numbers {
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
    pub(crate) fn place(&self, sample: usize) -> Place {
        Place {
            file: self.file.clone(),
            unit: self.unit,
            number: self.numbers.get(sample).unwrap_or(1),
        }
    }
}

/// The part that labels have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LabelColumn {
    Read,
    /// The column may be missing.
    LeftOut,
    /// It is a column like others, all of which are read as texts to be looked at.
    Survey,
}

struct Named {
    name: String,
    role: Role,
    cells: Cells,
}

#[derive(Clone, Debug)]
enum Role {
    Label {
        /// True if samples without a label are left out later.
        may_lack: bool,
    },
    Ignored,
    Weight,
    Input {
        kind: ColumnType,
        /// False if the job says nothing about the column.
        given: bool,
        /// True if each cell is a list.
        list: bool,
    },
}

/// The cells of a column, in the order of the samples.
pub(crate) enum Cells {
    /// Numbers, and dates as days since 1970; [`GAP`] where there is none.
    Numbers(Vec<f64>),
    /// Categories and labels.
    Texts(Texts),
    /// Ids, any number in each sample.
    Lists(Lists),
}

/// Lists of texts. The samples of `texts` are the elements of all lists.
pub(crate) struct Lists {
    pub(crate) texts: Texts,
    /// The end of each list among the elements.
    pub(crate) ends: Vec<usize>,
}

impl Lists {
    fn new() -> Self {
        Self {
            texts: Texts::default(),
            ends: Vec::new(),
        }
    }

    /// Returns the elements of a sample.
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

    /// Returns the cells of these samples; a column that is ignored has none.
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

/// The columns of a file: their names and what they are for.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    names: Vec<String>,
    roles: Vec<Role>,
    /// The index of the label's column; none if labels are not read.
    label: Option<usize>,
    gaps: Gaps,
    /// True if rows without a label are left out.
    skips_unlabelled: bool,
}

impl Header {
    /// Returns the columns of a file, which have these names. Those of `indices` are the index of a pandas frame, and are left out unless the job
    /// gives them a type. After training, `known` tells the columns that it had, and others are left out too.
    ///
    /// # Errors
    /// If a name occurs twice or is taken, the label is missing, no column is left to learn from, or the job names a
    /// column that the file does not have.
    pub(crate) fn new(
        file: &Arc<Path>,
        unit: Unit,
        names: &[&str],
        indices: &[&str],
        settings: &Data,
        known: Option<&dyn Fn(&str) -> bool>,
        labels: LabelColumn,
    ) -> Result<Self, InputError> {
        let role = |name: &&str| {
            let role = Role::new(name, settings, labels);
            let is_index = indices.contains(name) && !settings.columns.contains_key(*name);
            match role {
                Role::Input { .. } if is_index => {
                    tracing::info!(file = %file.display(), "column {name:?} is the index of a pandas frame and is left out; give it a type in [data.columns] to learn from it");
                    Role::Ignored
                }
                // A column that the training did not have.
                Role::Input { .. } if known.is_some_and(|known| !known(name)) => Role::Ignored,
                role => role,
            }
        };
        let label = names.iter().position(|name| *name == settings.label);
        let header = Self {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            roles: names.iter().map(role).collect(),
            label: label.filter(|_| labels == LabelColumn::Read),
            gaps: Gaps::of(settings),
            skips_unlabelled: settings.missing_label == MissingLabel::Skip
                && labels == LabelColumn::Read,
        };
        match header.problem(names, settings, labels, known.is_none()) {
            None => Ok(header),
            Some(problem) => Err(Place {
                file: file.clone(),
                unit,
                number: 1,
            }
            .wrong(problem)),
        }
    }

    /// Returns the place of the label's column; one that no row has if labels are not read.
    pub(crate) fn label_column(&self) -> usize {
        self.label.unwrap_or(usize::MAX)
    }

    /// Returns whether a row with this label is left out, because the label is missing and the job says so.
    pub(crate) fn skips(&self, label: Option<&[u8]>) -> bool {
        let text = |label| std::str::from_utf8(label).is_ok_and(|text| self.gaps.are(text.trim()));
        self.skips_unlabelled && label.is_some_and(text)
    }

    /// Returns whether rows without a label are left out.
    pub(crate) fn skips_unlabelled(&self) -> bool {
        self.skips_unlabelled
    }

    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Checks that another file to train on has the same columns in the same order.
    ///
    /// # Errors
    /// Names the columns of both.
    pub(crate) fn check_same(&self, other: &Self, place: &Place) -> Result<(), InputError> {
        let lists = |header: &Self| -> Vec<bool> {
            let list = |role: &Role| matches!(role, Role::Input { list: true, .. });
            header.roles.iter().map(list).collect()
        };
        match self.names == other.names {
            true if lists(self) != lists(other) => Err(place
                .wrong("a column has lists in one file and single values in another".to_owned())),
            true => Ok(()),
            false => Err(place.wrong(format!(
                "the columns {} were found; {} were expected, as in the first file",
                other.names.join(", "),
                self.names.join(", ")
            ))),
        }
    }

    /// Returns whether nothing reads the cells of a column.
    pub(crate) fn is_ignored(&self, column: usize) -> bool {
        matches!(self.roles[column], Role::Ignored)
    }

    /// Notes that the cells of a column are lists. Returns false if it is no column of ids, which alone can be lists.
    pub(crate) fn has_lists(&mut self, column: usize) -> bool {
        match &mut self.roles[column] {
            Role::Ignored => true,
            Role::Input {
                kind: ColumnType::Id { .. },
                list,
                ..
            } => {
                *list = true;
                true
            }
            _ => false,
        }
    }

    /// Returns a table of these samples, without their cells.
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
    /// Returns whether nothing reads the cells of a column.
    pub(crate) fn is_ignored(&self, column: usize) -> bool {
        matches!(self.columns[column].role, Role::Ignored)
    }

    /// Adds the next sample's cell to a column.
    ///
    /// # Errors
    /// [`InputError`] names file, place, column and value, and what was expected.
    pub(crate) fn push(&mut self, column: usize, value: Value) -> Result<(), InputError> {
        let column = &mut self.columns[column];
        let sample = column.cells.len();
        let rows = &self.rows;
        let pushed = column.push(self.gaps.read(value), value, || rows.place(sample));
        pushed.map_err(|problem| rows.place(sample).wrong(problem))
    }

    /// Adds an element to the list of a column's next sample.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub(crate) fn push_element(&mut self, column: usize, value: Value) -> Result<(), InputError> {
        let column = &mut self.columns[column];
        let (rows, value) = (&self.rows, self.gaps.read(value));
        if let Cells::Lists(lists) = &mut column.cells {
            let place = || rows.place(lists.ends.len());
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

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        self.rows.numbers.len()
    }

    /// Returns the samples with these numbers, in this order.
    pub(crate) fn select(&self, samples: &[u32]) -> Self {
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

    /// Returns the labels; none if they are not read.
    pub(crate) fn labels(&self) -> &Texts {
        static NONE: LazyLock<Texts> = LazyLock::new(Texts::default);
        match self.label.map(|label| &self.columns[label].cells) {
            Some(Cells::Texts(labels)) => labels,
            Some(_) => unreachable!("labels are read as texts"),
            None => &NONE,
        }
    }

    /// Returns the weight of each sample; none if all count alike.
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

    /// Returns the type and the cells of an input.
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

impl Header {
    /// Returns what is wrong with the names of the columns.
    fn problem(
        &self,
        names: &[&str],
        settings: &Data,
        labels: LabelColumn,
        in_training: bool,
    ) -> Option<String> {
        let label = &settings.label;
        let mut seen = HashSet::new();
        if let Some(twice) = names.iter().find(|name| !seen.insert(**name)) {
            return Some(format!(
                "two columns are called {twice:?}; rename one of them"
            ));
        }
        if labels == LabelColumn::Read && !names.contains(&label.as_str()) {
            let numbers = names.iter().all(|name| name.parse::<f64>().is_ok());
            let header = match numbers {
                true => {
                    "; the file seems to have no line of names: add one, or set data.header to false"
                }
                false => "",
            };
            return Some(format!(
                "no column is called {label:?}; let `data.label` name one of {names:?}{header}"
            ));
        }
        if let Some(weight) = &settings.weight {
            // Other data than that of training may have no weights; then all samples count alike.
            let is_absent = labels == LabelColumn::Read && !names.contains(&weight.as_str());
            if is_absent && in_training {
                return Some(format!(
                    "no column is called {weight:?}, which `data.weight` names; there are {names:?}"
                ));
            }
            if settings.columns.contains_key(weight) {
                return Some(format!(
                    "`data.columns` has {weight:?}, which `data.weight` names; leave it out there"
                ));
            }
        }
        if settings.columns.contains_key(label) {
            return Some(format!(
                "`data.columns` has {label:?}, the label; `data.target` says what the label is, so leave it out there"
            ));
        }
        let absent = |name: &&String| in_training && !names.contains(&name.as_str());
        if let Some(absent) = settings.columns.keys().find(absent) {
            return Some(format!(
                "`data.columns` has {absent:?}, which is no column of the file; it has {names:?}"
            ));
        }
        let is_input = |(_, role): &(&&str, &Role)| matches!(role, Role::Input { .. });
        if labels == LabelColumn::Survey {
            return None;
        }
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
    /// Returns the role of a column that is read as texts, or as lists of texts.
    fn surveyed() -> Self {
        Self::Input {
            kind: ColumnType::Id {
                hash: true,
                seed: 0,
                separator: None,
            },
            given: true,
            list: false,
        }
    }

    fn new(name: &str, settings: &Data, labels: LabelColumn) -> Self {
        match settings.columns.get(name) {
            _ if name == settings.label => match labels {
                LabelColumn::Read => Role::Label {
                    may_lack: settings.missing_label == MissingLabel::Skip,
                },
                LabelColumn::LeftOut => Role::Ignored,
                LabelColumn::Survey => Role::surveyed(),
            },
            _ if labels == LabelColumn::Survey => Role::surveyed(),
            _ if settings.weight.as_deref() == Some(name) => match labels {
                LabelColumn::Read => Role::Weight,
                LabelColumn::LeftOut | LabelColumn::Survey => Role::Ignored,
            },
            Some(ColumnType::Ignore {}) => Role::Ignored,
            kind => Role::Input {
                given: kind.is_some(),
                list: false,
                kind: kind
                    .cloned()
                    .unwrap_or(ColumnType::Number {
                        transform: Transform::default(),
                        buckets: None,
                        missing: None,
                    })
                    .or_missing(settings.missing),
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

/// The texts that stand for a missing value where a job does not name them: those of pandas and R, and that of the UCI archive.
const MISSING: [&str; 19] = [
    "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>",
    "?", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
];

/// The texts that stand for a missing value.
#[derive(Clone, Debug)]
pub(crate) struct Gaps(Arc<HashSet<String>>);

impl Gaps {
    pub(crate) fn of(settings: &Data) -> Self {
        Self(Arc::new(match &settings.missing_texts {
            Some(texts) => texts.iter().cloned().collect(),
            None => MISSING.map(str::to_owned).into(),
        }))
    }

    /// Returns whether a text stands for a missing value.
    pub(crate) fn are(&self, text: &str) -> bool {
        text.is_empty() || self.0.contains(text)
    }

    /// Returns the value, or that there is none: NaN is none either.
    fn read<'a>(&self, value: Value<'a>) -> Value<'a> {
        match value {
            Value::Text(text) if self.are(text) => Value::Missing,
            Value::Double(number) if number.is_nan() => Value::Missing,
            Value::Single(number) if number.is_nan() => Value::Missing,
            value => value,
        }
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
        }
    }

    /// Adds a cell, which is written as `found`. The error is a problem in words.
    fn push(
        &mut self,
        value: Value,
        found: Value,
        place: impl Fn() -> Place,
    ) -> Result<(), String> {
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
                if value == Value::Missing && kind.missing().is_some() =>
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
                        (true, Value::Missing) => "; add what takes its place to the column, as in missing = \"mean\" (or \"median\", \"zero\", \"indicator\" or a number)".to_owned(),
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
            (_, Cells::Lists(_)) => unreachable!("lists are read element by element"),
        }
        Ok(())
    }
}
