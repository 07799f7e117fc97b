//! CSV files: columns of numbers, categories and dates, one of them a label.
//!
//! `data.dir` is a folder with `train.csv` and, perhaps, `test.csv`, or a single file, compressed if its name ends with
//! `.gz`. The first line names the columns; `tabular` tells what becomes of them.

use std::path::Path;

use csv::{ErrorKind, ReaderBuilder, StringRecord, Trim};
use shared_proto::job::Data;

use super::dataset::Dataset;
use super::error::InputError;
use super::place;
use super::source::{DataSetup, Source};
use super::table::{Labels, Places, Table, Value};
use super::tabular;

/// The source `csv`.
pub struct Csv;

impl Source for Csv {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        tabular::open(setup, "csv", read)
    }
}

fn read(path: &Path, settings: &Data, labels: Labels) -> Result<Table, InputError> {
    let content = place::read(path)?;
    // The reader accepts rows of any length, so that their errors have the same form as all others.
    let mut reader = ReaderBuilder::new()
        .flexible(true)
        .trim(Trim::All)
        .from_reader(content.as_slice());
    let header = reader.headers().map_err(|e| unreadable(path, e))?.clone();
    if header.is_empty() {
        return Err(InputError::Line {
            path: path.to_owned(),
            line: 1,
            problem: "the file is empty; a line with the columns' names was expected".to_owned(),
        });
    }
    let names: Vec<&str> = header.iter().collect();
    let mut table = Table::new(path.to_owned(), Places::Lines, &names, settings, labels)?;
    let mut row = StringRecord::new();
    while reader
        .read_record(&mut row)
        .map_err(|e| unreadable(path, e))?
    {
        let line = line_of(&row, &content);
        if row.len() != names.len() {
            return Err(table.wrong(
                line,
                format!(
                    "{} fields were found, {} expected, as in the header",
                    row.len(),
                    names.len()
                ),
            ));
        }
        for (column, field) in row.iter().enumerate() {
            let value = match field {
                "" => Value::Missing,
                field => Value::Text(field),
            };
            table.push(column, value, line)?;
        }
    }
    if table.len() == 0 {
        return Err(table.wrong(1, "no sample follows the header".to_owned()));
    }
    Ok(table)
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
