//! The binary format of a log.
//!
//! A file of changes begins with a header, which has the file's generation. The first record has all rows, and each
//! later record has one change. The checksum of a record covers its length, its content, its number and the generation
//! of the file, so a record that an older generation has left in the file does not pass for one of a newer generation.
//! The file `Confirmed` has one number and its checksum.

use prost::Message;
use shared_proto::planted;

use super::Rows;

/// The version of the format that this release writes. It is raised when a release cannot read the logs of earlier
/// ones.
pub(super) const FORM: u32 = 5;

/// The first bytes of each file.
const MAGIC: [u8; 8] = *b"flambeau";

/// The length of a file's header in bytes: the magic, the format version, the generation, and their checksum.
const HEADER_BYTES: usize = 24;

/// The number of bytes before a record's content: its length, its checksum and its number.
const PREFIX_BYTES: usize = 16;

/// Changes of rows. The first record of a file has all rows.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Record {
    /// The rows that are new or have changed.
    #[prost(message, repeated, tag = "1")]
    pub(super) rows: Vec<Row>,
    /// The names of the rows that are no longer there.
    #[prost(string, repeated, tag = "2")]
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

/// The content of a file of changes.
#[derive(Debug)]
pub(super) enum Content {
    /// Nothing: the file is missing, or is only reserved space.
    Nothing,
    /// No state: the creation of the file was cut short, or its beginning is damaged.
    Unreadable,
    /// The file was not written by Flambeau.
    Foreign,
    /// The file has this format version, of another release.
    OtherForm(u32),
    /// A state.
    Whole(Whole),
}

/// The state in a file.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) generation: u64,
    pub(super) rows: Rows,
    /// The number of the newest change.
    pub(super) number: u64,
    /// The byte offset after the record of the newest change.
    pub(super) end: usize,
    /// The number of a later record that follows although the next record, at `end`, is missing or damaged.
    pub(super) beyond_damage: Option<u64>,
}

/// Returns the bytes of a new file: its header, and a record with all rows.
pub(super) fn encode_file(generation: u64, number: u64, rows: &Rows) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(FORM.to_le_bytes());
    bytes.extend(generation.to_le_bytes());
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    let rows = rows.iter().map(|(name, value)| Row {
        name: name.clone(),
        value: value.clone(),
    });
    let record = Record {
        rows: rows.collect(),
        removed: Vec::new(),
    };
    bytes.extend(encode_record(generation, number, &record));
    bytes
}

