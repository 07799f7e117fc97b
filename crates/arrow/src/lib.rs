//! Arrow record batches as data. The result of a DataFusion query, a table of Lance or Delta Lake, or whatever else
//! provides record batches becomes a data source in a few lines. Polars exports record batches through Arrow's C
//! interface. As for a Parquet file, the job's `[data]` gives the types of the columns, the label and the missing
//! values. Times of day are refused.
//!
//! ```
//! use std::sync::Arc;
//!
//! use arrow_array::{Float32Array, RecordBatch, StringArray};
//! use data::{DataSetup, Dataset, InputError, Source};
//!
//! /// The houses that a query finds.
//! struct Houses;
//!
//! impl Source for Houses {
//!     fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
//!         setup.only_options(&[])?;
//!         let batch = RecordBatch::try_from_iter([
//!             ("city", Arc::new(StringArray::from(vec!["Bern", "Basel"])) as _),
//!             ("price", Arc::new(Float32Array::from(vec![1.5, 2.5])) as _),
//!         ]);
//!         let batch = batch.map_err(|error| InputError::Invalid(error.to_string()))?;
//!         flambeau_arrow::dataset(setup, "houses", [batch])
//!     }
//! }
//! ```
//!
//! Programs that use the crate `flambeau` name `flambeau::Source` in place of `data::Source`, and so on.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Date32Type, Date64Type, Decimal32Type, Decimal64Type, Decimal128Type,
    Decimal256Type, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type,
    Int64Type, TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType,
    TimestampSecondType, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, GenericBinaryArray, OffsetSizeTrait, RecordBatch};
use arrow_schema::{DataType, TimeUnit};
use data::{Cell, CellWriter, DataSetup, Dataset, InputError, RowBatch, open_batches};

/// Opens a data set of record batches, which stay in memory. `origin` names the batches in messages. All workers of a
/// cluster must open the same rows in the same order, so a query needs an `ORDER BY`.
///
/// # Errors
/// Names the row, the column and the value that does not fit the job; [`InputError::Invalid`] if there is no row.
pub fn dataset(
    setup: &DataSetup,
    origin: &str,
    batches: impl IntoIterator<Item = RecordBatch>,
) -> Result<Dataset, InputError> {
    let batches = batches.into_iter().map(Rows::from).collect();
    open_batches(setup, origin, batches)
}

/// The rows of a record batch, for predictions.
///
/// Booleans, numbers, decimals, texts, dates, times and lists of these are read, also in dictionaries.
#[derive(Clone, Debug)]
pub struct Rows(RecordBatch);

impl From<RecordBatch> for Rows {
    fn from(batch: RecordBatch) -> Self {
        Self(batch)
    }
}

impl RowBatch for Rows {
    fn names(&self) -> Vec<String> {
        let schema = self.0.schema_ref();
        schema.fields().iter().map(|f| f.name().clone()).collect()
    }

    fn index_columns(&self) -> Vec<String> {
        let pandas = self.0.schema_ref().metadata().get("pandas");
        pandas.map_or_else(Vec::new, |pandas| data::pandas_index(pandas))
    }

    fn rows(&self) -> usize {
        self.0.num_rows()
    }

    fn has_lists(&self, column: usize) -> bool {
        matches!(
            self.0.column(column).data_type(),
            DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..)
        )
    }

    fn read(&self, column: usize, to: &mut CellWriter) -> Result<(), InputError> {
        let column = self.0.column(column);
        match column.data_type() {
            DataType::List(_) => {
                let lists = column.as_list::<i32>();
                let ends = lists.value_offsets().windows(2);
                let ends = ends.map(|ends| (ends[0] as usize, ends[1] as usize));
                read_lists(column, lists.values(), ends, to)
            }
            DataType::LargeList(_) => {
                let lists = column.as_list::<i64>();
                let ends = lists.value_offsets().windows(2);
                let ends = ends.map(|ends| (ends[0] as usize, ends[1] as usize));
                read_lists(column, lists.values(), ends, to)
            }
            DataType::FixedSizeList(_, length) => {
                let lists = column.as_fixed_size_list();
                let length = *length as usize;
                let ends = (0..lists.len()).map(|row| (row * length, (row + 1) * length));
                read_lists(column, lists.values(), ends, to)
            }
            _ => {
                let cell = reader(column).ok_or_else(|| unfit(column, to))?;
                (0..column.len()).try_for_each(|row| {
                    to.push(match column.is_null(row) {
                        true => Cell::Missing,
                        false => cell(row).ok_or_else(|| beyond(column, to))?,
                    })
                })
            }
        }
    }
}

/// Passes the elements of lists to `to`. `ends` has the index of the first element of each list, and the index behind
/// its last element.
fn read_lists(
    lists: &dyn Array,
    elements: &dyn Array,
    ends: impl Iterator<Item = (usize, usize)>,
    to: &mut CellWriter,
) -> Result<(), InputError> {
    let cell = reader(elements).ok_or_else(|| unfit(elements, to))?;
    for (row, (first, end)) in ends.enumerate() {
        if !lists.is_null(row) {
            for element in (first..end).filter(|element| elements.is_valid(*element)) {
                let cell = cell(element).ok_or_else(|| beyond(elements, to))?;
                to.push_element(cell)?;
            }
        }
        to.end_list();
    }
    Ok(())
}

fn unfit(array: &dyn Array, to: &CellWriter) -> InputError {
    to.unfit(&format!(
        "has the type {}, which is neither a number, a text, a date nor a list of these",
        array.data_type()
    ))
}

