//! CSV files: columns of numbers, categories and dates, one of them a label.
//!
//! `data.dir` is a folder with `train.csv` and, perhaps, `test.csv`, or a single file, or a pattern of names. Files are
//! compressed if their names end with `.gz` or `.zst`. The first line names the columns, unless `data.header` is false; `tabular` tells what
//! becomes of them.

use std::io::{self, BufRead, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use csv::{ByteRecord, ErrorKind, Reader, ReaderBuilder, StringRecord, Trim};

use super::survey::{self, ColumnSurvey};
use super::tabular;
use crate::columns::table::{Header, LabelColumn, Numbers, Rows, Table};
use crate::columns::value::Value;
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::files::DataFile;
use crate::place::{Place, Unit};
use crate::reading::chunks::{self, Chunk, Chunks};
use crate::reading::lines::{BYTE_ORDER_MARK, changed};
use crate::reading::parts;
use crate::source::{DataSetup, Source};

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

/// Returns what the columns of files look like.
///
/// # Errors
/// If the files cannot be read.
pub(crate) fn survey(setup: &DataSetup) -> Result<Vec<ColumnSurvey>, InputError> {
    survey::survey(setup, CsvFiles::open)
}

/// Returns the cells of these columns of all samples to predict, as texts.
///
/// # Errors
/// If the files cannot be read, or lack a column.
pub(crate) fn texts(setup: &DataSetup, names: &[String]) -> Result<Vec<Vec<String>>, InputError> {
    tabular::texts(setup, names, |setup, paths| {
        CsvFiles::open(setup, paths, LabelColumn::LeftOut)
    })
}

/// CSV files, cut into chunks of whole rows.
struct CsvFiles {
    /// The form of each file.
    forms: Vec<Form>,
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
    form: Form,
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
        let opened = parts::open(setup, paths)?;
        let size = chunks::size(setup, &opened);
        let mut all: Option<Self> = None;
        let several = opened.len() > 1;
        for file in opened {
            if several && file.size() == 0 {
                continue;
            }
            let form = Form::of(&file, setup)?;
            let header = read_header(&file, setup, labels, form)?;
            let files = all.get_or_insert_with(|| Self {
                forms: Vec::new(),
                files: Vec::new(),
                crcs: Vec::new(),
                header: header.clone(),
                parts: Vec::new(),
                chunks: Vec::new(),
            });
            files
                .header
                .check_same(&header, &Place::line(file.path(), 1))?;
            files.cut(file, size, form)?;
        }
        let all = match (all, paths.first()) {
            (Some(all), _) => all,
            (None, Some(first)) => {
                return Err(
                    Place::line(&first.as_path().into(), 1).wrong("no file has a line".to_owned())
                );
            }
            (None, None) => return Err(InputError::NoPlace),
        };
        // Of several files, some may have no row: Spark writes a file for each part of its data.
        match (all.parts.is_empty(), all.files.first()) {
            (true, Some(first)) => {
                Err(Place::line(first.path(), 1).wrong("no sample follows the header".to_owned()))
            }
            _ => Ok(all),
        }
    }

    /// Adds the chunks of a file, of about so many bytes.
    fn cut(&mut self, file: DataFile, size: u64, form: Form) -> Result<(), InputError> {
        let summed = Summed {
            from: file.reader(),
            crc: crc32fast::Hasher::new(),
        };
        let mut reader = form.reader(summed, form.header);
        let mut row = ByteRecord::new();
        let before = self.parts.len();
        let (mut last, mut unlabelled) = ((0, 1), 0u64);
        while reader
            .read_byte_record(&mut row)
            .map_err(|error| unreadable(&file, error))?
        {
            let (byte, line) = row.position().map_or((0, 1), |p| (p.byte(), p.line()));
            last = (byte, line);
            if self.header.skips(row.get(self.header.label_column())) {
                unlabelled += 1;
                continue;
            }
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
        if unlabelled > 0 {
            let file = file.path().display();
            tracing::warn!(%file, "{unlabelled} rows without a label are left out");
        }
        for (chunk, part) in self.chunks[before..].iter_mut().zip(&self.parts[before..]) {
            chunk.bytes = part.bytes.end - part.bytes.start;
        }
        if self.parts.len() > before {
            check_last(&file, last, form)?;
        }
        self.crcs.push(reader.into_inner().crc.finalize());
        self.forms.push(form);
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
        let form = self.forms[part.file];
        let mut reader = form.reader(content.as_slice(), false);
        let mut rows: Vec<Row> = Vec::new();
        let mut row = ByteRecord::new();
        while reader
            .read_byte_record(&mut row)
            .map_err(|error| unreadable(file, error))?
        {
            let (byte, line) = row.position().map_or((0, 1), |p| (p.byte(), p.line()));
            let byte = byte as usize;
            // A byte order mark is no part of the first row, which may be copied behind others.
            let byte = match byte == 0 && content.starts_with(&BYTE_ORDER_MARK) {
                true => BYTE_ORDER_MARK.len(),
                false => byte,
            };
            if let Some(last) = rows.last_mut() {
                // A row that was left out may lie between.
                last.bytes.end = last.bytes.end.min(byte);
            }
            if self.header.skips(row.get(self.header.label_column())) {
                continue;
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
            form,
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
        let mut reader = text.form.reader(content.as_slice(), false);
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
                let with_point = match text.form.decimal_comma {
                    true => with_point(field),
                    false => None,
                };
                let value = match with_point.as_deref().unwrap_or(field) {
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
fn check_last(file: &DataFile, (byte, line): (u64, u64), form: Form) -> Result<(), InputError> {
    let mut content = file.read(byte..file.size())?;
    content.extend_from_slice(b"\nx\n");
    match form
        .reader(content.as_slice(), false)
        .byte_records()
        .count()
    {
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
    form: Form,
) -> Result<Header, InputError> {
    let mut reader = form.reader(file.reader(), true);
    let first = reader.headers().map_err(|error| unreadable(file, error))?;
    if first.is_empty() {
        return Err(Place::line(file.path(), 1)
            .wrong("the file is empty; a line with the columns' names was expected".to_owned()));
    }
    let numbers: Vec<String> = (0..first.len()).map(|number| number.to_string()).collect();
    let names: Vec<&str> = match (form.header, &setup.settings.column_names) {
        (true, _) => first.iter().collect(),
        (false, Some(names)) if names.len() == first.len() => {
            names.iter().map(String::as_str).collect()
        }
        (false, Some(names)) => {
            return Err(Place::line(file.path(), 1).wrong(format!(
                "the line has {} fields, and data.column_names has {} names",
                first.len(),
                names.len()
            )));
        }
        (false, None) => numbers.iter().map(String::as_str).collect(),
    };
    // pandas writes its index as a column without a name, which becomes "Unnamed: 0" when it is read and written again.
    let index = |name: &&&str| ["", "Unnamed: 0"].contains(*name);
    let indices: Vec<&str> = names.iter().filter(index).copied().collect();
    let fitted = setup.purpose.fitted();
    let known = fitted.map(|fitted| |name: &str| fitted.has_column(name));
    let known = known.as_ref().map(|known| known as &dyn Fn(&str) -> bool);
    let settings = setup.settings;
    Header::new(
        file.path(),
        Unit::Line,
        &names,
        &indices,
        settings,
        known,
        labels,
    )
}

/// The form of a CSV file.
#[derive(Clone, Copy, Debug)]
struct Form {
    delimiter: u8,
    /// True if numbers have a comma before their fraction.
    decimal_comma: bool,
    /// True if the first line has the columns' names.
    header: bool,
}

/// The characters that may stand between fields, those that are tried first before others.
const DELIMITERS: [u8; 4] = [b',', b'\t', b';', b'|'];

impl Form {
    /// Returns the form that the job names. Without a delimiter there, it is the one that the first line has most often outside quotes.
    fn of(file: &DataFile, setup: &DataSetup) -> Result<Self, InputError> {
        let settings = setup.settings;
        let delimiter = match settings.delimiter {
            Some(delimiter) => delimiter as u8,
            None => {
                let mut line = Vec::new();
                BufReader::new(file.reader())
                    .take(LONGEST_LINE)
                    .read_until(b'\n', &mut line)
                    .map_err(|source| InputError::Unreadable {
                        path: file.path().to_path_buf(),
                        source,
                    })?;
                if line.starts_with(&[0xff, 0xfe]) || line.starts_with(&[0xfe, 0xff]) {
                    return Err(Place::line(file.path(), 1).wrong(
                        "the file is in UTF-16; write it in UTF-8, as `iconv -f UTF-16 -t UTF-8` does"
                            .to_owned(),
                    ));
                }
                most_frequent(&line)
            }
        };
        Ok(Self {
            delimiter,
            decimal_comma: settings.decimal == ',',
            header: settings.header,
        })
    }

    /// Returns a reader that accepts rows of any length, so that their errors have the same form as all others.
    fn reader<R: Read>(self, from: R, headers: bool) -> Reader<R> {
        ReaderBuilder::new()
            .delimiter(self.delimiter)
            .has_headers(headers)
            .flexible(true)
            .trim(Trim::All)
            .from_reader(from)
    }
}

/// Returns a number that has a comma before its fraction with a point instead; none if the text is no such number.
fn with_point(text: &str) -> Option<String> {
    let with_point = text.replacen(',', ".", 1);
    let is_number = text.contains(',') && with_point.parse::<f64>().is_ok();
    is_number.then_some(with_point)
}

/// The bytes of a first line that are searched for its delimiter.
const LONGEST_LINE: u64 = 1 << 20;

/// Returns the delimiter that a line has most often outside quotes; a comma if it has none.
fn most_frequent(line: &[u8]) -> u8 {
    let mut counts = [0; DELIMITERS.len()];
    let mut quoted = false;
    for byte in line {
        quoted ^= *byte == b'"';
        let at = DELIMITERS.iter().position(|delimiter| delimiter == byte);
        if let Some(at) = at.filter(|_| !quoted) {
            counts[at] += 1;
        }
    }
    // Of equal counts the first.
    let most = counts.iter().copied().max().unwrap_or(0);
    let at = counts.iter().position(|count| *count == most);
    DELIMITERS[at.unwrap_or(0)]
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
