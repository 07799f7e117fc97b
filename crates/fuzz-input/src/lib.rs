//! Inputs of the fuzz targets, and their replay without a fuzzer. No released program has them.

use std::ops::Range;
use std::path::Path;

use arbitrary::{Arbitrary, Unstructured};

/// The number of pseudo-random inputs of a replay.
const INPUTS: u64 = 100;

/// The most bytes of a pseudo-random input.
const BYTES: u64 = 2000;

/// A number that is the expected one, most of the time.
#[derive(Clone, Copy, Debug)]
pub enum Near {
    /// The expected number.
    Expected,
    /// A number close to the expected one.
    Off(i8),
    /// Any number.
    Any(u64),
}

impl Near {
    /// Returns the number where another one is expected.
    pub fn of(self, expected: u64) -> u64 {
        match self {
            Self::Expected => expected,
            Self::Off(by) => expected.saturating_add_signed(by.into()),
            Self::Any(number) => number,
        }
    }
}

impl<'a> Arbitrary<'a> for Near {
    fn arbitrary(input: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        Ok(match input.arbitrary()? {
            0..224u8 => Self::Expected,
            224..248 => Self::Off(input.arbitrary()?),
            248.. => Self::Any(input.arbitrary()?),
        })
    }
}

/// Reads events until the input is used up, but no more than `most`.
pub fn events<'a, E: Arbitrary<'a>>(input: &mut Unstructured<'a>, most: usize) -> Vec<E> {
    let next = || {
        (!input.is_empty())
            .then(|| input.arbitrary().ok())
            .flatten()
    };
    std::iter::from_fn(next).take(most).collect()
}

/// Runs a target on its corpus and on pseudo-random bytes. Returns the number of files.
///
/// # Panics
/// If the target does; it says which input that was.
pub fn replay(target: &str, run: impl Fn(&[u8])) -> usize {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let files = std::fs::read_dir(corpus.join(target)).expect("the target has a corpus");
    let mut paths: Vec<_> = files.flatten().map(|file| file.path()).collect();
    paths.sort_unstable();
    for path in &paths {
        let bytes = std::fs::read(path).expect("a file of the corpus");
        let _input = Input(path.display().to_string());
        run(&bytes);
    }
    for seed in 0..INPUTS {
        let _input = Input(format!("the pseudo-random one of seed {seed}"));
        run(&bytes(seed));
    }
    paths.len()
}

/// Names the input of a replay that fails.
struct Input(String);

impl Drop for Input {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the input is {}", self.0);
        }
    }
}

fn bytes(seed: u64) -> Vec<u8> {
    let numbers: Range<u64> = 0..1 + splitmix(seed) % (BYTES / 8);
    numbers
        .flat_map(|n| splitmix(seed << 32 | n).to_le_bytes())
        .collect()
}

/// Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, figure 17.
fn splitmix(seed: u64) -> u64 {
    let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
