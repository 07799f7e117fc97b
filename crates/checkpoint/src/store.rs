//! The store of checkpoints: writes, finds and reads them.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use object_store::ObjectStore;
use shared_proto::blocks::BlockId;
use shared_proto::table::SavedRows;
use shared_proto::task::boxed;

use crate::error::CheckpointError;
use crate::files::Files;
use crate::format::{folder_name, number_of};
use crate::manifest::{FileEntry, Manifest, is_file_name};
use crate::newest_first::{NewestFirst, Piece};
use crate::part::{SavedBlock, check_blocks, decode};

mod owner;
mod tidy;

pub use owner::{BEAT, Claim, DEAD_AFTER};
pub use tidy::Listed;

const MANIFEST: &str = "manifest.json";

/// A location that holds checkpoints.
#[derive(Clone)]
pub struct Store {
    pub(crate) files: Files,
    /// The id of the run that writes through this store.
    run: String,
}

impl fmt::Debug for Store {
    /// Leaves out the files: the `Debug` output of an object store contains keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.location()).finish()
    }
}

impl From<Files> for Store {
    fn from(files: Files) -> Self {
        Self {
            files,
            run: String::new(),
        }
    }
}

impl Store {
    /// Returns a store over any object store, named `location` in messages. It uses no threads.
    pub fn over(objects: Arc<dyn ObjectStore>, location: &str) -> Self {
        Files::over(objects, location).into()
    }

    /// Returns the location, an absolute path or a URL without credentials.
    pub fn location(&self) -> &str {
        self.files.location()
    }

    /// Returns the location of one checkpoint, which [`load`](crate::load) accepts.
    pub fn checkpoint_location(&self, number: u64) -> String {
        self.files.place(&folder_name(number))
    }

    /// Returns the store for one run. The names of its parts contain the run's id, so that no run can
    /// overwrite the parts of another.
    #[must_use]
    pub fn of_run(self, run: &str) -> Self {
        Self {
            run: run.to_owned(),
            ..self
        }
    }

    /// Returns the id of the run that [`of_run`](Self::of_run) has set; empty if none is set.
    pub fn run(&self) -> &str {
        &self.run
    }

    /// Returns the store below one of this store's folders.
    pub(crate) fn below(&self, name: &str) -> Self {
        Self {
            files: self.files.below(name),
            run: self.run.clone(),
        }
    }

    /// Returns the names of the folders in the store.
    pub(crate) async fn folders(&self) -> Result<Vec<String>, CheckpointError> {
        self.files.folders().await
    }

    /// Writes a file of a checkpoint that has no manifest yet. The file appears whole or not at all, and
    /// replaces an existing one of that name. Once this returns, it survives a crash.
    ///
    /// # Errors
    /// If the store cannot be written to, or the name leads elsewhere.
    #[boxed]
    pub async fn write_file(
        &self,
        checkpoint: u64,
        name: &str,
        content: Bytes,
    ) -> Result<(), CheckpointError> {
        if !is_file_name(name) || name == MANIFEST {
            return Err(CheckpointError::Location {
                location: name.to_owned(),
                reason: "it is no name of a file of a checkpoint".to_owned(),
            });
        }
        self.files
            .write(&folder_name(checkpoint), name, content)
            .await
    }

    /// Writes a manifest, which completes its checkpoint, reads it back, and returns it with its
    /// checksum. All its files must have been written. Never replaces an existing manifest.
    ///
    /// # Errors
    /// If the store cannot be written to; [`CheckpointError::Damaged`] if the checkpoint would not be
    /// whole; [`CheckpointError::Exists`] if another writer has made a checkpoint of that number.
    #[boxed]
    pub async fn write_manifest(&self, manifest: Manifest) -> Result<Manifest, CheckpointError> {
        let bytes = manifest.to_bytes()?;
        self.check_present(&manifest).await?;
        let folder = folder_name(manifest.number);
        let place = self.files.place(&format!("{folder}/{MANIFEST}"));
        let expected = Manifest::read(&bytes, &place)?;
        match self.files.create(&folder, MANIFEST, bytes.clone()).await {
            // A retried request may have found the file that its own first attempt created.
            Ok(()) | Err(CheckpointError::Exists(_)) => {}
            Err(error) => return Err(error),
        }
        if self.files.read(&folder, MANIFEST).await? == bytes {
            Ok(expected)
        } else {
            Err(CheckpointError::Exists(place))
        }
    }

