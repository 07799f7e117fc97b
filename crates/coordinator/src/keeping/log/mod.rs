//! Rows on disk: a log of their changes, with snapshots. Each byte that is read is covered by a checksum.
//!
//! Two files take turns. One has a snapshot of all rows, followed by a record for each change. When it is full, the
//! other file gets the next snapshot. The space of both files is reserved in advance, so a full disk does not stop
//! changes.
//!
//! A torn record at the end was never confirmed. Damage looks different: other records follow the damaged one, or the
//! third file, `Confirmed`, has a higher number than the last whole record. `Confirmed` is written after each change,
//! without waiting for the disk, so it is out of date only if the machine loses power.
//!
//! - `format`: the binary format
//! - `error`: why a log is refused
//! - `storage`: the files

mod error;
mod format;
mod storage;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use shared_proto::planted;

pub use error::StateError;
use format::{
    Confirmed, Content, Record, Row, Whole, decode_confirmed, decode_file, encode_confirmed,
    encode_file, encode_record,
};
use storage::Files;
pub use storage::{LogFile, Storage};

/// The values of rows, by name.
pub(crate) type Rows = BTreeMap<String, Vec<u8>>;

/// Changes of rows.
#[derive(Debug, Default)]
pub(crate) struct RowChanges {
    /// The rows that are new or differ, with their new values.
    pub(crate) set: Vec<(String, Vec<u8>)>,
    /// The names of the rows that are no longer there.
    pub(crate) removed: Vec<String>,
}

impl RowChanges {
    fn is_empty(&self) -> bool {
        self.set.is_empty() && self.removed.is_empty()
    }

    fn apply_to(self, rows: &mut Rows) {
        for name in &self.removed {
            rows.remove(name);
        }
        rows.extend(self.set);
    }
}

/// Rows that outlive the process.
pub(crate) trait RowStore: Send {
    /// Returns the rows as they were persisted last.
    fn rows(&self) -> &Rows;

    /// Persists changes. Once this returns, they survive a crash of the process and the machine.
    ///
    /// # Errors
    /// If the changes cannot be written. Then the rows stay as they were.
    fn write(&mut self, changes: RowChanges) -> Result<(), StateError>;

    /// Returns the number of changes that were persisted since the store was created. It never falls.
    fn changes(&self) -> u64;

    /// Releases the disk space that is reserved for later changes.
    fn release(&mut self);
}

/// A log, opened by this process.
#[derive(Debug)]
pub(crate) struct Log {
    storage: Box<dyn Storage>,
    /// The least space to reserve for each file of changes, in bytes.
    room: usize,
    rows: Rows,
    /// The generation of the newest snapshot. It is 0 if there is none.
    generation: u64,
    /// The number of the newest change.
    number: u64,
    /// The byte offset after the record of the newest change.
    end: usize,
    /// The lengths of the files, in the order of [`LogFile::ALL`].
    lengths: [usize; 3],
    /// True if a record may be appended: this process has written the snapshot, and no append has failed.
    is_appendable: bool,
}

impl Log {
    /// Opens or creates the log at a path, and reads it.
    ///
    /// # Errors
    /// See [`StateError`]. Nothing is changed then.
    pub(crate) fn open(path: &Path, room: usize) -> Result<Self, StateError> {
        refuse_earlier(path)?;
        let files = Files::open(path).map_err(opened_elsewhere)?;
        let log = Self::over(Box::new(files), path, room)?;
        log.check_beginning(path)?;
        Ok(log)
    }

    /// Refuses files that have lost all their content.
    fn check_beginning(&self, path: &Path) -> Result<(), StateError> {
        // The file of the second generation is made after the first change is confirmed.
        let file = LogFile::Even.path(path);
        match self.generation == 0 && file.exists() {
            true => Err(StateError::Damaged {
                file,
                what: "changes were confirmed, and none is left in any of the files".to_owned(),
            }),
            false => Ok(()),
        }
    }

