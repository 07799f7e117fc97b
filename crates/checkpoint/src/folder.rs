//! Writes to a folder that survive a crash: a file that has its final name is whole and durable.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// The treatment of an existing file of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The existing file is replaced.
    Replace,
    /// The existing file stays, and writing fails with [`io::ErrorKind::AlreadyExists`].
    Create,
}

/// Writes a file under a temporary name and renames it. Creates the folder if it is missing.
pub(crate) fn write(folder: &Path, name: &str, content: &[u8], mode: Mode) -> io::Result<()> {
    if !folder.is_dir() {
        std::fs::create_dir_all(folder)?;
        if let Some(parent) = folder.parent() {
            sync(parent)?;
        }
    }
    let mut file = tempfile::Builder::new();
    file.prefix(name).suffix(".partial");
    // Readable like any other file, not only by its owner: other users of a shared folder restore from it.
    #[cfg(unix)]
    file.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = file.tempfile_in(folder)?;
    file.write_all(content)?;
    file.as_file().sync_all()?;
    let path = folder.join(name);
    match mode {
        Mode::Replace => file.persist(path),
        // The rename is atomic, so of two writers one fails.
        Mode::Create => file.persist_noclobber(path),
    }
    .map_err(|error| error.error)?;
    sync(folder)
}

/// Removes files in order, and then the folder if it is empty. The first removal is durable before the
/// others begin.
pub(crate) fn remove(folder: &Path, files: &[String]) -> io::Result<()> {
    for (i, file) in files.iter().enumerate() {
        absent_is_fine(std::fs::remove_file(folder.join(file)))?;
        if i == 0 {
            absent_is_fine(sync(folder))?;
        }
    }
    match std::fs::remove_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => absent_is_fine(removed),
    }
}

fn absent_is_fine(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome,
    }
}

/// Syncs a folder, so that its entries are durable.
fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
