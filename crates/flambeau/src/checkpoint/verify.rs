//! `flambeau checkpoint verify`: reads checkpoints whole and compares them with their checksums.

use ::checkpoint::{
    CheckpointError, FileEntry, Manifest, NewestFirst, Store, folder_name, resolve,
};
use indicatif::HumanBytes;
use serde_json::{Value, json};

use super::{bar, list};
use crate::error::CommandError;

/// The result of verifying a checkpoint.
pub(super) struct Verified {
    location: String,
    files: usize,
    bytes: u64,
    pub(super) damages: Vec<String>,
}

impl Verified {
    pub(super) fn json(&self) -> Value {
        json!({
            "location": self.location,
            "files": self.files,
            "bytes": self.bytes,
            "whole": self.damages.is_empty(),
            "damages": self.damages,
        })
    }

    pub(super) fn line(&self) -> String {
        let state = match self.damages.len() {
            0 => "whole".to_owned(),
            n => format!("{n} damaged"),
        };
        let (files, bytes) = (self.files, HumanBytes(self.bytes));
        format!("{}: {state}, {files} files, {bytes}", self.location)
    }

    async fn read(
        &mut self,
        store: &Store,
        manifest: &Manifest,
        file: &FileEntry,
        reading: &mut NewestFirst,
    ) -> Result<(), CommandError> {
        self.files += 1;
        self.bytes += file.bytes;
        match store.read_file(manifest, file).await {
            Err(error) if error.is_damaged() => self.damages.push(error.to_string()),
            read => {
                for block in read? {
                    if let Err(why) = reading.take(manifest, file, block) {
                        self.damages
                            .push(format!("{} is damaged: {why}", self.location));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Verifies the checkpoint at a location, or all checkpoints there that have a manifest. Continues after a damaged one.
/// Leaves out checkpoints that a running job deletes meanwhile because newer ones replace them.
pub(super) async fn verify(location: &str, quiet: bool) -> Result<Vec<Verified>, CommandError> {
    let mut all = Vec::new();
    let (store, _) = resolve(location).await?;
    let found = list(location).await?;
    let good = found
        .iter()
        .filter_map(|f| f.manifest.as_ref()?.as_ref().ok());
    let bar = bar(good.map(Manifest::bytes).sum(), quiet);
    for found in found {
        // If a file is missing, the others are still verified, so that all damage is reported.
        let manifest = match found.manifest {
            None => continue,
            Some(Ok(manifest)) => Ok(manifest),
            Some(Err(_)) => store.manifest(found.number).await,
        };
        bar.set_message(folder_name(found.number));
        let location = found.location.clone();
        let mut verified = Verified {
            location: found.location,
            files: 0,
            bytes: 0,
            damages: Vec::new(),
        };
        match manifest {
            Err(error) if error.is_retryable() => return Err(error.into()),
            Err(error) => verified.damages.push(error.to_string()),
            Ok(manifest) => {
                let mut reading = NewestFirst::default();
                for file in NewestFirst::files(&manifest) {
                    let read = verified.read(&store, &manifest, file, &mut reading);
                    read.await?;
                    bar.inc(file.bytes);
                }
                if let (true, Err(why)) = (verified.damages.is_empty(), reading.finish(&manifest)) {
                    verified
                        .damages
                        .push(format!("{location} is damaged: {why}"));
                }
                if let Err(reason) = coordinator::can_begin_with(&manifest) {
                    verified
                        .damages
                        .push(format!("{location} is damaged: {reason}"));
                }
            }
        }
        if !verified.damages.is_empty() && store.is_deleted(found.number).await {
            continue;
        }
        all.push(verified);
    }
    bar.finish_and_clear();
    if all.is_empty() {
        let none = format!("nothing to verify: no finished checkpoint at {location}");
        return Err(CheckpointError::NotFound(none).into());
    }
    Ok(all)
}
