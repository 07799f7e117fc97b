//! CSV files: columns of numbers, categories and dates, one of them a label.
//!
//! `data.dir` is a folder with `train.csv` and possibly `test.csv`, a single file, or a pattern of file names. Files
//! are compressed if their names end with `.gz` or `.zst`. The first line has the names of the columns, unless
//! `data.header` is false. `tabular` describes what becomes of the columns.

use std::convert::Infallible;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::survey::{self, ColumnSurvey};
use super::tabular;
use crate::columns::cell::Cell;
use crate::columns::header::{Header, LabelColumn};
use crate::columns::table::{Numbers, Rows, Table};
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::files::{self, DataFile};
use crate::place::{Place, Unit};
use crate::reading::chunks::{self, Chunk, Chunks};
use crate::reading::file_rows::{FileRows, lines_in};
use crate::reading::lines::{BYTE_ORDER_MARK, changed};
use crate::reading::parts;
use crate::reading::rows::{Row, each_field, next_row};
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

/// Surveys the columns of files.
///
/// # Errors
/// If the files cannot be read.
pub(crate) fn survey(setup: &DataSetup) -> Result<Vec<ColumnSurvey>, InputError> {
    survey::survey(setup, |setup, labels| {
        CsvFiles::open(setup, &files::matching(setup.dir()?)?, labels)
    })
}

/// Returns the cells of the columns in `names` as texts, for all samples of a prediction.
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

/// The place of a chunk in its file.
struct Part {
    file: usize,
    bytes: Range<u64>,
    /// The number of the chunk's first line.
    first: u64,
}

/// A chunk in memory.
struct Text {
    form: Form,
    file: Arc<Path>,
    content: Vec<u8>,
    /// Each row with its line number.
    rows: Vec<(Row, u64)>,
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
            let form = Form::new(&file, setup)?;
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

