//! The disk with the coordinator's state. Writes that were not synced are lost or torn when the process is killed. The
//! disk may fail, it may be lost, and its files may be damaged.

use std::io;
use std::sync::{Arc, Mutex};

use coordinator::embedded::{LogFile, Storage};
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

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

/// The contents of the files, in the order of [`LogFile::ALL`].
type Contents = [Vec<u8>; 3];

#[derive(Debug, Default)]
struct Inner {
    /// The contents after a crash.
    durable: Contents,
    /// The contents that a process reads.
    seen: Contents,
    /// The changes since the last sync, each with its file.
    unsynced: Vec<(usize, Change)>,
    /// The contents as they were when the process was killed before the newest one.
    older: Contents,
    /// The contents before a damage, until a process has written something after it.
    undamaged: Option<Contents>,
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

    /// Kills the process that has the disk open. If its machine dies too, some of the changes that were not synced survive, in any order, and
    /// some in part.
    pub(crate) fn kill(&self, machine_dies: bool, rng: &mut ChaCha8Rng) {
        let mut inner = self.0.lock().unwrap();
        inner.process += 1;
        for (file, change) in std::mem::take(&mut inner.unsynced) {
            let content = &mut inner.durable[file];
            match change {
                change if !machine_dies => change.apply(content),
                _ if rng.random_bool(0.5) => {}
                Change::Write(offset, data) if rng.random_bool(0.5) => {
                    for (index, sector) in data.chunks(SECTOR).enumerate() {
                        if rng.random_bool(0.5) {
                            let at = offset + (index * SECTOR) as u64;
                            Change::Write(at, sector.to_vec()).apply(content);
                        }
                    }
                }
                change => change.apply(content),
            }
        }
        inner.seen = inner.durable.clone();
    }

    /// Damages a file: flips a bit, cuts it, or puts an older copy in its place. No process has the disk open.
    pub(crate) fn damage(&self, rng: &mut ChaCha8Rng) -> String {
        let mut inner = self.0.lock().unwrap();
        inner.undamaged = Some(inner.durable.clone());
        let file = *LogFile::ALL.choose(rng).unwrap();
        let older = inner.older[file as usize].clone();
        let content = &mut inner.durable[file as usize];
        let written = content.iter().rposition(|byte| *byte != 0);
        let written = written.map_or(0, |last| last + 1);
        let what = match (written, rng.random_range(0..3)) {
            (0, _) => "stays empty".to_owned(),
            (_, 0) => {
                let (at, bit) = (rng.random_range(0..written), rng.random_range(0..8));
                content[at] ^= 1 << bit;
                format!("has another bit {bit} of byte {at}")
            }
            (_, 1) => {
                let length = rng.random_range(0..written);
                content.truncate(length);
                format!("is cut to {length} bytes")
            }
            (_, _) => {
                *content = older;
                "is an older copy".to_owned()
            }
        };
        inner.older = inner.undamaged.clone().unwrap_or_default();
        inner.seen = inner.durable.clone();
        format!("{file:?} {what}")
    }

    /// Takes the newest damage back, if no process has written anything after it. Returns whether there was one.
    pub(crate) fn repair(&self) -> bool {
        let mut inner = self.0.lock().unwrap();
        let Some(undamaged) = inner.undamaged.take() else {
            return false;
        };
        (inner.durable, inner.seen) = (undamaged.clone(), undamaged);
        true
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

    fn change(&self, file: LogFile, change: Change) -> io::Result<()> {
        self.on(|inner| {
            inner.undamaged = None;
            change.apply(&mut inner.seen[file as usize]);
            inner.unsynced.push((file as usize, change));
        })
    }
}

impl Storage for Open {
    fn read(&self, file: LogFile) -> io::Result<Vec<u8>> {
        self.on(|inner| inner.seen[file as usize].clone())
    }

    fn write(&self, file: LogFile, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.change(file, Change::Write(offset, bytes.to_vec()))
    }

    fn set_len(&self, file: LogFile, length: u64) -> io::Result<()> {
        self.change(file, Change::Length(length))
    }

    fn sync(&self, file: LogFile) -> io::Result<()> {
        self.on(|inner| {
            let all = std::mem::take(&mut inner.unsynced);
            let is_of_file = |(of, _): &(usize, Change)| *of == file as usize;
            let (synced, rest): (Vec<_>, Vec<_>) = all.into_iter().partition(is_of_file);
            for (file, change) in synced {
                change.apply(&mut inner.durable[file]);
            }
            inner.unsynced = rest;
        })
    }
}
