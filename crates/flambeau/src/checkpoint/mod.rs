//! `flambeau checkpoint`: lists, shows, verifies and exports checkpoints.

mod export;
mod feed;
mod rows;
#[cfg(test)]
mod tests;
mod verify;

use daemon::{noteln, outln};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ::checkpoint::{BlockRange, CheckpointError, Manifest, Store, folder_name, load, resolve};
use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressDrawTarget};
use serde_json::{Value, json};

use self::export::Export;
pub(crate) use self::export::{Output, Values, write};
pub(crate) use self::rows::table_of;
use self::verify::{Verified, verify};
use crate::command::block_on;
use crate::error::CommandError;

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// List the checkpoints of a run.
    Ls(Named),
    /// Show the job, the progress and the files of a checkpoint.
    Show(Named),
    /// Read checkpoints whole and compare them with their checksums.
    Verify {
        #[command(flatten)]
        named: Named,
        /// No progress bar.
        #[arg(long)]
        quiet: bool,
    },
    /// Write a checkpoint's weights as a safetensors file, under the variables' own names, or the rows of a table.
    Export(Export),
}

#[derive(Clone, Debug, Args)]
pub(crate) struct Named {
    /// A run directory, a folder of checkpoints, a single checkpoint, or the URL of one of these, as in
    /// s3://bucket/folder.
    location: String,
    /// JSON instead of tables.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: &Command) -> Result<(), CommandError> {
    block_on(async {
        match command {
            Command::Ls(named) => {
                let found = list(&named.location).await?;
                print(
                    named,
                    json!(found.iter().map(Found::json).collect::<Vec<_>>()),
                    || list_table(&found),
                );
            }
            Command::Show(named) => {
                let (store, manifest) = pick(&named.location).await?;
                print(named, manifest_json(&store, &manifest), || {
                    manifest_text(&store, &manifest)
                });
            }
            Command::Verify { named, quiet } => {
                let verified = verify(&named.location, *quiet).await?;
                let all: Vec<Value> = verified.iter().map(Verified::json).collect();
                print(named, json!(all), || {
                    let lines: Vec<String> = verified.iter().map(Verified::line).collect();
                    lines.join("\n")
                });
                let damages: Vec<String> = verified.into_iter().flat_map(|v| v.damages).collect();
                if !damages.is_empty() {
                    return Err(CommandError::Damaged { damages });
                }
            }
            Command::Export(export) => export.run().await?,
        }
        Ok(())
    })
}

fn print(named: &Named, value: Value, text: impl FnOnce() -> String) {
    if named.json {
        outln!("{value}");
    } else {
        outln!("{}", text());
    }
}

/// Returns the checkpoint at a location; the newest whole one if the location has several. Warns of newer checkpoints
/// that are damaged.
async fn pick(location: &str) -> Result<(Store, Manifest), CommandError> {
    let (_, number) = resolve(location).await?;
    let (store, manifest) = load(location).await?;
    if number.is_none() {
        for listed in store.list().await? {
            if listed.complete
                && listed.number > manifest.number
                && let Err(error) = check(&store, listed.number).await?
            {
                noteln!("flambeau: passed over: {error}");
            }
        }
    }
    Ok((store, manifest))
}

/// Returns a checkpoint's manifest if all of its files exist, otherwise the damage.
///
/// # Errors
/// If the store cannot be read.
async fn check(
    store: &Store,
    number: u64,
) -> Result<Result<Manifest, CheckpointError>, CommandError> {
    let checked = match store.manifest(number).await {
        Ok(manifest) => store.check_present(&manifest).await.map(|()| manifest),
        Err(error) => Err(error),
    };
    match checked {
        Err(
            error @ (CheckpointError::Damaged { .. }
            | CheckpointError::Newer { .. }
            | CheckpointError::NotFound(_)),
        ) => Ok(Err(error)),
        checked => Ok(Ok(checked?)),
    }
}

/// A checkpoint of which at least one file exists.
struct Found {
    number: u64,
    location: String,
    /// The manifest, or its damage; `None` if the checkpoint is unfinished.
    manifest: Option<Result<Manifest, CheckpointError>>,
}

impl Found {
    fn state(&self) -> String {
        match &self.manifest {
            None => "unfinished".to_owned(),
            Some(Ok(_)) => "whole".to_owned(),
            Some(Err(error @ CheckpointError::Newer { .. })) => error.to_string(),
            Some(Err(CheckpointError::Damaged { file, reason, .. })) => {
                let name = file.rsplit('/').next().unwrap_or(file);
                format!("damaged: {name}: {reason}")
            }
            Some(Err(error)) => format!("damaged: {error}"),
        }
    }

