//! Parquet files: columns of numbers, texts and dates, one of them a label.
//!
//! `data.dir` is a folder with `train.parquet` and possibly `test.parquet`, a single file, or a pattern of file names;
//! `tabular` describes what becomes of the columns. A column of lists can have ids. A column of structures is refused
//! unless the job ignores it. Files may be compressed with Snappy, gzip, LZ4, Zstandard or Brotli. The columns in which
//! pandas keeps the index of a frame are ignored unless the job gives them a type.

mod cells;

use std::io::BufReader;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use bytes::Bytes;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};
use parquet::file::reader::{ChunkReader, FileReader, Length, SerializedFileReader};

use self::cells::{ColumnWriter, Meaning};
use super::survey::{self, ColumnSurvey};
use super::tabular;
use crate::columns::header::{Header, LabelColumn, pandas_index, unfit};
use crate::columns::table::{Numbers, Rows, Table};
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::files::{self, DataFile, Reader};
use crate::place::{Place, Unit};
use crate::reading::chunks::{Chunk, Chunks};
use crate::reading::parts;
use crate::source::{DataSetup, Source};

/// The most elements that all lists of a column have in a row group.
const MOST_ELEMENTS: i64 = 1 << 26;

/// The source `parquet`.
pub struct Parquet;

impl Source for Parquet {
    const STREAMS: bool = true;

    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        tabular::open(setup, "parquet", |paths, labels| {
            ParquetFiles::open(setup, paths, labels)
        })
    }
}

/// Surveys the columns of files.
///
/// # Errors
/// If the files cannot be read.
pub(crate) fn survey(setup: &DataSetup) -> Result<Vec<ColumnSurvey>, InputError> {
    survey::survey(setup, |setup, labels| {
        ParquetFiles::open(setup, &files::matching(setup.dir()?)?, labels)
    })
}

/// Returns the cells of the columns in `names` as texts, for all samples of a prediction.
///
/// # Errors
/// If the files cannot be read, or lack a column.
pub(crate) fn texts(setup: &DataSetup, names: &[String]) -> Result<Vec<Vec<String>>, InputError> {
    tabular::texts(setup, names, |setup, paths| {
        ParquetFiles::open(setup, paths, LabelColumn::LeftOut)
    })
}

/// Parquet files. Their row groups are the chunks.
struct ParquetFiles {
    files: Vec<Arc<Path>>,
    header: Header,
    groups: Vec<Group>,
    chunks: Vec<Chunk>,
    /// A hash of each file's metadata, which has the offsets and sizes of all column chunks.
    metadata: Vec<u32>,
}

/// The place of a row group.
struct Group {
    file: usize,
    number: usize,
    /// The number of rows before the group in its file.
    first: u64,
    rows: u32,
    bytes: Range<u64>,
    /// The indices of the rows with a label; `None` if all rows are samples.
    labelled: Option<Vec<u32>>,
}

impl ParquetFiles {
    fn open(setup: &DataSetup, paths: &[PathBuf], labels: LabelColumn) -> Result<Self, InputError> {
        // Refuses files that cannot be streamed.
        parts::open(setup, paths)?;
        let mut all: Option<Self> = None;
        for path in paths {
            let opened = safely(path, || open(path, 0..0))?;
            let header = header_of(path, &opened, setup, labels)?;
            let files = all.get_or_insert_with(|| Self {
                files: Vec::new(),
                header: header.clone(),
                groups: Vec::new(),
                chunks: Vec::new(),
                metadata: Vec::new(),
            });
            let file: Arc<Path> = path.as_path().into();
            files.header.check_same(&header, &Place::row(&file, 1))?;
            safely(path, || files.add(file, &opened))?;
        }
        let all = all.ok_or(InputError::NoPlace)?;
        // Of several files, some may have no row: Spark writes a file for each part of its data.
        match (all.groups.is_empty(), all.files.first()) {
            (true, Some(first)) => {
                Err(Place::row(first, 1).wrong("the file has no row".to_owned()))
            }
            _ => Ok(all),
        }
    }

