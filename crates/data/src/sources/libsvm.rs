//! LIBSVM files: a label and the features that are not zero, `label index:value index:value ...`, sample by sample.
//!
//! `data.dir` is a file, a pattern of file names, or a folder. The held-out samples are in the file that is named like
//! the training file with `.t` at its end, or with `.test` in place of `.train`. Without this file, a share of the
//! training file is held out, chosen by the job's seed. Settings in `data.options`: `train` and `test` name the files
//! in the folder; `width` is the number of features (by default, the highest index of the training files determines
//! it); with `sparse = true`, inputs are indices and values instead of rows, which is the default with more than 1,024
//! features. An evaluation and a prediction read files with the features and labels of the training.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shared_proto::job::MissingLabel;

use crate::columns::header::Gaps;
use crate::columns::table::Rows;
use crate::columns::texts::Texts;
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::features::fitted::{Features, Fitted};
use crate::features::target::{Labels, Target};
use crate::reading::chunks::{self, Decode, Files, Format, Subset};
use crate::reading::held_out::HeldOut;
use crate::reading::lines::{Lines, Text, TextFiles};
use crate::reading::parts;
use crate::samples::column::{Column, Values};
use crate::samples::memory::InMemory;
use crate::source::{DataSetup, Purpose, Source};

/// With more features than this, samples are sparse by default.
const MOST_DENSE: u64 = 1024;

/// The most numbers that dense samples can have together: 16 GiB.
const MOST_DENSE_NUMBERS: usize = 1 << 32;

/// The most features: indices are 32-bit numbers.
const MOST_FEATURES: u64 = u32::MAX as u64;

/// The name of the target.
const LABEL: &str = "label";

/// The source `libsvm`.
pub struct LibSvm;

impl Source for LibSvm {
    const STREAMS: bool = true;

    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&["train", "test", "width", "sparse"])?;
        let parts = parts::find(setup, |file| {
            let name = file.to_string_lossy();
            let twin = name
                .strip_suffix(".train")
                .map(|stem| format!("{stem}.test"));
            twin.unwrap_or_else(|| format!("{name}.t")).into()
        })?;
        let has_labels = !matches!(setup.purpose, Purpose::Prediction(_));
        let cut = |paths: &[PathBuf]| {
            let files = parts::open(setup, paths)?;
            let size = chunks::size(setup, &files);
            let gaps = Gaps::new(setup.settings);
            let skips = setup.settings.missing_label == MissingLabel::Skip && has_labels;
            let is_kept = gaps.clone();
            let unlabelled = Arc::new(AtomicU64::new(0));
            let counted = unlabelled.clone();
            let lines = Lines::open(files, size, move |line| {
                let is_left_out = skips && is_sample(line) && lacks_label(line, &is_kept);
                counted.fetch_add(is_left_out.into(), Relaxed);
                is_sample(line) && !is_left_out
            })?;
            let unlabelled = unlabelled.load(Relaxed);
            if unlabelled > 0 {
                tracing::warn!("{unlabelled} samples without a label are left out");
            }
            Ok::<_, InputError>(TextFiles::new(lines, move |text, samples| {
                Samples::parse(text, samples, has_labels.then_some(&gaps))
            }))
        };
        let width = setup.whole_number("width")?;
        if let Some(width) = width.filter(|width| !(1..=MOST_FEATURES).contains(width)) {
            return Err(InputError::Invalid(format!(
                "`data.options.width` is {width}, but must be at least 1 and at most {MOST_FEATURES}"
            )));
        }
        let sparse = setup.truth("sparse")?;
        let mut files = Files {
            training: cut(&parts.training)?,
            evaluation: None,
            place: &parts.place,
        };
        let known = match setup.purpose {
            Purpose::Training => None,
            Purpose::Evaluation(fitted) => Some(fitted),
            Purpose::EvaluationOfAll(fitted) => {
                let mut paths = parts.training;
                paths.extend(parts.evaluation);
                files.training = cut(&paths)?;
                let decode = decode(fitted, |target, labels, _| target.column(LABEL, labels))?;
                return files.open_all(setup, decode, fitted);
            }
            Purpose::Prediction(fitted) => {
                let decode = decode(fitted, |target, _, count| Ok(target.unknown(LABEL, count)))?;
                return files.open_all(setup, decode, fitted);
            }
        };
        files.evaluation = parts.evaluation.map(|path| cut(&[path])).transpose()?;
        let format = Seen {
            known: known.cloned(),
            width,
            sparse,
            labels: Labels::new(setup.settings, true),
            lowest: None,
            highest: None,
        };
        files.open(setup, HeldOut::Random, format)
    }
}