    /// Adds the chunks of a file, of about `size` bytes each.
    fn cut(&mut self, file: DataFile, size: u64, form: Form) -> Result<(), InputError> {
        let mut rows = FileRows::new(&file, form.delimiter);
        if form.header {
            rows.next()?;
        }
        let before = self.parts.len();
        let mut unlabelled = 0u64;
        while let Some((row, line)) = rows.next()? {
            if self.header.skips_unlabelled() && self.lacks_label(rows.bytes(&row), form) {
                unlabelled += 1;
                continue;
            }
            let byte = rows.byte(&row);
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
        self.crcs.push(rows.crc());
        self.forms.push(form);
        self.files.push(file);
        Ok(())
    }

    /// Returns whether the label of a row is missing.
    fn lacks_label(&self, row: &[u8], form: Form) -> bool {
        let fields = form.fields(&String::from_utf8_lossy(row));
        let label = fields.get(self.header.label_column());
        label.is_some_and(|label| self.header.skips(label))
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
        let skips = self.header.skips_unlabelled();
        let mut rows = Vec::with_capacity(self.chunks[chunk].samples as usize);
        let (mut at, mut line) = (0, part.first);
        while let Some(row) = next_row(&content, at, form.delimiter) {
            line += lines_in(&content[at..row.bytes.start]);
            let begins = line;
            if row.quoted {
                line += lines_in(&content[row.bytes.clone()]);
            }
            at = row.bytes.end;
            if !skips || !self.lacks_label(&content[row.bytes.clone()], form) {
                rows.push((row, begins));
            }
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
        let rows = || samples.iter().map(|sample| &text.rows[*sample as usize]);
        // Rows are scattered over the chunk. The CPU overlaps the cache misses of copies, but not those of a parser, which branches on
        // what it reads.
        let bytes = rows().map(|(row, _)| row.bytes.len()).sum();
        let mut content = Vec::with_capacity(bytes);
        for (row, _) in rows() {
            content.extend_from_slice(&text.content[row.bytes.clone()]);
        }
        let mut table = self.header.table(Rows {
            file: text.file.clone(),
            unit: Unit::Line,
            numbers: Numbers::Each(rows().map(|(_, line)| *line).collect()),
        });
        let content = String::from_utf8(content).map_err(|_| text.not_utf8(samples))?;
        let (expected, mut start) = (self.header.names().len(), 0);
        for (sample, (row, _)) in rows().enumerate() {
            let end = start + row.bytes.len();
            // Two rows may have a half of a character each.
            if !content.is_char_boundary(end) {
                return Err(text.not_utf8(samples));
            }
            let found = each_field(
                &content[start..end],
                row.quoted,
                text.form.delimiter,
                |column, field| {
                    // The number of fields is told at their end.
                    if column >= expected {
                        return Ok(());
                    }
                    let with_point = match text.form.decimal_comma {
                        true => with_point(field),
                        false => None,
                    };
                    let value = match with_point.as_deref().unwrap_or(field) {
                        "" => Cell::Missing,
                        field => Cell::Text(field),
                    };
                    table.push(column, value)
                },
            );
            let wrong = |found: usize| {
                table.place(sample).wrong(format!(
                    "{found} fields were found, {expected} expected, as in the header"
                ))
            };
            match found {
                Ok(found) if found == expected => {}
                Ok(found) => return Err(wrong(found)),
                // Where fields are missing, those behind are not what their column says.
                Err(error) => {
                    let found = text.form.fields(&content[start..end]).len();
                    return Err(if found == expected {
                        error
                    } else {
                        wrong(found)
                    });
                }
            }
            start = end;
        }
        Ok(table)
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        for crc in &self.crcs {
            hash(&crc.to_le_bytes());
        }
    }
}

impl Text {
    /// Returns the error for the first of these samples that is not UTF-8.
    fn not_utf8(&self, samples: &[u32]) -> InputError {
        let rows = samples.iter().map(|sample| &self.rows[*sample as usize]);
        let wrong = rows
            .map(|(row, line)| (&self.content[row.bytes.clone()], line))
            .find(|(bytes, _)| std::str::from_utf8(bytes).is_err());
        let (bytes, line) = wrong.unwrap_or((&[], &1));
        let fields = self.form.fields(&String::from_utf8_lossy(bytes));
        let is_wrong = |field: &String| field.contains(char::REPLACEMENT_CHARACTER);
        let field = fields.iter().position(is_wrong).unwrap_or(0) + 1;
        Place::line(&self.file, *line).wrong(format!("field {field} is no text in UTF-8"))
    }
}

/// Returns whether the next row has one field more than there are names, and begins with a quote, as in files to which
/// R writes row names. Rows that are too long for another reason are refused later.
fn has_row_names(rows: &mut FileRows, form: Form, names: usize) -> Result<bool, InputError> {
    let Some((row, _)) = rows.next()? else {
        return Ok(false);
    };
    let row = rows.bytes(&row);
    let fields = form.fields(&String::from_utf8_lossy(row));
    Ok(row.starts_with(b"\"") && fields.len() == names + 1)
}

fn read_header(
    file: &DataFile,
    setup: &DataSetup,
    labels: LabelColumn,
    form: Form,
) -> Result<Header, InputError> {
    let mut rows = FileRows::new(file, form.delimiter);
    let Some((first, line)) = rows.next()? else {
        return Err(Place::line(file.path(), 1)
            .wrong("the file is empty; a line with the columns' names was expected".to_owned()));
    };
    let first = std::str::from_utf8(rows.bytes(&first)).map_err(|_| {
        Place::line(file.path(), line).wrong("the first row is no text in UTF-8".to_owned())
    })?;
    let mut fields = form.fields(first);
    let is_quoted = first.starts_with('"');
    if form.header && is_quoted && has_row_names(&mut rows, form, fields.len())? {
        tracing::info!(file = %file.path().display(), "the first column has no name; it is taken for the names of the rows and left out");
        fields.insert(0, String::new());
    }
    let numbers: Vec<String> = (0..fields.len()).map(|number| number.to_string()).collect();
    let names: Vec<&str> = match (form.header, &setup.settings.column_names) {
        (true, _) => fields.iter().map(String::as_str).collect(),
        (false, Some(names)) if names.len() == fields.len() => {
            names.iter().map(String::as_str).collect()
        }
        (false, Some(names)) => {
            return Err(Place::line(file.path(), 1).wrong(format!(
                "the line has {} fields, and data.column_names has {} names",
                fields.len(),
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

/// The format of a CSV file.
#[derive(Clone, Copy, Debug)]
struct Form {
    delimiter: u8,
    /// True if numbers have a comma before their fraction.
    decimal_comma: bool,
    /// True if the first line has the columns' names.
    header: bool,
}

/// The possible delimiters. If several occur equally often, the first of them is used.
const DELIMITERS: [u8; 4] = [b',', b'\t', b';', b'|'];

impl Form {
    /// Returns the form that the job sets. If the job sets no delimiter, it is the one that occurs most often outside
    /// quotes in the first line.
    fn new(file: &DataFile, setup: &DataSetup) -> Result<Self, InputError> {
        let settings = setup.settings;
        let delimiter = match settings.delimiter {
            Some(delimiter) => delimiter as u8,
            None => {
                let line = file.read(0..file.size().min(LONGEST_LINE))?;
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

    /// Returns the fields of a row.
    fn fields(self, row: &str) -> Vec<String> {
        let mut fields = Vec::new();
        let Ok(_) = each_field(row, true, self.delimiter, |_, field| {
            fields.push(field.to_owned());
            Ok::<_, Infallible>(())
        });
        fields
    }
}

/// Replaces the decimal comma of a number by a point; `None` if the text is not a number with a decimal comma.
fn with_point(text: &str) -> Option<String> {
    let with_point = text.replacen(',', ".", 1);
    let is_number = text.contains(',') && with_point.parse::<f64>().is_ok();
    is_number.then_some(with_point)
}

/// The most bytes of the first line that are searched for the delimiter.
const LONGEST_LINE: u64 = 1 << 20;

/// Returns the delimiter that occurs most often outside quotes in the first line of a text; a comma if there is none.
fn most_frequent(text: &[u8]) -> u8 {
    let text = text.strip_prefix(&BYTE_ORDER_MARK).unwrap_or(text);
    let is_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
    let start = text.iter().position(|byte| !is_end(byte)).unwrap_or(0);
    let mut counts = [0; DELIMITERS.len()];
    let mut quoted = false;
    // A quote counts where it begins a field, and behind one that has just closed it.
    let mut may_open = true;
    for byte in &text[start..] {
        let at = DELIMITERS.iter().position(|delimiter| delimiter == byte);
        match (byte, at) {
            (b'"', _) if quoted || may_open => {
                quoted = !quoted;
                may_open = true;
            }
            _ if quoted => {}
            (byte, _) if is_end(byte) => break,
            (_, Some(at)) => {
                counts[at] += 1;
                may_open = true;
            }
            _ => may_open = false,
        }
    }
    // Of equal counts the first.
    let most = counts.iter().copied().max().unwrap_or(0);
    let at = counts.iter().position(|count| *count == most);
    DELIMITERS[at.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_alone_tells_the_delimiter() {
        for (text, delimiter) in [
            ("genres\nAction|Comedy\nDrama|War\n", b','),
            ("diag\",price\n\"a;b\",3\n", b','),
            ("\n\na;\"b,\n,,\"\"|,\";c\n", b';'),
            ("\u{feff}a\tb\n", b'\t'),
            ("", b','),
        ] {
            assert_eq!(most_frequent(text.as_bytes()), delimiter, "{text:?}");
        }
    }
}
