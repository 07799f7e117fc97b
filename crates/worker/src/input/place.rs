//! Where a source's files are, and the samples that are held out of a single one.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::error::InputError;
use super::memory::{self, InMemory};
use super::source::DataSetup;
use crate::shuffle;

/// The files of a data set.
pub(super) struct Parts {
    /// The samples to train on.
    pub(super) training: PathBuf,
    /// The samples that are held out, if they have a file of their own.
    pub(super) evaluation: Option<PathBuf>,
}

/// Finds the files of `data.dir`: a file, or a folder with one file to train on. `data.options` may name both, as
/// `train` and `test`. `twin` returns the name of the file with the held-out samples beside one to train on.
///
/// # Errors
/// [`InputError::Missing`] if there is no such file; [`InputError::Invalid`] if there are several, or if a name is no
/// text.
pub(super) fn parts(
    setup: &DataSetup,
    twin: impl Fn(&Path) -> PathBuf,
) -> Result<Parts, InputError> {
    let place = setup.dir()?;
    let named = |key: &str| {
        let path = |name| match place.is_dir() {
            true => place.join(name),
            false => place.with_file_name(name),
        };
        Ok::<_, InputError>(setup.text(key)?.map(path))
    };
    let training = match named("train")? {
        Some(path) => path,
        None if place.is_dir() => the_one(place, &twin)?,
        None => place.to_owned(),
    };
    let beside = twin(&training);
    let evaluation = match named("test")? {
        Some(path) => Some(path),
        None => Some(beside).filter(|path| *path != training && path.is_file()),
    };
    for path in [Some(&training), evaluation.as_ref()].into_iter().flatten() {
        if !path.is_file() {
            return Err(InputError::Missing {
                folder: path.parent().unwrap_or(place).to_owned(),
                names: path
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into(),
            });
        }
    }
    Ok(Parts {
        training,
        evaluation,
    })
}

/// Returns the one file in a folder that is no other's twin. Files with names that begin with a dot, and descriptions, do
/// not count.
fn the_one(folder: &Path, twin: &impl Fn(&Path) -> PathBuf) -> Result<PathBuf, InputError> {
    let files = files(folder)?;
    let is_twin = |path: &PathBuf| {
        files
            .iter()
            .any(|other| other != path && twin(other) == *path)
    };
    let mut candidates = files.iter().filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let describes = name.starts_with('.') || name.ends_with(".md") || name == "featmap.txt";
        !describes && !is_twin(path)
    });
    match (candidates.next(), candidates.next()) {
        (Some(path), None) => Ok(path.clone()),
        (None, _) => Err(InputError::Missing {
            folder: folder.to_owned(),
            names: "file to train on".to_owned(),
        }),
        (Some(first), Some(second)) => Err(InputError::Invalid(format!(
            "{} has several files, {} and {} among them; let `data.dir` name the one to train on, or `data.options.train`",
            folder.display(),
            name_of(first),
            name_of(second)
        ))),
    }
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into()
}

/// Returns the files of a folder, sorted by name.
///
/// # Errors
/// [`InputError::Unreadable`].
pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>, InputError> {
    let unreadable = |source| InputError::Unreadable {
        path: folder.to_owned(),
        source,
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the content of a file, decompressed if its name ends with `.gz`.
///
/// # Errors
/// [`InputError::Unreadable`].
pub(super) fn read(path: &Path) -> Result<Vec<u8>, InputError> {
    let unreadable = |source| InputError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let content = fs::read(path).map_err(unreadable)?;
    if path.extension().is_none_or(|extension| extension != "gz") {
        return Ok(content);
    }
    let mut plain = Vec::new();
    let read = MultiGzDecoder::new(content.as_slice()).read_to_end(&mut plain);
    read.map_err(unreadable)?;
    Ok(plain)
}

/// Returns the text of a file, decompressed if its name ends with `.gz`.
///
/// # Errors
/// [`InputError::Unreadable`]; [`InputError::Bytes`] where it is no UTF-8.
pub(super) fn read_text(path: &Path) -> Result<String, InputError> {
    String::from_utf8(read(path)?).map_err(|error| InputError::Bytes {
        path: path.to_owned(),
        offset: error.utf8_error().valid_up_to() as u64,
        problem: "the file is no text in UTF-8".to_owned(),
    })
}

/// Splits samples into those to train on and a share that is held out, chosen by the job's seed. `path` is their file.
///
/// # Errors
/// [`InputError::Invalid`] if there is a single sample.
pub(super) fn hold_out(
    all: &InMemory,
    setup: &DataSetup,
    path: &Path,
) -> Result<(InMemory, InMemory), InputError> {
    let (training, evaluation) = split(all.len(), setup, setup.seed, path)?;
    Ok((all.select(&training), all.select(&evaluation)))
}

/// Returns the numbers of the samples to train on, and of a share that is held out, chosen by a seed.
///
/// # Errors
/// [`InputError::Invalid`] if there are less than two samples, or more than can be numbered.
pub(super) fn split(
    samples: usize,
    setup: &DataSetup,
    seed: u64,
    path: &Path,
) -> Result<(Vec<u32>, Vec<u32>), InputError> {
    memory::countable(samples)?;
    let begin = first_held_out(samples, setup, path)?;
    let mut training = shuffle::held_out(seed, samples);
    let evaluation = training.split_off(begin);
    Ok((training, evaluation))
}

/// Returns the number of the first sample that is held out, if the last share of the samples is. At least one sample is
/// held out, and at least one is not.
///
/// # Errors
/// [`InputError::Invalid`] if there are less than two samples.
pub(super) fn first_held_out(
    samples: usize,
    setup: &DataSetup,
    path: &Path,
) -> Result<usize, InputError> {
    if samples < 2 {
        let found = if samples == 0 {
            "no sample"
        } else {
            "a single sample"
        };
        return Err(InputError::Invalid(format!(
            "{}: there is {found}; at least one to learn from and one to hold out are needed",
            path.display()
        )));
    }
    let share = (samples as f64 * setup.settings.held_out).ceil() as usize;
    Ok(samples - share.clamp(1, samples - 1))
}