    /// Reads the rows of the log at a path, and changes nothing. Returns `None` if there is no log.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(crate) fn find(path: &Path) -> Result<Option<Rows>, StateError> {
        refuse_earlier(path)?;
        let Some(files) = Files::find(path).map_err(opened_elsewhere)? else {
            return Ok(None);
        };
        let log = Self::over(Box::new(files), path, 0)?;
        log.check_beginning(path)?;
        Ok(Some(log.rows))
    }

    /// Opens the log in `storage`. Error messages name `path`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(crate) fn over(
        storage: Box<dyn Storage>,
        path: &Path,
        room: usize,
    ) -> Result<Self, StateError> {
        let confirmed = storage.read(LogFile::Confirmed)?;
        let (even, odd) = (storage.read(LogFile::Even)?, storage.read(LogFile::Odd)?);
        let lengths = [confirmed.len(), even.len(), odd.len()];
        let files = [(LogFile::Even, &even), (LogFile::Odd, &odd)];
        let contents = files.map(|(file, bytes)| (file, decode_file(bytes)));
        let newest = newest(path, decode_confirmed(&confirmed), contents)?;
        let mut log = Self {
            storage,
            room,
            rows: Rows::new(),
            generation: 0,
            number: 0,
            end: 0,
            lengths,
            is_appendable: false,
        };
        if let Some(newest) = newest {
            log.rows = newest.rows;
            log.generation = newest.generation;
            log.number = newest.number;
            log.end = newest.end;
        }
        Ok(log)
    }

    /// Appends a record of the changes to the file of the newest snapshot. Returns false if this file takes no records,
    /// if the record does not fit, or if it cannot be written.
    fn append(&mut self, changes: &RowChanges) -> bool {
        if !self.is_appendable {
            return false;
        }
        let rows = changes.set.iter().map(|(name, value)| Row {
            name: name.clone(),
            value: value.clone(),
        });
        let record = Record {
            rows: rows.collect(),
            removed: changes.removed.clone(),
        };
        let file = LogFile::of_generation(self.generation);
        let bytes = encode_record(self.generation, self.number + 1, &record);
        if self.end + bytes.len() > self.lengths[file as usize] {
            return false;
        }
        // The record of a write that fails may be whole on the disk. Its number is that of no other change.
        self.number += 1;
        if let Err(error) = self.write_and_sync(file, self.end, &bytes) {
            tracing::warn!(
                "a change cannot be appended to the log: {error}; a snapshot is written in its place"
            );
            self.is_appendable = false;
            return false;
        }
        self.end += bytes.len();
        self.confirm();
        true
    }

    fn write_and_sync(&self, file: LogFile, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.storage.write(file, offset as u64, bytes)?;
        match planted!(LogNotSynced) {
            true => Ok(()),
            false => self.storage.sync(file),
        }
    }

    /// Begins the next generation with a snapshot.
    fn write_snapshot(&mut self, rows: &Rows) -> io::Result<()> {
        let (generation, number) = (self.generation + 1, self.number + 1);
        if self.generation > 0 && !self.is_appendable {
            // The number may be damaged. While this snapshot is not whole, only the number shows that the older one is the newest.
            self.confirm();
            self.storage.sync(LogFile::Confirmed)?;
        }
        // Until this one is written: if it fails, it may be whole on the disk and count for the next process.
        self.is_appendable = false;
        let file = LogFile::of_generation(generation);
        let bytes = encode_file(generation, number, rows);
        let room = self.room.max((2 * bytes.len()).next_power_of_two());
        let reserved = self.reserve(file, room, bytes.len());
        if let Err(error) = reserved
            && self.lengths[file as usize] < bytes.len()
        {
            return Err(error);
        }
        self.write_and_sync(file, 0, &bytes)?;
        (self.generation, self.number, self.end) = (generation, number, bytes.len());
        self.is_appendable = true;
        self.confirm();
        // Without this number the older snapshot would pass for the newest one if the newer were damaged.
        if let Err(error) = self.storage.sync(LogFile::Confirmed) {
            tracing::warn!("the number of the newest change is not on the disk: {error}");
        }
        // The next snapshot has its room even if the disk is full then.
        let next = LogFile::of_generation(generation + 1);
        if let Err(error) = self.reserve(next, room, bytes.len()) {
            tracing::warn!(
                "no room can be reserved for the coordinator's state: {error}. Make room on that disk"
            );
        }
        Ok(())
    }

    /// Extends a file with zeros to a length in bytes. If the disk has too little space, tries half the length again
    /// and again, but not less than `least`. The zeros are written, because a sparse file reserves no space.
    ///
    /// # Errors
    /// The error of the last attempt.
    fn reserve(&mut self, file: LogFile, length: usize, least: usize) -> io::Result<()> {
        let known = self.lengths[file as usize];
        if known >= length {
            return Ok(());
        }
        let zeros = vec![0; length - known];
        let written = self.storage.write(file, known as u64, &zeros);
        match written.and_then(|()| self.storage.sync(file)) {
            Ok(()) => {
                self.lengths[file as usize] = length;
                Ok(())
            }
            Err(error) => {
                let _ = self.storage.set_len(file, known as u64);
                match length / 2 >= least {
                    true => self.reserve(file, length / 2, least),
                    false => Err(error),
                }
            }
        }
    }

    /// Writes the number of the newest change, without waiting for the disk.
    fn confirm(&self) {
        let bytes = encode_confirmed(self.number);
        if let Err(error) = self.storage.write(LogFile::Confirmed, 0, &bytes) {
            tracing::warn!("the number of the newest change cannot be written: {error}");
        }
    }
}

