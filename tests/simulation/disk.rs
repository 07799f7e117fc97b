//! The disk with the coordinator's state: what was not synced is lost or torn when the process is killed; it
//! may fail, and it may be lost.

use std::io;
use std::sync::{Arc, Mutex};

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use redb::StorageBackend;

/// What a disk writes in one go.
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
    /// What is there after a crash.
    durable: Vec<u8>,
    /// What a process reads.
    seen: Vec<u8>,
    /// What has changed since it was synced.
    unsynced: Vec<Change>,
    /// Of the process that has it open: earlier ones are dead.
    process: u64,
    fails: bool,
    /// It has failed that process.
    has_failed: bool,
}

/// The disk, whoever has it open.
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

    /// The process that has it open is killed, in two of three cases with its machine. Of what was not synced
    /// some is there then, in any order, and some in part.
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

    /// It fails from now on, or does not any more.
    pub(crate) fn set_failing(&self, fails: bool) {
        self.0.lock().unwrap().fails = fails;
    }

    /// Whether it has failed the process that has it open.
    pub(crate) fn has_failed(&self) -> bool {
        self.0.lock().unwrap().has_failed
    }

    /// All that was kept is gone.
    pub(crate) fn lose(&self) {
        let mut inner = self.0.lock().unwrap();
        *inner = Inner {
            process: inner.process + 1,
            ..Inner::default()
        };
    }
}

/// The disk as one process has it.
#[derive(Debug)]
pub(crate) struct Open {
    disk: Disk,
    process: u64,
}

impl Open {
    fn on<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> io::Result<T> {
        let mut inner = self.disk.0.lock().unwrap();
        if inner.process != self.process {
            // What a killed process does not do any more, its destructors do.
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
