//! The files of a data set: where they are, and their bytes.

use std::fs::{self, File};
use std::io::{self, BufReader, Cursor, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use flate2::read::MultiGzDecoder;

use storage::without_user;

use super::archive::{self, Member};
use super::error::InputError;
use super::remote::Remote;
use super::source::DataSetup;

/// A file that samples are read from.
#[derive(Clone, Debug)]
pub(super) struct DataFile {
    path: Arc<Path>,
    size: u64,
    content: Content,
    /// A part that has been read, with its place.
    part: Option<(u64, Arc<[u8]>)>,
}

/// The bytes of a file.
#[derive(Clone, Debug)]
enum Content {
    /// They are read from the file system.
    Local,
    Remote(Remote),
    /// They were compressed.
    Memory(Arc<[u8]>),
}

impl DataFile {
    /// Finds a file. Files that end with `.gz` or `.zst`, or are in an archive, are decompressed.
    ///
    /// # Errors
    /// [`InputError::Unreadable`].
    pub(super) fn open(path: &Path) -> Result<Self, InputError> {
        let (content, size) = match Remote::of(path).map_err(unreadable(path))? {
            _ if is_compressed(path)? => {
                let content: Arc<[u8]> = read(path)?.into();
                let size = content.len() as u64;
                (Content::Memory(content), size)
            }
            Some(remote) => (Content::Remote(remote), size(path)?),
            None => (Content::Local, size(path)?),
        };
        Ok(Self {
            path: path.into(),
            size,
            content,
            part: None,
        })
    }

    /// Reads a part of a file in an object store at once, which is then read in small pieces.
    ///
    /// # Errors
    /// [`InputError::Unreadable`].
    pub(super) fn with_part(mut self, range: Range<u64>) -> Result<Self, InputError> {
        if let Content::Remote(_) = self.content {
            let range = range.start.min(self.size)..range.end.min(self.size);
            self.part = Some((range.start, self.read(range)?.into()));
        }
        Ok(self)
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
        if let Some((start, part)) = &self.part
            && let Some(begin) = range.start.checked_sub(*start)
            && let Some(bytes) = part.get(begin as usize..(range.end - start) as usize)
        {
            return Ok(bytes.to_vec());
        }
        match &self.content {
            Content::Local => {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                let file = File::open(&self.path);
                let read = file.and_then(|file| file.read_exact_at(&mut bytes, range.start));
                read.map(|()| bytes).map_err(unreadable(&self.path))
            }
            Content::Remote(remote) => remote.read(range).map_err(unreadable(&self.path)),
            Content::Memory(content) => {
                let part = content.get(range.start as usize..range.end as usize);
                Ok(part.unwrap_or_default().to_vec())
            }
        }
    }

    /// Returns a reader of the whole file.
    pub(super) fn reader(&self) -> BufReader<Reader> {
        let reader = Reader {
            file: self.clone(),
            at: 0,
        };
        // A request to an object store takes as long for many bytes as for a few.
        BufReader::with_capacity(1 << 20, reader)
    }

    /// Returns a reader of a few bytes from this one on.
    pub(super) fn reader_from(&self, at: u64) -> BufReader<Reader> {
        BufReader::new(Reader {
            file: self.clone(),
            at,
        })
    }
}

/// Reads a file from a place on.
pub(super) struct Reader {
    file: DataFile,
    at: u64,
}

impl Read for Reader {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let start = self.at.min(self.file.size);
        let end = self.file.size.min(start + to.len() as u64);
        let bytes = self.file.read(start..end);
        let bytes = bytes.map_err(|error| match error {
            InputError::Unreadable { source, .. } => source,
            other => io::Error::other(other.to_string()),
        })?;
        to[..bytes.len()].copy_from_slice(&bytes);
        self.at = end;
        Ok(bytes.len())
    }
}

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Folder,
    Nothing,
}

