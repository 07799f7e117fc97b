//! Numbers in columns, one of them a label.
//!
//! `data.dir` is a folder with `train.csv` and, perhaps, `test.csv`, or a single file. The first
//! line names the columns. All but the label are numbers; each column is shifted and scaled by the
//! mean and the standard deviation that it has in the training part. Labels are whole numbers from
//! 0, or else names, numbered in sorted order. Without `test.csv`, a share of the samples is held
//! out, chosen by the job's seed.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use csv::{ErrorKind, ReaderBuilder, StringRecord, Trim};
use shared_proto::job::Data;

use super::dataset::Dataset;
use super::error::InputError;
use super::memory::{Features, InMemory};
use super::source::{DataSetup, Source};
use crate::shuffle;

/// Labels from this number on are refused: each class costs a row of the model's output layer.
const MAX_CLASSES: u32 = 1 << 16;

/// The source `csv`.
pub struct Csv;

impl Source for Csv {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        load(setup.dir()?, setup.settings, setup.seed)
    }
}

fn load(place: &Path, data: &Data, seed: u64) -> Result<Dataset, InputError> {
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
    let classes = Classes::of(&train)?;
    let all = train.take_samples(&classes)?;
    let (mut training, mut evaluation) = match test {
        Some(test) => {
            let mut test = Table::read(test, &data.label)?;
            test.check_columns(&train)?;
            (all, test.take_samples(&classes)?)
        }
        None => hold_out(&all, data.held_out, seed, &train)?,
    };
    standardise(&mut training, &mut evaluation);
    Dataset::in_memory(training, evaluation, classes.count)
}

fn hold_out(
    all: &InMemory,
    share: f64,
    seed: u64,
    table: &Table,
) -> Result<(InMemory, InMemory), InputError> {
    if all.len() < 2 {
        return Err(table.wrong(
            2,
            "there is a single sample; at least one to learn from and one to hold out are needed"
                .to_owned(),
        ));
    }
    let held_out = (all.len() as f64 * share).ceil() as usize;
    let order = shuffle::held_out(seed, all.len());
    let (training, evaluation) = order.split_at(all.len() - held_out.clamp(1, all.len() - 1));
    Ok((all.select(training), all.select(evaluation)))
}

/// Gives each column the mean 0 and the deviation 1 in the training part, and moves the evaluation
/// part along. A column that never changes there becomes 0.
fn standardise(training: &mut InMemory, evaluation: &mut InMemory) {
    let columns = training.sample_shape()[0];
    let count = training.len() as f64;
    let (Features::Floats(train), Features::Floats(test)) =
        (&mut training.features, &mut evaluation.features)
    else {
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
    /// The index of each row's label in `names`.
    labels: Vec<u32>,
    /// The labels that occur, each with the first line where it does.
    names: Vec<(String, u64)>,
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
            labels: Vec::new(),
            names: Vec::new(),
        };
        let label = table.read_header(&header, label)?;
        let mut known = HashMap::new();
        let mut row = StringRecord::new();
        while reader
            .read_record(&mut row)
            .map_err(|e| unreadable(&table.path, e))?
        {
            let line = line_of(&row, &content);
            table.read_row(&row, line, &header, label, &mut known)?;
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
        known: &mut HashMap<String, u32>,
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
            } else if let Some(known) = known.get(field) {
                self.labels.push(*known);
            } else {
                let new = self.names.len() as u32;
                known.insert(field.to_owned(), new);
                self.names.push((field.to_owned(), line));
                self.labels.push(new);
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

    fn take_samples(&mut self, classes: &Classes) -> Result<InMemory, InputError> {
        let mut numbers = Vec::with_capacity(self.names.len());
        for (name, line) in &self.names {
            let number = classes.numbers.get(name).ok_or_else(|| {
                self.wrong(
                    *line,
                    format!("label {name:?} does not occur in the training data"),
                )
            })?;
            numbers.push(*number);
        }
        let labels = self.labels.iter().map(|l| numbers[*l as usize]).collect();
        let features = std::mem::take(&mut self.features);
        InMemory::floats(vec![self.columns.len()], features, labels)
    }

    fn wrong(&self, line: u64, problem: String) -> InputError {
        InputError::Line {
            path: self.path.clone(),
            line,
            problem,
        }
    }
}

/// The class of each label.
struct Classes {
    numbers: HashMap<String, u32>,
    count: usize,
}

impl Classes {
    fn of(train: &Table) -> Result<Self, InputError> {
        let names = train.names.iter();
        let whole: Option<HashMap<String, u32>> = names
            .clone()
            .map(|(name, _)| Some((name.clone(), name.parse().ok()?)))
            .collect();
        let Some(numbers) = whole else {
            let sorted: BTreeSet<&String> = names.map(|(name, _)| name).collect();
            return Ok(Self {
                count: sorted.len(),
                numbers: sorted.into_iter().cloned().zip(0..).collect(),
            });
        };
        let too_large = |(name, _): &&(String, u64)| numbers[name] >= MAX_CLASSES;
        if let Some((name, line)) = train.names.iter().find(too_large) {
            return Err(train.wrong(
                *line,
                format!(
                    "label {name} is too large; number the classes from 0, below {MAX_CLASSES}"
                ),
            ));
        }
        let highest = numbers.values().max().copied().unwrap_or(0);
        Ok(Self {
            numbers,
            count: highest as usize + 1,
        })
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
