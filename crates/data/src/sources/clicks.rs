//! Generated clicks on advertisements, in the manner of Criteo's data and in any number, for trials and benchmarks of
//! embedding tables.
//!
//! A sample has the inputs `numbers` (13, normally distributed) and `categories`: an id for each of
//! `data.options.fields` fields (26 by default). The ids follow Zipf's law with `exponent` (1.1). Each field draws from
//! its own share of `rows` ids (1,000,000), or, with `shared = true`, from all of them. Ids are scattered over all
//! numbers below 2^63, as hashes are. There are `samples` training samples (200,000), and a twentieth as many held-out
//! samples.
//!
//! The label is drawn with the probability that a planted model computes. Each number and each id has a weight, and
//! each id has a factor. The logit is the sum of a bias, the weighted numbers, the weights of the ids, and the products
//! of all pairs of factors. No model can do better than this one. Samples are independent draws, so each pass has them
//! in the same order.

use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal, Zipf};
use shared_proto::table::hash::hash;

use crate::dataset::Dataset;
use crate::error::InputError;
use crate::samples::column::{Column, Values};
use crate::samples::field::{Field, Signature, ValueType};
use crate::samples::memory::InMemory;
use crate::samples::{Order, Samples};
use crate::source::{DataSetup, Source};

const NUMBERS: usize = 13;
const FIELDS: u64 = 26;
const ROWS: u64 = 1_000_000;
const EXPONENT: f64 = 1.1;
const SAMPLES: u64 = 200_000;
/// The number of training samples for each held-out sample.
const HELD_OUT: u64 = 20;

/// The most ids that a sample can have.
const MOST_FIELDS: u64 = 1000;

/// The standard deviations of the planted weights and factors.
const NUMBER_WEIGHT: f32 = 0.15;
const ID_WEIGHT: f32 = 0.25;
const FACTOR: f32 = 0.1;
/// The bias of the planted model, with which about a quarter of the samples are clicks.
const BIAS: f32 = -1.3;

/// The source `clicks`.
pub struct Clicks;

impl Source for Clicks {
    const STREAMS: bool = true;

    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&["samples", "fields", "rows", "exponent", "shared"])?;
        let count = |key, default| {
            let found = setup.whole_number(key)?.unwrap_or(default);
            match found {
                0 => Err(InputError::Invalid(format!(
                    "`data.options.{key}` is 0, but must be at least 1"
                ))),
                found => Ok(found),
            }
        };
        let (samples, fields) = (count("samples", SAMPLES)?, count("fields", FIELDS)?);
        let shared = setup.truth("shared")?.unwrap_or(false);
        let rows = count("rows", ROWS)?;
        let categories = if shared { rows } else { rows.div_ceil(fields) };
        let exponent = setup.number("exponent")?.unwrap_or(EXPONENT);
        if fields > MOST_FIELDS || !exponent.is_finite() {
            return Err(InputError::Invalid(format!(
                "`data.options.fields` is {fields} and `data.options.exponent` {exponent}; there are at most {MOST_FIELDS} fields, and the exponent is finite"
            )));
        }
        let law = Zipf::new(categories as f64, exponent).map_err(|error| {
            InputError::Invalid(format!(
                "`data.options.exponent` is {exponent}, which is no exponent of Zipf's law: {error}"
            ))
        })?;
        let of = |first, count| Drawn {
            seed: setup.seed,
            first,
            count,
            fields: fields as usize,
            categories,
            shared,
            law,
            drawn: None,
        };
        let signature = Signature {
            inputs: vec![
                Field::numbers("numbers", vec![NUMBERS]),
                Field {
                    values: ValueType::I64,
                    shape: vec![fields as usize],
                    ..Field::category("categories", 1 << 63)
                },
            ],
            targets: vec![Field::binary("label")],
        };
        Ok(Dataset {
            training: Box::new(of(0, samples)),
            evaluation: Box::new(of(samples, samples.div_ceil(HELD_OUT))),
            signature,
            transforms: None,
        })
    }
}

