//! Numbers in columns, one of them a label.
//!
//! `data.dir` is a folder with `train.csv` and, perhaps, `test.csv`, or a single file. The first
//! line names the columns. All but the label are numbers; each column is shifted and scaled by the
//! mean and the standard deviation that it has in the training part. Labels are classes (whole numbers from
//! 0, or names, numbered in sorted order) or numbers; `data.target` decides. Without `test.csv`, a share of the samples is held
//! out, chosen by the job's seed.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use csv::{ErrorKind, ReaderBuilder, StringRecord, Trim};

use super::column::{Column, Values};
use super::dataset::Dataset;
use super::error::InputError;
use super::memory::InMemory;
use super::place;
use super::source::{DataSetup, Source};
use super::target::{Labels, Target};

/// The source `csv`.
pub struct Csv;

impl Source for Csv {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        load(setup.dir()?, setup)
    }
}

fn load(place: &Path, setup: &DataSetup) -> Result<Dataset, InputError> {
    let data = setup.settings;
    let (train, test) = if place.is_dir() {
        let test = place.join("test.csv");
        (place.join("train.csv"), test.is_file().then_some(test))
    } else {
        (place.to_owned(), None)
    };
    if !train.is_file() {
        return Err(InputError::Missing {
            folder: place.to_owned(),
            names: "train.csv (nor is it a CSV file itself)".to_owned(),
        });
    }
    let mut train = Table::read(train, &data.label)?;
    let wrong = |line, problem| train.wrong(line, problem);
    let target = Target::of(&train.labels, data.target, false, &wrong)?;
    let all = train.take_samples(&target)?;
    let (mut training, mut evaluation) = match test {
        Some(test) => {
            let mut test = Table::read(test, &data.label)?;
            test.check_columns(&train)?;
            (all, test.take_samples(&target)?)
        }
        None => place::hold_out(&all, setup, &train.path)?,
    };
    standardise(&mut training, &mut evaluation);
    Dataset::in_memory(training, evaluation)
}

/// Gives each column the mean 0 and the deviation 1 in the training part, and moves the evaluation
/// part along. A column that never changes there becomes 0.
fn standardise(training: &mut InMemory, evaluation: &mut InMemory) {
    let columns = training.inputs[0].field().elements();
    let count = training.len() as f64;
    let (Values::F32(train), Values::F32(test)) = (
        training.inputs[0].stored_mut(),
        evaluation.inputs[0].stored_mut(),
    ) else {
        unreachable!("columns are read as floats");
    };
    for column in 0..columns {
        let values = || train.iter().skip(column).step_by(columns);
        let first = train[column];
        let constant = values().all(|v| *v == first);
        let mean = values().map(|v| f64::from(*v)).sum::<f64>() / count;
        let squares: f64 = values().map(|v| (f64::from(*v) - mean).powi(2)).sum();
        let deviation = if constant {
            1.0
        } else {
            (squares / count).sqrt()
        };
        for values in [&mut *train, &mut *test] {
            for value in values.iter_mut().skip(column).step_by(columns) {
                *value = ((f64::from(*value) - mean) / deviation) as f32;
            }
        }
    }
}

/// A file's content.
struct Table {
    path: PathBuf,
    /// The names of all columns except the label's.
    columns: Vec<String>,
    /// The values of these columns, row by row.
    features: Vec<f32>,
    labels: Labels,
}

impl Table {
    fn read(path: PathBuf, label: &str) -> Result<Self, InputError> {
        let content = std::fs::read(&path).map_err(|source| InputError::Unreadable {
            path: path.clone(),
            source,
        })?;
        // The reader accepts rows of any length, so that their errors have the same form as all others.
        let mut reader = ReaderBuilder::new()
            .flexible(true)
            .trim(Trim::All)
            .from_reader(content.as_slice());
        let header = reader.headers().map_err(|e| unreadable(&path, e))?.clone();
        let mut table = Self {
            path,
            columns: Vec::new(),
            features: Vec::new(),
            labels: Labels::default(),
        };
        let label = table.read_header(&header, label)?;
        let mut row = StringRecord::new();
        while reader
            .read_record(&mut row)
            .map_err(|e| unreadable(&table.path, e))?
        {
            let line = line_of(&row, &content);
            table.read_row(&row, line, &header, label)?;
        }
        if table.labels.is_empty() {
            return Err(table.wrong(1, "no sample follows the header".to_owned()));
        }
        Ok(table)
    }