/// Returns what a path leads to, in the file system or in an object store.
///
/// # Errors
/// [`InputError::Unreadable`] if the object store does not say.
pub(super) fn kind(path: &Path) -> Result<Kind, InputError> {
    if let Some(member) = in_archive(path)? {
        return Ok(match member.is_in(read(&member.archive)?)? {
            true => Kind::File,
            false => Kind::Nothing,
        });
    }
    let Some(remote) = Remote::of(path).map_err(unreadable(path))? else {
        return Ok(match (path.is_dir(), path.is_file()) {
            (true, _) => Kind::Folder,
            (false, true) => Kind::File,
            (false, false) => Kind::Nothing,
        });
    };
    if remote.size().map_err(unreadable(path))?.is_some() {
        return Ok(Kind::File);
    }
    let (folders, files) = remote.list().map_err(unreadable(path))?;
    Ok(match folders.is_empty() && files.is_empty() {
        true => Kind::Nothing,
        false => Kind::Folder,
    })
}

/// Returns the file in an archive that a path names, if it names one.
fn in_archive(path: &Path) -> Result<Option<Member>, InputError> {
    match Member::of(path) {
        Some(member) if is_file(&member.archive)? => Ok(Some(member)),
        _ => Ok(None),
    }
}

/// Returns whether a path is one of the file system.
pub(super) fn is_local(path: &Path) -> bool {
    !path.to_string_lossy().contains("://")
}

/// Returns whether a path leads to a file.
///
/// # Errors
/// As [`kind`].
pub(super) fn is_file(path: &Path) -> Result<bool, InputError> {
    Ok(kind(path)? == Kind::File)
}

