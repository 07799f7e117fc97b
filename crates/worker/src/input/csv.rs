//! CSV files: columns of numbers, categories and dates, one of them a label.
//!
//! `data.dir` is a folder with `train.csv` and, perhaps, `test.csv`, or a single file, or a pattern of names. Files are
//! compressed if their names end with `.gz`. The first line names the columns; `tabular` tells what becomes of them.

use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use csv::{ByteRecord, ErrorKind, Reader, ReaderBuilder, StringRecord, Trim};

use super::chunks::{self, Chunk, Chunks};
use super::dataset::Dataset;
use super::error::InputError;
use super::files::{self, DataFile};
use super::lines::changed;
use super::place::{Place, Unit};
use super::source::{DataSetup, Source};
use super::table::{Header, LabelColumn, Numbers, Rows, Table, Value};
use super::tabular;

/// The source `csv`.
pub struct Csv;

impl Source for Csv {
    const STREAMS: bool = true;

    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        tabular::open(setup, "csv", |paths, labels| {
            CsvFiles::open(setup, paths, labels)
        })
    }
}

/// CSV files, cut into chunks of whole rows.
struct CsvFiles {
    files: Vec<DataFile>,
    /// The checksum of each file.
    crcs: Vec<u32>,
    header: Header,
    parts: Vec<Part>,
    chunks: Vec<Chunk>,
}

/// A chunk's place.
struct Part {
    file: usize,
    bytes: Range<u64>,
    /// The number of its first line.
    first: u64,
}

/// A chunk in memory.
struct Text {
    file: Arc<Path>,
    content: Vec<u8>,
    rows: Vec<Row>,
}

/// A row in a chunk.
struct Row {
    bytes: Range<usize>,
    line: u64,
}

impl CsvFiles {
    fn open(setup: &DataSetup, paths: &[PathBuf], labels: LabelColumn) -> Result<Self, InputError> {
        let opened = files::open(setup, paths)?;
        let size = chunks::size(setup, &opened);
        let mut all: Option<Self> = None;
        for file in opened {
            let header = read_header(&file, setup, labels)?;
            let files = all.get_or_insert_with(|| Self {
                files: Vec::new(),
                crcs: Vec::new(),
                header: header.clone(),
                parts: Vec::new(),
                chunks: Vec::new(),
            });
            files
                .header
                .check_same(&header, &Place::line(file.path(), 1))?;
            files.cut(file, size)?;
        }
        all.ok_or(InputError::NoPlace)
    }

    /// Adds the chunks of a file, of about so many bytes.
    fn cut(&mut self, file: DataFile, size: u64) -> Result<(), InputError> {
        let summed = Summed {
            from: file.reader(),
            crc: crc32fast::Hasher::new(),
        };
        let mut reader = reader(summed, true);
        let mut row = ByteRecord::new();
        let before = self.parts.len();
        let mut last = (0, 1);
        while reader
            .read_byte_record(&mut row)
            .map_err(|error| unreadable(&file, error))?
        {
            let (byte, line) = row.position().map_or((0, 1), |p| (p.byte(), p.line()));
            last = (byte, line);
            let begins = self.parts[before..]
                .last()
                .is_none_or(|part| byte - part.bytes.start >= size);
            if begins {
                if let Some(last) = self.parts[before..].last_mut() {
                    last.bytes.end = byte;
                }
                self.parts.push(Part {
                    file: self.files.len(),
                    bytes: byte..file.size(),
                    first: line,
                });
                self.chunks.push(Chunk {
                    samples: 0,
                    bytes: 0,
                });
            }
            if let Some(chunk) = self.chunks.last_mut() {
                chunk.samples += 1;
            }
        }
        if self.parts.len() == before {
            return Err(
                Place::line(file.path(), 1).wrong("no sample follows the header".to_owned())
            );
        }
        for (chunk, part) in self.chunks[before..].iter_mut().zip(&self.parts[before..]) {
            chunk.bytes = part.bytes.end - part.bytes.start;
        }
        check_last(&file, last)?;
        self.crcs.push(reader.into_inner().crc.finalize());
        self.files.push(file);
        Ok(())
    }
}

impl Chunks for CsvFiles {
    type Raw = Text;
    type Parsed = Table;

    fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    fn read(&self, chunk: usize) -> Result<Text, InputError> {
        let part = &self.parts[chunk];
        let file = &self.files[part.file];
        let content = file.read(part.bytes.clone())?;
        let mut reader = reader(content.as_slice(), false);
        let mut rows: Vec<Row> = Vec::new();
        let mut row = ByteRecord::new();
        while reader
            .read_byte_record(&mut row)
            .map_err(|error| unreadable(file, error))?
        {
            let (byte, line) = row.position().map_or((0, 1), |p| (p.byte(), p.line()));
            let byte = byte as usize;
            if let Some(last) = rows.last_mut() {
                last.bytes.end = byte;
            }
            // The reader gives the first of the blank lines before a row.
            let blank = content[byte..].iter();
            let blank = blank.take_while(|byte| matches!(byte, b'\r' | b'\n'));
            let blank = blank.filter(|byte| **byte == b'\n').count() as u64;
            rows.push(Row {
                bytes: byte..content.len(),
                line: part.first + line - 1 + blank,
            });
        }
        if rows.len() != self.chunks[chunk].samples as usize {
            return Err(changed(file.path()));
        }
        Ok(Text {
            file: file.path().clone(),
            content,
            rows,
        })
    }

    fn parse(&self, text: &Text, samples: &[u32]) -> Result<Table, InputError> {
        let mut content = Vec::new();
        for sample in samples {
            content.extend_from_slice(&text.content[text.rows[*sample as usize].bytes.clone()]);
            // The last row of a file may have no end.
            if content.last() != Some(&b'\n') {
                content.push(b'\n');
            }
        }
        let line = |sample: &u32| text.rows[*sample as usize].line;
        let mut table = self.header.table(Rows {
            file: text.file.clone(),
            unit: Unit::Line,
            numbers: Numbers::Each(samples.iter().map(line).collect()),
        });
        let mut reader = reader(content.as_slice(), false);
        let (mut row, expected) = (StringRecord::new(), self.header.names().len());
        for sample in 0..samples.len() {
            let wrong = |problem: String| Err(table.place(sample).wrong(problem));
            match reader.read_record(&mut row) {
                Ok(true) => {}
                Ok(false) => return Err(changed(&text.file)),
                Err(error) => {
                    return wrong(match error.into_kind() {
                        ErrorKind::Utf8 { err, .. } => {
                            format!("field {} is no text in UTF-8", err.field() + 1)
                        }
                        other => format!("the row cannot be read: {other:?}"),
                    });
                }
            }
            if row.len() != expected {
                return wrong(format!(
                    "{} fields were found, {expected} expected, as in the header",
                    row.len()
                ));
            }
            for (column, field) in row.iter().enumerate() {
                let value = match field {
                    "" => Value::Missing,
                    field => Value::Text(field),
                };
                table.push(column, value)?;
            }
        }
        Ok(table)
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        for crc in &self.crcs {
            hash(&crc.to_le_bytes());
        }
    }
}

/// Refuses a last row, at this byte and line, with a quote that is left open: it would take in what follows it.
fn check_last(file: &DataFile, (byte, line): (u64, u64)) -> Result<(), InputError> {
    let mut content = file.read(byte..file.size())?;
    content.extend_from_slice(b"\nx\n");
    match reader(content.as_slice(), false).byte_records().count() {
        0 | 1 => Err(Place::line(file.path(), line).wrong(
            "the last row has a quote that is left open; close it, or get the file again"
                .to_owned(),
        )),
        _ => Ok(()),
    }
}

fn read_header(
    file: &DataFile,
    setup: &DataSetup,
    labels: LabelColumn,
) -> Result<Header, InputError> {
    let mut reader = reader(file.reader(), true);
    let names = reader.headers().map_err(|error| unreadable(file, error))?;
    if names.is_empty() {
        return Err(Place::line(file.path(), 1)
            .wrong("the file is empty; a line with the columns' names was expected".to_owned()));
    }
    let names: Vec<&str> = names.iter().collect();
    Header::new(file.path(), Unit::Line, &names, setup.settings, labels)
}

/// Returns a reader that accepts rows of any length, so that their errors have the same form as all others.
fn reader<R: Read>(from: R, headers: bool) -> Reader<R> {
    ReaderBuilder::new()
        .has_headers(headers)
        .flexible(true)
        .trim(Trim::All)
        .from_reader(from)
}

/// A reader with the checksum of what it has read.
struct Summed<R> {
    from: R,
    crc: crc32fast::Hasher,
}

impl<R: Read> Read for Summed<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(to)?;
        self.crc.update(&to[..read]);
        Ok(read)
    }
}

fn unreadable(file: &DataFile, error: csv::Error) -> InputError {
    let line = error.position().map_or(1, csv::Position::line);
    let problem = error.to_string();
    match error.into_kind() {
        ErrorKind::Io(source) => InputError::Unreadable {
            path: file.path().to_path_buf(),
            source,
        },
        _ => Place::line(file.path(), line).wrong(problem),
    }
}
