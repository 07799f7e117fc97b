//! The journal at the beginning of the file: changes of rows that the database does not have yet. To append one takes one small write,
//! where the database writes several pages.

use std::io;
use std::sync::Arc;

use prost::Message;
use redb::StorageBackend;
use shared_proto::planted;

use super::StateError;
use super::rows::Changes;

/// The bytes before each record: its length and its checksum.
const PREFIX_BYTES: usize = 8;

/// The first bytes of a database.
const MAGIC_OF_DATABASE: &[u8; 4] = b"redb";

/// Returns whether a file has a journal of so many bytes and a database behind it. Otherwise it has neither: it is new, or a process died
/// while it created the file.
///
/// # Errors
/// If the file cannot be read, or is of another kind.
pub(super) fn is_created(storage: &dyn StorageBackend, bytes: usize) -> Result<bool, StateError> {
    let length = storage.len()?;
    let read = |offset: usize, most: usize| {
        let rest = length.saturating_sub(offset as u64);
        let mut content = vec![0; usize::try_from(rest).unwrap_or(most).min(most)];
        if !content.is_empty() {
            storage.read(offset as u64, &mut content)?;
        }
        Ok::<_, io::Error>(content)
    };
    if read(0, MAGIC_OF_DATABASE.len())? == MAGIC_OF_DATABASE {
        return Err(StateError::NoJournal);
    }
    // The database writes its magic last when it is created.
    let magic = read(bytes, MAGIC_OF_DATABASE.len())?;
    if magic == MAGIC_OF_DATABASE {
        return Ok(true);
    }
    let mut content = magic.into_iter().chain(read(0, bytes)?);
    if content.any(|byte| byte != 0) {
        let what = "it is not the state of a coordinator";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what).into());
    }
    Ok(false)
}

/// Changes of rows, as they lie in the journal.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Record {
    /// The number of the write, from 1.
    #[prost(uint64, tag = "1")]
    pub(super) sequence: u64,
    /// The rows that differ from those before.
    #[prost(message, repeated, tag = "2")]
    pub(super) rows: Vec<Row>,
    /// The names of the rows that are no longer there.
    #[prost(string, repeated, tag = "3")]
    pub(super) removed: Vec<String>,
}

/// A row with its new value.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Row {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
}

/// The journal. Each process begins it at its start, once the database has all of its records, and again when it is full.
#[derive(Debug)]
pub(super) struct Journal {
    storage: Arc<dyn StorageBackend>,
    bytes: usize,
    /// The place of the next record.
    position: usize,
    /// True once a record could not be written. None is appended then.
    has_failed: bool,
}

impl Journal {
    /// Opens the journal in the first `bytes` of a file. It is read before the database is written, and appended to after that.
    pub(super) fn open(storage: &Arc<dyn StorageBackend>, bytes: usize) -> Self {
        Self {
            storage: Arc::clone(storage),
            bytes,
            position: 0,
            has_failed: false,
        }
    }

    /// Creates the journal of a file without a database. The database is created behind it.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn create(storage: &Arc<dyn StorageBackend>, bytes: usize) -> io::Result<Self> {
        storage.set_len(bytes as u64)?;
        // Written, so that most file systems have nothing to allocate when records are written.
        storage.write(0, &vec![0; bytes])?;
        storage.sync_data()?;
        Ok(Self::open(storage, bytes))
    }

    /// Reads the records that follow the write with this number.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(super) fn read(&self, after: u64) -> io::Result<Vec<Record>> {
        let mut content = vec![0; self.bytes];
        self.storage.read(0, &mut content)?;
        let mut records = Vec::new();
        let mut rest = content.as_slice();
        // After the last record come older ones, or one that was not written whole.
        while let Some((record, length)) = first_record(rest)
            && (record.sequence == after + records.len() as u64 + 1 || planted!(OldRecords))
        {
            rest = &rest[length..];
            records.push(record);
        }
        Ok(records)
    }

    /// Appends changes durably. Returns false if there is no room for them, or an earlier record could not be written.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn append(&mut self, sequence: u64, changes: &Changes) -> io::Result<bool> {
        if self.has_failed {
            return Ok(false);
        }
        let rows = changes.rows.iter().map(|(name, value)| Row {
            name: name.clone(),
            value: value.clone(),
        });
        let record = Record {
            sequence,
            rows: rows.collect(),
            removed: changes.removed.clone(),
        };
        let length = record.encoded_len();
        let end = self.position + PREFIX_BYTES + length;
        let (true, Ok(prefix)) = (end <= self.bytes, u32::try_from(length)) else {
            return Ok(false);
        };
        let mut written = vec![0; PREFIX_BYTES];
        record.encode(&mut written).map_err(io::Error::other)?;
        let checksum = crc32c::crc32c(&written[PREFIX_BYTES..]);
        written[..4].copy_from_slice(&prefix.to_le_bytes());
        written[4..PREFIX_BYTES].copy_from_slice(&checksum.to_le_bytes());
        // It counts as failed until it is durable.
        self.has_failed = true;
        self.storage.write(self.position as u64, &written)?;
        if !planted!(JournalNotSynced) {
            self.storage.sync_data()?;
        }
        self.has_failed = false;
        self.position = end;
        Ok(true)
    }

    /// Begins again at the start: the database has all records.
    pub(super) fn restart(&mut self) {
        self.position = 0;
    }
}

/// Returns the record at the beginning, with the number of bytes that it takes; none if there is no whole one.
fn first_record(bytes: &[u8]) -> Option<(Record, usize)> {
    let (length, rest) = bytes.split_first_chunk()?;
    let (checksum, rest) = rest.split_first_chunk()?;
    let length = u32::from_le_bytes(*length) as usize;
    let encoded = rest.get(..length).filter(|_| length > 0)?;
    if crc32c::crc32c(encoded) != u32::from_le_bytes(*checksum) {
        return None;
    }
    let record = Record::decode(encoded).ok()?;
    Some((record, PREFIX_BYTES + length))
}
