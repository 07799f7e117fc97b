//! A feed of a table's rows for other programs. Each export is a folder. It has all rows, or those that have changed
//! since the previous export.
//!
//! - `entry`: the manifest of an export, and the search for the newest export
//! - `parts`: writes the files of an export
//! - `changes`: the rows that differ between two checkpoints

mod changes;
mod entry;
mod parts;
#[cfg(test)]
mod tests;

use daemon::{noteln, outln};
use std::path::Path;
use std::time::Duration;

use ::checkpoint::{CheckpointError, Files, Manifest, Store, resolve};
use clap::Args;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use self::changes::Difference;
use self::entry::Entry;
use self::parts::Parts;
use super::rows::table_of;
use crate::error::CommandError;

/// The source and the destination of a feed.
#[derive(Clone, Debug)]
pub(super) struct Feed<'a> {
    /// A run directory, a folder of checkpoints, or the URL of one.
    pub(super) location: &'a str,
    pub(super) table: &'a str,
    /// The folder or the URL of the exports.
    pub(super) output: &'a Path,
    pub(super) settings: &'a Follow,
    /// True if reports are JSON.
    pub(super) json: bool,
}

/// The settings of a feed.
#[derive(Clone, Debug, Args)]
pub(crate) struct Follow {
    /// Export the newest checkpoint's rows of the table, and after each newer checkpoint the rows that have changed.
    #[arg(long, requires = "table")]
    pub(super) follow: bool,
    /// The pause in seconds before it looks for a newer checkpoint.
    #[arg(long, requires = "follow", default_value_t = 10.0, value_name = "SECONDS", value_parser = seconds)]
    every: f64,
    /// The most exports of changed rows before one of all rows.
    #[arg(long, requires = "follow", default_value_t = 100, value_name = "N")]
    changes: u64,
    /// End after the newest checkpoint, instead of waiting for newer ones.
    #[arg(long, requires = "follow")]
    once: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok();
    let seconds = seconds.filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| format!("{text:?} is no time in seconds from 0.1 to 86400"))
}