/// Samples that are drawn when they are read.
struct Drawn {
    seed: u64,
    /// The index of the first sample. The indices of held-out samples follow those of training samples.
    first: u64,
    count: u64,
    fields: usize,
    /// The number of categories of a field.
    categories: u64,
    /// True if all fields have the same categories.
    shared: bool,
    law: Zipf<f64>,
    /// All samples, drawn once, if there are few.
    drawn: Option<Draws>,
}

/// Numbers, ids and labels of samples.
#[derive(Default)]
struct Draws {
    numbers: Vec<f32>,
    ids: Vec<i64>,
    labels: Vec<f32>,
}

/// The most ids that are kept in memory.
const MOST_KEPT: u64 = 1 << 22;

impl Drawn {
    /// Returns the index of a field's first category.
    fn first_of(&self, field: u64) -> u64 {
        match self.shared {
            true => 0,
            false => field * self.categories,
        }
    }

    fn draw(&self, positions: Range<u64>) -> Draws {
        let mut values = Draws::default();
        let Draws {
            numbers,
            ids,
            labels,
        } = &mut values;
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        for position in positions {
            random.set_stream(self.first + position);
            random.set_word_pos(0);
            let start = (numbers.len(), ids.len());
            numbers.extend((0..NUMBERS).map(|_| random.sample::<f32, _>(StandardNormal)));
            for field in 0..self.fields as u64 {
                let rank = self.law.sample(&mut random) as u64 - 1;
                ids.push(category_id(self.first_of(field) + rank).cast_signed());
            }
            let logit = logit(self.seed, &numbers[start.0..], &ids[start.1..]);
            let probability = 1.0 / (1.0 + (-logit).exp());
            labels.push(f32::from(u8::from(random.random::<f32>() < probability)));
        }
        values
    }
}

impl Samples for Drawn {
    fn count(&self) -> u64 {
        self.count
    }

    fn read(&mut self, _: Order, positions: Range<u64>) -> Result<InMemory, InputError> {
        let samples = (positions.end - positions.start) as usize;
        if self.drawn.is_none() && self.count.saturating_mul(self.fields as u64) <= MOST_KEPT {
            self.drawn = Some(self.draw(0..self.count));
        }
        let drawn = match &self.drawn {
            None => self.draw(positions),
            Some(all) => {
                let of = |width| positions.start as usize * width..positions.end as usize * width;
                Draws {
                    numbers: all.numbers[of(NUMBERS)].to_vec(),
                    ids: all.ids[of(self.fields)].to_vec(),
                    labels: all.labels[of(1)].to_vec(),
                }
            }
        };
        let ids = Column::values("categories", vec![self.fields], Values::I64(drawn.ids));
        Ok(InMemory::of_checked(
            vec![
                Column::numbers("numbers", vec![NUMBERS], drawn.numbers),
                ids.below(1 << 63),
            ],
            vec![Column::binary("label", drawn.labels)],
            None,
            samples,
        ))
    }
}

/// Returns the id of a generated category: a hash of the category's index `number`, below 2^63.
pub fn category_id(number: u64) -> u64 {
    hash(number ^ 0x5bd1_e995) >> 1
}

/// Returns the planted model's logit of a sample.
fn logit(seed: u64, numbers: &[f32], ids: &[i64]) -> f32 {
    let mut logit = BIAS;
    for (number, value) in (0u64..).zip(numbers) {
        logit += NUMBER_WEIGHT * value * about_normal(seed ^ (number + 1));
    }
    let (mut sum, mut squares) = (0.0, 0.0);
    for id in ids {
        let id = id.cast_unsigned() ^ seed.rotate_left(17);
        logit += ID_WEIGHT * about_normal(id);
        let factor = FACTOR * about_normal(!id);
        sum += factor;
        squares += factor * factor;
    }
    logit + (sum * sum - squares) / 2.0
}

