//! The files of a data set: the training files, and the file with the held-out samples.

use std::path::{Component, Path, PathBuf};

use crate::error::InputError;
use crate::files::{
    DataFile, Kind, in_folder, is_archive, is_compressed, is_file, kind, matching, name_of,
    no_member, read,
};
use crate::source::DataSetup;

/// Opens files whose samples are read in chunks.
///
/// # Errors
/// [`InputError::Unreadable`]; [`InputError::Invalid`] for a compressed file of streamed data, and for an archive if
/// the path does not name a file in it.
pub(crate) fn open(setup: &DataSetup, paths: &[PathBuf]) -> Result<Vec<DataFile>, InputError> {
    for path in paths {
        if setup.settings.stream && is_compressed(path)? {
            return Err(InputError::Invalid(format!(
                "{} is compressed, so it cannot be streamed; decompress it, or set data.stream to false",
                path.display()
            )));
        }
    }
    if let Some(path) = paths.iter().find(|path| is_archive(path)) {
        return Err(no_member(path, read(path)?));
    }
    paths.iter().map(|path| DataFile::open(path)).collect()
}

/// The files of a data set.
pub(crate) struct Parts {
    /// The path of the data, as `data.dir` gives it.
    pub(crate) place: PathBuf,
    /// The training files, sorted by name.
    pub(crate) training: Vec<PathBuf>,
    /// The file with the held-out samples; `None` if these samples have no file of their own.
    pub(crate) evaluation: Option<PathBuf>,
}

/// Finds the files of `data.dir`, which is a file, a pattern of file names, or a folder with one training file.
/// `data.options` may name the training files as `train`, and the file with the held-out samples as `test`. Without
/// `test`, the file that `twin` returns for a single training file has the held-out samples, if it exists.
///
/// # Errors
/// [`InputError::Missing`] if a file does not exist; [`InputError::Invalid`] if a folder has several training files, or
/// if an option does not name a file in the folder of the data.
pub(crate) fn find(
    setup: &DataSetup,
    twin: impl Fn(&Path) -> PathBuf,
) -> Result<Parts, InputError> {
    let place = setup.dir()?;
    let is_folder = kind(place)? == Kind::Folder;
    let named = |key: &str| {
        let Some(name) = setup.text(key)? else {
            return Ok(None);
        };
        let below = |part| matches!(part, Component::Normal(_));
        if !Path::new(name).components().all(below) {
            return Err(InputError::Invalid(format!(
                "`data.options.{key}` is {name:?}; name a file in the folder of the data"
            )));
        }
        Ok::<_, InputError>(Some(match is_folder {
            true => place.join(name),
            false => place.with_file_name(name),
        }))
    };
    let test = named("test")?;
    let mut training = match named("train")? {
        Some(path) => matching(&path)?,
        None if is_folder => vec![the_one(place, &twin)?],
        None => matching(place)?,
    };
    // A pattern may match files of held-out samples too.
    let twins: Vec<PathBuf> = training.iter().map(|path| twin(path)).collect();
    if training.len() > 1 {
        let own = |path: &PathBuf| twin(path) == *path;
        training.retain(|path| own(path) || !twins.contains(path));
    }
    training.retain(|path| test.as_ref().is_none_or(|test| !is_same(path, test)));
    let evaluation = match (test, training.as_slice()) {
        (Some(path), _) => Some(path),
        (None, [single]) => match twin(single) {
            twin if twin != *single && is_file(&twin)? => Some(twin),
            _ => None,
        },
        (None, _) => None,
    };
    for path in training.iter().chain(&evaluation) {
        if !is_file(path)? {
            return Err(InputError::Missing {
                folder: path.parent().unwrap_or(place).to_owned(),
                names: name_of(path),
            });
        }
    }
    Ok(Parts {
        place: place.to_owned(),
        training,
        evaluation,
    })
}

/// Returns whether two paths are equal apart from a leading `.`, which paths that match a pattern lack.
fn is_same(a: &Path, b: &Path) -> bool {
    let plain = |path: &Path| -> PathBuf {
        let parts = path.components();
        parts.filter(|part| *part != Component::CurDir).collect()
    };
    plain(a) == plain(b)
}

/// Returns the only file in a folder that is not the twin of another file. Hidden files and descriptions do not count.
fn the_one(folder: &Path, twin: &impl Fn(&Path) -> PathBuf) -> Result<PathBuf, InputError> {
    let files = in_folder(folder)?;
    let is_twin = |path: &PathBuf| {
        files
            .iter()
            .any(|other| other != path && twin(other) == *path)
    };
    let mut candidates = files.iter().filter(|path| {
        let name = name_of(path);
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
            "{} has several files, {} and {} among them; let `data.dir` name the one to train on, or a pattern such as {}/*, or set `data.options.train`",
            folder.display(),
            name_of(first),
            name_of(second),
            folder.display()
        ))),
    }
}
