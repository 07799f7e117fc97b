//! Samples that are sorted by class: each class has a file or a folder, whose name is that of the class.

use std::collections::HashSet;
use std::iter::repeat_n;
use std::path::{Path, PathBuf};

use crate::columns::cell::known;
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::features::fitted::Fitted;
use crate::features::target::Target;
use crate::reading::held_out::split;
use crate::samples::column::Column;
use crate::samples::memory::{InMemory, countable};
use crate::source::{DataSetup, Purpose};

/// The name of the target.
const LABEL: &str = "label";

/// Samples that are sorted by class.
pub(crate) struct Sorted {
    /// The index of each sample's class; 0 in a prediction.
    pub(crate) labels: Vec<u32>,
    /// The meaning of the labels.
    pub(crate) transforms: Fitted,
    /// The indices of the samples to train on.
    pub(crate) training: Vec<u32>,
    /// The indices of the samples that are held out.
    pub(crate) evaluation: Vec<u32>,
}

impl Sorted {
    /// Assigns indices and labels to the samples of classes, one class after another. `classes` has the file or folder
    /// of each class and its number of samples. A share of each class is held out, chosen by the job's seed. An
    /// evaluation uses the class indices of the training. In an evaluation of all samples and in a prediction, all
    /// samples are held out; in a prediction, all labels are 0.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if two classes have the same name, if a class has fewer than two samples to split or did
    /// not exist in training, or if there are more than `u32::MAX` samples.
    pub(crate) fn new(classes: &[(PathBuf, usize)], setup: &DataSetup) -> Result<Self, InputError> {
        let samples = classes.iter().map(|(_, count)| count).sum();
        countable(samples)?;
        let transforms = match setup.purpose {
            Purpose::Training => {
                let names = classes.iter().map(|(path, _)| name_of(path));
                let mut seen = HashSet::new();
                if let Some(twice) = names.clone().find(|name| !seen.insert(name.clone())) {
                    return Err(InputError::Invalid(format!(
                        "two classes are called {twice:?}; rename one of them"
                    )));
                }
                Fitted::of_target(Target::Class {
                    numbers: names.zip(0..).collect(),
                    count: classes.len() as u64,
                })
            }
            Purpose::Evaluation(fitted) | Purpose::EvaluationOfAll(fitted) => fitted.clone(),
            Purpose::Prediction(fitted) => {
                return Ok(Self {
                    labels: vec![0; samples],
                    transforms: fitted.clone(),
                    training: vec![0],
                    evaluation: (0u32..).take(samples).collect(),
                });
            }
        };
        let numbers = numbers(&transforms.target, classes)?;
        let labels = numbers.iter().zip(classes);
        let labels = labels.flat_map(|(number, (_, count))| repeat_n(*number, *count));
        let labels: Vec<u32> = labels.collect();
        if let Purpose::EvaluationOfAll(_) = setup.purpose {
            return Ok(Self {
                labels,
                transforms,
                training: vec![0],
                evaluation: (0u32..).take(samples).collect(),
            });
        }
        let (mut training, mut evaluation) = (Vec::new(), Vec::new());
        let mut first = 0;
        for (number, (path, count)) in numbers.iter().zip(classes) {
            let seed = setup.seed ^ u64::from(*number);
            let (learn, hold) = split(*count, setup, seed, path)?;
            training.extend(learn.iter().map(|i| first + i));
            evaluation.extend(hold.iter().map(|i| first + i));
            first += *count as u32;
        }
        Ok(Self {
            labels,
            transforms,
            training,
            evaluation,
        })
    }

    /// Returns the target of samples with these labels.
    pub(crate) fn column(target: &Target, labels: Vec<u32>) -> Column {
        match target {
            Target::Class { count, .. } => Column::category(LABEL, labels, *count),
            other => other.unknown(LABEL, labels.len()),
        }
    }

    /// Returns the data set of these samples in memory. `inputs` has the input of each sample.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if the number of inputs is not the number of samples.
    pub(crate) fn in_memory(self, inputs: Column) -> Result<Dataset, InputError> {
        let labels = Self::column(&self.transforms.target, self.labels);
        let all = InMemory::new(vec![inputs], vec![labels])?;
        Ok(Dataset {
            transforms: Some(self.transforms),
            ..Dataset::in_memory(
                all.select_unchecked(&self.training),
                all.select_unchecked(&self.evaluation),
            )?
        })
    }
}

/// Returns the index of each class.
fn numbers(target: &Target, classes: &[(PathBuf, usize)]) -> Result<Vec<u32>, InputError> {
    let Target::Class { numbers, .. } = target else {
        return Err(InputError::Invalid(
            "the training had no classes; train again with this data, or name the run directory that belongs to it".to_owned(),
        ));
    };
    let number = |(path, _): &(PathBuf, usize)| {
        numbers.get(&name_of(path)).copied().ok_or_else(|| {
            let known: Vec<&str> = numbers.keys().map(String::as_str).collect();
            InputError::Invalid(format!(
                "{} would be class {:?}, which did not exist in training; the classes are {}",
                path.display(),
                name_of(path),
                known.join(", ")
            ))
        })
    };
    classes.iter().map(number).collect()
}

/// Returns the name of a class: that of its folder, or of its `.npy` file without the extension.
fn name_of(path: &Path) -> String {
    let name = match path.extension() {
        Some(extension) if extension == "npy" => path.file_stem(),
        _ => path.file_name(),
    };
    let name = name.unwrap_or_default().to_string_lossy();
    // As labels have it.
    known(&name, true).into_owned()
}
