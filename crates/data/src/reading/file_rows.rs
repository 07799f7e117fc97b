//! The rows of a CSV file, read piece by piece.

use memchr::memchr_iter;

use super::lines::BYTE_ORDER_MARK;
use super::rows::{End, Row, next_row};
use crate::error::InputError;
use crate::files::DataFile;
use crate::place::Place;

/// The least number of bytes that are read at once.
const PIECE: u64 = 1 << 20;

/// The most bytes that a row can have.
const LONGEST_ROW: usize = 1 << 28;

/// The rows of a file, from its beginning.
pub(crate) struct FileRows<'a> {
    file: &'a DataFile,
    delimiter: u8,
    /// A piece of the file, which begins at the offset `start`.
    piece: Vec<u8>,
    start: u64,
    /// The end of the last row in the piece, and the number of the file's lines before this end.
    at: usize,
    lines: u64,
    /// The checksum of all bytes that have been read.
    crc: crc32fast::Hasher,
    /// The least number of bytes that are read at once.
    at_once: u64,
}

impl<'a> FileRows<'a> {
    pub(crate) fn new(file: &'a DataFile, delimiter: u8) -> Self {
        Self {
            file,
            at_once: PIECE,
            delimiter,
            piece: Vec::new(),
            start: 0,
            at: 0,
            lines: 0,
            crc: crc32fast::Hasher::new(),
        }
    }

    /// Returns the next row and its line number; `None` at the end of the file. [`Self::bytes`] has the bytes of the row
    /// until the next call.
    ///
    /// # Errors
    /// If the file cannot be read, or a quote is left open.
    pub(crate) fn next(&mut self) -> Result<Option<(Row, u64)>, InputError> {
        loop {
            let row = next_row(&self.piece, self.at, self.delimiter);
            let read = self.start + self.piece.len() as u64;
            let is_all = read == self.file.size();
            match row {
                Some(row) if row.end == End::Line || is_all => {
                    let line = self.lines + lines_in(&self.piece[self.at..row.bytes.start]) + 1;
                    if row.end == End::OpenQuote {
                        return Err(self.open_quote(line));
                    }
                    self.lines += lines_in(&self.piece[self.at..row.bytes.end]);
                    self.at = row.bytes.end;
                    return Ok(Some((row, line)));
                }
                None if is_all => return Ok(None),
                None => {
                    self.lines += lines_in(&self.piece[self.at..]);
                    self.at = self.piece.len();
                }
                Some(row) if row.bytes.len() > LONGEST_ROW => {
                    let line = self.lines + lines_in(&self.piece[self.at..row.bytes.start]) + 1;
                    return Err(match row.end {
                        End::OpenQuote => self.open_quote(line),
                        _ => Place::line(self.file.path(), line).wrong(format!(
                            "the row has more than {} MiB; the file is no CSV, or has other ends of lines",
                            LONGEST_ROW >> 20
                        )),
                    });
                }
                Some(_) => {}
            }
            self.piece.drain(..self.at);
            self.start += self.at as u64;
            self.at = 0;
            let mark = BYTE_ORDER_MARK.len() as u64;
            // A long row is not searched again and again.
            let size = self.at_once.max(self.piece.len() as u64);
            let more = self.file.read(read..self.file.size().min(read + size))?;
            self.crc.update(&more);
            self.piece.extend_from_slice(&more);
            if self.start == 0 && read < mark && self.piece.starts_with(&BYTE_ORDER_MARK) {
                self.at = BYTE_ORDER_MARK.len();
            }
        }
    }

    /// Returns the bytes of the row that was returned last.
    pub(crate) fn bytes(&self, row: &Row) -> &[u8] {
        &self.piece[row.bytes.clone()]
    }

    /// Returns the offset of a row in the file.
    pub(crate) fn byte(&self, row: &Row) -> u64 {
        self.start + row.bytes.start as u64
    }

    /// Returns the checksum of all bytes that have been read.
    pub(crate) fn crc(self) -> u32 {
        self.crc.finalize()
    }

    fn open_quote(&self, line: u64) -> InputError {
        Place::line(self.file.path(), line).wrong(
            "the row has a quote that is left open; close it, or get the file again".to_owned(),
        )
    }
}

/// Returns the number of line breaks in a text.
pub(crate) fn lines_in(text: &[u8]) -> u64 {
    match text {
        [b'\n'] | [b'\r', b'\n'] => 1,
        _ => memchr_iter(b'\n', text).count() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_the_same_in_pieces_of_any_size() {
        let dir = tempfile::tempdir().unwrap();
        let lines = "\r\na,\"b\"\"\n\",c\r\n\r\n\n\"x\ny\",2\r3,\"\"\n\n\nlast,1";
        for text in [
            lines.to_owned(),
            format!("\u{feff}{lines}"),
            format!("{lines}\n"),
            "\n".repeat(50),
        ] {
            let path = dir.path().join("rows.csv");
            std::fs::write(&path, &text).unwrap();
            let file = DataFile::open(&path).unwrap();
            let read = |at_once: u64| {
                let mut rows = FileRows::new(&file, b',');
                rows.at_once = at_once;
                let mut all = Vec::new();
                while let Some((row, line)) = rows.next().unwrap() {
                    all.push((rows.byte(&row), line, row.quoted, rows.bytes(&row).to_vec()));
                }
                (all, rows.crc())
            };
            let whole = read(PIECE);
            assert_eq!(whole.1, crc32fast::hash(text.as_bytes()));
            for at_once in 1..9 {
                assert_eq!(read(at_once), whole, "{text:?} in pieces of {at_once}");
            }
        }
    }
}
