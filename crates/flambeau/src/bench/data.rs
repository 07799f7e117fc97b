//! `flambeau bench data`: measures how long one thread takes to turn files into batches. `scripts/measure-data.sh`
//! compares the times with those of pyarrow.

use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::Device;
use clap::Args;
use comfy_table::{Table, presets};
use daemon::outln;
use model::Batch;
use model::input::{Order, Purpose, Samples};
use model::registry::Registry;
use replica::ReplicaError;
use serde::Serialize;
use shared_proto::job::Job;

use super::median;
use crate::error::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// Jobs whose data is read.
    #[arg(value_name = "JOB.toml", required = true)]
    jobs: Vec<PathBuf>,
    /// The number of times that each is opened and read.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    turns: u32,
    /// Samples in a batch.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// The medians of a job's turns.
#[derive(Debug, Serialize)]
struct Row {
    job: String,
    kind: String,
    streamed: bool,
    samples: u64,
    /// Seconds until the data is open: files are found, columns fitted, and samples that are not streamed are in memory.
    open_seconds: f64,
    /// Seconds of one pass over all samples, in the order of training.
    pass_seconds: f64,
    /// Samples divided by the sum of both times.
    samples_per_second: f64,
    /// Megabytes of the files divided by the sum of both times; `None` if the data is not in files of this machine.
    megabytes_per_second: Option<f64>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let rows = arguments.jobs.iter().map(|job| measure(job, arguments));
    let rows = rows.collect::<Result<Vec<Row>, CommandError>>()?;
    if arguments.json {
        outln!("{}", serde_json::json!({ "rows": rows }));
        return Ok(());
    }
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header([
        "job",
        "kind",
        "streamed",
        "samples",
        "open s",
        "pass s",
        "samples/s",
        "MB/s",
    ]);
    for row in rows {
        let megabytes = row.megabytes_per_second;
        table.add_row([
            row.job,
            row.kind,
            row.streamed.to_string(),
            row.samples.to_string(),
            format!("{:.3}", row.open_seconds),
            format!("{:.3}", row.pass_seconds),
            format!("{:.0}", row.samples_per_second),
            megabytes.map_or("-".to_owned(), |rate| format!("{rate:.0}")),
        ]);
    }
    outln!("{table}");
    Ok(())
}

fn measure(path: &Path, arguments: &Arguments) -> Result<Row, CommandError> {
    let text = std::fs::read_to_string(path).map_err(CommandError::file(path))?;
    let job = Job::from_toml(&text).map_err(|error| CommandError::Content {
        path: path.to_owned(),
        reason: error.to_string(),
    })?;
    let registry = Registry::builtin();
    let (mut opens, mut passes, mut samples) = (Vec::new(), Vec::new(), 0);
    for _ in 0..arguments.turns {
        let began = Instant::now();
        let mut data = registry.open(&job.data, job.seed, Purpose::Training)?;
        opens.push(began.elapsed().as_secs_f64());
        let began = Instant::now();
        samples = 0;
        for part in [&mut data.training, &mut data.evaluation] {
            samples += read(&mut **part, job.seed, arguments.batch)?;
        }
        passes.push(began.elapsed().as_secs_f64());
    }
    let (open_seconds, pass_seconds) = (median(opens), median(passes));
    let seconds = open_seconds + pass_seconds;
    let bytes = job.data.dir.as_deref().and_then(size);
    Ok(Row {
        job: path.display().to_string(),
        kind: job.data.kind,
        streamed: job.data.stream,
        samples,
        open_seconds,
        pass_seconds,
        samples_per_second: samples as f64 / seconds,
        megabytes_per_second: bytes.map(|bytes| bytes as f64 / 1e6 / seconds),
    })
}

/// Reads all samples in batches. Returns the number of samples.
fn read(samples: &mut dyn Samples, seed: u64, batch: u64) -> Result<u64, CommandError> {
    let (order, count) = (Order::Shuffled { seed, epoch: 0 }, samples.count());
    let mut read = 0;
    for start in (0..count).step_by(batch as usize) {
        let samples = samples.read(order, start..count.min(start + batch))?;
        let batch = Batch::of_samples(samples, &Device::Cpu).map_err(ReplicaError::from)?;
        read += batch.samples() as u64;
    }
    Ok(read)
}

/// Returns the size in bytes of a file, or of all files in a folder and its subfolders; `None` if one cannot be read.
fn size(path: &Path) -> Option<u64> {
    let found = path.metadata().ok()?;
    if !found.is_dir() {
        return Some(found.len());
    }
    let entries = std::fs::read_dir(path).ok()?;
    entries.map(|entry| size(&entry.ok()?.path())).sum()
}