/// Opens the files that samples are read from in chunks.
///
/// # Errors
/// [`InputError::Unreadable`]; [`InputError::Invalid`] for a compressed file of streamed data.
pub(super) fn open(setup: &DataSetup, paths: &[PathBuf]) -> Result<Vec<DataFile>, InputError> {
    for path in paths {
        if setup.settings.stream && is_compressed(path)? {
            return Err(InputError::Invalid(format!(
                "{} is compressed, so it cannot be streamed; decompress it, or set data.stream to false",
                path.display()
            )));
        }
    }
    if let Some(path) = paths.iter().find(|path| archive::is_archive(path)) {
        return Err(archive::no_member(path, read(path)?));
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

/// Returns whether two paths are equal but for a dot at their beginning, which patterns leave out.
fn is_same(a: &Path, b: &Path) -> bool {
    let plain = |path: &Path| -> PathBuf {
        let parts = path.components();
        parts.filter(|part| *part != Component::CurDir).collect()
    };
    plain(a) == plain(b)
}

/// Returns the files that a path stands for: itself, or those that match its pattern, in the order of their names.
///
/// # Errors
/// [`InputError::Missing`] if no file matches; [`InputError::Invalid`] for a pattern that cannot be read.
pub(super) fn matching(path: &Path) -> Result<Vec<PathBuf>, InputError> {
    let text = path.to_string_lossy();
    if !text.contains(['*', '?', '[']) || kind(path)? != Kind::Nothing {
        return Ok(vec![path.to_owned()]);
    }
    let invalid = |error: glob::PatternError| {
        InputError::Invalid(format!("{text:?} is no pattern of file names: {error}"))
    };
    let mut found = match (is_local(path), path.parent()) {
        (false, Some(folder)) => {
            let pattern = glob::Pattern::new(&name_of(path)).map_err(invalid)?;
            let mut files = in_folder(folder)?;
            files.retain(|file| pattern.matches(&name_of(file)));
            files
        }
        _ => {
            let found = glob::glob(&text).map_err(invalid)?;
            let found: Result<Vec<PathBuf>, _> = found.collect();
            let mut found = found.map_err(|error| {
                let path = error.path().to_owned();
                unreadable(&path)(error.into())
            })?;
            found.retain(|path| path.is_file());
            found
        }
    };
    found.retain(|path| !name_of(path).starts_with('.'));
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

/// Returns the files in a folder, in the order of their names.
///
/// # Errors
/// [`InputError::Unreadable`].
pub(super) fn in_folder(folder: &Path) -> Result<Vec<PathBuf>, InputError> {
    Ok(list(folder)?.1)
}

/// Returns the folders and the files in a folder, each in the order of their names.
///
/// # Errors
/// [`InputError::Unreadable`].
pub(super) fn list(folder: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), InputError> {
    let (mut folders, mut files) = (Vec::new(), Vec::new());
    if let Some(remote) = Remote::of(folder).map_err(unreadable(folder))? {
        (folders, files) = remote.list().map_err(unreadable(folder))?;
    } else {
        for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
            let path = entry.map_err(unreadable(folder))?.path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.is_file() => files.push(path),
                false => {}
            }
        }
    }
    folders.sort();
    files.sort();
    Ok((folders, files))
}

/// Returns the number of bytes of a file.
///
/// # Errors
/// [`InputError::Unreadable`].
pub(super) fn size(path: &Path) -> Result<u64, InputError> {
    if let Some(member) = in_archive(path)? {
        return Ok(member.read(read(&member.archive)?)?.len() as u64);
    }
    let size = match Remote::of(path).map_err(unreadable(path))? {
        Some(remote) => remote
            .size()
            .and_then(|size| size.ok_or_else(|| io::ErrorKind::NotFound.into())),
        None => fs::metadata(path).map(|found| found.len()),
    };
    size.map_err(unreadable(path))
}

/// Returns the content of a file, which may be in an archive, decompressed if its name ends with `.gz` or `.zst`.
///
/// # Errors
/// [`InputError::Unreadable`]; for a file in an archive, those of [`Member::read`].
pub(super) fn read(path: &Path) -> Result<Vec<u8>, InputError> {
    let content = match in_archive(path)? {
        Some(member) => member.read(read(&member.archive)?)?,
        None => {
            let content = match Remote::of(path).map_err(unreadable(path))? {
                Some(remote) => remote.read_all(),
                None => fs::read(path),
            };
            content.map_err(unreadable(path))?
        }
    };
    let mut plain = Vec::new();
    let read = if is_gzipped(path) {
        MultiGzDecoder::new(content.as_slice())
            .read_to_end(&mut plain)
            .map(|_| ())
    } else if is_zstandard(path) {
        zstd::stream::copy_decode(content.as_slice(), &mut plain)
    } else {
        return Ok(content);
    };
    read.map_err(unreadable(path))?;
    Ok(plain)
}

/// Returns a reader of a file's bytes, as they are.
///
/// # Errors
/// [`InputError::Unreadable`].
pub(super) fn stored(path: &Path) -> Result<Box<dyn Read>, InputError> {
    if let Some(member) = in_archive(path)? {
        let content = member.read(read(&member.archive)?)?;
        return Ok(Box::new(Cursor::new(content)));
    }
    let opened = match Remote::of(path).map_err(unreadable(path))? {
        Some(remote) => remote
            .read_all()
            .map(|content| Box::new(Cursor::new(content)) as Box<dyn Read>),
        None => File::open(path).map(|file| Box::new(BufReader::new(file)) as Box<dyn Read>),
    };
    opened.map_err(unreadable(path))
}

/// Returns whether a file is compressed, by its name, or in an archive.
///
/// # Errors
/// As [`kind`].
fn is_compressed(path: &Path) -> Result<bool, InputError> {
    Ok(is_gzipped(path) || is_zstandard(path) || in_archive(path)?.is_some())
}

/// Returns whether a file is compressed by gzip, by its name.
pub(super) fn is_gzipped(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gz")
}

/// Returns whether a file is compressed by Zstandard, by its name.
fn is_zstandard(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "zst")
}

/// Returns a function that makes errors of a file.
pub(super) fn unreadable(path: &Path) -> impl Fn(io::Error) -> InputError + '_ {
    |source| InputError::Unreadable {
        path: match is_local(path) {
            true => path.to_owned(),
            false => shown(&path.to_string_lossy()),
        },
        source,
    }
}

/// Returns a URL without user and query, which may have secrets.
fn shown(url: &str) -> PathBuf {
    let plain = url.split(['?', '#']).next().unwrap_or_default();
    without_user(plain).into()
}
