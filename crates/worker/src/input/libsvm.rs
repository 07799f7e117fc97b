//! LIBSVM files: a label and the features that are not zero, `label index:value index:value ...`, sample by sample.
//!
//! `data.dir` is a file, or a folder. The file beside the training file with `.t` at its end, or `.test` in place of
//! `.train`, has the samples that are held out; without it, a share of the training file is held out, chosen by the
//! job's seed. Settings in `data.options`: `train` and `test` name the files in the folder; `width` is the number of
//! features (by default, those up to the highest index of the training file); `sparse = true` hands out indices and values instead of rows,
//! which is the default beyond 1,024 features.

use std::path::{Path, PathBuf};

use super::column::{Column, Values};
use super::dataset::Dataset;
use super::error::InputError;
use super::memory::InMemory;
use super::place::{self, Parts};
use super::source::{DataSetup, Source};
use super::target::Target;
use super::texts::Texts;

/// With more features than this, samples are sparse.
const MOST_DENSE: usize = 1024;

/// The most features: indices are 32-bit numbers.
const MOST_FEATURES: u64 = u32::MAX as u64;

/// The source `libsvm`.
pub struct LibSvm;

impl Source for LibSvm {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&["train", "test", "width", "sparse"])?;
        let parts = place::parts(setup, |file| {
            let name = file.to_string_lossy();
            let twin = name
                .strip_suffix(".train")
                .map(|stem| format!("{stem}.test"));
            twin.unwrap_or_else(|| format!("{name}.t")).into()
        })?;
        let training = File::read(&parts.training)?;
        let evaluation = parts.evaluation.as_deref().map(File::read).transpose()?;
        let options = Options::of(setup, &training, evaluation.as_ref())?;
        let kind = setup.settings.target;
        let wrong = |line, problem| training.wrong(line, problem);
        let target = Target::of(&training.labels, kind, true, &wrong)?;
        let all = training.samples(&options, &target)?;
        let Some(evaluation) = evaluation else {
            let Parts { training: path, .. } = parts;
            let (training, evaluation) = place::hold_out(&all, setup, &path)?;
            return Dataset::in_memory(training, evaluation);
        };
        Dataset::in_memory(all, evaluation.samples(&options, &target)?)
    }
}

/// How features become columns.
struct Options {
    /// The index of the first feature.
    first: u32,
    width: usize,
    sparse: bool,
}

impl Options {
    fn of(
        setup: &DataSetup,
        training: &File,
        evaluation: Option<&File>,
    ) -> Result<Self, InputError> {
        let mut files = [Some(training), evaluation].into_iter().flatten();
        let first = u32::from(!files.any(|file| file.indices.contains(&0)));
        let highest = training.indices.iter().max().copied().unwrap_or(first);
        let found = u64::from(highest) + 1 - u64::from(first);
        let width = setup.whole_number("width")?.unwrap_or(found);
        if width == 0 || width > MOST_FEATURES {
            return Err(InputError::Invalid(format!(
                "`data.options.width` is {width}, but must be at least 1 and at most {MOST_FEATURES}"
            )));
        }
        let width = width as usize;
        Ok(Self {
            first,
            width,
            sparse: setup.truth("sparse")?.unwrap_or(width > MOST_DENSE),
        })
    }
}

/// A file's content.
struct File {
    path: PathBuf,
    labels: Texts,
    /// The line of each sample.
    lines: Vec<u64>,
    /// The place in `indices` at which each sample begins, and the end of the last one.
    offsets: Vec<usize>,
    indices: Vec<u32>,
    values: Vec<f32>,
}

impl File {
    fn read(path: &Path) -> Result<Self, InputError> {
        let text = place::read_text(path)?;
        let mut file = Self {
            path: path.to_owned(),
            labels: Texts::default(),
            lines: Vec::new(),
            offsets: vec![0],
            indices: Vec::new(),
            values: Vec::new(),
        };
        for (line, row) in (1..).zip(text.lines()) {
            // A comment may end a line.
            let row = row.split('#').next().unwrap_or_default();
            let mut fields = row.split_ascii_whitespace();
            if let Some(label) = fields.next() {
                file.read_row(line, label, fields)?;
            }
        }
        match file.labels.is_empty() {
            true => Err(file.wrong(1, "there is no sample".to_owned())),
            false => Ok(file),
        }
    }

    fn read_row<'a>(
        &mut self,
        line: u64,
        label: &str,
        fields: impl Iterator<Item = &'a str>,
    ) -> Result<(), InputError> {
        if label.contains(':') {
            return Err(self.wrong(line, format!("{label:?} stands where the label belongs")));
        }
        self.labels.push_label(label, line);
        self.lines.push(line);
        let begin = self.indices.len();
        for field in fields {
            let parsed = field.split_once(':').and_then(|(index, value)| {
                let value: f32 = value.parse().ok()?;
                Some((index.parse().ok()?, value)).filter(|_| value.is_finite())
            });
            let Some((index, value)) = parsed else {
                return Err(self.wrong(
                    line,
                    format!("{field:?} was found; an index and a finite number were expected, as in 3:0.5"),
                ));
            };
            if self.indices[begin..]
                .last()
                .is_some_and(|last| *last >= index)
            {
                return Err(self.wrong(
                    line,
                    format!("index {index} comes after a higher or an equal one; sort the indices of a sample"),
                ));
            }
            self.indices.push(index);
            self.values.push(value);
        }
        self.offsets.push(self.indices.len());
        Ok(())
    }

    fn samples(&self, options: &Options, target: &Target) -> Result<InMemory, InputError> {
        let (first, width) = (options.first, options.width);
        let place = |index: u32| index.checked_sub(first).map(|i| i as usize);
        for (row, line) in self.offsets.windows(2).zip(&self.lines) {
            let mut indices = self.indices[row[0]..row[1]].iter();
            let beyond = |index: &&u32| place(**index).is_none_or(|i| i >= width);
            if let Some(index) = indices.find(beyond) {
                return Err(self.wrong(
                    *line,
                    format!(
                        "index {index} is not among the {width} features from {first} on; set data.options.width to the number of features"
                    ),
                ));
            }
        }
        let features = if options.sparse {
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
            let mut rows = vec![0.0; self.lines.len() * width];
            for (row, ends) in rows.chunks_exact_mut(width).zip(self.offsets.windows(2)) {
                for at in ends[0]..ends[1] {
                    row[(self.indices[at] - first) as usize] = self.values[at];
                }
            }
            Column::numbers("features", vec![width], rows)
        };
        let wrong = |line, problem| self.wrong(line, problem);
        let target = target.column("label", &self.labels, &wrong)?;
        InMemory::new(vec![features], vec![target])
    }

    fn wrong(&self, line: u64, problem: String) -> InputError {
        InputError::Line {
            path: self.path.clone(),
            line,
            problem,
        }
    }
}
