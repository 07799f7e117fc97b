//! The cells of a Parquet column, which are read from the file into a table.

use half::f16;
use parquet::basic::{ConvertedType, LogicalType, TimeUnit};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{AsBytes, DataType};
use parquet::schema::types::ColumnDescriptor;

use crate::columns::cell::Cell;
use crate::columns::date;
use crate::columns::header::unfit;
use crate::columns::table::Table;
use crate::error::InputError;

/// The number of rows of a column that are read at once.
const ROWS: usize = 1 << 12;

/// The meaning of a column's numbers.
#[derive(Clone, Copy)]
pub(super) enum Meaning {
    /// Numbers, or texts.
    Plain,
    Unsigned,
    /// Decimal fractions, with this number of digits behind the point.
    Decimal(i32),
    /// Days since 1970.
    Days,
    /// A time since the beginning of 1970, in units of this number of nanoseconds.
    Time(i128),
    Half,
}

impl Meaning {
    /// Returns the meaning that the file's schema gives to a column.
    pub(super) fn new(column: &ColumnDescriptor) -> Self {
        let (millis, micros, nanos) = (1_000_000, 1000, 1);
        match (column.logical_type_ref(), column.converted_type()) {
            (Some(LogicalType::Timestamp(time)), _) => Self::Time(match time.unit {
                TimeUnit::MILLIS => millis,
                TimeUnit::MICROS => micros,
                TimeUnit::NANOS => nanos,
            }),
            (Some(LogicalType::Date), _) | (None, ConvertedType::DATE) => Self::Days,
            (Some(LogicalType::Float16), _) => Self::Half,
            (Some(LogicalType::Decimal(_)), _) | (None, ConvertedType::DECIMAL) => {
                Self::Decimal(column.type_scale())
            }
            (Some(LogicalType::Integer(integer)), _) if !integer.is_signed => Self::Unsigned,
            (None, ConvertedType::TIMESTAMP_MILLIS) => Self::Time(millis),
            (None, ConvertedType::TIMESTAMP_MICROS) => Self::Time(micros),
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

    fn of_integer(self, number: i64, unsigned: u64) -> Cell<'static> {
        match self {
            Self::Plain | Self::Half => Cell::Integer(number.into()),
            Self::Unsigned => Cell::Integer(unsigned.into()),
            Self::Decimal(scale) => Cell::Decimal {
                unscaled: number.into(),
                scale,
            },
            Self::Days => Cell::Days(number as f64),
            Self::Time(unit) => Cell::Days(date::days_of(i128::from(number) * unit)),
        }
    }

    /// Returns the value of bytes: a text, a decimal fraction or a number of half precision. `None` if the bytes are not
    /// valid.
    fn of_bytes(self, bytes: &[u8]) -> Option<Cell<'_>> {
        match (self, bytes) {
            (Self::Half, [low, high]) => {
                let half = f16::from_le_bytes([*low, *high]);
                Some(Cell::Single(half.to_f32()))
            }
            (Self::Decimal(scale), [first, ..]) => {
                let (sign, fill) = if *first < 128 { (0, 0) } else { (-1, 0xff) };
                // Of more than 128 bits, those in front may be no more than the sign.
                let (extra, bytes) = bytes.split_at(bytes.len().saturating_sub(16));
                let same_sign = bytes
                    .first()
                    .is_some_and(|byte| (*byte < 128) == (sign == 0));
                let fits = extra.is_empty() || same_sign && extra.iter().all(|byte| *byte == fill);
                if !fits {
                    return None;
                }
                let unscaled = bytes
                    .iter()
                    .fold(sign, |n: i128, byte| n << 8 | i128::from(*byte));
                Some(Cell::Decimal { unscaled, scale })
            }
            (Self::Plain, text) => std::str::from_utf8(text).ok().map(Cell::Text),
            _ => None,
        }
    }
}

/// Reads the cells of a column from the file into the table.
pub(super) struct ColumnWriter<'a> {
    pub(super) is_list: bool,
    pub(super) table: &'a mut Table,
    pub(super) column: usize,
    pub(super) name: &'a str,
    pub(super) meaning: Meaning,
    /// The definition level of a present cell. A cell with a lower level is missing.
    pub(super) nulls_below: i16,
    /// The number of the group's rows that have been read.
    pub(super) read: u32,
    /// The number of rows that the file promises for the group.
    pub(super) count: u32,
}