/// Returns the error for a value that cannot be read.
fn beyond(array: &dyn Array, to: &CellWriter) -> InputError {
    let kind = match array.data_type() {
        DataType::Dictionary(_, values) => values,
        kind => kind,
    };
    to.unfit(match kind {
        DataType::Binary | DataType::LargeBinary => "has bytes that are no text in UTF-8",
        _ => "has a decimal with more than 38 digits",
    })
}

/// Returns the value in a row, which must not be null. `None` for a decimal with too many digits, and for bytes that are
/// not UTF-8.
type Reader<'a> = Box<dyn Fn(usize) -> Option<Cell<'a>> + 'a>;

/// Returns a function that reads the values of an array; `None` if the type of the array is not supported.
fn reader(array: &dyn Array) -> Option<Reader<'_>> {
    const SECOND: i128 = 1_000_000_000;
    Some(match array.data_type() {
        DataType::Null => Box::new(|_| Some(Cell::Missing)),
        DataType::Boolean => {
            let array = array.as_boolean();
            Box::new(|row| Some(Cell::Boolean(array.value(row))))
        }
        DataType::Int8 => integers::<Int8Type>(array),
        DataType::Int16 => integers::<Int16Type>(array),
        DataType::Int32 => integers::<Int32Type>(array),
        DataType::Int64 => integers::<Int64Type>(array),
        DataType::UInt8 => integers::<UInt8Type>(array),
        DataType::UInt16 => integers::<UInt16Type>(array),
        DataType::UInt32 => integers::<UInt32Type>(array),
        DataType::UInt64 => integers::<UInt64Type>(array),
        DataType::Float16 => values::<Float16Type>(array, |n| Cell::Single(n.to_f32())),
        DataType::Float32 => values::<Float32Type>(array, Cell::Single),
        DataType::Float64 => values::<Float64Type>(array, Cell::Double),
        DataType::Utf8 => {
            let array = array.as_string::<i32>();
            Box::new(|row| Some(Cell::Text(array.value(row))))
        }
        DataType::LargeUtf8 => {
            let array = array.as_string::<i64>();
            Box::new(|row| Some(Cell::Text(array.value(row))))
        }
        DataType::Utf8View => {
            let array = array.as_string_view();
            Box::new(|row| Some(Cell::Text(array.value(row))))
        }
        DataType::Binary => bytes(array.as_binary::<i32>()),
        DataType::LargeBinary => bytes(array.as_binary::<i64>()),
        DataType::Date32 => values::<Date32Type>(array, |days| Cell::Days(days.into())),
        DataType::Date64 => times::<Date64Type>(array, SECOND / 1000),
        DataType::Timestamp(TimeUnit::Second, _) => times::<TimestampSecondType>(array, SECOND),
        DataType::Timestamp(TimeUnit::Millisecond, _) => {
            times::<TimestampMillisecondType>(array, SECOND / 1000)
        }
        DataType::Timestamp(TimeUnit::Microsecond, _) => {
            times::<TimestampMicrosecondType>(array, 1000)
        }
        DataType::Timestamp(TimeUnit::Nanosecond, _) => times::<TimestampNanosecondType>(array, 1),
        DataType::Decimal32(_, scale) => decimals::<Decimal32Type>(array, *scale),
        DataType::Decimal64(_, scale) => decimals::<Decimal64Type>(array, *scale),
        DataType::Decimal128(_, scale) => decimals::<Decimal128Type>(array, *scale),
        DataType::Decimal256(_, scale) => {
            let (array, scale) = (array.as_primitive::<Decimal256Type>(), *scale);
            Box::new(move |row| {
                Some(Cell::Decimal {
                    unscaled: array.value(row).to_i128()?,
                    scale: scale.into(),
                })
            })
        }
        DataType::Dictionary(..) => {
            let array = array.as_any_dictionary();
            let values = array.values();
            if values.is_empty() {
                return Some(Box::new(|_| Some(Cell::Missing)));
            }
            let keys = array.normalized_keys();
            let value = reader(values)?;
            Box::new(move |row| match values.is_null(keys[row]) {
                true => Some(Cell::Missing),
                false => value(keys[row]),
            })
        }
        _ => return None,
    })
}

/// Reads bytes that are texts in UTF-8.
fn bytes<O: OffsetSizeTrait>(array: &GenericBinaryArray<O>) -> Reader<'_> {
    Box::new(|row| std::str::from_utf8(array.value(row)).ok().map(Cell::Text))
}

fn values<T: ArrowPrimitiveType>(
    array: &dyn Array,
    cell: impl Fn(T::Native) -> Cell<'static> + 'static,
) -> Reader<'_> {
    let array = array.as_primitive::<T>();
    Box::new(move |row| Some(cell(array.value(row))))
}

fn integers<T: ArrowPrimitiveType<Native: Into<i128>>>(array: &dyn Array) -> Reader<'_> {
    values::<T>(array, |number| Cell::Integer(number.into()))
}

/// Reads times in units of `unit` nanoseconds.
fn times<T: ArrowPrimitiveType<Native = i64>>(array: &dyn Array, unit: i128) -> Reader<'_> {
    values::<T>(array, move |time| Cell::time(i128::from(time) * unit))
}

fn decimals<T: ArrowPrimitiveType<Native: Into<i128>>>(array: &dyn Array, scale: i8) -> Reader<'_> {
    values::<T>(array, move |number| Cell::Decimal {
        unscaled: number.into(),
        scale: scale.into(),
    })
}
