//! The manifest of an export, and the search for the newest export.

use ::checkpoint::{CheckpointError, Files, Manifest};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use shared_proto::table::TableSpec;

use crate::error::CommandError;

/// The version of the export format. Other versions are refused.
const FORM: u32 = 1;

/// The name of the manifest. It is written last: a folder without it is no export.
const NAME: &str = "manifest.json";

/// The manifest of an export: `manifest.json` in the export's folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    pub(super) form: u32,
    /// The export's number, from 0, also the name of its folder.
    pub(super) number: u64,
    /// True if the export has all rows. Otherwise it has the rows that have changed since the previous export.
    pub(super) full: bool,
    /// The number of exports since the last one with all rows; 0 if this one has all rows.
    pub(super) since_full: u64,
    pub(super) table: String,
    /// The number of values in each row.
    pub(super) dimension: u32,
    /// The run and the number of the checkpoint.
    pub(super) run: String,
    pub(super) checkpoint: u64,
    /// The training's clock, and the time at which the checkpoint was begun, in seconds since 1970-01-01 00:00 UTC.
    pub(super) clock: u64,
    pub(super) began: u64,
    /// The number of rows in `files`, and of the ids in `removed_files`.
    pub(super) rows: u64,
    pub(super) removed: u64,
    /// Parquet files with the columns `id` and `values`.
    pub(super) files: Vec<File>,
    /// Parquet files with the column `id`: the rows that were removed since the previous export. A removed row need not
    /// be in any earlier export.
    pub(super) removed_files: Vec<File>,
}

/// A file of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// SHA-256 of the file's content, in hexadecimal.
    pub(super) sha256: String,
}

impl Entry {
    /// Returns the entry for an export of all rows of a checkpoint. It has no files yet.
    pub(super) fn full(checkpoint: &Manifest, spec: &TableSpec, number: u64) -> Self {
        Self {
            form: FORM,
            number,
            full: true,
            since_full: 0,
            table: spec.name.clone(),
            dimension: spec.dimension,
            run: checkpoint.run.clone(),
            checkpoint: checkpoint.number,
            clock: checkpoint.clock,
            began: checkpoint.began,
            rows: 0,
            removed: 0,
            files: Vec::new(),
            removed_files: Vec::new(),
        }
    }

    /// Returns the entry for an export of the rows that have changed since the export `before`. It has no files yet.
    pub(super) fn changes(checkpoint: &Manifest, spec: &TableSpec, before: &Self) -> Self {
        Self {
            full: false,
            since_full: before.since_full + 1,
            ..Self::full(checkpoint, spec, before.number + 1)
        }
    }

    /// Returns whether this is the export of a checkpoint.
    pub(super) fn is_of(&self, checkpoint: &Manifest) -> bool {
        (&self.run, self.checkpoint) == (&checkpoint.run, checkpoint.number)
    }

    /// Returns the name of the export's folder.
    pub(super) fn folder(&self) -> String {
        folder(self.number)
    }

    /// Returns the newest export that has a manifest; `None` if there is none.
    ///
    /// # Errors
    /// If exports cannot be read, or the newest one is damaged.
    pub(super) async fn newest(files: &Files) -> Result<Option<Self>, CommandError> {
        let mut numbers: Vec<u64> = files
            .folders()
            .await?
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect();
        numbers.sort_unstable();
        for number in numbers.into_iter().rev() {
            let text = match files.read(&folder(number), NAME).await {
                Ok(text) => text,
                Err(CheckpointError::NotFound(_)) => continue,
                Err(error) => return Err(error.into()),
            };
            let entry: Result<Self, _> = serde_json::from_slice(&text);
            let place = files.place(&format!("{}/{NAME}", folder(number)));
            return match entry {
                Ok(entry) if entry.form == FORM && entry.number == number => Ok(Some(entry)),
                Ok(_) => Err(CheckpointError::damaged(
                    &place,
                    "it is of another export or another release",
                )
                .into()),
                Err(error) => Err(CheckpointError::damaged(&place, error.to_string()).into()),
            };
        }
        Ok(None)
    }

    /// Commits the export: writes its manifest.
    ///
    /// # Errors
    /// If another process has committed an export of this number, or the manifest cannot be written.
    pub(super) async fn write(&self, files: &Files) -> Result<(), CommandError> {
        let mut text = serde_json::to_vec_pretty(self).map_err(|error| CommandError::Content {
            path: files.place(&self.folder()).into(),
            reason: error.to_string(),
        })?;
        text.push(b'\n');
        files
            .create(&self.folder(), NAME, Bytes::from(text))
            .await
            .map_err(|error| match error {
                CheckpointError::Exists(place) => CommandError::FeedTaken { place },
                error => error.into(),
            })
    }
}

/// Returns the name of an export's folder: its number, with zeros in front, so that names are in the order of the numbers.
pub(super) fn folder(number: u64) -> String {
    format!("{number:08}")
}
