//! A file that appears whole or not at all.

use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::error::CommandError;

/// A file that is being written. It has a temporary name until it is complete.
pub(crate) struct Output {
    path: PathBuf,
    file: NamedTempFile,
    force: bool,
}

impl Output {
    /// Begins a file. If `force` is true, it replaces an existing file.
    ///
    /// # Errors
    /// If the file exists and `force` is false, or if the system cannot create a file.
    pub(crate) fn create(path: &Path, force: bool) -> Result<Self, CommandError> {
        let wrong = || CommandError::file(path);
        if !force && path.exists() {
            return Err(wrong()(exists()));
        }
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        let file = tempfile::Builder::new()
            .suffix(".partial")
            .permissions(PermissionsExt::from_mode(0o666))
            .tempfile_in(folder)
            .map_err(wrong())?;
        Ok(Self {
            path: path.to_owned(),
            file,
            force,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn file(&mut self) -> &mut File {
        self.file.as_file_mut()
    }

    /// Returns a function that turns a system error into the error of this file.
    pub(super) fn wrong(&self) -> impl FnOnce(io::Error) -> CommandError + '_ {
        CommandError::file(&self.path)
    }

    /// Makes the file durable, and gives it its name.
    pub(super) fn finish(self) -> Result<(), CommandError> {
        let wrong = || CommandError::file(&self.path);
        self.file.as_file().sync_all().map_err(wrong())?;
        let persisted = match self.force {
            true => self.file.persist(&self.path),
            false => self.file.persist_noclobber(&self.path),
        };
        match persisted {
            Ok(_) => Ok(()),
            Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
                Err(wrong()(exists()))
            }
            Err(error) => Err(wrong()(error.error)),
        }
    }
}

fn exists() -> io::Error {
    io::Error::new(
        io::ErrorKind::AlreadyExists,
        "it is there; --force replaces it",
    )
}
