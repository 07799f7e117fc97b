//! The handwritten digits that are part of the program; `data/README.md` names their origin.

use std::io::Read;
use std::path::PathBuf;

use flate2::read::GzDecoder;

use crate::dataset::Dataset;
use crate::error::InputError;
use crate::samples::column::Column;
use crate::samples::memory::InMemory;
use crate::shuffle;
use crate::source::{DataSetup, Source};

const FILE: &[u8] = include_bytes!("../../data/digits.csv.gz");
const PIXELS: usize = 64;
const DARKEST: u8 = 16;
const CLASSES: usize = 10;

/// The seed that determines which samples are held out. It is not the job's seed, so that results of different jobs can
/// be compared.
const HELD_OUT_SEED: u64 = 1797;

/// The source `digits`. It shuffles the 1,797 samples and holds out the last fifth: 1,437 are for training, 360 for
/// evaluation.
pub struct Digits;

impl Source for Digits {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&[])?;
        let all = parse()?;
        let (training, evaluation) = split(all.len());
        Dataset::in_memory(
            all.select_unchecked(&training),
            all.select_unchecked(&evaluation),
        )
    }
}

/// Returns the indices of the samples to train on, and the indices of the samples that are held out.
fn split(samples: usize) -> (Vec<u32>, Vec<u32>) {
    let mut training = shuffle::held_out(HELD_OUT_SEED, samples);
    let evaluation = training.split_off(samples * 4 / 5);
    (training, evaluation)
}

fn parse() -> Result<InMemory, InputError> {
    let path = || PathBuf::from("the program's own digits.csv.gz");
    let mut text = String::new();
    GzDecoder::new(FILE)
        .read_to_string(&mut text)
        .map_err(|source| InputError::Unreadable {
            path: path(),
            source,
        })?;
    let mut pixels = Vec::new();
    let mut labels = Vec::new();
    for (line, row) in (1..).zip(text.lines()) {
        let fields: Vec<u8> = row.split(',').map_while(|f| f.parse().ok()).collect();
        match fields.split_last() {
            Some((label, row))
                if row.len() == PIXELS
                    && usize::from(*label) < CLASSES
                    && row.iter().all(|p| *p <= DARKEST) =>
            {
                pixels.extend_from_slice(row);
                labels.push(u32::from(*label));
            }
            _ => {
                return Err(InputError::Line {
                    path: path(),
                    line,
                    problem: "64 numbers up to 16 and a digit were expected; build again from unchanged sources".to_owned(),
                });
            }
        }
    }
    let image = Column::bytes("image", vec![1, 8, 8], pixels, DARKEST.into());
    let label = Column::category("label", labels, CLASSES as u64);
    InMemory::new(vec![image], vec![label])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs of other languages train on the same samples by this list (`make_example_vectors.py`).
    #[test]
    fn the_held_out_samples_are_those_of_the_list() {
        let list = include_str!("../../../../tests/end_to_end/vectors/digits_held_out.txt");
        let listed: Vec<u32> = list.lines().map(|line| line.parse().unwrap()).collect();
        let (_, mut held_out) = split(parse().unwrap().len());
        held_out.sort();
        assert_eq!(held_out, listed);
    }
}