/// Returns a pseudo-random number that depends on the key alone: a sum of four uniform numbers, with mean 0 and
/// variance 1.
fn about_normal(key: u64) -> f32 {
    let bits = hash(key.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let parts = [0, 16, 32, 48].map(|shift| (bits >> shift & 0xffff) as f32);
    let sum: f32 = parts.into_iter().sum();
    (sum / 65_536.0 - 2.0) * 3f32.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Purpose;
    use shared_proto::job::Data;

    fn open(options: &str) -> Result<Dataset, InputError> {
        let settings = Data {
            options: toml::from_str(options).unwrap(),
            ..Data::default()
        };
        Clicks::open(&DataSetup {
            settings: &settings,
            seed: 7,
            purpose: Purpose::Training,
        })
    }

    #[test]
    fn no_model_does_better_than_the_planted_one_and_it_is_not_perfect() {
        let mut data = open("samples = 100000\nrows = 26000").unwrap();
        let batch = read(&mut data, 0..20_000);
        let numbers: Vec<f32> = batch.numbers("numbers").iter().map(|v| *v as f32).collect();
        let ids = ids(&batch);
        let labels = batch.numbers("label").into_iter().map(|v| v as f32);
        let mut scored: Vec<(f32, f32)> = numbers
            .chunks_exact(NUMBERS)
            .zip(&ids)
            .map(|(numbers, ids)| logit(7, numbers, ids))
            .zip(labels)
            .collect();
        scored.sort_by(|one, other| one.0.total_cmp(&other.0));
        let (mut negatives, mut before, mut positives) = (0.0, 0.0, 0.0);
        for (_, label) in scored {
            match label {
                1.0 => {
                    positives += 1.0;
                    before += negatives;
                }
                _ => negatives += 1.0,
            }
        }
        let auc: f64 = before / (positives * negatives);
        assert!((0.75..0.9).contains(&auc), "{auc}");
        let share: f64 = positives / 20_000.0;
        assert!((0.15..0.35).contains(&share), "{share}");
        // The most frequent ids are in many samples.
        let mut first: Vec<i64> = ids.iter().map(|ids| ids[0]).collect();
        first.sort_unstable();
        let most = first
            .chunk_by(|one, other| one == other)
            .map(<[i64]>::len)
            .max();
        assert!(most.unwrap() > 1_000, "{most:?}");
    }

    fn read(data: &mut Dataset, positions: Range<u64>) -> InMemory {
        data.training.read(Order::Stored, positions).unwrap()
    }

    /// Returns the ids of each sample.
    fn ids(batch: &InMemory) -> Vec<Vec<i64>> {
        let (inputs, ..) = batch.clone().into_columns();
        let ids = inputs
            .into_iter()
            .find(|column| column.field().name == "categories");
        match ids.unwrap().into_batch().values {
            Values::I64(ids) => ids
                .chunks_exact(ids.len() / batch.len())
                .map(<[i64]>::to_vec)
                .collect(),
            _ => panic!("ids have 64 bits"),
        }
    }

    #[test]
    fn all_readers_get_the_same_sample() {
        let ids = |data: &mut Dataset, positions| ids(&read(data, positions));
        let (mut one, mut other) = (open("").unwrap(), open("").unwrap());
        assert_eq!(ids(&mut one, 5..9)[2..], ids(&mut other, 7..9));
        assert_ne!(ids(&mut one, 5..6), ids(&mut one, 6..7));
        assert_eq!(one.evaluation.count(), 10_000);
    }

    #[test]
    fn wrong_settings_are_named() {
        for (options, said) in [
            ("fields = 0", "fields"),
            ("exponent = -1.0", "exponent"),
            ("exponent = inf", "exponent"),
            ("fields = 1000000", "fields"),
            ("exponent = \"x\"", "exponent"),
            ("colour = 1", "colour"),
        ] {
            let error = open(options).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
