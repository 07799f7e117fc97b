//! The disk with the coordinator's state. Writes that were not synced are lost or torn when the process is killed. The
//! disk may fail, and it may be lost.

use std::io;
use std::sync::{Arc, Mutex};

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use redb::StorageBackend;

/// The bytes that a disk writes at once.
const SECTOR: usize = 512;

#[derive(Clone, Debug)]
enum Change {
    Length(u64),
    Write(u64, Vec<u8>),
}

impl Change {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            Self::Length(length) => content.resize(*length as usize, 0),
            Self::Write(offset, data) => {
                let (start, end) = (*offset as usize, *offset as usize + data.len());
                if content.len() < end {
                    content.resize(end, 0);
                }
                content[start..end].copy_from_slice(data);
            }
        }
    }
}

#[derive(Debug, Default)]
struct Inner {
    /// The content after a crash.
    durable: Vec<u8>,
    /// The content that a process reads.
    seen: Vec<u8>,
    /// The changes since the last sync.
    unsynced: Vec<Change>,
    /// The number of the process that has the disk open: earlier ones are dead.
    process: u64,
    fails: bool,
    /// True if a request of that process has failed.
    has_failed: bool,
}

/// The disk, for all processes that open it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disk(Arc<Mutex<Inner>>);

impl Disk {
    /// Opens it for a new process.
    pub(crate) fn open(&self) -> Open {
        let mut inner = self.0.lock().unwrap();
        inner.process += 1;
        inner.has_failed = false;
        Open {
            disk: self.clone(),
            process: inner.process,
        }
    }

    /// Kills the process that has the disk open, in two of three cases with its machine. Some of the changes that were
    /// not synced then survive, in any order, and some in part.
    pub(crate) fn kill(&self, rng: &mut ChaCha8Rng) {
        let mut inner = self.0.lock().unwrap();
        inner.process += 1;
        let process_only = rng.random_range(0..3) == 0;
        for change in std::mem::take(&mut inner.unsynced) {
            match change {
                change if process_only => change.apply(&mut inner.durable),
                _ if rng.random_bool(0.5) => {}
                Change::Write(offset, data) if rng.random_bool(0.5) => {
                    for (index, sector) in data.chunks(SECTOR).enumerate() {
                        if rng.random_bool(0.5) {
                            let at = offset + (index * SECTOR) as u64;
                            Change::Write(at, sector.to_vec()).apply(&mut inner.durable);
                        }
                    }
                }
                change => change.apply(&mut inner.durable),
            }
        }
        inner.seen = inner.durable.clone();
    }

    /// Sets whether the disk fails from now on.
    pub(crate) fn set_failing(&self, fails: bool) {
        self.0.lock().unwrap().fails = fails;
    }

    /// Returns whether a request of the process that has the disk open has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.0.lock().unwrap().has_failed
    }

    /// Deletes all content.
    pub(crate) fn lose(&self) {
        let mut inner = self.0.lock().unwrap();
        *inner = Inner {
            process: inner.process + 1,
            ..Inner::default()
        };
    }
}

/// The disk, opened by one process.
#[derive(Debug)]
pub(crate) struct Open {
    disk: Disk,
    process: u64,
}

impl Open {
    fn on<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> io::Result<T> {
        let mut inner = self.disk.0.lock().unwrap();
        if inner.process != self.process {
            // A killed process writes nothing more, but its destructors run in the simulation.
            return Err(io::Error::other("the process was killed"));
        }
        if inner.fails {
            inner.has_failed = true;
            return Err(io::Error::other("the disk fails"));
        }
        Ok(work(&mut inner))
    }

    fn change(&self, change: Change) -> io::Result<()> {
        self.on(|inner| {
            change.apply(&mut inner.seen);
            inner.unsynced.push(change);
        })
    }
}

impl StorageBackend for Open {
    fn len(&self) -> io::Result<u64> {
        self.on(|inner| inner.seen.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.on(|inner| {
            let start = offset as usize;
            out.copy_from_slice(&inner.seen[start..start + out.len()]);
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(Change::Length(len))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.on(|inner| {
            for change in std::mem::take(&mut inner.unsynced) {
                change.apply(&mut inner.durable);
            }
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(Change::Write(offset, data.to_vec()))
    }
}