/// Returns whether the label of a sample is missing: its line begins with a feature, or with a text that stands for a
/// missing value.
fn lacks_label(line: &[u8], gaps: &Gaps) -> bool {
    let first = line
        .split(u8::is_ascii_whitespace)
        .find(|field| !field.is_empty());
    let first = first.and_then(|field| std::str::from_utf8(field).ok());
    first.is_some_and(|field| field.contains(':') || gaps.are(field))
}

/// Returns whether a line has a sample, and not only blanks or a comment.
fn is_sample(line: &[u8]) -> bool {
    let first = line.iter().find(|byte| !byte.is_ascii_whitespace());
    first.is_some_and(|byte| *byte != b'#')
}

/// The features and labels that are found while the samples are read.
struct Seen {
    /// The features and labels of the training; `None` if this is the training.
    known: Option<Fitted>,
    /// The number of features; `None` if the job does not set it.
    width: Option<u64>,
    /// Whether samples are sparse; `None` if the job does not set it.
    sparse: Option<bool>,
    /// The labels of the training files.
    labels: Labels,
    /// The lowest index of all files.
    lowest: Option<u32>,
    /// The highest index of the training files.
    highest: Option<u32>,
}

impl Format for Seen {
    type Parsed = Samples;

    fn learns(&self) -> bool {
        self.known.is_none()
    }

    fn learn(&mut self, samples: &Samples, subset: Subset) -> Result<(), InputError> {
        let lowest = samples.indices.iter().min().copied();
        self.lowest = [self.lowest, lowest].into_iter().flatten().min();
        if let Subset::Training(training) = subset {
            self.highest = self.highest.max(samples.indices.iter().max().copied());
            self.labels.note(&samples.labels, training);
        }
        Ok(())
    }

    fn finish(self) -> Result<(Decode<Samples>, Option<Fitted>), InputError> {
        let fitted = match self.known {
            Some(fitted) => fitted,
            None => {
                let first = u32::from(self.lowest != Some(0));
                let highest = self.highest.unwrap_or(first);
                let found = u64::from(highest) + 1 - u64::from(first);
                let width = self.width.unwrap_or(found);
                let features = Features {
                    first,
                    width,
                    sparse: self.sparse.unwrap_or(width > MOST_DENSE),
                };
                Fitted {
                    features: Some(features),
                    ..Fitted::of_target(self.labels.target()?)
                }
            }
        };
        let decode = decode(&fitted, |target, labels, _| target.column(LABEL, labels))?;
        Ok((decode, Some(fitted)))
    }
}

/// Returns the target's column for labels, given the number of samples.
type ReadLabels = fn(&Target, &Texts, usize) -> Result<Column, InputError>;

/// Returns the function that decodes samples with the features and labels of the training.
fn decode(fitted: &Fitted, read_labels: ReadLabels) -> Result<Decode<Samples>, InputError> {
    let Some(features) = fitted.features else {
        return Err(InputError::Invalid(
            "the training had no LIBSVM files; name the run directory that belongs to this data, or train again".to_owned(),
        ));
    };
    let target = fitted.target.clone();
    Ok(Arc::new(move |samples: Samples| {
        let inputs = samples.inputs(features)?;
        let labels = read_labels(&target, &samples.labels, samples.offsets.len() - 1)?;
        InMemory::new(vec![inputs], vec![labels])
    }))
}

/// Samples as a file has them.
struct Samples {
    rows: Rows,
    labels: Texts,
    /// The index in `indices` at which each sample begins, and then the end of the last sample.
    offsets: Vec<usize>,
    indices: Vec<u32>,
    values: Vec<f32>,
}