    /// Reads a checkpoint's manifest.
    ///
    /// # Errors
    /// [`CheckpointError::NotFound`] if there is none; [`CheckpointError::Damaged`] or
    /// [`CheckpointError::Newer`]; or if the store cannot be read.
    #[boxed]
    pub async fn manifest(&self, number: u64) -> Result<Manifest, CheckpointError> {
        let folder = folder_name(number);
        let what = self.files.place(&format!("{folder}/{MANIFEST}"));
        let manifest = Manifest::read(&self.files.read(&folder, MANIFEST).await?, &what)?;
        if manifest.number == number {
            Ok(manifest)
        } else {
            let reason = format!(
                "it is of {}, and not of the folder that it is in",
                folder_name(manifest.number)
            );
            Err(CheckpointError::damaged(&what, reason))
        }
    }

    /// Returns whether the manifest of a checkpoint no longer exists. The manifest is deleted before the checkpoint's
    /// other files.
    #[boxed]
    pub async fn is_deleted(&self, number: u64) -> bool {
        let manifest = self.manifest(number).await;
        matches!(manifest, Err(CheckpointError::NotFound(_)))
    }

    /// Finds the newest checkpoint that has a good manifest and files of the right sizes. Skips damaged
    /// ones with a warning.
    ///
    /// # Errors
    /// If the store cannot be read, or if the newest is of a newer format: an older one would lose the
    /// training of the newer program.
    #[boxed]
    pub async fn newest(&self) -> Result<Option<Manifest>, CheckpointError> {
        self.newest_of(|_| true, |_| true).await
    }

    /// Finds the newest good checkpoint below a number, as [`newest`](Self::newest) does.
    ///
    /// # Errors
    /// As [`newest`](Self::newest).
    #[boxed]
    pub async fn before(&self, number: u64) -> Result<Option<Manifest>, CheckpointError> {
        self.before_of(number, &|_| true).await
    }

