//! The files of a log, and the interface through which they are read and written. Simulations implement this interface
//! with disks that tear and lose writes.

use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

/// A file of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFile {
    /// The number of the newest confirmed change.
    Confirmed,
    /// The changes of even generations.
    Even,
    /// The changes of odd generations.
    Odd,
}

impl LogFile {
    /// All files.
    pub const ALL: [Self; 3] = [Self::Confirmed, Self::Even, Self::Odd];

    /// Returns the file with the changes of a generation.
    pub(super) fn of_generation(generation: u64) -> Self {
        if generation.is_multiple_of(2) {
            Self::Even
        } else {
            Self::Odd
        }
    }

    /// Returns the path of this file of the log at `log`: `log` itself for [`Self::Confirmed`], otherwise `log` with
    /// `.0` or `.1` appended.
    pub fn path(self, log: &Path) -> PathBuf {
        let ending = match self {
            Self::Confirmed => return log.to_owned(),
            Self::Even => ".0",
            Self::Odd => ".1",
        };
        let mut path = log.as_os_str().to_owned();
        path.push(ending);
        PathBuf::from(path)
    }
}

/// The files of a log. A file that is missing reads as an empty one, and writing creates it.
pub trait Storage: fmt::Debug + Send + Sync + 'static {
    /// Returns the content of a file.
    ///
    /// # Errors
    /// If the file cannot be read.
    fn read(&self, file: LogFile) -> io::Result<Vec<u8>>;

    /// Writes bytes at an offset. Until [`Self::sync`] returns, later writes may reach the disk before these bytes, and
    /// a loss of power may lose the bytes.
    ///
    /// # Errors
    /// If the file cannot be written. It may have some of the bytes then.
    fn write(&self, file: LogFile, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Sets the length of a file in bytes: cuts the file, or extends it with zeros.
    ///
    /// # Errors
    /// If the file cannot be changed.
    fn set_len(&self, file: LogFile, length: u64) -> io::Result<()>;

    /// Waits until everything that was written to a file is on the disk.
    ///
    /// # Errors
    /// If that fails.
    fn sync(&self, file: LogFile) -> io::Result<()>;
}

/// Files in a folder. One process has them open at a time.
#[derive(Debug)]
pub(super) struct Files {
    log: PathBuf,
    /// Open files, in the order of [`LogFile::ALL`].
    open: [Mutex<Option<File>>; 3],
}

impl Files {
    /// Opens the files of the log at a path, and locks them for this process.
    ///
    /// # Errors
    /// `WouldBlock` if another process has the files open, otherwise the error of the file system.
    pub(super) fn open(log: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        Self::locked(log, options.open(log)?)
    }

    /// Opens the files if there are any. Creates none.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(super) fn find(log: &Path) -> io::Result<Option<Self>> {
        match OpenOptions::new().read(true).write(true).open(log) {
            Ok(file) => Self::locked(log, file).map(Some),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Err(_) => {
                let is_there = LogFile::ALL.iter().any(|file| file.path(log).exists());
                let files = is_there.then(|| Self {
                    log: log.to_owned(),
                    open: [const { Mutex::new(None) }; 3],
                });
                Ok(files)
            }
        }
    }

    fn locked(log: &Path, file: File) -> io::Result<Self> {
        // Some file systems have no locks.
        if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Self {
            log: log.to_owned(),
            open: [Some(file), None, None].map(Mutex::new),
        })
    }

    fn with<T>(
        &self,
        file: LogFile,
        use_file: impl FnOnce(&File) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut open = self.open[file as usize].lock();
        if let Some(open) = &*open {
            return use_file(open);
        }
        let path = file.path(&self.log);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let created = !path.exists();
        let opened = options.open(&path)?;
        if created && let Some(folder) = path.parent() {
            // The name is on the disk before the content is.
            File::open(folder).and_then(|folder| folder.sync_all())?;
        }
        use_file(open.insert(opened))
    }
}

impl Drop for Files {
    /// Unlocks the files. Closing them is not enough: a child process that is being started has inherited the open
    /// files, and holds the lock until its `exec`.
    fn drop(&mut self) {
        if let Some(file) = self.open[LogFile::Confirmed as usize].get_mut() {
            // An error leaves the lock until the last copy is closed.
            let _ = file.unlock();
        }
    }
}

impl Storage for Files {
    fn read(&self, file: LogFile) -> io::Result<Vec<u8>> {
        match std::fs::read(file.path(&self.log)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            read => read,
        }
    }

    fn write(&self, file: LogFile, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.with(file, |file| file.write_all_at(bytes, offset))
    }

    fn set_len(&self, file: LogFile, length: u64) -> io::Result<()> {
        self.with(file, |file| file.set_len(length))
    }

    fn sync(&self, file: LogFile) -> io::Result<()> {
        self.with(file, File::sync_data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_unlocked_though_a_child_process_has_copies_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let files = Files::open(&log).unwrap();
        let copy = files.with(LogFile::Confirmed, File::try_clone).unwrap();
        assert!(Files::open(&log).is_err());
        drop(files);
        Files::open(&log).unwrap();
        drop(copy);
    }
}
