//! Data sets of tables: columns by their types, what is fitted to the training samples, and the held-out part.
//!
//! `data.dir` is a folder with `train.EXTENSION` and, perhaps, `test.EXTENSION`, or a single file. One column is the
//! label; `data.target` says what it is. `data.columns` gives the types of the others, which are numbers if it says
//! nothing. The number columns and dates together are the input `inputs`; each category is an input of its own.
//! Without a file of their own, a share of the samples is held out, chosen by the job's seed.

use std::path::{Path, PathBuf};

use shared_proto::job::Data;

use super::dataset::Dataset;
use super::error::InputError;
use super::fitted::Fitted;
use super::memory::{self, InMemory};
use super::place;
use super::source::{DataSetup, Purpose};
use super::table::{LABEL, Labels, Table};
use super::target::Target;

/// Opens a data set of tables, of which `read` reads one.
///
/// # Errors
/// Those of `read`, and of labels that do not fit.
pub(super) fn open(
    setup: &DataSetup,
    extension: &str,
    read: impl Fn(&Path, &Data, Labels) -> Result<Table, InputError>,
) -> Result<Dataset, InputError> {
    setup.only_options(&[])?;
    if let Purpose::Prediction(fitted) = setup.purpose {
        let file = setup.dir()?;
        if !file.is_file() {
            return Err(InputError::Invalid(format!(
                "{} is no file; name the {} file to predict",
                file.display(),
                extension.to_uppercase()
            )));
        }
        let table = read(file, setup.settings, Labels::LeftOut)?;
        return unlabelled(fitted, &table);
    }
    let (train, test) = files(setup.dir()?, extension)?;
    let read = |path: &Path| {
        let table = read(path, setup.settings, Labels::Read)?;
        memory::countable(table.len())?;
        Ok::<_, InputError>(table)
    };
    let table = read(&train)?;
    let known = match setup.purpose {
        Purpose::Evaluation(fitted) => Some(fitted),
        Purpose::Training | Purpose::Prediction(_) => None,
    };
    let target = match known {
        Some(fitted) => fitted.target.clone(),
        None => {
            let wrong = |line, problem| table.wrong(line, problem);
            Target::of(table.labels(), setup.settings.target, false, &wrong)?
        }
    };
    let fit = |training: &[u32]| match known {
        Some(fitted) => fitted.clone(),
        None => Fitted::to(&table, training, target),
    };
    let (fitted, training, evaluation) = match test {
        Some(test) => {
            let held_out = read(&test)?;
            let all: Vec<u32> = (0u32..).take(table.len()).collect();
            let fitted = fit(&all);
            let (training, evaluation) = (samples(&fitted, &table)?, samples(&fitted, &held_out)?);
            (fitted, training, evaluation)
        }
        None => {
            let (training, evaluation) = place::split(table.len(), setup, setup.seed, &train)?;
            let fitted = fit(&training);
            let all = samples(&fitted, &table)?;
            (fitted, all.select(&training), all.select(&evaluation))
        }
    };
    Ok(Dataset {
        transforms: Some(fitted),
        ..Dataset::in_memory(training, evaluation)?
    })
}

/// Returns all samples of a table without labels as those that are held out.
fn unlabelled(fitted: &Fitted, table: &Table) -> Result<Dataset, InputError> {
    memory::countable(table.len())?;
    let target = fitted.target.unknown(LABEL, table.len());
    let samples = InMemory::new(fitted.inputs(table)?, vec![target])?;
    Ok(Dataset {
        transforms: Some(fitted.clone()),
        ..Dataset::in_memory(samples.select(&[0]), samples)?
    })
}

/// Returns the samples of a table.
fn samples(fitted: &Fitted, table: &Table) -> Result<InMemory, InputError> {
    let wrong = |place, problem| table.wrong(place, problem);
    let target = fitted.target.column(LABEL, table.labels(), &wrong)?;
    InMemory::new(fitted.inputs(table)?, vec![target])
}

/// Returns the file to train on, and that with the samples that are held out, if there is one.
fn files(place: &Path, extension: &str) -> Result<(PathBuf, Option<PathBuf>), InputError> {
    let (train, test) = match place.is_dir() {
        true => {
            let file = |part| place.join(format!("{part}.{extension}"));
            (file("train"), Some(file("test")).filter(|f| f.is_file()))
        }
        false => (place.to_owned(), None),
    };
    match train.is_file() {
        true => Ok((train, test)),
        false => Err(InputError::Missing {
            folder: place.to_owned(),
            names: format!(
                "train.{extension} (nor is it a {} file itself)",
                extension.to_uppercase()
            ),
        }),
    }
}