impl Feed<'_> {
    /// Exports the newest checkpoint, and then each newer checkpoint that it finds, until SIGINT or SIGTERM. After a
    /// temporary failure of a store, tries again. With `once`, exports the newest checkpoint only.
    ///
    /// # Errors
    /// If there is no such table, a checkpoint cannot be read or an export cannot be written. A temporary failure of a
    /// store is an error with `once` only; a full store is always an error. Committed exports remain.
    pub(super) async fn follow(&self) -> Result<(), CommandError> {
        let signals = |kind| signal(kind).map_err(CommandError::file("signals"));
        let mut interrupt = signals(SignalKind::interrupt())?;
        let mut terminate = signals(SignalKind::terminate())?;
        let files = Files::open(&self.output.to_string_lossy())?;
        let mut last = self.newest(&files).await?;
        let (mut announced, mut failure) = (false, None);
        loop {
            let exported = tokio::select! {
                exported = self.export_next(&files, &mut last, failure.is_some()) => exported,
                _ = interrupt.recv() => return Ok(()),
                _ = terminate.recv() => return Ok(()),
            };
            match exported {
                Ok(_) if self.settings.once => return Ok(()),
                Ok(true) => {
                    failure = None;
                    continue;
                }
                Ok(false) => {
                    failure = None;
                    if !std::mem::replace(&mut announced, true) {
                        noteln!("waiting for newer checkpoints at {}", self.location);
                    }
                }
                // A full store needs a person: each attempt would leave more files there.
                Err(CommandError::Checkpoint(error))
                    if error.is_retryable() && !error.is_full() && !self.settings.once =>
                {
                    if failure.as_ref() != Some(&error) {
                        noteln!("{error}; trying again every {} s", self.settings.every);
                    }
                    failure = Some(error);
                }
                Err(error) => return Err(error),
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs_f64(self.settings.every)) => {}
                _ = interrupt.recv() => return Ok(()),
                _ = terminate.recv() => return Ok(()),
            }
        }
    }

    /// Returns the newest export of the feed; `None` before the first. Fails if it is of another table.
    async fn newest(&self, files: &Files) -> Result<Option<Entry>, CommandError> {
        let newest = Entry::newest(files).await?;
        if let Some(last) = &newest
            && last.table != self.table
        {
            return Err(CommandError::OtherFeed {
                output: files.location().to_owned(),
                table: last.table.clone(),
            });
        }
        Ok(newest)
    }

    /// Exports the newest checkpoint, reports the export, and stores it in `last`, the newest export. Returns false if
    /// no checkpoint is newer than `last`. `again` is true if the previous attempt has failed: it may nevertheless have
    /// committed its export.
    async fn export_next(
        &self,
        files: &Files,
        last: &mut Option<Entry>,
        again: bool,
    ) -> Result<bool, CommandError> {
        if again
            && let Some(newest) = self.newest(files).await?
            && last.as_ref().is_none_or(|last| newest.number > last.number)
        {
            self.report(files, &newest);
            *last = Some(newest);
        }
        let Some(entry) = self.export(files, last.as_ref()).await? else {
            return Ok(false);
        };
        self.report(files, &entry);
        *last = Some(entry);
        Ok(true)
    }

    /// Exports the newest checkpoint. Returns `None` if no checkpoint is newer than that of the last export.
    async fn export(
        &self,
        files: &Files,
        last: Option<&Entry>,
    ) -> Result<Option<Entry>, CommandError> {
        let store = match resolve(self.location).await {
            Ok((store, None)) => store,
            Ok((_, Some(_))) => {
                return Err(CommandError::OneCheckpoint {
                    location: self.location.to_owned(),
                });
            }
            // A run that has just begun.
            Err(CheckpointError::NotFound(_)) if !self.settings.once => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut failed: Option<(u64, CommandError)> = None;
        loop {
            let Some(newest) = store.newest().await? else {
                let none = format!("no whole checkpoint in {}", store.location());
                return match self.settings.once {
                    true => Err(CheckpointError::NotFound(none).into()),
                    false => Ok(None),
                };
            };
            // If the newest checkpoint is damaged later, an older one is found, which must not follow its own successor.
            if last.is_some_and(|last| last.run == newest.run && newest.number <= last.checkpoint) {
                return Ok(None);
            }
            // The job deletes checkpoints that newer ones have replaced, also while they are read.
            if let Some((number, error)) = failed
                && number == newest.number
            {
                return Err(error);
            }
            match self.write(files, &store, &newest, last).await {
                Ok(entry) => return Ok(Some(entry)),
                Err(CommandError::Checkpoint(
                    error @ (CheckpointError::Damaged { .. } | CheckpointError::NotFound(_)),
                )) => failed = Some((newest.number, error.into())),
                Err(error) => return Err(error),
            }
        }
    }

    async fn write(
        &self,
        files: &Files,
        store: &Store,
        now: &Manifest,
        last: Option<&Entry>,
    ) -> Result<Entry, CommandError> {
        let (variable, spec) = table_of(store, now, self.table)?;
        let number = last.map_or(0, |last| last.number + 1);
        let parts = || Parts::new(files, number, spec.dimension as usize);
        let difference = Difference {
            store,
            now,
            variable,
        };
        let begin = last.filter(|last| {
            last.dimension == spec.dimension && last.since_full < self.settings.changes
        });
        if let Some(last) = begin {
            let (mut of_chain, mut compared) = (parts(), parts());
            let changed = if last.run == now.run
                && difference.by_chain(last.checkpoint, &mut of_chain).await?
            {
                Some(of_chain)
            } else {
                let found = difference.by_comparison(last, &mut compared).await?;
                found.then_some(compared)
            };
            if let Some(changed) = changed {
                return changed.finish(Entry::changes(now, spec, last)).await;
            }
        }
        let mut all = parts();
        difference.all(&mut all).await?;
        all.finish(Entry::full(now, spec, number)).await
    }

    fn report(&self, files: &Files, entry: &Entry) {
        let place = files.place(&entry.folder());
        if self.json {
            let mut line = json!(entry);
            line["location"] = place.into();
            outln!("{line}");
            return;
        }
        let rows = match entry.full {
            true => format!("all {} rows", entry.rows),
            false => format!("{} changed rows, {} removed", entry.rows, entry.removed),
        };
        outln!("wrote {place}: {rows}, of checkpoint {}", entry.checkpoint);
    }
}
