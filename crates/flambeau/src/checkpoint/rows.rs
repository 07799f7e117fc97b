//! The tables of a checkpoint: their indices in block ids, and the Parquet format of their rows.

use std::io::{self, Write};
use std::sync::Arc;

use ::checkpoint::{Manifest, Store};
use parquet::data_type::{FloatType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use shared_proto::payload;
use shared_proto::table::{SavedRows, TableSpec, ids_of_bytes};

use crate::error::CommandError;

/// A row group is written when it has this number of rows; its last bucket may exceed it.
const GROUP_ROWS: usize = 1 << 17;

const ROWS: &str = "message rows {
    required int64 id (INTEGER(64, false));
    required group values (LIST) { repeated group list { required float element; } }
}";

const IDS: &str = "message ids { required int64 id (INTEGER(64, false)); }";

/// A Parquet file with the columns `id` and `values`, a list. Rows are buffered until they fill a row group.
pub(crate) struct ParquetRows<W: Write + Send> {
    writer: SerializedFileWriter<W>,
    dimension: usize,
    ids: Vec<i64>,
    values: Vec<f32>,
}

impl<W: Write + Send> ParquetRows<W> {
    /// Begins a file.
    pub(crate) fn begin(output: W, dimension: usize) -> io::Result<Self> {
        Ok(Self {
            writer: begin(output, ROWS)?,
            dimension,
            ids: Vec::new(),
            values: Vec::new(),
        })
    }

    /// Adds the rows of a bucket.
    pub(crate) fn add(&mut self, saved: &SavedRows) -> io::Result<()> {
        let ids = ids_of_bytes(&saved.ids);
        let numbers = payload::elements(&saved.numbers);
        let width = numbers.len().checked_div(ids.len()).unwrap_or(0).max(1);
        // The optimizer's state follows the values of a row.
        let values = numbers
            .chunks_exact(width)
            .flat_map(|row| &row[..self.dimension.min(width)]);
        self.values.extend(values.map(|value| value.get()));
        self.ids.extend(ids.into_iter().map(u64::cast_signed));
        match self.ids.len() < GROUP_ROWS {
            true => Ok(()),
            false => self.write_group().map_err(of_parquet),
        }
    }

    /// Ends the file, and returns its writer.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.write_group().map_err(of_parquet)?;
        self.writer.into_inner().map_err(of_parquet)
    }

    fn write_group(&mut self) -> Result<(), ParquetError> {
        if self.ids.is_empty() {
            return Ok(());
        }
        let (ids, values) = (&self.ids, &self.values);
        let mut group = self.writer.next_row_group()?;
        if let Some(mut column) = group.next_column()? {
            column.typed::<Int64Type>().write_batch(ids, None, None)?;
            column.close()?;
        }
        if let Some(mut column) = group.next_column()? {
            // Each value is defined; the first of a row begins a new list.
            let defined = vec![1; values.len()];
            let begins = |place: usize| i16::from(!place.is_multiple_of(self.dimension));
            let repeated: Vec<i16> = (0..values.len()).map(begins).collect();
            let typed = column.typed::<FloatType>();
            typed.write_batch(values, Some(&defined), Some(&repeated))?;
            column.close()?;
        }
        group.close()?;
        self.ids.clear();
        self.values.clear();
        Ok(())
    }
}

/// Returns a table's index in block ids, and its specification.
///
/// # Errors
/// If the checkpoint has no such table.
pub(crate) fn table_of<'a>(
    store: &Store,
    manifest: &'a Manifest,
    table: &str,
) -> Result<(u32, &'a TableSpec), CommandError> {
    let mut tables = manifest.tables.iter().enumerate();
    let found = tables.find(|(_, spec)| spec.name == table);
    let (number, spec) = found.ok_or_else(|| CommandError::NoTable {
        checkpoint: store.checkpoint_location(manifest.number),
        table: table.to_owned(),
        tables: manifest
            .tables
            .iter()
            .map(|spec| spec.name.clone())
            .collect(),
    })?;
    Ok(((manifest.variables.len() + number) as u32, spec))
}

/// Returns a Parquet file with the column `id`.
pub(crate) fn parquet_ids(ids: &[u64]) -> io::Result<Vec<u8>> {
    let ids: Vec<i64> = ids.iter().map(|id| id.cast_signed()).collect();
    let mut writer = begin(Vec::new(), IDS)?;
    let mut write = || -> Result<(), ParquetError> {
        let mut group = writer.next_row_group()?;
        if let Some(mut column) = group.next_column()? {
            column.typed::<Int64Type>().write_batch(&ids, None, None)?;
            column.close()?;
        }
        group.close()?;
        Ok(())
    };
    write().map_err(of_parquet)?;
    writer.into_inner().map_err(of_parquet)
}

fn begin<W: Write + Send>(output: W, schema: &str) -> io::Result<SerializedFileWriter<W>> {
    // Values of embeddings hardly repeat, and are rarely filtered by.
    let properties = WriterProperties::builder()
        .set_dictionary_enabled(false)
        .set_statistics_enabled(EnabledStatistics::None)
        .build();
    let schema = parse_message_type(schema).map_err(of_parquet)?;
    let writer = SerializedFileWriter::new(output, Arc::new(schema), Arc::new(properties));
    writer.map_err(of_parquet)
}

fn of_parquet(error: ParquetError) -> io::Error {
    match error {
        ParquetError::External(error) => io::Error::other(error),
        error => io::Error::other(error.to_string()),
    }
}