    /// Finds the newest good checkpoint below a number for which `wanted` returns true.
    ///
    /// # Errors
    /// As [`newest`](Self::newest).
    #[boxed]
    pub async fn before_of(
        &self,
        number: u64,
        wanted: &(dyn for<'a> Fn(&'a Manifest) -> bool + Sync),
    ) -> Result<Option<Manifest>, CheckpointError> {
        self.newest_of(|other| other < number, wanted).await
    }

    async fn newest_of(
        &self,
        numbered: impl Fn(u64) -> bool,
        wanted: impl Fn(&Manifest) -> bool,
    ) -> Result<Option<Manifest>, CheckpointError> {
        let folders = self.folders().await?;
        let numbers = folders.iter().filter_map(|name| number_of(name));
        let mut numbers: Vec<u64> = numbers.filter(|number| numbered(*number)).collect();
        numbers.sort_unstable();
        for number in numbers.into_iter().rev() {
            match self.whole(number).await {
                Ok(manifest) if wanted(&manifest) => return Ok(Some(manifest)),
                Ok(_) => {}
                Err(CheckpointError::Damaged { file, reason, .. }) => {
                    tracing::warn!(file, reason, "a damaged checkpoint is passed over");
                }
                Err(CheckpointError::NotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Reads a checkpoint's manifest and checks that all its files exist with the right sizes.
    async fn whole(&self, number: u64) -> Result<Manifest, CheckpointError> {
        let manifest = self.manifest(number).await?;
        self.check_present(&manifest).await?;
        Ok(manifest)
    }

    /// Checks that a checkpoint's files exist and have the right sizes, without reading them.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], or if the store cannot be read.
    #[boxed]
    pub async fn check_present(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        let mut folders = HashMap::new();
        for folder in manifest.builds_on().into_iter().chain([manifest.number]) {
            folders.insert(folder, self.files.list(&folder_name(folder)).await?);
        }
        for entry in &manifest.files {
            let folder = manifest.folder_of(entry);
            let files = folders.get(&folder).map_or(&[][..], Vec::as_slice);
            let found = files.iter().find(|(name, _)| *name == entry.name);
            let reason = match found {
                None if folder != manifest.number => format!(
                    "it is missing, and checkpoint {} builds on it; if that was copied from elsewhere, copy this one too",
                    manifest.number
                ),
                None => "it is missing".to_owned(),
                Some((_, bytes)) if *bytes < entry.bytes => {
                    format!("truncated: {bytes} of {} bytes", entry.bytes)
                }
                Some((_, bytes)) if *bytes > entry.bytes => {
                    format!("altered: {bytes} bytes instead of {}", entry.bytes)
                }
                Some(_) => continue,
            };
            let file = self.file_place(folder, &entry.name);
            return Err(CheckpointError::damaged(&file, reason));
        }
        Ok(())
    }

    /// Reads a checkpoint's file and checks that it is unaltered and has the blocks that the manifest
    /// names.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], or if the store cannot be read.
    #[boxed]
    pub async fn read_file(
        &self,
        manifest: &Manifest,
        file: &FileEntry,
    ) -> Result<Vec<SavedBlock>, CheckpointError> {
        let folder = manifest.folder_of(file);
        let place = self.file_place(folder, &file.name);
        let content = match self.files.read(&folder_name(folder), &file.name).await {
            Err(CheckpointError::NotFound(_)) => {
                return Err(CheckpointError::damaged(&place, "it is missing"));
            }
            content => content?,
        };
        let (manifest, file) = (manifest.clone(), file.clone());
        self.files
            .work(move || {
                let damaged = |reason| CheckpointError::damaged(&place, reason);
                file.check(&content).map_err(damaged)?;
                let blocks = decode(&content, &place)?;
                check_blocks(&blocks, &manifest, &file).map_err(damaged)?;
                Ok(blocks)
            })
            .await
    }

    /// Reads the rows of the buckets for which `wanted` returns true, and calls `take` with rows of one bucket at a
    /// time. Each row comes once. The newest files of a chain of incremental checkpoints are read first. One file is in
    /// memory at a time, together with the ids of the rows in incremental checkpoints. Calls `after` with the number of
    /// bytes of each file once the file is read.
    ///
    /// # Errors
    /// As [`read_file`](Self::read_file), or if the files of the chain do not fit each other, or the errors of `take`.
    pub async fn read_rows<E: From<CheckpointError>>(
        &self,
        manifest: &Manifest,
        wanted: impl Fn(BlockId) -> bool,
        mut take: impl FnMut(BlockId, SavedRows) -> Result<(), E>,
        mut after: impl FnMut(u64),
    ) -> Result<(), E> {
        let place = self.checkpoint_location(manifest.number);
        let damaged = |why| CheckpointError::damaged(&place, why);
        let mut reading = NewestFirst::default();
        for file in NewestFirst::files(manifest) {
            let mut ids = file.blocks.iter().flat_map(|range| range.ids());
            if !ids.any(&wanted) {
                continue;
            }
            for block in self.read_file(manifest, file).await? {
                let id = block.id;
                if wanted(id) {
                    let piece = reading.take(manifest, file, block).map_err(damaged)?;
                    if let Some(rows) = piece.and_then(Piece::into_rows) {
                        take(id, rows)?;
                    }
                }
            }
            after(file.bytes);
        }
        Ok(reading.finish(manifest).map_err(damaged)?)
    }

    /// Reads and checks all files of a checkpoint.
    ///
    /// # Errors
    /// As [`read_file`](Self::read_file), of the first file that is damaged.
    #[boxed]
    pub async fn verify(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        let mut reading = NewestFirst::default();
        let damaged =
            |why| CheckpointError::damaged(&self.checkpoint_location(manifest.number), why);
        for file in NewestFirst::files(manifest) {
            for block in self.read_file(manifest, file).await? {
                reading.take(manifest, file, block).map_err(damaged)?;
            }
        }
        reading.finish(manifest).map_err(damaged)
    }

    /// Adds an older checkpoint that may serve instead to an error about a checkpoint's content.
    #[boxed]
    pub async fn advise(&self, number: u64, error: CheckpointError) -> CheckpointError {
        match error {
            CheckpointError::Damaged { file, reason, .. } => {
                // If none can be found, the damage is reported all the same.
                let has_it = |manifest: &Manifest, entry: &FileEntry| {
                    self.file_place(manifest.folder_of(entry), &entry.name) == file
                };
                let without = |manifest: &Manifest| {
                    !manifest.files.iter().any(|entry| has_it(manifest, entry))
                };
                let instead = self.before_of(number, &without).await.ok().flatten();
                CheckpointError::Damaged {
                    file,
                    reason,
                    instead: instead.map(|m| (m.number, self.checkpoint_location(m.number))),
                }
            }
            error => error,
        }
    }

    /// Returns the location of a checkpoint's file, for messages.
    pub fn place_of(&self, manifest: &Manifest, file: &FileEntry) -> String {
        self.file_place(manifest.folder_of(file), &file.name)
    }

    fn file_place(&self, number: u64, name: &str) -> String {
        self.files.place(&format!("{}/{name}", folder_name(number)))
    }
}