    /// Reads the names of the columns, and returns the index of the label's.
    fn read_header(&mut self, header: &StringRecord, label: &str) -> Result<usize, InputError> {
        if header.is_empty() {
            return Err(self.wrong(
                1,
                "the file is empty; a line with the columns' names was expected".to_owned(),
            ));
        }
        let mut seen = HashSet::new();
        if let Some(twice) = header.iter().find(|name| !seen.insert(*name)) {
            return Err(self.wrong(
                1,
                format!("two columns are called {twice:?}; rename one of them"),
            ));
        }
        let place = header.iter().position(|name| name == label);
        let columns = header.iter().filter(|name| *name != label);
        self.columns = columns.map(str::to_owned).collect();
        match place {
            None => Err(self.wrong(
                1,
                format!(
                    "no column is called {label:?}; let `data.label` name one of {:?}",
                    self.columns
                ),
            )),
            Some(_) if self.columns.is_empty() => Err(self.wrong(
                1,
                format!("{label:?} is the only column; there is nothing to learn from"),
            )),
            Some(place) => Ok(place),
        }
    }

    fn read_row(
        &mut self,
        row: &StringRecord,
        line: u64,
        header: &StringRecord,
        label: usize,
    ) -> Result<(), InputError> {
        if row.len() != header.len() {
            return Err(self.wrong(
                line,
                format!(
                    "{} fields were found, {} expected, as in the header",
                    row.len(),
                    header.len()
                ),
            ));
        }
        for (i, (field, column)) in row.iter().zip(header).enumerate() {
            if i != label {
                let value = field.parse::<f32>().ok().filter(|v| v.is_finite());
                let value = value.ok_or_else(|| {
                    self.wrong(
                        line,
                        format!("column {column:?} holds {field:?}; a finite number was expected"),
                    )
                })?;
                self.features.push(value);
            } else if field.is_empty() {
                return Err(self.wrong(line, format!("the label, column {column:?}, is empty")));
            } else {
                self.labels.push(field, line);
            }
        }
        Ok(())
    }

    fn check_columns(&self, train: &Self) -> Result<(), InputError> {
        if self.columns == train.columns {
            return Ok(());
        }
        Err(self.wrong(
            1,
            format!(
                "columns {:?} were found; {:?} were expected, as in {}",
                self.columns,
                train.columns,
                train.path.display()
            ),
        ))
    }

    fn take_samples(&mut self, target: &Target) -> Result<InMemory, InputError> {
        let label = target.column("label", &self.labels, &|line, what| self.wrong(line, what))?;
        let features = std::mem::take(&mut self.features);
        let features = Column::numbers("features", vec![self.columns.len()], features);
        InMemory::new(vec![features], vec![label])
    }

    fn wrong(&self, line: u64, problem: String) -> InputError {
        InputError::Line {
            path: self.path.clone(),
            line,
            problem,
        }
    }
}

/// Returns the line of a row. The reader gives the first of the blank lines before it.
fn line_of(row: &StringRecord, content: &[u8]) -> u64 {
    let Some(position) = row.position() else {
        return 1;
    };
    let rest = content.iter().skip(position.byte() as usize);
    let blank = rest.take_while(|byte| matches!(byte, b'\r' | b'\n'));
    position.line() + blank.filter(|byte| **byte == b'\n').count() as u64
}

fn unreadable(path: &Path, error: csv::Error) -> InputError {
    let line = error.position().map_or(1, csv::Position::line);
    let problem = error.to_string();
    match error.into_kind() {
        ErrorKind::Io(source) => InputError::Unreadable {
            path: path.to_owned(),
            source,
        },
        _ => InputError::Line {
            path: path.to_owned(),
            line,
            problem,
        },
    }
}