    fn json(&self) -> Value {
        let mut value = json!({
            "number": self.number,
            "location": self.location,
            "state": self.state(),
        });
        if let Some(Ok(m)) = &self.manifest {
            value["run"] = m.run.as_str().into();
            value["clock"] = m.clock.into();
            value["steps"] = m.steps.into();
            value["samples"] = m.samples.into();
            value["bytes"] = m.own_bytes().into();
            value["began"] = m.began.into();
        }
        value
    }
}

async fn list(location: &str) -> Result<Vec<Found>, CommandError> {
    let (store, number) = resolve(location).await?;
    let mut all = Vec::new();
    for listed in store.list().await? {
        if number.is_some_and(|number| number != listed.number) {
            continue;
        }
        all.push(Found {
            number: listed.number,
            location: store.checkpoint_location(listed.number),
            manifest: if listed.complete {
                Some(check(&store, listed.number).await?)
            } else {
                None
            },
        });
    }
    match number {
        Some(number) if all.is_empty() => {
            let place = store.checkpoint_location(number);
            Err(CheckpointError::NotFound(format!("{place} is not there")).into())
        }
        _ => Ok(all),
    }
}

fn list_table(found: &[Found]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "number",
        "clock",
        "steps in all",
        "samples",
        "size",
        "age",
        "state",
    ]);
    for found in found {
        let of = |text: fn(&Manifest) -> String| match &found.manifest {
            Some(Ok(manifest)) => text(manifest),
            _ => String::new(),
        };
        table.add_row([
            found.number.to_string(),
            of(|m| m.clock.to_string()),
            of(|m| m.steps.to_string()),
            of(|m| m.samples.to_string()),
            of(|m| HumanBytes(m.own_bytes()).to_string()),
            of(|m| HumanDuration(age(m)).to_string()),
            found.state(),
        ]);
    }
    table.trim_fmt()
}

/// Returns the time since the checkpoint was begun; zero if this machine's clock is behind.
fn age(manifest: &Manifest) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
        .saturating_sub(Duration::from_secs(manifest.began))
}

/// Returns a manifest as JSON, with the checkpoint's location and the numbers of the checkpoints on which it builds.
fn manifest_json(store: &Store, manifest: &Manifest) -> Value {
    let mut value = json!(manifest);
    value["location"] = store.checkpoint_location(manifest.number).into();
    value["builds_on"] = json!(manifest.builds_on());
    value
}

fn manifest_text(store: &Store, m: &Manifest) -> String {
    let elements: u64 = m.variables.iter().map(|v| v.elements()).sum();
    let slots = m.variables.iter().map(|v| v.slots);
    let slots = match (slots.clone().min(), slots.max()) {
        (Some(1), Some(1)) => "1 slot".to_owned(),
        (Some(least), Some(most)) if least < most => format!("{least} to {most} slots"),
        (_, slots) => format!("{} slots", slots.unwrap_or_default()),
    };
    let mut files = Table::new();
    files
        .load_preset(presets::NOTHING)
        .set_header(["file", "size", "blocks", "sha256"]);
    for file in &m.files {
        let blocks: u64 = file.blocks.iter().map(count).sum();
        let name = &file.name;
        files.add_row([
            match file.checkpoint {
                Some(earlier) => format!("{}/{name}", folder_name(earlier)),
                None => name.clone(),
            },
            HumanBytes(file.bytes).to_string(),
            blocks.to_string(),
            file.sha256.clone(),
        ]);
    }
    format!(
        "{place}\n\
         job {:?}, {}: step {}, {} steps and {} samples in all, epoch {} of the shard map\n\
         run {}, begun {} ago\n\
         {} variables, {elements} weights, {slots} beside each, blocks of {} at the most\n\
         {} in its own folder; {} files of {} shards\n{files}",
        m.job,
        m.mode,
        m.clock,
        m.steps,
        m.samples,
        m.epoch,
        if m.run.is_empty() { "unknown" } else { &m.run },
        HumanDuration(age(m)),
        m.variables.len(),
        m.block_elements,
        HumanBytes(m.own_bytes()),
        m.files.len(),
        m.shards,
        place = store.checkpoint_location(m.number),
        files = files.trim_fmt(),
    )
}

fn count(range: &BlockRange) -> u64 {
    u64::from(range.last - range.first) + 1
}

/// Returns a progress bar of bytes on stderr. It is hidden if `quiet` is true or stderr is no terminal.
fn bar(bytes: u64, quiet: bool) -> ProgressBar {
    let target = if quiet {
        ProgressDrawTarget::hidden()
    } else {
        ProgressDrawTarget::stderr_with_hz(10)
    };
    let bar = ProgressBar::with_draw_target(Some(bytes), target);
    let template = "[{bar:30}] {bytes} of {total_bytes}, {bytes_per_sec} {msg}";
    bar.with_style(crate::progress::style(template))
}
