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
        let count = all.len() as u32;
        let share = (f64::from(count) * setup.settings.held_out).ceil() as u32;
        let held_out = share.clamp(1, count.saturating_sub(1).max(1));
        let samples = |range: std::ops::Range<u32>| all.select(&range.collect::<Vec<_>>());
        Dataset::in_memory(
            samples(0..count - held_out),
            samples(count - held_out..count),
        )
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

/// FNV-1a of a field's number and a text, with its bits mixed (the finaliser of MurmurHash3), so that the remainder by any
/// number of buckets is even.
fn hash(field: u64, text: &str) -> u64 {
    let bytes = field.to_le_bytes().into_iter().chain(text.bytes());
    let mut hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    hash ^ (hash >> 33)
}