    /// Adds the row groups of a file.
    fn add(
        &mut self,
        file: Arc<Path>,
        opened: &SerializedFileReader<DataFile>,
    ) -> Result<(), InputError> {
        let (mut first, mut unlabelled) = (0, 0);
        for (number, group) in opened.metadata().row_groups().iter().enumerate() {
            let samples = u32::try_from(group.num_rows())
                .map_err(|_| damaged(&file, "a row group's number of rows is impossible"))?;
            if samples == 0 {
                continue;
            }
            let mut new = Group {
                file: self.files.len(),
                number,
                first,
                rows: samples,
                bytes: bytes_of(group),
                labelled: None,
            };
            first += u64::from(samples);
            if self.header.skips_unlabelled() {
                new.labelled = Some(self.table_of(&file, opened, &new)?.labelled());
            }
            let samples = new
                .labelled
                .as_ref()
                .map_or(samples, |labelled| labelled.len() as u32);
            if samples == 0 {
                continue;
            }
            unlabelled += u64::from(new.rows - samples);
            self.groups.push(new);
            self.chunks.push(Chunk {
                samples,
                // Cells are held as 8 bytes each, texts once.
                bytes: u64::try_from(group.total_byte_size())
                    .unwrap_or_default()
                    .max(u64::from(samples) * 8 * (group.num_columns() as u64 + 1)),
            });
        }
        if unlabelled > 0 {
            tracing::warn!(file = %file.display(), "{unlabelled} rows without a label are left out");
        }
        self.metadata.push(crc32fast::hash(&footer(&file)?));
        self.files.push(file);
        Ok(())
    }
}

impl ParquetFiles {
    /// Reads all rows of a group.
    fn table_of(
        &self,
        file: &Arc<Path>,
        opened: &SerializedFileReader<DataFile>,
        group: &Group,
    ) -> Result<Table, InputError> {
        let rows = Rows {
            file: file.clone(),
            unit: Unit::Row,
            numbers: Numbers::From(group.first + 1, group.rows as usize),
        };
        let mut table = self.header.table(rows);
        read_group(opened, group, group.rows, &mut table)?;
        Ok(table)
    }
}

impl Chunks for ParquetFiles {
    type Raw = Table;
    type Parsed = Table;

    fn decodes_whole(&self) -> bool {
        !self.header.has_ids()
    }

    fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    fn read(&self, chunk: usize) -> Result<Table, InputError> {
        let group = &self.groups[chunk];
        let file = &self.files[group.file];
        safely(file, || {
            let opened = open(file, group.bytes.clone())?;
            let table = self.table_of(file, &opened, group)?;
            Ok(table.selected(group.labelled.as_deref()))
        })
    }

    fn parse(&self, table: &Table, samples: &[u32]) -> Result<Table, InputError> {
        Ok(table.select(samples))
    }

    fn parse_all(&self, table: Table, _: &[u32]) -> Result<Table, InputError> {
        Ok(table)
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        for crc in &self.metadata {
            hash(&crc.to_le_bytes());
        }
    }
}

thread_local! {
    /// True while this thread reads a Parquet file: a panic then becomes an error and is not logged.
    static IS_READING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Installs, once, the hook that keeps panics out of the log if they become errors.
static QUIET: Once = Once::new();

/// Calls a function that reads a file, and turns a panic into an error. The library panics on some damaged files (the
/// test `damaged_files_are_refused` has some).
fn safely<T>(path: &Path, read: impl FnOnce() -> Result<T, InputError>) -> Result<T, InputError> {
    QUIET.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_READING.get() {
                usual(panic);
            }
        }));
    });
    let before = IS_READING.replace(true);
    let done = catch_unwind(AssertUnwindSafe(read));
    IS_READING.set(before);
    done.unwrap_or_else(|_| Err(damaged(path, "its pages do not fit together")))
}

/// Opens a file. If the file is in an object store, reads `part` in advance.
fn open(path: &Path, part: Range<u64>) -> Result<SerializedFileReader<DataFile>, InputError> {
    SerializedFileReader::new(DataFile::open(path)?.with_part(part)?)
        .map_err(|error| damaged(path, &error.to_string()))
}

/// Returns the bytes of the file that a row group spans.
fn bytes_of(group: &RowGroupMetaData) -> Range<u64> {
    let columns = group.columns().iter().map(ColumnChunkMetaData::byte_range);
    let start = columns.clone().map(|(start, _)| start).min();
    let end = columns.map(|(start, length)| start.saturating_add(length));
    start.unwrap_or(0)..end.max().unwrap_or(0)
}

impl Length for DataFile {
    fn len(&self) -> u64 {
        self.size()
    }
}

