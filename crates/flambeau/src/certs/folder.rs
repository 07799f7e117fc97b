//! The folder of certificates, keys and tokens. Each file is written atomically and durably, with the permissions of a
//! secret or of a public file.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use crate::error::CommandError;

/// The permissions of files that their owner alone reads, and of all others.
pub(super) const SECRET: u32 = 0o600;
pub(super) const PUBLIC: u32 = 0o644;

/// The folder that files are written to.
pub(super) struct Folder<'a> {
    pub(super) dir: &'a Path,
    /// The names of the files that were written.
    pub(super) made: Vec<String>,
}

impl Folder<'_> {
    /// Writes a file atomically and durably. It has its permissions from the start, and the owner of the file that it
    /// replaces.
    pub(super) fn write(
        &mut self,
        name: String,
        text: &str,
        mode: u32,
    ) -> Result<(), CommandError> {
        let path = self.dir.join(&name);
        let folder = path.parent().unwrap_or(self.dir);
        fs::create_dir_all(folder).map_err(CommandError::file(folder))?;
        let permissions = fs::Permissions::from_mode(mode);
        let mut file = tempfile::Builder::new()
            .permissions(permissions)
            .tempfile_in(folder)
            .map_err(CommandError::file(&path))?;
        let written = file.write_all(text.as_bytes());
        let written = written
            .and_then(|()| keep_owner(file.as_file(), &path))
            .and_then(|()| file.as_file().sync_all());
        written.map_err(CommandError::file(&path))?;
        let kept = file.persist(&path).map_err(|error| error.error);
        kept.map(drop).map_err(CommandError::file(&path))?;
        let named = fs::File::open(folder).and_then(|folder| where_supported(folder.sync_all()));
        named.map_err(CommandError::file(folder))?;
        self.made.push(name);
        Ok(())
    }
}

/// Gives a file the owner of the file at `path`, which it is about to replace, so that the process that reads the file
/// still can. Does nothing where the user may not change owners or the file system has none.
fn keep_owner(file: &fs::File, path: &Path) -> io::Result<()> {
    let Ok(before) = fs::metadata(path) else {
        return Ok(());
    };
    let ours = file.metadata()?;
    if (ours.uid(), ours.gid()) == (before.uid(), before.gid()) {
        return Ok(());
    }
    where_supported(fchown(file, Some(before.uid()), Some(before.gid())))
}

/// Ignores the error of an operation that the user may not do, or that the file system does not support.
fn where_supported(done: io::Result<()>) -> io::Result<()> {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    match done {
        Err(error) if [InvalidInput, PermissionDenied, Unsupported].contains(&error.kind()) => {
            Ok(())
        }
        done => done,
    }
}
