//! The files of a data set: where they are, and their bytes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::read::MultiGzDecoder;

use super::error::InputError;
use super::source::DataSetup;

/// A file that samples are read from.
#[derive(Clone, Debug)]
pub(super) struct DataFile {
    path: Arc<Path>,
    size: u64,
    /// The content of a file that was compressed; none for a file that is read where it is.
    content: Option<Arc<[u8]>>,
}

impl DataFile {
    /// Finds a file. Files that end with `.gz` are decompressed.
    ///
    /// # Errors
    /// [`InputError::Unreadable`].
    pub(super) fn open(path: &Path) -> Result<Self, InputError> {
        let found = fs::metadata(path).map_err(unreadable(path))?;
        let content = match is_compressed(path) {
            true => Some(read(path)?.into()),
            false => None,
        };
        let size = content.as_ref().map(|content: &Arc<[u8]>| content.len());
        Ok(Self {
            path: path.into(),
            size: size.map_or(found.len(), |size| size as u64),
            content,
        })
    }

    pub(super) fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Returns the number of bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Returns some bytes of the file.
    ///
    /// # Errors
    /// [`InputError::Unreadable`], also if the file has become shorter.
    pub(super) fn read(&self, range: Range<u64>) -> Result<Vec<u8>, InputError> {
        if let Some(content) = &self.content {
            let part = content.get(range.start as usize..range.end as usize);
            return Ok(part.unwrap_or_default().to_vec());
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let file = File::open(&self.path);
        let read = file.and_then(|file| file.read_exact_at(&mut bytes, range.start));
        read.map_err(unreadable(&self.path))?;
        Ok(bytes)
    }

    /// Returns a reader of the whole file.
    pub(super) fn reader(&self) -> impl Read + '_ {
        Reader { file: self, at: 0 }
    }
}

struct Reader<'a> {
    file: &'a DataFile,
    at: u64,
}

impl Read for Reader<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let end = self.file.size.min(self.at + to.len() as u64);
        let bytes = self.file.read(self.at..end);
        let bytes = bytes.map_err(|error| match error {
            InputError::Unreadable { source, .. } => source,
            other => io::Error::other(other.to_string()),
        })?;
        to[..bytes.len()].copy_from_slice(&bytes);
        self.at = end;
        Ok(bytes.len())
    }
}

/// Opens the files that samples are read from in chunks.
///
/// # Errors
/// [`InputError::Unreadable`]; [`InputError::Invalid`] for a compressed file of streamed data.
pub(super) fn open(setup: &DataSetup, paths: &[PathBuf]) -> Result<Vec<DataFile>, InputError> {
    let compressed = paths.iter().find(|path| is_compressed(path));
    if let (true, Some(path)) = (setup.settings.stream, compressed) {
        return Err(InputError::Invalid(format!(
            "{} is compressed, so it cannot be streamed; decompress it, or set data.stream to false",
            path.display()
        )));
    }
    paths.iter().map(|path| DataFile::open(path)).collect()
}

/// The files of a data set.
pub(super) struct Parts {
    /// The place that was named.
    pub(super) place: PathBuf,
    /// Those to train on, in the order of their names.
    pub(super) training: Vec<PathBuf>,
    /// The one with the samples that are held out, if they have a file of their own.
    pub(super) evaluation: Option<PathBuf>,
}

/// Finds the files of `data.dir`: a file, a pattern of names, or a folder with one file to train on. `data.options` may
/// name both parts, as `train` and `test`. `twin` returns the name of the file with the held-out samples beside one to
/// train on.
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
    let test = named("test")?;
    let mut training = match named("train")? {
        Some(path) => matching(&path)?,
        None if place.is_dir() => vec![the_one(place, &twin)?],
        None => matching(place)?,
    };
    training.retain(|path| Some(path) != test.as_ref());
    let evaluation = match (test, training.as_slice()) {
        (Some(path), _) => Some(path),
        (None, [single]) => Some(twin(single)).filter(|path| path != single && path.is_file()),
        (None, _) => None,
    };
    for path in training.iter().chain(&evaluation) {
        if !path.is_file() {
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

/// Returns the files that a path stands for: itself, or those that match its pattern, in the order of their names.
///
/// # Errors
/// [`InputError::Missing`] if no file matches; [`InputError::Invalid`] for a pattern that cannot be read.
pub(super) fn matching(path: &Path) -> Result<Vec<PathBuf>, InputError> {
    let text = path.to_string_lossy();
    if path.exists() || !text.contains(['*', '?', '[']) {
        return Ok(vec![path.to_owned()]);
    }
    let found = glob::glob(&text).map_err(|error| {
        InputError::Invalid(format!("{text:?} is no pattern of file names: {error}"))
    })?;
    let found: Result<Vec<PathBuf>, _> = found.collect();
    let mut found = found.map_err(|error| {
        let path = error.path().to_owned();
        unreadable(&path)(error.into())
    })?;
    found.retain(|path| path.is_file());
    match found.is_empty() {
        false => Ok(found),
        true => Err(InputError::Missing {
            folder: path.parent().unwrap_or(path).to_owned(),
            names: format!("file that matches {}", name_of(path)),
        }),
    }
}

/// Returns the one file in a folder that is no other's twin. Files with names that begin with a dot, and descriptions, do
/// not count.
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

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Returns the files of a folder, in the order of their names.
///
/// # Errors
/// [`InputError::Unreadable`].
pub(super) fn in_folder(folder: &Path) -> Result<Vec<PathBuf>, InputError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        let path = entry.map_err(unreadable(folder))?.path();
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
    let content = fs::read(path).map_err(unreadable(path))?;
    if !is_compressed(path) {
        return Ok(content);
    }
    let mut plain = Vec::new();
    let read = MultiGzDecoder::new(content.as_slice()).read_to_end(&mut plain);
    read.map_err(unreadable(path))?;
    Ok(plain)
}

/// Returns whether a file is compressed, by its name.
pub(super) fn is_compressed(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gz")
}

/// Returns a function that makes errors of a file.
pub(super) fn unreadable(path: &Path) -> impl Fn(io::Error) -> InputError + '_ {
    |source| InputError::Unreadable {
        path: path.to_owned(),
        source,
    }
}
