//! Writes to a folder that survive a crash: what is there under its name is whole, and stays.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Writes a file under another name, then gives it its own. Makes its folder, if missing.
pub(crate) fn write(folder: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    if !folder.is_dir() {
        std::fs::create_dir_all(folder)?;
        if let Some(parent) = folder.parent() {
            sync(parent)?;
        }
    }
    let mut file = tempfile::Builder::new();
    file.prefix(name).suffix(".partial");
    // As any other file, and not for the owner alone: other users of a shared folder restore from it.
    #[cfg(unix)]
    file.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = file.tempfile_in(folder)?;
    file.write_all(content)?;
    file.as_file().sync_all()?;
    file.persist(folder.join(name))
        .map_err(|error| error.error)?;
    sync(folder)
}

/// Removes a checkpoint's folder, its manifest first: half a removal leaves no checkpoint.
pub(crate) fn remove(folder: &Path, manifest: &str) -> io::Result<()> {
    absent_is_fine(std::fs::remove_file(folder.join(manifest)))?;
    absent_is_fine(sync(folder))?;
    absent_is_fine(std::fs::remove_dir_all(folder))
}

fn absent_is_fine(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome,
    }
}

/// Puts a folder's names on disk.
fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