impl Samples {
    /// Parses lines. `gaps` are the texts that stand for a missing label. Without `gaps`, labels are not read, and
    /// lines may lack them.
    fn parse(text: &Text, samples: &[u32], gaps: Option<&Gaps>) -> Result<Self, InputError> {
        let mut parsed = Self {
            rows: text.rows(samples),
            labels: Texts::default(),
            offsets: vec![0],
            indices: Vec::new(),
            values: Vec::new(),
        };
        for (sample, line) in text.select(samples)?.lines().enumerate() {
            // A comment may end a line.
            let row = line.split('#').next().unwrap_or_default();
            let mut fields = row.split_ascii_whitespace().peekable();
            match gaps {
                Some(gaps) => {
                    if let Some(label) = fields.next() {
                        parsed.read_label(sample, label, gaps)?;
                    }
                }
                None => drop(fields.next_if(|first| !first.contains(':'))),
            }
            parsed.read_row(sample, fields)?;
        }
        Ok(parsed)
    }

    fn read_label(&mut self, sample: usize, label: &str, gaps: &Gaps) -> Result<(), InputError> {
        let wrong = |problem: String| Err(self.rows.place(sample).wrong(problem));
        if label.contains(':') {
            return wrong(format!("{label:?} stands where the label belongs"));
        }
        if label.contains(',') {
            return wrong(format!(
                "{label:?} is a set of labels, and a sample has one label here; give a file for each label, with 1 where a sample has it and 0 elsewhere"
            ));
        }
        if gaps.are(label) {
            return wrong(format!(
                "the label is missing ({label:?}); correct it, or set data.missing_label to \"skip\" to leave such samples out"
            ));
        }
        self.labels.push_label(label, || self.rows.place(sample));
        Ok(())
    }

    fn read_row<'a>(
        &mut self,
        sample: usize,
        fields: impl Iterator<Item = &'a str>,
    ) -> Result<(), InputError> {
        let wrong = |problem: String| Err(self.rows.place(sample).wrong(problem));
        let begin = self.indices.len();
        for field in fields {
            let parsed = field.split_once(':').and_then(|(index, value)| {
                let value: f32 = value.parse().ok()?;
                Some((index.parse().ok()?, value)).filter(|_| value.is_finite())
            });
            let Some((index, value)) = parsed else {
                return wrong(format!(
                    "{field:?} was found; an index and a finite number were expected, as in 3:0.5"
                ));
            };
            let last = self.indices[begin..].last();
            if last.is_some_and(|last| *last >= index) {
                return wrong(format!(
                    "index {index} comes after a higher or an equal one; sort the indices of a sample"
                ));
            }
            self.indices.push(index);
            self.values.push(value);
        }
        self.offsets.push(self.indices.len());
        Ok(())
    }

    /// Returns the features as an input column.
    ///
    /// # Errors
    /// Names the first index that is out of range; [`InputError::Invalid`] if dense samples have too many numbers.
    fn inputs(&self, features: Features) -> Result<Column, InputError> {
        let (first, width) = (features.first, features.width as usize);
        let place = |index: u32| index.checked_sub(first).map(|i| i as usize);
        for (sample, row) in self.offsets.windows(2).enumerate() {
            let mut indices = self.indices[row[0]..row[1]].iter();
            let beyond = |index: &&u32| place(**index).is_none_or(|i| i >= width);
            if let Some(index) = indices.find(beyond) {
                return Err(self.rows.place(sample).wrong(format!(
                    "index {index} is not among the {width} features from {first} on; set data.options.width to the number of features"
                )));
            }
        }
        Ok(if features.sparse {
            let indices = self.indices.iter().map(|index| index - first).collect();
            let values = Some(self.values.clone());
            let offsets = self.offsets.clone();
            Column::ragged(
                "features",
                Values::U32(indices),
                offsets,
                values,
                Some(width as u64),
            )
        } else {
            let samples = self.offsets.len() - 1;
            if samples.saturating_mul(width) > MOST_DENSE_NUMBERS {
                return Err(InputError::Invalid(format!(
                    "{samples} samples of {width} features each do not fit in memory as rows; leave out data.options.sparse, or set it to true"
                )));
            }
            let mut rows = vec![0.0; samples * width];
            for (row, ends) in rows.chunks_exact_mut(width).zip(self.offsets.windows(2)) {
                for at in ends[0]..ends[1] {
                    row[(self.indices[at] - first) as usize] = self.values[at];
                }
            }
            Column::numbers("features", vec![width], rows)
        })
    }
}
