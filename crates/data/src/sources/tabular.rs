//! Data sets of tables: the types of columns, the parameters that are fitted to the training samples, and the held-out
//! samples.
//!
//! `data.dir` is a folder with `train.EXTENSION` and possibly `test.EXTENSION`, a single file, or a pattern of file
//! names; all files have the same columns. One column is the label, whose kind `data.target` gives. `data.columns`
//! gives the types of the other columns, which are numbers by default. All number columns and dates together are the
//! input `inputs`; each column of categories or ids is an input of its own. If the held-out samples have no file of
//! their own, a share of the samples is held out, chosen by the job's seed.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use shared_proto::job::{ColumnType, Data};

use super::survey::with_all_lines;
use crate::columns::header::{LABEL, LabelColumn};
use crate::columns::table::{Cells, Table};
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::features::fitted::Fitted;
use crate::features::fitting::Fitting;
use crate::features::target::Labels;
use crate::files::{self, Kind};
use crate::reading::chunks::{Chunks, Decode, Files, Format, Subset};
use crate::reading::held_out::HeldOut;
use crate::samples::memory::InMemory;
use crate::source::{DataSetup, Purpose};

/// Opens a data set of tables in files, which `cut` opens.
///
/// # Errors
/// Those of `cut`, and those of labels that do not fit.
pub(crate) fn open<C: Chunks<Parsed = Table>>(
    setup: &DataSetup,
    extension: &str,
    cut: impl Fn(&[PathBuf], LabelColumn) -> Result<C, InputError>,
) -> Result<Dataset, InputError> {
    setup.only_options(&[])?;
    let place = setup.dir()?;
    let all = |paths: &[PathBuf], labels| {
        Ok::<_, InputError>(Files {
            training: cut(paths, labels)?,
            evaluation: None,
            place,
        })
    };
    match setup.purpose {
        Purpose::Prediction(fitted) => {
            let paths = files::matching(place)?;
            for path in &paths {
                if !files::is_file(path)? {
                    return Err(InputError::Invalid(format!(
                        "{} is no file; name the {} file to predict",
                        path.display(),
                        extension.to_uppercase()
                    )));
                }
            }
            let files = all(&paths, LabelColumn::LeftOut)?;
            return files.open_all(setup, unlabelled(fitted.clone()), fitted);
        }
        Purpose::EvaluationOfAll(fitted) => {
            let (mut paths, test) = find(place, extension)?;
            paths.extend(test);
            let files = all(&paths, LabelColumn::Read)?;
            return files.open_all(setup, labelled(fitted.clone()), fitted);
        }
        Purpose::Evaluation(_) | Purpose::Training => {}
    }
    let (train, test) = find(place, extension)?;
    let test = test.map(|test| cut(&[test], LabelColumn::Read));
    let files = Files {
        training: cut(&train, LabelColumn::Read)?,
        evaluation: test.transpose()?,
        place: train.first().map_or(place, PathBuf::as_path),
    };
    let opened = files.open(setup, HeldOut::Random, Columns::new(setup));
    opened.map_err(|error| match setup.purpose {
        Purpose::Training => with_all_lines(error, setup, |_, labels| {
            cut(&files::matching(place)?, labels)
        }),
        _ => error,
    })
}

/// Opens a data set of rows that are in no file, which `cut` returns.
///
/// # Errors
/// Those of `cut`, and those of labels that do not fit.
pub(crate) fn open_rows<C: Chunks<Parsed = Table>>(
    setup: &DataSetup,
    place: &Path,
    cut: impl Fn(&DataSetup, LabelColumn) -> Result<C, InputError>,
) -> Result<Dataset, InputError> {
    let labels = match setup.purpose {
        Purpose::Prediction(_) => LabelColumn::LeftOut,
        _ => LabelColumn::Read,
    };
    let files = Files {
        training: cut(setup, labels)?,
        evaluation: None,
        place,
    };
    match setup.purpose {
        Purpose::Prediction(fitted) => files.open_all(setup, unlabelled(fitted.clone()), fitted),
        Purpose::EvaluationOfAll(fitted) => files.open_all(setup, labelled(fitted.clone()), fitted),
        Purpose::Evaluation(_) => files.open(setup, HeldOut::Random, Columns::new(setup)),
        Purpose::Training => {
            let opened = files.open(setup, HeldOut::Random, Columns::new(setup));
            opened.map_err(|error| with_all_lines(error, setup, cut))
        }
    }
}

