//! Parquet files: columns of numbers, texts and dates, one of them a label.
//!
//! `data.dir` is a folder with `train.parquet` and, perhaps, `test.parquet`, or a single file; `tabular` tells what
//! becomes of the columns. They are flat: a list or a structure is refused, unless the job ignores it. Files may be
//! compressed with Snappy, gzip or LZ4.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use half::f16;
use parquet::basic::{ConvertedType, LogicalType, TimeUnit};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{AsBytes, DataType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::ColumnDescriptor;
use shared_proto::job::Data;

use super::dataset::Dataset;
use super::error::InputError;
use super::source::{DataSetup, Source};
use super::table::{Labels, Places, Table, Value};
use super::tabular;

/// The rows of a column that are read at once.
const ROWS: usize = 1 << 12;

const SECONDS_OF_A_DAY: f64 = 86_400.0;

/// The source `parquet`.
pub struct Parquet;

impl Source for Parquet {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        tabular::open(setup, "parquet", read)
    }
}

fn read(path: &Path, settings: &Data, labels: Labels) -> Result<Table, InputError> {
    let file = File::open(path).map_err(|source| InputError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    // The library panics on some damaged files (`damaged_files_are_refused` has such).
    let table = catch_unwind(AssertUnwindSafe(|| read_file(file, path, settings, labels)));
    table.unwrap_or_else(|_| Err(damaged(path, "its pages do not fit together")))
}

fn read_file(
    file: File,
    path: &Path,
    settings: &Data,
    labels: Labels,
) -> Result<Table, InputError> {
    let broken = |error: ParquetError| damaged(path, &error.to_string());
    let reader = SerializedFileReader::new(file).map_err(broken)?;
    let schema = reader.metadata().file_metadata().schema_descr();
    let names: Vec<&str> = schema
        .root_schema()
        .get_fields()
        .iter()
        .map(|field| field.name())
        .collect();
    let mut table = Table::new(path.to_owned(), Places::Rows, &names, settings, labels)?;
    let mut rows = 0;
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group).map_err(broken)?;
        let count = u32::try_from(group.metadata().num_rows());
        let count = u64::from(
            count.map_err(|_| damaged(path, "a row group's number of rows is impossible"))?,
        );
        for (leaf, described) in schema.columns().iter().enumerate() {
            let column = schema.get_column_root_idx(leaf);
            if table.is_ignored(column) {
                continue;
            }
            let mut cells = ColumnWriter {
                table: &mut table,
                column,
                name: names[column],
                meaning: Meaning::of(described),
                nulls_below: described.max_def_level(),
                row: rows,
                last: rows + count,
            };
            if described.path().parts().len() > 1 || described.max_rep_level() > 0 {
                return Err(cells.wrong("is a list or a structure"));
            }
            cells.read(group.get_column_reader(leaf).map_err(broken)?)?;
            let found = cells.row - rows;
            if found != count {
                return Err(damaged(
                    path,
                    &format!(
                        "column {:?} has {found} rows where {count} are promised",
                        names[column]
                    ),
                ));
            }
        }
        rows += count;
    }
    match table.len() {
        0 => Err(table.wrong(1, "the file has no row".to_owned())),
        _ => Ok(table),
    }
}

fn damaged(path: &Path, problem: &str) -> InputError {
    InputError::Invalid(format!(
        "{} cannot be read as Parquet: {problem}; get the file again, or write it anew, compressed with Snappy",
        path.display()
    ))
}

/// The meaning of a column's numbers.
#[derive(Clone, Copy)]
enum Meaning {
    /// Numbers, or texts.
    Plain,
    Unsigned,
    /// Decimal fractions: the value is the number divided by this one.
    Decimal(f64),
    /// Days since 1970.
    Days,
    /// A time since the beginning of 1970, in so many parts of a day.
    Time(f64),
    Half,
}

impl Meaning {
    fn of(column: &ColumnDescriptor) -> Self {
        let (millis, micros, nanos) = (1e3, 1e6, 1e9);
        match (column.logical_type_ref(), column.converted_type()) {
            (Some(LogicalType::Timestamp(time)), _) => Self::Time(
                SECONDS_OF_A_DAY
                    * match time.unit {
                        TimeUnit::MILLIS => millis,
                        TimeUnit::MICROS => micros,
                        TimeUnit::NANOS => nanos,
                    },
            ),
            (Some(LogicalType::Date), _) | (None, ConvertedType::DATE) => Self::Days,
            (Some(LogicalType::Float16), _) => Self::Half,
            (Some(LogicalType::Decimal(_)), _) | (None, ConvertedType::DECIMAL) => {
                Self::Decimal(10f64.powi(column.type_scale()))
            }
            (Some(LogicalType::Integer(integer)), _) if !integer.is_signed => Self::Unsigned,
            (None, ConvertedType::TIMESTAMP_MILLIS) => Self::Time(SECONDS_OF_A_DAY * millis),
            (None, ConvertedType::TIMESTAMP_MICROS) => Self::Time(SECONDS_OF_A_DAY * micros),
            (
                _,
                ConvertedType::UINT_8
                | ConvertedType::UINT_16
                | ConvertedType::UINT_32
                | ConvertedType::UINT_64,
            ) => Self::Unsigned,
            _ => Self::Plain,
        }
    }