impl RowStore for Log {
    fn rows(&self) -> &Rows {
        &self.rows
    }

    fn write(&mut self, changes: RowChanges) -> Result<(), StateError> {
        if changes.is_empty() {
            return Ok(());
        }
        if self.append(&changes) {
            changes.apply_to(&mut self.rows);
            return Ok(());
        }
        let mut rows = self.rows.clone();
        changes.apply_to(&mut rows);
        self.write_snapshot(&rows)?;
        self.rows = rows;
        Ok(())
    }

    fn changes(&self) -> u64 {
        self.number
    }

    fn release(&mut self) {
        self.room = 0;
        if self.generation == 0 {
            return;
        }
        let file = LogFile::of_generation(self.generation);
        let next = LogFile::of_generation(self.generation + 1);
        // The older snapshot is not needed, because this one is on the disk.
        for (file, length) in [(file, self.end), (next, 0)] {
            if self.storage.set_len(file, length as u64).is_ok() {
                self.lengths[file as usize] = length;
            }
        }
    }
}

/// Returns the newest state of the two files. `None` if no change was ever confirmed.
fn newest(
    path: &Path,
    confirmed: Confirmed,
    contents: [(LogFile, Content); 2],
) -> Result<Option<Whole>, StateError> {
    let damaged = |file: LogFile, what: String| StateError::Damaged {
        file: file.path(path),
        what,
    };
    let mut wholes = Vec::new();
    let (mut unreadable, mut other_form) = (None, None);
    for (file, content) in contents {
        match content {
            Content::Whole(whole) => wholes.push((file, whole)),
            Content::OtherForm(form) => other_form = Some(form),
            Content::Foreign if confirmed == Confirmed::Nothing => {
                let file = file.path(path);
                return Err(StateError::Foreign { file });
            }
            Content::Foreign | Content::Unreadable => unreadable = Some(file),
            Content::Nothing => {}
        }
    }
    let newest = wholes.into_iter().max_by_key(|(_, whole)| whole.generation);
    let Some((file, newest)) = newest else {
        if let Some(form) = other_form {
            return Err(StateError::OtherRelease(form));
        }
        return match (confirmed, unreadable) {
            // The first snapshot was not written whole.
            (Confirmed::Nothing, _) => Ok(None),
            (_, Some(file)) => Err(damaged(file, "its beginning cannot be read".to_owned())),
            (Confirmed::Unreadable, None) => Err(StateError::Foreign {
                file: path.to_owned(),
            }),
            (Confirmed::Number(number), None) => Err(damaged(
                LogFile::Odd,
                format!("it is missing or empty, but {number} changes were confirmed"),
            )),
        };
    };
    if let Some(later) = newest.beyond_damage {
        let what = format!(
            "change {} at byte {} cannot be read, and change {later} follows",
            newest.number + 1,
            newest.end
        );
        return Err(damaged(file, what));
    }
    let trusts_the_end = planted!(DamageTakenForTheEnd);
    match confirmed {
        Confirmed::Number(number) if number > newest.number && !trusts_the_end => {
            let what = format!(
                "its newest whole change is {}, but change {number} was confirmed. It is an older copy, or the rest is damaged or lost",
                newest.number
            );
            Err(damaged(unreadable.unwrap_or(file), what))
        }
        Confirmed::Number(_) => Ok(Some(newest)),
        Confirmed::Nothing | Confirmed::Unreadable => match unreadable {
            Some(file) => Err(damaged(file, "its beginning cannot be read".to_owned())),
            None => {
                let path = path.display();
                tracing::warn!(
                    "{path} is damaged or missing; the changes are whole, so it is written again"
                );
                Ok(Some(newest))
            }
        },
    }
}

fn opened_elsewhere(error: io::Error) -> StateError {
    match error.kind() {
        io::ErrorKind::WouldBlock => StateError::OpenElsewhere,
        _ => StateError::Io(error),
    }
}

/// Refuses the database that an earlier release had in place of a log.
fn refuse_earlier(path: &Path) -> Result<(), StateError> {
    let file = path.with_extension("redb");
    match file.exists() && !path.exists() {
        true => Err(StateError::EarlierRelease { file }),
        false => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests;
