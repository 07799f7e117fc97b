//! Exports a checkpoint: its weights as one safetensors file, like a run's `model.safetensors`, or the rows of a table.

mod output;
mod rows;

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use ::checkpoint::{Manifest, SavedBlock, Store, weights_header};
use clap::Args;
use indicatif::{HumanBytes, ProgressBar};
use optimizer::VariableRule;
use serde_json::json;
use shared_proto::blocks::VariableSpec;
use shared_proto::job::Job;

pub(crate) use self::output::Output;
pub(crate) use self::rows::write_rows;
use super::feed::{Feed, Follow};
use super::{Named, bar, pick, print};
use crate::error::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct Export {
    #[command(flatten)]
    pub(super) named: Named,
    /// The file to write. With --follow, the folder or the URL to which exports are written.
    #[arg(long, short, value_name = "FILE")]
    pub(super) output: PathBuf,
    /// The rows of this table, as Parquet or safetensors, by the end of the file's name.
    #[arg(long, value_name = "NAME", conflicts_with = "averages")]
    pub(super) table: Option<String>,
    /// The weights' moving averages (ema_decay in the job) instead of the weights.
    #[arg(long)]
    pub(super) averages: bool,
    /// Replace an existing file.
    #[arg(long, conflicts_with = "follow")]
    pub(super) force: bool,
    /// No progress bar.
    #[arg(long)]
    pub(super) quiet: bool,
    #[command(flatten)]
    pub(super) follow: Follow,
}

impl Export {
    pub(super) async fn run(&self) -> Result<(), CommandError> {
        match &self.table {
            Some(table) if self.follow.follow => self.feed(table).follow().await,
            table => self.once(table.as_deref()).await,
        }
    }

    fn feed<'a>(&'a self, table: &'a str) -> Feed<'a> {
        Feed {
            location: &self.named.location,
            table,
            output: &self.output,
            settings: &self.follow,
            json: self.named.json,
        }
    }

    /// Exports the weights, or the rows of a table, of one checkpoint.
    async fn once(&self, table: Option<&str>) -> Result<(), CommandError> {
        let output = &self.output;
        let (store, manifest) = pick(&self.named.location).await?;
        let values = match self.averages {
            true => Values::averages(&store, &manifest)?,
            false => Values::Weights,
        };
        let file = Output::create(output, self.force)?;
        let bar = bar(manifest.bytes(), self.quiet);
        let from = store.checkpoint_location(manifest.number);
        let (written, size) = match table {
            Some(table) => {
                let exported = write_rows(&store, &manifest, table, file, &bar).await?;
                let written = json!({
                    "checkpoint": from,
                    "output": output,
                    "table": table,
                    "rows": exported.rows,
                    "dimension": exported.dimension,
                });
                (written, format!("{} rows of {table}", exported.rows))
            }
            None => {
                let bytes = write(&store, &manifest, &values, file, &bar).await?;
                let written = json!({
                    "checkpoint": from,
                    "output": output,
                    "values": values.name(),
                    "variables": manifest.variables.len(),
                    "bytes": bytes,
                });
                (
                    written,
                    format!("{} of {}", HumanBytes(bytes), values.name()),
                )
            }
        };
        print(&self.named, written, || {
            format!("wrote {}: {size}, from {from}", output.display())
        });
        Ok(())
    }
}

/// The values that are exported for each variable.
pub(crate) enum Values {
    /// The weights.
    Weights,
    /// The moving averages of the variables that have them, and the weights of the others. The rules, one for each
    /// variable, say where the averages of a block are.
    Averages(Vec<VariableRule>),
}

impl Values {
    /// Returns the averages of a checkpoint as the values to export.
    ///
    /// # Errors
    /// If the checkpoint's job keeps no averages, or cannot be read.
    pub(crate) fn averages(store: &Store, manifest: &Manifest) -> Result<Self, CommandError> {
        let checkpoint = store.checkpoint_location(manifest.number);
        let job = Job::parse(&manifest.job_toml).map_err(|error| CommandError::Content {
            path: checkpoint.clone().into(),
            reason: error.to_string(),
        })?;
        let rule = |saved| VariableRule::new(&job, &VariableSpec::from(saved), 1);
        let rules: Vec<VariableRule> = manifest.variables.iter().map(rule).collect();
        match rules.iter().any(VariableRule::has_averages) {
            true => Ok(Self::Averages(rules)),
            false => Err(CommandError::NoAverages { checkpoint }),
        }
    }

    /// Returns the name of these values in the command's output.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Averages(_) => "averages",
        }
    }

    /// Returns these values of a variable's block; `None` if the block lacks the averages that it must have.
    fn of<'a>(&self, block: &'a SavedBlock) -> Option<&'a [u8]> {
        let size = size_of::<f32>();
        let [weights, slots] = block.values.numbers();
        let place = match self {
            Self::Weights => None,
            Self::Averages(rules) => {
                rules[block.id.variable as usize].averages(weights.len() / size)
            }
        };
        match place {
            None => Some(weights),
            Some(place) => slots.get(place.start * size..place.end * size),
        }
    }
}

/// Writes the values file by file, so that no more than one of the checkpoint's files is in memory. Returns the number of
/// bytes of values.
pub(crate) async fn write(
    store: &Store,
    manifest: &Manifest,
    values: &Values,
    mut output: Output,
    bar: &ProgressBar,
) -> Result<u64, CommandError> {
    let header = weights_header(manifest);
    let written = output.file().write_all(&header);
    written.map_err(output.wrong())?;
    let (starts, end) = starts(manifest, header.len() as u64);
    let own = manifest
        .files
        .iter()
        .filter(|file| file.checkpoint.is_none());
    bar.set_length(manifest.own_bytes());
    for entry in own {
        let blocks = store.read_file(manifest, entry).await?;
        let of_variables = |block: &SavedBlock| !manifest.is_table(block.id.variable);
        for block in blocks.into_iter().filter(of_variables) {
            let size = size_of::<f32>() as u64;
            let within = u64::from(block.id.index) * manifest.block_elements * size;
            let place = starts[block.id.variable as usize] + within;
            let values = values.of(&block).ok_or_else(|| CommandError::Content {
                path: store.checkpoint_location(manifest.number).into(),
                reason: format!(
                    "{} has blocks without averages, but its job keeps them",
                    entry.name
                ),
            })?;
            let written = output.file().write_all_at(values, place);
            written.map_err(output.wrong())?;
        }
        bar.inc(entry.bytes);
    }
    bar.finish_and_clear();
    output.finish()?;
    Ok(end - header.len() as u64)
}

/// Returns the offset at which each variable begins, and the end of the last one.
fn starts(manifest: &Manifest, header: u64) -> (Vec<u64>, u64) {
    let mut end = header;
    let mut starts = Vec::with_capacity(manifest.variables.len());
    for variable in &manifest.variables {
        starts.push(end);
        end += variable.elements() * size_of::<f32>() as u64;
    }
    (starts, end)
}