    fn of_integer(self, number: i64, unsigned: u64) -> Value<'static> {
        match self {
            Self::Plain | Self::Half => Value::Integer(number),
            Self::Unsigned => {
                i64::try_from(unsigned).map_or(Value::Number(unsigned as f64), Value::Integer)
            }
            Self::Decimal(divisor) => Value::Number(number as f64 / divisor),
            Self::Days => Value::Days(number as f64),
            Self::Time(of_day) => Value::Days(number as f64 / of_day),
        }
    }

    /// Returns the value of bytes: a text, a decimal fraction or a number of half precision.
    fn of_bytes(self, bytes: &[u8]) -> Option<Value<'_>> {
        match (self, bytes) {
            (Self::Half, [low, high]) => {
                let half = f16::from_le_bytes([*low, *high]);
                Some(Value::Number(half.to_f64()))
            }
            (Self::Decimal(divisor), [first, ..]) if bytes.len() <= 16 => {
                let sign = if *first < 128 { 0 } else { -1 };
                let number = bytes
                    .iter()
                    .fold(sign, |n: i128, byte| n << 8 | i128::from(*byte));
                Some(Value::Number(number as f64 / divisor))
            }
            (Self::Plain, text) => std::str::from_utf8(text).ok().map(Value::Text),
            _ => None,
        }
    }
}

/// The cells of a column, on their way from the file into the table.
struct ColumnWriter<'a> {
    table: &'a mut Table,
    column: usize,
    name: &'a str,
    meaning: Meaning,
    /// A cell with a lower definition level is absent.
    nulls_below: i16,
    /// The rows that have been read.
    row: u64,
    /// The rows that the file promises up to the end of the group.
    last: u64,
}

impl ColumnWriter<'_> {
    fn read(&mut self, reader: ColumnReader) -> Result<(), InputError> {
        let meaning = self.meaning;
        let number = |number: f64| Some(Value::Number(number));
        let integer = |signed, unsigned| Some(meaning.of_integer(signed, unsigned));
        match reader {
            ColumnReader::BoolColumnReader(reader) => {
                self.each(reader, |value| Some(Value::Integer((*value).into())))
            }
            ColumnReader::Int32ColumnReader(reader) => self.each(reader, |value| {
                integer((*value).into(), (*value as u32).into())
            }),
            ColumnReader::Int64ColumnReader(reader) => {
                self.each(reader, |value| integer(*value, *value as u64))
            }
            ColumnReader::Int96ColumnReader(reader) => self.each(reader, |value| {
                // Times of old files; milliseconds do not overflow.
                let days = value.to_millis() as f64 / (SECONDS_OF_A_DAY * 1e3);
                Some(Value::Days(days))
            }),
            ColumnReader::FloatColumnReader(reader) => {
                self.each(reader, |value| number((*value).into()))
            }
            ColumnReader::DoubleColumnReader(reader) => self.each(reader, |value| number(*value)),
            ColumnReader::ByteArrayColumnReader(reader) => {
                self.each(reader, |value| meaning.of_bytes(value.as_bytes()))
            }
            ColumnReader::FixedLenByteArrayColumnReader(reader) => {
                self.each(reader, |value| meaning.of_bytes(value.as_bytes()))
            }
        }
    }

    /// Hands each cell to the table; `value` returns none for bytes that are neither a text nor a number.
    fn each<T: DataType>(
        &mut self,
        mut reader: ColumnReaderImpl<T>,
        value: impl for<'v> Fn(&'v T::T) -> Option<Value<'v>>,
    ) -> Result<(), InputError> {
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        loop {
            levels.clear();
            values.clear();
            let read = reader.read_records(ROWS, Some(&mut levels), None, &mut values);
            let (rows, _, _) =
                read.map_err(|error| self.wrong(&format!("cannot be read ({error})")))?;
            if rows == 0 {
                return Ok(());
            }
            // A few bytes can stand for any number of rows.
            if self.row + rows as u64 > self.last {
                return Err(self.wrong("has more rows than the file promises"));
            }
            let mut present = values.iter();
            for row in 0..rows {
                let absent = levels
                    .get(row)
                    .is_some_and(|level| *level < self.nulls_below);
                let cell = match if absent { None } else { present.next() } {
                    Some(cell) => value(cell).ok_or_else(|| {
                        self.wrong("has bytes that are neither text nor a number")
                    })?,
                    None => Value::Missing,
                };
                self.row += 1;
                self.table.push(self.column, cell, self.row)?;
            }
        }
    }

    fn wrong(&self, problem: &str) -> InputError {
        let name = self.name;
        self.table.wrong(
            self.row + 1,
            format!(
                "column {name:?} {problem}; leave it out with this line in [data.columns]: {name:?} = {{ type = \"ignore\" }}"
            ),
        )
    }
}
