//! The rows of a table as a Parquet or a safetensors file.

use std::fs::File;
use std::io::{self, BufWriter, Seek, Write};

use ::checkpoint::{Manifest, Store};
use indicatif::ProgressBar;
use shared_proto::blocks::BlockId;
use shared_proto::table::SavedRows;

use super::super::rows::{ParquetRows, table_of};
use super::Output;
use crate::error::CommandError;

/// The number of bytes for the header of a safetensors file with two tensors, including the length in front of it.
/// Spaces fill the rest.
const HEADER_BYTES: usize = 512;

/// The outcome of an export of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exported {
    /// The number of rows.
    pub(crate) rows: u64,
    /// The number of values in each row.
    pub(crate) dimension: u32,
}

/// Writes the ids and values of a table's rows, bucket by bucket. The extension of the output's name chooses the
/// format. A Parquet file has the columns `id` and `values`, a list. A safetensors file has the tensors `values` of
/// shape `[rows, dimension]` and `ids` of shape `[rows]`. Memory holds one of the checkpoint's files, a row group, and
/// the ids of the rows that have changed since the last full checkpoint.
///
/// # Errors
/// If there is no such table, if the name ends in neither `.parquet` nor `.safetensors`, or if the store or the system
/// fails.
pub(crate) async fn write_rows(
    store: &Store,
    manifest: &Manifest,
    table: &str,
    mut output: Output,
    bar: &ProgressBar,
) -> Result<Exported, CommandError> {
    let (variable, spec) = table_of(store, manifest, table)?;
    let dimension = spec.dimension as usize;
    let extension = output.path().extension().unwrap_or_default();
    let parquet = match extension.to_str() {
        Some("parquet") => true,
        Some("safetensors") => false,
        _ => {
            return Err(CommandError::UnknownFormat {
                path: output.path().to_owned(),
            });
        }
    };
    let file = output.file().try_clone();
    let file = file.map_err(output.wrong())?;
    let mut form: Box<dyn Form> = match parquet {
        true => {
            let rows = ParquetRows::begin(BufWriter::new(file), dimension);
            Box::new(rows.map_err(output.wrong())?)
        }
        false => Box::new(TensorFile::begin(file, dimension).map_err(output.wrong())?),
    };
    let mut rows = 0;
    let files = manifest.files.iter();
    let of_table = files.filter(|file| file.blocks.iter().any(|range| range.variable == variable));
    bar.set_length(of_table.map(|file| file.bytes).sum());
    let path = output.path().to_owned();
    let add = |_, saved: SavedRows| {
        rows += saved.ids.len() as u64 / size_of::<u64>() as u64;
        form.add(&saved).map_err(CommandError::file(&path))
    };
    let wanted = |id: BlockId| id.variable == variable;
    let read = store.read_rows(manifest, wanted, add, |bytes| bar.inc(bytes));
    read.await?;
    form.finish().map_err(output.wrong())?;
    bar.finish_and_clear();
    output.finish()?;
    Ok(Exported {
        rows,
        dimension: spec.dimension,
    })
}

/// A file format for rows.
trait Form {
    /// Adds the rows of a bucket.
    fn add(&mut self, rows: &SavedRows) -> io::Result<()>;

    /// Ends the file.
    fn finish(self: Box<Self>) -> io::Result<()>;
}

impl Form for ParquetRows<BufWriter<File>> {
    fn add(&mut self, rows: &SavedRows) -> io::Result<()> {
        Self::add(self, rows)
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        Self::finish(*self)?.flush()
    }
}

/// A safetensors file. Its header needs the number of rows, which is known only at the end. Until then, the header's
/// space is blank, and the ids are in a temporary file.
struct TensorFile {
    file: BufWriter<File>,
    ids: BufWriter<File>,
    rows: u64,
    dimension: usize,
}

impl TensorFile {
    fn begin(file: File, dimension: usize) -> io::Result<Self> {
        let mut file = BufWriter::new(file);
        file.write_all(&[b' '; HEADER_BYTES])?;
        Ok(Self {
            file,
            ids: BufWriter::new(tempfile::tempfile()?),
            rows: 0,
            dimension,
        })
    }
}

impl Form for TensorFile {
    fn add(&mut self, saved: &SavedRows) -> io::Result<()> {
        let rows = saved.ids.len() / size_of::<u64>();
        self.rows += rows as u64;
        self.ids.write_all(&saved.ids)?;
        // The optimizer's state follows the values of a row.
        let width = saved.numbers.len().checked_div(rows).unwrap_or(0).max(1);
        let values = self.dimension * size_of::<f32>();
        let mut numbers = saved.numbers.chunks_exact(width);
        numbers.try_for_each(|row| self.file.write_all(&row[..values.min(width)]))
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        let Self {
            mut file,
            ids,
            rows,
            dimension,
        } = *self;
        let mut ids = ids.into_inner()?;
        ids.rewind()?;
        io::copy(&mut ids, &mut file)?;
        let values_end = rows * dimension as u64 * size_of::<f32>() as u64;
        let ids_end = values_end + rows * size_of::<u64>() as u64;
        let header = format!(
            r#"{{"values":{{"dtype":"F32","shape":[{rows},{dimension}],"data_offsets":[0,{values_end}]}},"ids":{{"dtype":"U64","shape":[{rows}],"data_offsets":[{values_end},{ids_end}]}}}}"#
        );
        let length = HEADER_BYTES - size_of::<u64>();
        file.rewind()?;
        file.write_all(&(length as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        file.flush()
    }
}