impl ChunkReader for DataFile {
    type T = BufReader<Reader>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        Ok(self.reader_from(start))
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        let end = start.saturating_add(length as u64).min(self.size());
        let bytes = self.read(start..end.max(start));
        match bytes {
            Ok(bytes) => Ok(bytes.into()),
            Err(error) => Err(ParquetError::External(Box::new(error))),
        }
    }
}

/// Returns the metadata at the end of a file. Only the metadata's length and a magic number follow it, of four bytes
/// each.
fn footer(path: &Path) -> Result<Vec<u8>, InputError> {
    let file = DataFile::open(path)?;
    let end = file.size().saturating_sub(8);
    let length = file.read(end..file.size())?;
    let length = length.first_chunk().map_or(0, |l| u32::from_le_bytes(*l));
    file.read(end.saturating_sub(length.into())..end)
}

fn header_of(
    path: &Path,
    opened: &SerializedFileReader<DataFile>,
    setup: &DataSetup,
    labels: LabelColumn,
) -> Result<Header, InputError> {
    let schema = opened.metadata().file_metadata().schema_descr();
    let fields = schema.root_schema().get_fields();
    let names: Vec<&str> = fields.iter().map(|field| field.name()).collect();
    let metadata = opened.metadata().file_metadata().key_value_metadata();
    let mut metadata = metadata.into_iter().flatten();
    let pandas = metadata.find(|pair| pair.key == "pandas");
    let pandas = pandas.and_then(|pair| pair.value.as_deref());
    let indices = pandas.map_or_else(Vec::new, pandas_index);
    let indices: Vec<&str> = indices.iter().map(String::as_str).collect();
    let fitted = setup.purpose.fitted();
    let known = fitted.map(|fitted| |name: &str| fitted.has_column(name));
    let (file, settings) = (path.into(), setup.settings);
    let mut header = Header::new(&file, Unit::Row, &names, &indices, settings, known, labels)?;
    let wrong = |column: usize, problem: &str| {
        Err(Place::row(&path.into(), 1).wrong(unfit(names[column], problem)))
    };
    for (leaf, described) in schema.columns().iter().enumerate() {
        let column = schema.get_column_root_idx(leaf);
        let nested = described.path().parts().len() > 1 || described.max_rep_level() > 0;
        if !nested || header.is_ignored(column) {
            continue;
        }
        let leaves = (0..schema.num_columns()).map(|leaf| schema.get_column_root_idx(leaf));
        let is_list =
            described.max_rep_level() == 1 && leaves.filter(|c| *c == column).count() == 1;
        if !is_list {
            return wrong(column, "is a structure, or has lists in lists");
        }
        let groups = opened.metadata().row_groups().iter();
        if groups
            .into_iter()
            .any(|group| group.column(leaf).num_values() > MOST_ELEMENTS)
        {
            return wrong(
                column,
                "has more elements in a row group than fit in memory; write smaller row groups",
            );
        }
        if !header.has_lists(column) {
            return wrong(column, "has lists, which can be ids (type = \"id\")");
        }
    }
    Ok(header)
}

/// Reads the cells of a row group.
fn read_group(
    opened: &SerializedFileReader<DataFile>,
    group: &Group,
    count: u32,
    table: &mut Table,
) -> Result<(), InputError> {
    let path = table.place(0).file;
    let broken = |error: ParquetError| damaged(&path, &error.to_string());
    let schema = opened.metadata().file_metadata().schema_descr();
    let reader = opened.get_row_group(group.number).map_err(broken)?;
    let fields = schema.root_schema().get_fields();
    let names: Vec<&str> = fields.iter().map(|field| field.name()).collect();
    for (leaf, described) in schema.columns().iter().enumerate() {
        let column = schema.get_column_root_idx(leaf);
        if table.is_ignored(column) {
            continue;
        }
        let is_list = described.max_rep_level() > 0;
        let mut cells = ColumnWriter {
            is_list,
            table,
            column,
            name: names[column],
            meaning: Meaning::new(described),
            nulls_below: described.max_def_level(),
            read: 0,
            count,
        };
        cells.read(reader.get_column_reader(leaf).map_err(broken)?)?;
        let found = cells.read;
        if found != count {
            return Err(damaged(
                &path,
                &format!(
                    "column {:?} has {found} rows where {count} are promised",
                    described.name()
                ),
            ));
        }
    }
    Ok(())
}

fn damaged(path: &Path, problem: &str) -> InputError {
    InputError::Invalid(format!(
        "{} cannot be read as Parquet: {problem}; get the file again, or write it anew",
        path.display()
    ))
}
