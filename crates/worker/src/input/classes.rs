//! Samples that lie class by class, in a file or a folder for each class, by which the class is named.

use std::iter::repeat_n;
use std::path::{Path, PathBuf};

use super::column::Column;
use super::dataset::Dataset;
use super::error::InputError;
use super::fitted::Fitted;
use super::memory::InMemory;
use super::place::split;
use super::source::{DataSetup, Purpose};
use super::target::Target;

/// The name of the target.
const LABEL: &str = "label";

/// Returns a data set of samples of several classes. `inputs` has the samples of each class after those of the class
/// before; `classes` has the file or folder of each, and its number of samples. A share of each class is held out, chosen
/// by the job's seed. In an evaluation, classes have the numbers that they had in training; in a prediction, all samples
/// are held out, and their classes do not count.
///
/// # Errors
/// [`InputError::Invalid`] if a class has less than two samples, or did not exist in training.
pub(super) fn dataset(
    inputs: Column,
    classes: &[(PathBuf, usize)],
    setup: &DataSetup,
) -> Result<Dataset, InputError> {
    let samples = classes.iter().map(|(_, count)| count).sum();
    let fitted = match setup.purpose {
        Purpose::Training => {
            let names = classes.iter().map(|(path, _)| name_of(path));
            Fitted::of_target(Target::Class {
                numbers: names.zip(0..).collect(),
                count: classes.len() as u64,
            })
        }
        Purpose::Evaluation(fitted) => fitted.clone(),
        Purpose::Prediction(fitted) => {
            let unknown = fitted.target.unknown(LABEL, samples);
            let samples = InMemory::new(vec![inputs], vec![unknown])?;
            return Ok(Dataset {
                transforms: Some(fitted.clone()),
                ..Dataset::in_memory(samples.select(&[0]), samples)?
            });
        }
    };
    let (numbers, count) = numbers(&fitted.target, classes)?;
    let labels = numbers.iter().zip(classes);
    let labels = labels.flat_map(|(number, (_, count))| repeat_n(*number, *count));
    let labels = Column::category(LABEL, labels.collect(), count);
    let all = InMemory::new(vec![inputs], vec![labels])?;
    let (mut training, mut evaluation) = (Vec::new(), Vec::new());
    let mut first = 0;
    for (number, (path, count)) in numbers.into_iter().zip(classes) {
        let seed = setup.seed ^ u64::from(number);
        let (learn, hold) = split(*count, setup, seed, path)?;
        training.extend(learn.iter().map(|i| first + i));
        evaluation.extend(hold.iter().map(|i| first + i));
        first += *count as u32;
    }
    Ok(Dataset {
        transforms: Some(fitted),
        ..Dataset::in_memory(all.select(&training), all.select(&evaluation))?
    })
}

/// Returns the number of each class, and the number of all classes.
fn numbers(target: &Target, classes: &[(PathBuf, usize)]) -> Result<(Vec<u32>, u64), InputError> {
    let Target::Class { numbers, count } = target else {
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
    let found = classes.iter().map(number).collect::<Result<_, _>>()?;
    Ok((found, *count))
}

/// Returns the name of a class: that of its folder, or of its file without the extension.
fn name_of(path: &Path) -> String {
    let name = match path.is_dir() {
        true => path.file_name(),
        false => path.file_stem(),
    };
    name.unwrap_or_default().to_string_lossy().into_owned()
}
