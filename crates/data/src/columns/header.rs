//! The columns of a table: their names, their roles, and the texts that stand for a missing value.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use shared_proto::job::{ColumnType, Data, MissingLabel, Transform};

use super::cell::Cell;
use crate::error::InputError;
use crate::place::{Place, Unit};

/// The name of the input that holds all number columns.
pub(crate) const NUMBERS: &str = "inputs";

/// The name of the target.
pub(crate) const LABEL: &str = "label";

/// How the label's column is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LabelColumn {
    Read,
    /// Labels are not read, and the file may lack the column.
    LeftOut,
    /// In a survey: all columns are read as texts, and the label's column is one of them.
    Survey,
}

#[derive(Clone, Debug)]
pub(super) enum Role {
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

/// The columns of a file: their names and their roles.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub(super) names: Vec<String>,
    pub(super) roles: Vec<Role>,
    /// The index of the label's column; `None` if labels are not read.
    pub(super) label: Option<usize>,
    pub(super) gaps: Gaps,
    /// True if rows without a label are left out.
    skips_unlabelled: bool,
}

impl Header {
    /// Returns the columns of a file with these names. The columns in `indices` are the index of a pandas frame; they
    /// are ignored unless the job gives them a type. After training, `known` returns whether the training had a column
    /// of this name; other columns are ignored too.
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
        known: Option<impl Fn(&str) -> bool>,
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
                Role::Input { .. } if known.as_ref().is_some_and(|known| !known(name)) => {
                    Role::Ignored
                }
                role => role,
            }
        };
        let label = names.iter().position(|name| *name == settings.label);
        let header = Self {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            roles: names.iter().map(role).collect(),
            label: label.filter(|_| labels == LabelColumn::Read),
            gaps: Gaps::new(settings),
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

    /// Returns the index of the label's column; `usize::MAX`, which no row has, if labels are not read.
    pub(crate) fn label_column(&self) -> usize {
        self.label.unwrap_or(usize::MAX)
    }

    /// Returns whether any column has ids. The ids of samples take more memory than texts of which each is held once.
    pub(crate) fn has_ids(&self) -> bool {
        let is_id = |role: &Role| {
            matches!(
                role,
                Role::Input {
                    kind: ColumnType::Id { .. },
                    ..
                }
            )
        };
        self.roles.iter().any(is_id)
    }

    /// Returns whether a row with this label is left out: the label is missing, and the job skips samples without one.
    pub(crate) fn skips(&self, label: &str) -> bool {
        self.skips_unlabelled && self.gaps.are(label)
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

    /// Returns whether the cells of a column are ignored.
    pub(crate) fn is_ignored(&self, column: usize) -> bool {
        matches!(self.roles[column], Role::Ignored)
    }

    /// Marks the cells of a column as lists. Returns false if the column cannot have lists. Only columns of ids and
    /// ignored columns can.
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
}

impl Header {
    /// Returns what is wrong with the names of the columns; `None` if they are valid.
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

    /// Returns whether the column becomes an input of ids, which has the column's name.
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

/// Returns the message for a column that has a problem, with the line of a job that leaves the column out.
pub(crate) fn unfit(name: &str, problem: &str) -> String {
    format!(
        "column {name:?} {problem}; leave it out with this line in [data.columns]: {name:?} = {{ type = \"ignore\" }}"
    )
}

/// Returns the names of the columns that hold the index of a pandas frame. `metadata` is the JSON that pandas writes
/// under the key `pandas` of a file's or a batch's metadata.
pub fn pandas_index(metadata: &str) -> Vec<String> {
    let pandas: Option<serde_json::Value> = serde_json::from_str(metadata).ok();
    let columns = pandas
        .as_ref()
        .and_then(|pandas| pandas["index_columns"].as_array());
    // A range is an object, and has no column.
    let names = columns
        .into_iter()
        .flatten()
        .filter_map(|column| column.as_str());
    names.map(str::to_owned).collect()
}

/// The texts that stand for a missing value unless the job sets `data.missing_texts`: those of pandas and R, and the
/// `?` of the UCI archive.
const MISSING: [&str; 19] = [
    "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>",
    "?", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
];

/// The texts that stand for a missing value.
#[derive(Clone, Debug)]
pub(crate) struct Gaps {
    texts: Arc<HashSet<String>>,
    /// True if one of the texts is a number.
    pub(super) has_number: bool,
}

impl Gaps {
    pub(crate) fn new(settings: &Data) -> Self {
        let texts: HashSet<String> = match &settings.missing_texts {
            Some(texts) => texts.iter().cloned().collect(),
            None => MISSING.map(str::to_owned).into(),
        };
        Self {
            has_number: texts.iter().any(|text| Cell::Text(text).number().is_some()),
            texts: Arc::new(texts),
        }
    }

    /// Returns whether a text stands for a missing value.
    pub(crate) fn are(&self, text: &str) -> bool {
        text.is_empty() || self.texts.contains(text)
    }

    /// Returns the value, or [`Cell::Missing`] for NaN and for a text that stands for a missing value.
    pub(super) fn read<'a>(&self, value: Cell<'a>) -> Cell<'a> {
        match value {
            Cell::Text(text) if self.are(text) => Cell::Missing,
            Cell::Double(number) if number.is_nan() => Cell::Missing,
            Cell::Single(number) if number.is_nan() => Cell::Missing,
            value => value,
        }
    }
}
