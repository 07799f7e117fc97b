//! Rows on disk, which do not fit into a server's memory.
//!
//! A row on disk has a record in its table's file. The index stays in memory: finding a row on disk takes one read, and
//! finding that an id has no row takes none, except if another id happens to have the same key. A file has no name, and
//! the system deletes it when the process ends. Only checkpoints are durable.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::chunks::Place;

/// The number of records that are read together when many rows are read.
const WINDOW: u32 = 512;

/// The most bytes by which reads may exceed the limit. The next update frees them.
const READ_SLACK: usize = 1 << 20;

/// The time for which no rows are written after a failure.
const PAUSE: Duration = Duration::from_secs(5);

/// The memory that a server has for rows, and the folder for rows beyond it.
#[derive(Debug)]
pub struct Disk {
    folder: PathBuf,
    limit: usize,
    used: AtomicUsize,
    buckets: AtomicUsize,
    /// The moment until which no rows are written.
    paused: Mutex<Option<Instant>>,
}

/// The work after which rows go to disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    Read,
    Update,
}

impl Disk {
    /// Returns a limit in bytes on the memory of rows and their index. Rows beyond the limit go to files in `folder`.
    ///
    /// # Errors
    /// If no file can be created in `folder`.
    pub fn new(folder: &Path, limit: usize) -> io::Result<Self> {
        tempfile::tempfile_in(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
            limit,
            used: AtomicUsize::new(0),
            buckets: AtomicUsize::new(0),
            paused: Mutex::default(),
        })
    }

    /// Returns a file for rows of `words` words each.
    pub(crate) fn file(self: &Arc<Self>, words: usize) -> Arc<RowFile> {
        Arc::new(RowFile {
            disk: Arc::clone(self),
            words,
            file: OnceLock::new(),
            records: Mutex::default(),
        })
    }

    fn paused(&self) -> MutexGuard<'_, Option<Instant>> {
        self.paused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file with rows of a table.
#[derive(Debug)]
pub struct RowFile {
    disk: Arc<Disk>,
    /// The number of words of a row.
    words: usize,
    /// The file, which is created when the first row is written.
    file: OnceLock<File>,
    records: Mutex<Records>,
}

#[derive(Debug, Default)]
struct Records {
    free: Vec<u32>,
    /// The number of records in the file.
    count: u32,
}

impl RowFile {
    /// Writes the rows that are back to back in `rows`. Returns the record of each row.
    ///
    /// # Errors
    /// If the file cannot be written, or has no record left. Then no row counts as written.
    pub(crate) fn write(&self, rows: &[u32]) -> io::Result<Vec<u32>> {
        let records = self.take_records(rows.len() / self.words)?;
        let written = self.write_to(&records, rows);
        if let Err(error) = written {
            self.release(&records);
            *self.disk.paused() = Some(Instant::now() + PAUSE);
            return Err(error);
        }
        Ok(records)
    }

    fn write_to(&self, records: &[u32], mut rows: &[u32]) -> io::Result<()> {
        let file = self.open()?;
        for run in records.chunk_by(|a, b| a + 1 == *b) {
            let of_run;
            (of_run, rows) = rows.split_at(run.len() * self.words);
            file.write_all_at(bytemuck::cast_slice(of_run), self.offset(run[0]))?;
        }
        Ok(())
    }

    /// Reads the row in a record.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn read(&self, record: u32, row: &mut [u32]) -> io::Result<()> {
        let bytes = bytemuck::cast_slice_mut(row);
        self.open()?.read_exact_at(bytes, self.offset(record))
    }

    /// Reads the rows in `records`, which must be in ascending order. Calls `each` with each row, in the order of the
    /// records.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn read_many(
        &self,
        records: &[u32],
        mut each: impl FnMut(&[u32]),
    ) -> io::Result<()> {
        let mut rows = Vec::new();
        for records in records.chunk_by(|a, b| a / WINDOW == b / WINDOW) {
            let (first, last) = (records[0], records[records.len() - 1]);
            rows.resize((last - first + 1) as usize * self.words, 0);
            self.read(first, &mut rows)?;
            for record in records {
                each(&rows[(record - first) as usize * self.words..][..self.words]);
            }
        }
        Ok(())
    }

    /// Makes records free for other rows.
    pub(crate) fn release(&self, records: &[u32]) {
        self.records().free.extend(records);
    }

    /// Takes `count` unused records. Returns them in ascending order.
    fn take_records(&self, count: usize) -> io::Result<Vec<u32>> {
        let mut records = self.records();
        let kept = records.free.len().saturating_sub(count);
        let mut taken = records.free.split_off(kept);
        let more = (count - taken.len()) as u32;
        if more > Place::RECORDS - records.count {
            records.free.append(&mut taken);
            return Err(io::Error::other("a file has as many rows as it can have"));
        }
        taken.sort_unstable();
        taken.extend(records.count..records.count + more);
        records.count += more;
        Ok(taken)
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> io::Result<&File> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        let new = tempfile::tempfile_in(&self.disk.folder)?;
        Ok(self.file.get_or_init(|| new))
    }

    fn offset(&self, record: u32) -> u64 {
        u64::from(record) * (self.words * size_of::<u32>()) as u64
    }
}

/// The part of a server's memory for rows that a bucket takes.
#[derive(Debug)]
pub(crate) struct MemoryUse {
    disk: Arc<Disk>,
    bytes: usize,
}

impl MemoryUse {
    pub(crate) fn new(file: &RowFile) -> Self {
        let disk = Arc::clone(&file.disk);
        disk.buckets.fetch_add(1, Ordering::Relaxed);
        Self { disk, bytes: 0 }
    }

    /// Sets the number of bytes that the bucket takes now.
    pub(crate) fn set(&mut self, bytes: usize) {
        let used = &self.disk.used;
        match bytes.checked_sub(self.bytes) {
            Some(more) => used.fetch_add(more, Ordering::Relaxed),
            None => used.fetch_sub(self.bytes - bytes, Ordering::Relaxed),
        };
        self.bytes = bytes;
    }

    /// Returns the number of bytes that the bucket must free so that the server keeps its limit; 0 during the pause
    /// after a failed write. Only buckets of at least the mean size free some: the rows of a small table stay in memory
    /// beside those of a large one.
    pub(crate) fn surplus(&self, after: After) -> usize {
        let used = self.disk.used.load(Ordering::Relaxed);
        let buckets = self.disk.buckets.load(Ordering::Relaxed);
        let surplus = used.saturating_sub(self.disk.limit);
        let slack = match after {
            After::Read => READ_SLACK.min(self.disk.limit / 16),
            After::Update => 0,
        };
        let is_large = self.bytes >= used / buckets.max(1);
        if surplus <= slack || !is_large {
            return 0;
        }
        let is_paused = self
            .disk
            .paused()
            .is_some_and(|until| Instant::now() < until);
        if is_paused { 0 } else { surplus }
    }
}

impl Drop for MemoryUse {
    fn drop(&mut self) {
        self.set(0);
        self.disk.buckets.fetch_sub(1, Ordering::Relaxed);
    }
}