impl ColumnWriter<'_> {
    /// Reads the column.
    ///
    /// # Errors
    /// Names the row that cannot be read.
    pub(super) fn read(&mut self, reader: ColumnReader) -> Result<(), InputError> {
        let meaning = self.meaning;
        let integer = |signed, unsigned| Some(meaning.of_integer(signed, unsigned));
        match reader {
            ColumnReader::BoolColumnReader(reader) => {
                self.each(reader, |value| Some(Cell::Boolean(*value)))
            }
            ColumnReader::Int32ColumnReader(reader) => self.each(reader, |value| {
                integer((*value).into(), (*value as u32).into())
            }),
            ColumnReader::Int64ColumnReader(reader) => {
                self.each(reader, |value| integer(*value, *value as u64))
            }
            ColumnReader::Int96ColumnReader(reader) => self.each(reader, |value| {
                // Times of old files; milliseconds do not overflow.
                let nanoseconds = i128::from(value.to_millis()) * 1_000_000;
                Some(Cell::Days(date::days_of(nanoseconds)))
            }),
            ColumnReader::FloatColumnReader(reader) => {
                self.each(reader, |value| Some(Cell::Single(*value)))
            }
            ColumnReader::DoubleColumnReader(reader) => {
                self.each(reader, |value| Some(Cell::Double(*value)))
            }
            ColumnReader::ByteArrayColumnReader(reader) => {
                self.each(reader, |value| meaning.of_bytes(value.as_bytes()))
            }
            ColumnReader::FixedLenByteArrayColumnReader(reader) => {
                self.each(reader, |value| meaning.of_bytes(value.as_bytes()))
            }
        }
    }

    /// Adds each cell to the table. `value` returns none for bytes that are not a valid text or number.
    fn each<T: DataType>(
        &mut self,
        mut reader: ColumnReaderImpl<T>,
        value: impl for<'v> Fn(&'v T::T) -> Option<Cell<'v>>,
    ) -> Result<(), InputError> {
        if self.is_list {
            return self.each_list(reader, value);
        }
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
            if rows > (self.count - self.read) as usize {
                return Err(self.wrong("has more rows than the file promises"));
            }
            if values.len() == rows && self.table.extend(self.column, values.iter().map(&value)) {
                self.read += rows as u32;
                continue;
            }
            let mut present = values.iter();
            for row in 0..rows {
                let absent = levels
                    .get(row)
                    .is_some_and(|level| *level < self.nulls_below);
                let cell = match if absent { None } else { present.next() } {
                    Some(cell) => value(cell).ok_or_else(|| self.beyond())?,
                    None => Cell::Missing,
                };
                self.read += 1;
                self.table.push(self.column, cell)?;
            }
        }
    }

    /// Adds the elements of each list to the table.
    fn each_list<T: DataType>(
        &mut self,
        mut reader: ColumnReaderImpl<T>,
        value: impl for<'v> Fn(&'v T::T) -> Option<Cell<'v>>,
    ) -> Result<(), InputError> {
        let (mut levels, mut starts, mut values) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            levels.clear();
            starts.clear();
            values.clear();
            let read = reader.read_records(ROWS, Some(&mut levels), Some(&mut starts), &mut values);
            let (rows, _, count) =
                read.map_err(|error| self.wrong(&format!("cannot be read ({error})")))?;
            if rows == 0 {
                return Ok(());
            }
            if rows > (self.count - self.read) as usize || starts.first() != Some(&0) {
                return Err(self.wrong("has other rows than the file promises"));
            }
            let mut present = values.iter();
            for at in 0..count.min(levels.len()).min(starts.len()) {
                // A level of 0 begins a list, and so ends the one before. Of an empty list and of one that is missing, and for a missing element,
                // there is no value.
                if starts[at] == 0 && at > 0 {
                    self.end_list();
                }
                if levels[at] == self.nulls_below
                    && let Some(cell) = present.next()
                {
                    let cell = value(cell).ok_or_else(|| self.beyond())?;
                    self.table.push_element(self.column, cell)?;
                }
            }
            self.end_list();
        }
    }

    fn end_list(&mut self) {
        self.table.end_list(self.column);
        self.read += 1;
    }

    /// Returns the error for bytes that are not a valid cell.
    fn beyond(&self) -> InputError {
        self.wrong(match self.meaning {
            Meaning::Decimal(_) => "has a decimal with more than 38 digits",
            _ => "has bytes that are neither text nor a number",
        })
    }

    fn wrong(&self, problem: &str) -> InputError {
        let place = self.table.place(self.read as usize);
        place.wrong(unfit(self.name, problem))
    }
}
