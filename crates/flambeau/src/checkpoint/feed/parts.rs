//! Writes the files of an export.

use std::io;

use ::checkpoint::{Files, sha256};
use bytes::Bytes;
use shared_proto::table::SavedRows;

use super::super::rows::{ParquetRows, parquet_ids};
use super::entry::{Entry, File, folder};
use crate::error::CommandError;

/// A file is closed when its values have this size in bytes; its last bucket may exceed it. An open file is in memory.
const FILE_BYTES: u64 = 64 << 20;

/// The most ids in one file of removed rows.
const FILE_IDS: usize = 1 << 20;

/// The files of an export, which are written one after the other.
pub(super) struct Parts<'a> {
    files: &'a Files,
    folder: String,
    /// A random part of the files' names. Each attempt at an export has another one, so an abandoned attempt cannot
    /// overwrite the files of another.
    token: u64,
    dimension: usize,
    /// The open file and the number of its rows; none between files.
    open: Option<(ParquetRows<Vec<u8>>, u64)>,
    removed: Vec<u64>,
    rows: u64,
    written: Vec<File>,
}

impl<'a> Parts<'a> {
    /// Begins the export of this number.
    pub(super) fn new(files: &'a Files, number: u64, dimension: usize) -> Self {
        Self {
            files,
            folder: folder(number),
            token: rand::random(),
            dimension,
            open: None,
            removed: Vec::new(),
            rows: 0,
            written: Vec::new(),
        }
    }

    /// Adds rows of a bucket.
    pub(super) async fn add(&mut self, rows: &SavedRows) -> Result<(), CommandError> {
        let count = (rows.ids.len() / size_of::<u64>()) as u64;
        if count == 0 {
            return Ok(());
        }
        let begin = || ParquetRows::begin(Vec::new(), self.dimension);
        let (mut open, mut in_file) = match self.open.take() {
            Some(open) => open,
            None => (begin().map_err(self.wrong())?, 0),
        };
        open.add(rows).map_err(self.wrong())?;
        self.rows += count;
        in_file += count;
        self.open = Some((open, in_file));
        let bytes = in_file * (self.dimension * size_of::<f32>()) as u64;
        match bytes < FILE_BYTES {
            true => Ok(()),
            false => self.close().await,
        }
    }

    /// Adds the ids of rows that were removed.
    pub(super) fn remove(&mut self, ids: impl IntoIterator<Item = u64>) {
        self.removed.extend(ids);
    }

    /// Writes the open file and the removed ids, and commits the export.
    pub(super) async fn finish(mut self, mut entry: Entry) -> Result<Entry, CommandError> {
        self.close().await?;
        entry.rows = self.rows;
        entry.removed = self.removed.len() as u64;
        let removed = std::mem::take(&mut self.removed);
        for (part, ids) in removed.chunks(FILE_IDS).enumerate() {
            let content = parquet_ids(ids).map_err(self.wrong())?;
            let file = self.write(
                format!("removed-{part:04}-{:016x}.parquet", self.token),
                content,
            );
            entry.removed_files.push(file.await?);
        }
        entry.files = self.written;
        entry.write(self.files).await?;
        Ok(entry)
    }

    /// Writes the open file, if there is one.
    async fn close(&mut self) -> Result<(), CommandError> {
        let Some((open, _)) = self.open.take() else {
            return Ok(());
        };
        let content = open.finish().map_err(self.wrong())?;
        let name = format!("rows-{:04}-{:016x}.parquet", self.written.len(), self.token);
        let file = self.write(name, content).await?;
        self.written.push(file);
        Ok(())
    }

    async fn write(&self, name: String, content: Vec<u8>) -> Result<File, CommandError> {
        let file = File {
            bytes: content.len() as u64,
            sha256: sha256(&content),
            name,
        };
        let content = Bytes::from(content);
        self.files.write(&self.folder, &file.name, content).await?;
        Ok(file)
    }

    fn wrong(&self) -> impl FnOnce(io::Error) -> CommandError + use<> {
        CommandError::file(self.files.place(&self.folder))
    }
}