/// Returns the bytes of a record.
pub(super) fn encode_record(generation: u64, number: u64, record: &Record) -> Vec<u8> {
    let content = record.encode_to_vec();
    let length = (content.len() as u32).to_le_bytes();
    let mut bytes = length.to_vec();
    bytes.extend(checksum(generation, number, length, &content).to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend(content);
    bytes
}

fn checksum(generation: u64, number: u64, length: [u8; 4], content: &[u8]) -> u32 {
    let checksum = crc32c::crc32c(&generation.to_le_bytes());
    let checksum = crc32c::crc32c_append(checksum, &number.to_le_bytes());
    let checksum = crc32c::crc32c_append(checksum, &length);
    crc32c::crc32c_append(checksum, content)
}

/// Reads a file of changes.
pub(super) fn decode_file(bytes: &[u8]) -> Content {
    let bytes = without_room(bytes);
    if bytes.is_empty() {
        return Content::Nothing;
    }
    let begins_as_one = bytes.starts_with(&MAGIC) || bytes.starts_with(&[0; MAGIC.len()]);
    let Some(generation) = decode_header(bytes) else {
        return if begins_as_one {
            Content::Unreadable
        } else {
            Content::Foreign
        };
    };
    let generation = match generation {
        Ok(generation) => generation,
        Err(form) => return Content::OtherForm(form),
    };
    let Some((mut number, first, mut end)) = record_at(bytes, HEADER_BYTES, generation) else {
        return Content::Unreadable;
    };
    let mut rows = Rows::new();
    apply(first, &mut rows);
    while let Some((next, record, behind)) = record_at(bytes, end, generation)
        && next == number + 1
    {
        apply(record, &mut rows);
        (number, end) = (next, behind);
    }
    // What a write that was cut short has left is not followed by records, because none is appended to it.
    let is_later = |place| match record_at(bytes, place, generation) {
        Some((later, ..)) if later > number => Some(later),
        _ => None,
    };
    let beyond_damage = match planted!(DamageTakenForTheEnd) {
        true => None,
        false => (end..bytes.len().saturating_sub(PREFIX_BYTES)).find_map(is_later),
    };
    Content::Whole(Whole {
        generation,
        rows,
        number,
        end,
        beyond_damage,
    })
}

/// Returns the bytes up to the last block that is not all zeros.
fn without_room(bytes: &[u8]) -> &[u8] {
    const BLOCK: usize = 4096;
    let zeros = [0; BLOCK];
    let blocks = bytes.chunks(BLOCK);
    let empty = blocks
        .rev()
        .take_while(|block| **block == zeros[..block.len()]);
    let empty: usize = empty.map(<[u8]>::len).sum();
    &bytes[..bytes.len() - empty]
}

/// Returns the generation of a file, or as an error the format version of another release. `None` if there is no whole
/// header.
fn decode_header(bytes: &[u8]) -> Option<Result<u64, u32>> {
    let (header, _) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let (covered, checksum) = header.split_last_chunk::<4>()?;
    let (magic, rest) = covered.split_first_chunk::<8>()?;
    let (form, generation) = rest.split_first_chunk::<4>()?;
    let generation = generation.first_chunk::<8>()?;
    if *magic != MAGIC || crc32c::crc32c(covered) != u32::from_le_bytes(*checksum) {
        return None;
    }
    let form = u32::from_le_bytes(*form);
    Some(match form == FORM {
        true => Ok(u64::from_le_bytes(*generation)),
        false => Err(form),
    })
}

/// Returns the number of the record at a byte offset, the record, and the offset after it. `None` if there is no whole
/// record.
fn record_at(bytes: &[u8], place: usize, generation: u64) -> Option<(u64, Record, usize)> {
    let (length, rest) = bytes.get(place..)?.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    let (number, rest) = rest.split_first_chunk::<8>()?;
    let content = rest.get(..u32::from_le_bytes(*length) as usize)?;
    let number = u64::from_le_bytes(*number);
    // Zeros are no record.
    if number == 0 || checksum(generation, number, *length, content) != u32::from_le_bytes(*sum) {
        return None;
    }
    let record = Record::decode(content).ok()?;
    Some((number, record, place + PREFIX_BYTES + content.len()))
}

fn apply(record: Record, rows: &mut Rows) {
    for name in record.removed {
        rows.remove(&name);
    }
    rows.extend(record.rows.into_iter().map(|row| (row.name, row.value)));
}

/// Returns the bytes of the file `Confirmed`.
pub(super) fn encode_confirmed(number: u64) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(number.to_le_bytes());
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

/// The content of the file `Confirmed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Confirmed {
    /// The file is missing or empty.
    Nothing,
    Unreadable,
    /// The number of the newest confirmed change, or an earlier one if the machine lost power.
    Number(u64),
}

/// Reads the file `Confirmed`.
pub(super) fn decode_confirmed(bytes: &[u8]) -> Confirmed {
    if bytes.is_empty() {
        return Confirmed::Nothing;
    }
    let number = bytes.get(MAGIC.len()..).and_then(|rest| rest.first_chunk());
    match number.map(|number| u64::from_le_bytes(*number)) {
        Some(number) if *bytes == encode_confirmed(number) => Confirmed::Number(number),
        _ => Confirmed::Unreadable,
    }
}