/// Returns the cells of the columns in `names` as texts, for all samples of a prediction: one vector for each column.
///
/// # Errors
/// Those of `cut`, or if a column does not exist.
pub(crate) fn texts<C: Chunks<Parsed = Table>>(
    setup: &DataSetup,
    names: &[String],
    cut: impl Fn(&DataSetup, &[PathBuf]) -> Result<C, InputError>,
) -> Result<Vec<Vec<String>>, InputError> {
    let kind = |name: &String| (name.clone(), ColumnType::Category { buckets: None });
    let settings = Data {
        // Of the columns, these alone are read.
        label: String::new(),
        weight: None,
        missing_texts: Some(Vec::new()),
        columns: names.iter().map(kind).collect(),
        ..setup.settings.clone()
    };
    let fitted = Fitted::of_texts(names);
    let setup = DataSetup {
        settings: &settings,
        purpose: Purpose::Prediction(&fitted),
        ..*setup
    };
    let files = cut(&setup, &files::matching(setup.dir()?)?)?;
    let mut columns = vec![Vec::new(); names.len()];
    for chunk in 0..files.chunks().len() {
        let samples: Vec<u32> = (0..files.chunks()[chunk].samples).collect();
        let table = files.parse(&files.read(chunk)?, &samples)?;
        for (column, name) in columns.iter_mut().zip(names) {
            match table.input(name) {
                Some((_, Cells::Texts(cells))) => column.extend(cells.owned()),
                _ => {
                    return Err(table
                        .header_place()
                        .wrong(format!("there is no column {name:?} to be copied")));
                }
            }
        }
    }
    Ok(columns)
}

/// What is learned from the columns of all tables.
struct Columns {
    /// The parameters that were fitted in training; `None` if this is the training.
    known: Option<Fitted>,
    /// The labels of the training files.
    labels: Labels,
    fitting: Fitting,
}

impl Columns {
    fn new(setup: &DataSetup) -> Self {
        Self {
            known: setup.purpose.fitted().cloned(),
            labels: Labels::new(setup.settings, false),
            fitting: Fitting::default(),
        }
    }
}

impl Format for Columns {
    type Parsed = Table;

    fn learns(&self) -> bool {
        self.known.is_none()
    }

    fn learn(&mut self, table: &Table, subset: Subset) -> Result<(), InputError> {
        if let Subset::Training(samples) = subset {
            self.labels.note(table.labels(), samples);
            self.fitting.add(table, samples);
        }
        Ok(())
    }

    fn finish(self) -> Result<(Decode<Table>, Option<Fitted>), InputError> {
        let fitted = match self.known {
            Some(fitted) => fitted,
            None => self.fitting.finish(self.labels.target()?),
        };
        Ok((labelled(fitted.clone()), Some(fitted)))
    }
}

/// Returns the function that decodes tables with labels.
fn labelled(fitted: Fitted) -> Decode<Table> {
    let unknown = UnknownCategories::default();
    Arc::new(move |table: Table| {
        unknown.warn(&fitted, &table);
        let target = fitted.target.column(LABEL, table.labels())?;
        let samples = InMemory::new(fitted.inputs(&table)?, vec![target])?;
        match table.weights() {
            Some(weights) => samples.with_weights(weights),
            None => Ok(samples),
        }
    })
}

/// The columns for which a warning about unknown categories has been logged.
#[derive(Default)]
struct UnknownCategories(Mutex<HashSet<String>>);

impl UnknownCategories {
    /// Logs a warning, once for each column, if most cells of a column have categories that the training did not have.
    fn warn(&self, fitted: &Fitted, table: &Table) {
        for (name, share, examples) in fitted.mostly_unknown(table) {
            if self.0.lock().insert(name.to_owned()) {
                tracing::warn!(
                    "{:.0} % of the cells of column {name:?} have categories that the training did not have, such as {}",
                    100.0 * share,
                    examples.join(", ")
                );
            }
        }
    }
}

/// Returns the function that decodes tables without labels.
pub(crate) fn unlabelled(fitted: Fitted) -> Decode<Table> {
    let unknown = UnknownCategories::default();
    Arc::new(move |table: Table| {
        unknown.warn(&fitted, &table);
        let target = fitted.target.unknown(LABEL, table.len());
        InMemory::new(fitted.inputs(&table)?, vec![target])
    })
}

/// Returns the training files, and the file with the held-out samples, if there is one.
fn find(place: &Path, extension: &str) -> Result<(Vec<PathBuf>, Option<PathBuf>), InputError> {
    let (train, test) = match files::kind(place)? {
        Kind::Folder => {
            let file = |part| place.join(format!("{part}.{extension}"));
            let test = files::is_file(&file("test"))?.then(|| file("test"));
            (vec![file("train")], test)
        }
        Kind::File | Kind::Nothing => (files::matching(place)?, None),
    };
    let mut all = true;
    for file in &train {
        all &= files::is_file(file)?;
    }
    match all {
        true => Ok((train, test)),
        false => Err(InputError::Missing {
            folder: place.to_owned(),
            names: format!(
                "train.{extension} (nor is it a {} file itself)",
                extension.to_uppercase()
            ),
        }),
    }
}
