//! Clicks on advertisements, as Criteo publishes them: lines of 40 fields between tabs, the label, 13 whole numbers, and 26
//! hashes of 8 hexadecimal digits. An empty field is missing.
//!
//! `data.dir` is a file, or a folder with one file to train on (`data.options.train` and `test` name files). Lines are in
//! the order of time, so without a file of its own the last share of the lines is held out (`data.held_out`). The input
//! `numbers` has `ln(1 + x)` of each number, 0 where it is missing or negative. The input `categories` has an id for each
//! hash, below `data.options.buckets` (100,000 by default): the hash of the field's number and the text; a missing one is a
//! text of its own.

use std::path::Path;

use super::column::{Column, Values};
use super::dataset::Dataset;
use super::error::InputError;
use super::hash::hash;
use super::memory::InMemory;
use super::place;
use super::source::{DataSetup, Source};

const NUMBERS: usize = 13;
const CATEGORIES: usize = 26;
const FIELDS: usize = 1 + NUMBERS + CATEGORIES;
const BUCKETS: u64 = 100_000;

/// The source `criteo`.
pub struct Criteo;

impl Source for Criteo {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&["train", "test", "buckets"])?;
        let parts = place::parts(setup, Path::to_owned)?;
        let buckets = setup.whole_number("buckets")?.unwrap_or(BUCKETS);
        if buckets == 0 || buckets > u64::from(u32::MAX) {
            return Err(InputError::Invalid(format!(
                "`data.options.buckets` is {buckets}, but must be at least 1 and at most {}",
                u32::MAX
            )));
        }
        let all = read(&parts.training, buckets)?;
        if let Some(path) = &parts.evaluation {
            return Dataset::in_memory(all, read(path, buckets)?);
        }
        let begin = place::first_held_out(all.len(), setup, &parts.training)?;
        let numbers: Vec<u32> = (0u32..).take(all.len()).collect();
        let (training, evaluation) = numbers.split_at(begin);
        Dataset::in_memory(all.select(training), all.select(evaluation))
    }
}

fn read(path: &Path, buckets: u64) -> Result<InMemory, InputError> {
    let text = place::read_text(path)?;
    let (mut labels, mut numbers, mut categories) = (Vec::new(), Vec::new(), Vec::new());
    for (line, row) in (1..).zip(text.lines()) {
        let wrong = |problem: String| InputError::Line {
            path: path.to_owned(),
            line,
            problem,
        };
        let fields: Vec<&str> = row.split('\t').collect();
        if fields.len() != FIELDS {
            return Err(wrong(format!(
                "{} fields were found; a label, {NUMBERS} numbers and {CATEGORIES} categories between tabs were expected",
                fields.len()
            )));
        }
        labels.push(match fields[0] {
            "0" => 0.0,
            "1" => 1.0,
            other => return Err(wrong(format!("label {other:?} is neither 0 nor 1"))),
        });
        for (i, field) in fields[1..=NUMBERS].iter().enumerate() {
            let number = match field.is_empty() {
                true => 0,
                false => field.parse::<i64>().map_err(|_| {
                    wrong(format!(
                        "number {} is {field:?}; a whole number was expected",
                        i + 1
                    ))
                })?,
            };
            numbers.push((number.max(0) as f64).ln_1p() as f32);
        }
        for (field, text) in (0u64..).zip(&fields[1 + NUMBERS..]) {
            if !text.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(wrong(format!(
                    "category {} is {text:?}; hexadecimal digits were expected",
                    field + 1
                )));
            }
            categories.push((hash(field, text) % buckets) as u32);
        }
    }
    if labels.is_empty() {
        return Err(InputError::Line {
            path: path.to_owned(),
            line: 1,
            problem: "there is no sample".to_owned(),
        });
    }
    let numbers = Column::numbers("numbers", vec![NUMBERS], numbers);
    let categories = Column::values("categories", vec![CATEGORIES], Values::U32(categories));
    let categories = categories.below(buckets);
    InMemory::new(
        vec![numbers, categories],
        vec![Column::binary("label", labels)],
    )
}
