//! Clicks on advertisements in the format of Criteo. A line has 40 fields between tabs: the label, 13 whole numbers,
//! and 26 hashes of 8 hexadecimal digits. An empty field is a missing value.
//!
//! `data.dir` is a file, a pattern of file names, or a folder with one training file. `data.options.train` and
//! `data.options.test` may name the files. Lines are in chronological order, so without a test file, the last share of
//! the lines is held out (`data.held_out`). The input `numbers` has `ln(1 + x)` of each number, or 0 where the number
//! is missing or negative. The input `categories` has an id for each hash, below `data.options.buckets` (100,000 by
//! default). The id is a hash of the field's index and its text; a missing value has the empty text.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use crate::columns::hash::Hasher;
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::features::fitted::Fitted;
use crate::features::target::Target;
use crate::reading::chunks::{self, Decode, Files, Format, Subset};
use crate::reading::held_out::HeldOut;
use crate::reading::lines::{Lines, Text, TextFiles};
use crate::reading::parts;
use crate::samples::column::{Column, Values};
use crate::samples::memory::InMemory;
use crate::source::{DataSetup, Purpose, Source};

const NUMBERS: usize = 13;
const CATEGORIES: usize = 26;
const FIELDS: usize = 1 + NUMBERS + CATEGORIES;
const BUCKETS: u64 = 100_000;

/// `ln(1 + x)` of small numbers. Most numbers of the data are small.
static LOGARITHMS: LazyLock<[f32; 1024]> =
    LazyLock::new(|| std::array::from_fn(|x| logarithm(x as u64)));

/// The source `criteo`.
pub struct Criteo;

impl Source for Criteo {
    const STREAMS: bool = true;

    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&["train", "test", "buckets"])?;
        let parts = parts::find(setup, Path::to_owned)?;
        let buckets = setup.whole_number("buckets")?.unwrap_or(BUCKETS);
        if buckets == 0 || buckets > u64::from(u32::MAX) {
            return Err(InputError::Invalid(format!(
                "`data.options.buckets` is {buckets}, but must be at least 1 and at most {}",
                u32::MAX
            )));
        }
        let has_labels = !matches!(setup.purpose, Purpose::Prediction(_));
        let cut = |paths: &[PathBuf]| {
            let files = parts::open(setup, paths)?;
            let size = chunks::size(setup, &files);
            let lines = Lines::open(files, size, |_| true)?;
            Ok::<_, InputError>(TextFiles::new(lines, move |text, samples| {
                parse(text, samples, buckets, has_labels)
            }))
        };
        if let Purpose::EvaluationOfAll(fitted) | Purpose::Prediction(fitted) = setup.purpose {
            let mut paths = parts.training;
            paths.extend(parts.evaluation.filter(|_| has_labels));
            let files = Files {
                training: cut(&paths)?,
                evaluation: None,
                place: &parts.place,
            };
            return files.open_all(setup, Arc::new(Ok), fitted);
        }
        let evaluation = parts.evaluation.map(|path| cut(&[path])).transpose()?;
        let files = Files {
            training: cut(&parts.training)?,
            evaluation,
            place: &parts.place,
        };
        files.open(setup, HeldOut::Last, Clicks)
    }
}

/// Clicks are parsed directly to samples, without anything to learn.
struct Clicks;

impl Format for Clicks {
    type Parsed = InMemory;

    fn learns(&self) -> bool {
        false
    }

    fn learn(&mut self, _: &InMemory, _: Subset) -> Result<(), InputError> {
        Ok(())
    }

    fn finish(self) -> Result<(Decode<InMemory>, Option<Fitted>), InputError> {
        let values = [("0".to_owned(), 0.0), ("1".to_owned(), 1.0)].into();
        Ok((
            Arc::new(Ok),
            Some(Fitted::of_target(Target::Binary { values })),
        ))
    }
}

/// Parses lines. If `has_labels` is false, a line may lack the label, as in Criteo's test file.
fn parse(
    text: &Text,
    samples: &[u32],
    buckets: u64,
    has_labels: bool,
) -> Result<InMemory, InputError> {
    let mut labels = Vec::with_capacity(samples.len());
    let mut numbers = Vec::with_capacity(samples.len() * NUMBERS);
    let mut categories = Vec::with_capacity(samples.len() * CATEGORIES);
    let hashers: Vec<Hasher> = (0..CATEGORIES as u64).map(Hasher::new).collect();
    for (sample, row) in text.select(samples)?.lines().enumerate() {
        let wrong = |problem: String| text.rows(&samples[sample..=sample]).place(0).wrong(problem);
        let (mut fields, mut found) = split(row);
        if !has_labels && found == FIELDS - 1 {
            fields.rotate_right(1);
            (fields[0], found) = ("0", FIELDS);
        }
        if found != FIELDS {
            return Err(wrong(format!(
                "{found} fields were found; a label, {NUMBERS} numbers and {CATEGORIES} categories between tabs were expected"
            )));
        }
        labels.push(match fields[0] {
            "0" => 0.0,
            "1" => 1.0,
            _ if !has_labels => 0.0,
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
            numbers.push(scaled(number));
        }
        for ((field, text), hasher) in (1..).zip(&fields[1 + NUMBERS..]).zip(&hashers) {
            // The fold reads all bytes, so it needs no branch for each byte.
            let any_wrong = |wrong, b: u8| wrong | !b.is_ascii_hexdigit();
            if text.bytes().fold(false, any_wrong) {
                return Err(wrong(format!(
                    "category {field} is {text:?}; hexadecimal digits were expected"
                )));
            }
            categories.push((hasher.hash(text) % buckets) as u32);
        }
    }
    let numbers = Column::numbers("numbers", vec![NUMBERS], numbers);
    let categories = Column::values("categories", vec![CATEGORIES], Values::U32(categories));
    let categories = categories.below(buckets);
    InMemory::new(
        vec![numbers, categories],
        vec![Column::binary("label", labels)],
    )
}

/// Splits a line at its tabs. Returns the first [`FIELDS`] fields, and the number of all fields.
fn split(row: &str) -> ([&str; FIELDS], usize) {
    let (mut fields, mut found, mut start) = ([""; FIELDS], 0, 0);
    // Most fields are too short for `memchr` to be faster than a loop.
    let tabs = row.bytes().enumerate().filter(|(_, b)| *b == b'\t');
    for end in tabs.map(|(at, _)| at).chain([row.len()]) {
        if let Some(field) = fields.get_mut(found) {
            *field = &row[start..end];
        }
        (found, start) = (found + 1, end + 1);
    }
    (fields, found)
}

/// Returns `ln(1 + x)` of a number, or 0 if the number is negative.
fn scaled(number: i64) -> f32 {
    let number = number.max(0) as u64;
    let small = usize::try_from(number).ok();
    let known = small.and_then(|number| LOGARITHMS.get(number));
    known.copied().unwrap_or_else(|| logarithm(number))
}

fn logarithm(number: u64) -> f32 {
    (number as f64).ln_1p() as f32
}
