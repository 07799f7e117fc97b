//! Files in zip archives: `ratings.zip/ratings.csv` is the file `ratings.csv` in the archive `ratings.zip`.

use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};

use storage::without_user;
use zip::ZipArchive;
use zip::result::ZipError;

use crate::error::InputError;

/// The most file names that a message lists.
const SHOWN: usize = 10;

type Archive = ZipArchive<Cursor<Vec<u8>>>;

/// A file in a zip archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// The archive.
    pub(crate) archive: PathBuf,
    /// The file's path in the archive, or the last parts of this path.
    name: String,
}

impl Member {
    /// Returns the file in an archive that a path names; `None` if no folder of the path has a name that ends with
    /// `.zip`.
    pub(crate) fn new(path: &Path) -> Option<Self> {
        let archive = path.ancestors().skip(1).find(|path| is_archive(path))?;
        Some(Self {
            archive: archive.to_owned(),
            name: path.strip_prefix(archive).ok()?.to_str()?.to_owned(),
        })
    }

    /// Returns whether an archive with these bytes has the file.
    ///
    /// # Errors
    /// [`InputError::Unreadable`], or [`InputError::Invalid`] if several files match the name.
    pub(crate) fn is_in(&self, bytes: Vec<u8>) -> Result<bool, InputError> {
        Ok(self.find(&self.open(bytes)?)?.is_some())
    }

    /// Returns the content of the file in an archive with these bytes.
    ///
    /// # Errors
    /// As [`is_in`](Self::is_in), or if there is no such file.
    pub(crate) fn read(&self, bytes: Vec<u8>) -> Result<Vec<u8>, InputError> {
        let mut archive = self.open(bytes)?;
        let Some(name) = self.find(&archive)? else {
            return Err(InputError::Missing {
                folder: shown(&self.archive),
                names: self.name.clone(),
            });
        };
        let file = archive.by_name(&name);
        let mut content = Vec::new();
        file.map_err(|error| self.unreadable(error))?
            .read_to_end(&mut content)
            .map_err(|error| self.unreadable(error.into()))?;
        Ok(content)
    }

    fn open(&self, bytes: Vec<u8>) -> Result<Archive, InputError> {
        ZipArchive::new(Cursor::new(bytes)).map_err(|error| self.unreadable(error))
    }

    /// Returns the full path of the file that has exactly this name, or else of the only file whose path ends with it;
    /// `None` if no file matches.
    fn find(&self, archive: &Archive) -> Result<Option<String>, InputError> {
        let mut names = names(archive).map_err(|error| self.unreadable(error))?;
        if names.contains(&self.name) {
            return Ok(Some(self.name.clone()));
        }
        let end = format!("/{}", self.name);
        names.retain(|name| name.ends_with(&end));
        match names.as_slice() {
            [one, other, ..] => Err(InputError::Invalid(format!(
                "{} has several files {}: {one} and {other}; name one of them whole",
                shown(&self.archive).display(),
                self.name
            ))),
            _ => Ok(names.pop()),
        }
    }

    fn unreadable(&self, error: ZipError) -> InputError {
        InputError::Unreadable {
            path: shown(&self.archive),
            source: io::Error::other(error),
        }
    }
}

/// Returns the names of the files in an archive, in order.
fn names(archive: &Archive) -> Result<Vec<String>, ZipError> {
    let names = archive.file_names().map(|name| Ok(name?.into_owned()));
    let mut names: Vec<String> = names.collect::<Result<_, ZipError>>()?;
    names.retain(|name| !name.ends_with('/'));
    names.sort_unstable();
    Ok(names)
}

/// Returns a path as messages show it. A URL loses its user and query, which may have secrets.
fn shown(path: &Path) -> PathBuf {
    let text = path.to_string_lossy();
    match text.contains("://") {
        true => without_user(text.split(['?', '#']).next().unwrap_or_default()).into(),
        false => path.to_owned(),
    }
}

/// Returns whether the name of a path is that of an archive.
pub(crate) fn is_archive(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "zip")
}

/// Returns the error for a path that names an archive without a file in it. `bytes` has the content of the archive.
pub(crate) fn no_member(path: &Path, bytes: Vec<u8>) -> InputError {
    let names = ZipArchive::new(Cursor::new(bytes)).and_then(|archive| names(&archive));
    let names = match names {
        Ok(names) if names.len() > SHOWN => {
            let (first, rest) = names.split_at(SHOWN);
            format!("{} and {} more files", first.join(", "), rest.len())
        }
        Ok(names) => names.join(", "),
        Err(error) => format!("nothing that can be read: {error}"),
    };
    InputError::Invalid(format!(
        "{0} is an archive; name the file in it, as in {0}/FILE; it has {names}",
        shown(path).display()
    ))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    fn archive(files: &[(&str, &str)]) -> Vec<u8> {
        let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
        for (name, content) in files {
            writer
                .start_file(*name, SimpleFileOptions::default())
                .unwrap();
            writer.write_all(content.as_bytes()).unwrap();
        }
        writer.finish().unwrap().into_inner()
    }

    fn member(path: &str) -> Member {
        Member::new(Path::new(path)).unwrap()
    }

    #[test]
    fn a_file_is_found_by_its_name_or_the_end_of_it() {
        let bytes = archive(&[("small/a.csv", "1"), ("small/b.csv", "2"), ("a.csv", "3")]);
        let read = |path: &str| member(path).read(bytes.clone()).unwrap();
        assert_eq!(read("data/x.zip/small/a.csv"), b"1");
        assert_eq!(read("x.zip/b.csv"), b"2");
        assert_eq!(read("s3://bucket/x.zip/a.csv"), b"3");
        assert!(!member("x.zip/c.csv").is_in(bytes.clone()).unwrap());
        assert!(
            Member::new(Path::new("x.zip")).is_none() && Member::new(Path::new("a/b")).is_none()
        );
    }

    #[test]
    fn errors_name_the_archive_and_its_files() {
        let bytes = archive(&[("a/x.csv", "1"), ("b/x.csv", "2")]);
        let error = member("data.zip/x.csv").read(bytes.clone()).unwrap_err();
        assert!(error.to_string().contains("a/x.csv and b/x.csv"), "{error}");
        let error = member("data.zip/y.csv").read(bytes.clone()).unwrap_err();
        assert!(error.to_string().contains("y.csv"), "{error}");
        let error = no_member(Path::new("data.zip"), bytes.clone());
        assert!(
            error.to_string().contains("it has a/x.csv, b/x.csv"),
            "{error}"
        );
        let error = member("s3://me:secret@bucket/data.zip/x.csv").read(b"PK".to_vec());
        assert!(!error.unwrap_err().to_string().contains("secret"));
        for damaged in [&bytes[..bytes.len() / 2], b"", b"PK"] {
            let error = member("data.zip/x.csv").read(damaged.to_vec()).unwrap_err();
            assert!(error.to_string().contains("data.zip"), "{error}");
        }
    }
}
