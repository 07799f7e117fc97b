//! The bytes of files in folders, in object stores and in archives.

mod archive;
mod remote;

use std::fs::{self, File};
use std::io::{self, BufReader, Cursor, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::read::MultiGzDecoder;

use storage::without_user;

pub(crate) use archive::{is_archive, no_member};

use archive::Member;
use remote::Remote;

use crate::error::InputError;

/// A file that samples are read from.
#[derive(Clone, Debug)]
pub(crate) struct DataFile {
    path: Arc<Path>,
    size: u64,
    content: Content,
    /// A part of the file that has been read in advance: its offset and its bytes.
    part: Option<(u64, Arc<[u8]>)>,
}

/// The bytes of a file.
#[derive(Clone, Debug)]
enum Content {
    /// Bytes in the file system, which are read when they are needed.
    Local,
    Remote(Remote),
    /// The decompressed bytes of a compressed file.
    Memory(Arc<[u8]>),
}

impl DataFile {
    /// Opens a file. Decompresses a file whose name ends with `.gz` or `.zst`, or that is in an archive.
    ///
    /// # Errors
    /// [`InputError::Unreadable`]; for a file in an archive, those of [`Member::read`].
    pub(crate) fn open(path: &Path) -> Result<Self, InputError> {
        let (content, size) = match Remote::new(path).map_err(unreadable(path))? {
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

    /// Reads a range of a file in an object store with one request. Later reads within the range need no further
    /// request. Other files stay as they are.
    ///
    /// # Errors
    /// [`InputError::Unreadable`].
    pub(crate) fn with_part(mut self, range: Range<u64>) -> Result<Self, InputError> {
        if let Content::Remote(_) = self.content {
            let range = range.start.min(self.size)..range.end.min(self.size);
            self.part = Some((range.start, self.read(range)?.into()));
        }
        Ok(self)
    }

    pub(crate) fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Returns the number of bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the bytes of a range.
    ///
    /// # Errors
    /// [`InputError::Unreadable`], also if the file has become shorter.
    pub(crate) fn read(&self, range: Range<u64>) -> Result<Vec<u8>, InputError> {
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
    pub(crate) fn reader(&self) -> BufReader<Reader> {
        let reader = Reader {
            file: self.clone(),
            at: 0,
        };
        // A request to an object store takes as long for many bytes as for a few.
        BufReader::with_capacity(1 << 20, reader)
    }

    /// Returns a reader that starts at the offset `at`, for a few bytes.
    pub(crate) fn reader_from(&self, at: u64) -> BufReader<Reader> {
        BufReader::new(Reader {
            file: self.clone(),
            at,
        })
    }
}

/// Reads a file from an offset on.
pub(crate) struct Reader {
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
pub(crate) enum Kind {
    File,
    Folder,
    Nothing,
}

/// Returns what a path leads to, in the file system or in an object store.
///
/// # Errors
/// [`InputError::Unreadable`] if an object store or an archive cannot be read; [`InputError::Invalid`] if several files
/// of an archive match the path.
pub(crate) fn kind(path: &Path) -> Result<Kind, InputError> {
    if let Some(member) = in_archive(path)? {
        return Ok(match member.is_in(read(&member.archive)?)? {
            true => Kind::File,
            false => Kind::Nothing,
        });
    }
    let Some(remote) = Remote::new(path).map_err(unreadable(path))? else {
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

/// Returns the file in an archive that a path names; `None` if the path does not lead into an archive.
fn in_archive(path: &Path) -> Result<Option<Member>, InputError> {
    match Member::new(path) {
        Some(member) if is_file(&member.archive)? => Ok(Some(member)),
        _ => Ok(None),
    }
}

/// Returns whether a path is in the file system, and not the URL of an object store.
pub(crate) fn is_local(path: &Path) -> bool {
    !path.to_string_lossy().contains("://")
}

/// Returns whether a path leads to a file.
///
/// # Errors
/// As [`kind`].
pub(crate) fn is_file(path: &Path) -> Result<bool, InputError> {
    Ok(kind(path)? == Kind::File)
}

/// Returns the files that a path names: the path itself, or the files that match the pattern in it, sorted by name.
/// Hidden files do not match.
///
/// # Errors
/// [`InputError::Missing`] if no file matches; [`InputError::Invalid`] for an invalid pattern;
/// [`InputError::Unreadable`] if a folder cannot be read.
pub fn matching(path: &Path) -> Result<Vec<PathBuf>, InputError> {
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

pub(crate) fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Returns the files in a folder, in the order of their names.
///
/// # Errors
/// [`InputError::Unreadable`].
pub(crate) fn in_folder(folder: &Path) -> Result<Vec<PathBuf>, InputError> {
    Ok(list(folder)?.1)
}

/// Returns the folders and the files in a folder, each in the order of their names.
///
/// # Errors
/// [`InputError::Unreadable`].
pub(crate) fn list(folder: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), InputError> {
    let (mut folders, mut files) = (Vec::new(), Vec::new());
    if let Some(remote) = Remote::new(folder).map_err(unreadable(folder))? {
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
pub(crate) fn size(path: &Path) -> Result<u64, InputError> {
    if let Some(member) = in_archive(path)? {
        return Ok(member.read(read(&member.archive)?)?.len() as u64);
    }
    let size = match Remote::new(path).map_err(unreadable(path))? {
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
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, InputError> {
    let content = match in_archive(path)? {
        Some(member) => member.read(read(&member.archive)?)?,
        None => {
            let content = match Remote::new(path).map_err(unreadable(path))? {
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

/// Returns a reader of a file's bytes as they are stored. Does not decompress `.gz` and `.zst`.
///
/// # Errors
/// [`InputError::Unreadable`].
pub(crate) fn stored(path: &Path) -> Result<Box<dyn Read>, InputError> {
    if let Some(member) = in_archive(path)? {
        let content = member.read(read(&member.archive)?)?;
        return Ok(Box::new(Cursor::new(content)));
    }
    let opened = match Remote::new(path).map_err(unreadable(path))? {
        Some(remote) => remote
            .read_all()
            .map(|content| Box::new(Cursor::new(content)) as Box<dyn Read>),
        None => File::open(path).map(|file| Box::new(BufReader::new(file)) as Box<dyn Read>),
    };
    opened.map_err(unreadable(path))
}

/// Returns whether a file is compressed: its name ends with `.gz` or `.zst`, or it is in an archive.
///
/// # Errors
/// As [`kind`].
pub(crate) fn is_compressed(path: &Path) -> Result<bool, InputError> {
    Ok(is_gzipped(path) || is_zstandard(path) || in_archive(path)?.is_some())
}

/// Returns whether the name of a file is that of a gzip file.
pub(crate) fn is_gzipped(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gz")
}

/// Returns whether the name of a file is that of a Zstandard file.
fn is_zstandard(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "zst")
}

/// Returns a function that converts an I/O error to the error of this file.
pub(crate) fn unreadable(path: &Path) -> impl Fn(io::Error) -> InputError + '_ {
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
