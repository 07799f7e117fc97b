//! LIBSVM files: a label and the features that are not zero, `label index:value index:value ...`, sample by sample.
//!
//! `data.dir` is a file, or a folder. The file beside the training file with `.t` at its end, or `.test` in place of
//! `.train`, has the samples that are held out; without it, a share of the training file is held out, chosen by the
//! job's seed. Settings in `data.options`: `train` and `test` name the files in the folder; `width` is the number of
//! features (by default, those up to the highest index of the training file); `sparse = true` hands out indices and values instead of rows,
//! which is the default beyond 1,024 features. An evaluation and a prediction read files with the features and labels of the
//! training.

use std::path::PathBuf;
use std::sync::Arc;

use super::chunks::{self, Decode, Files, Format, Subset};
use super::column::{Column, Values};
use super::dataset::Dataset;
use super::error::InputError;
use super::files;
use super::fitted::{Features, Fitted};
use super::held_out::HeldOut;
use super::lines::{Lines, Text, TextFiles};
use super::memory::InMemory;
use super::source::{DataSetup, Purpose, Source};
use super::table::Rows;
use super::target::{Labels, Target};
use super::texts::Texts;

/// With more features than this, samples are sparse.
const MOST_DENSE: u64 = 1024;

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
        let parts = files::parts(setup, |file| {
            let name = file.to_string_lossy();
            let twin = name
                .strip_suffix(".train")
                .map(|stem| format!("{stem}.test"));
            twin.unwrap_or_else(|| format!("{name}.t")).into()
        })?;
        let cut = |paths: &[PathBuf]| {
            let files = files::open(setup, paths)?;
            let size = chunks::size(setup, &files);
            Ok::<_, InputError>(TextFiles::new(
                Lines::open(files, size, is_sample)?,
                Samples::parse,
            ))
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
            Purpose::Prediction(fitted) => {
                let decode = decode(fitted, |target, labels| {
                    Ok(target.unknown(LABEL, labels.samples.len()))
                })?;
                return files.open_all(setup, decode, fitted);
            }
        };
        files.evaluation = parts.evaluation.map(|path| cut(&[path])).transpose()?;
        let format = Seen {
            known: known.cloned(),
            width,
            sparse,
            labels: Labels::of(setup.settings.target, true),
            lowest: None,
            highest: None,
        };
        files.open(setup, HeldOut::Random, format)
    }
}

/// Returns whether a line has more than a comment.
fn is_sample(line: &[u8]) -> bool {
    let first = line.iter().find(|byte| !byte.is_ascii_whitespace());
    first.is_some_and(|byte| *byte != b'#')
}

/// The features and labels of all samples, as they pass by.
struct Seen {
    /// What they were in training, if this is not one.
    known: Option<Fitted>,
    /// The number of features, if the job gives it.
    width: Option<u64>,
    /// Whether samples are sparse, if the job says it.
    sparse: Option<bool>,
    /// The labels of the files to train on.
    labels: Labels,
    /// The lowest index of all files.
    lowest: Option<u32>,
    /// The highest index of the files to train on.
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
        if let Subset::Training(_) = subset {
            self.highest = self.highest.max(samples.indices.iter().max().copied());
            self.labels.note(&samples.labels);
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
        let decode = decode(&fitted, |target, labels| target.column(LABEL, labels))?;
        Ok((decode, Some(fitted)))
    }
}

/// Returns the column of a target.
type ReadLabels = fn(&Target, &Texts) -> Result<Column, InputError>;

/// Returns how samples are decoded, with the features and labels of the training.
fn decode(fitted: &Fitted, read_labels: ReadLabels) -> Result<Decode<Samples>, InputError> {
    let Some(features) = fitted.features else {
        return Err(InputError::Invalid(
            "the training had no LIBSVM files; name the run directory that belongs to this data, or train again".to_owned(),
        ));
    };
    let target = fitted.target.clone();
    Ok(Arc::new(move |samples: Samples| {
        let inputs = samples.inputs(features)?;
        let labels = read_labels(&target, &samples.labels)?;
        InMemory::new(vec![inputs], vec![labels])
    }))
}

/// Samples as a file has them.
struct Samples {
    rows: Rows,
    labels: Texts,
    /// The place in `indices` at which each sample begins, and the end of the last one.
    offsets: Vec<usize>,
    indices: Vec<u32>,
    values: Vec<f32>,
}

impl Samples {
    fn parse(text: &Text, samples: &[u32]) -> Result<Self, InputError> {
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
            let mut fields = row.split_ascii_whitespace();
            if let Some(label) = fields.next() {
                parsed.read_row(sample, label, fields)?;
            }
        }
        Ok(parsed)
    }

    fn read_row<'a>(
        &mut self,
        sample: usize,
        label: &str,
        fields: impl Iterator<Item = &'a str>,
    ) -> Result<(), InputError> {
        let wrong = |problem: String| Err(self.rows.place(sample).wrong(problem));
        if label.contains(':') {
            return wrong(format!("{label:?} stands where the label belongs"));
        }
        self.labels.push_label(label, || self.rows.place(sample));
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

    /// Returns the features as inputs.
    ///
    /// # Errors
    /// Names the first index that is out of range.
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
            let mut rows = vec![0.0; (self.offsets.len() - 1) * width];
            for (row, ends) in rows.chunks_exact_mut(width).zip(self.offsets.windows(2)) {
                for at in ends[0]..ends[1] {
                    row[(self.indices[at] - first) as usize] = self.values[at];
                }
            }
            Column::numbers("features", vec![width], rows)
        })
    }
}
