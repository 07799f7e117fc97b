//! `flambeau bench train`: the same job in one process, and on clusters.

use clap::Args;
use comfy_table::{Table, presets};
use coordinator::read_job;
use serde::{Deserialize, Serialize};
use shared_proto::job::Job;
use worker::device;
use worker::local;
use worker::model::Registry;

use crate::app::JobArguments;
use crate::error::CommandError;
use crate::train;

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    job: JobArguments,
    /// Numbers of workers to measure; a job's own number does not count here.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2,4",
        value_name = "N,..."
    )]
    worker_counts: Vec<u32>,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(crate) struct LocalArguments {
    #[command(flatten)]
    job: JobArguments,
}

/// One configuration's figures.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Row {
    configuration: String,
    samples_per_second: f64,
    test_accuracy: Option<f64>,
    share_pull: Option<f64>,
    share_compute: Option<f64>,
    share_push: Option<f64>,
    share_wait: Option<f64>,
}

pub(crate) fn run(arguments: Arguments) -> Result<(), CommandError> {
    let job = read_job(arguments.job.file.as_deref(), arguments.job.flags)?;
    let mut rows = vec![single_process(&job)?];
    for workers in arguments.worker_counts {
        eprintln!("measuring {workers} workers ...");
        rows.push(distributed(&job, workers)?);
    }
    if arguments.json {
        println!("{}", serde_json::json!({ "rows": rows }));
    } else {
        println!("{}", table(&rows).trim_fmt());
    }
    Ok(())
}

/// In a process of its own with one thread, as each worker has where there are as many as cores.
fn single_process(job: &Job) -> Result<Row, CommandError> {
    eprintln!("measuring a single process ...");
    let failed = |reason: String| CommandError::Start {
        name: "the single process".to_owned(),
        reason,
    };
    let dir = tempfile::tempdir().map_err(CommandError::file("a temporary folder"))?;
    let file = dir.path().join("job.toml");
    std::fs::write(&file, job.to_toml()).map_err(CommandError::file(&file))?;
    let executable = std::env::current_exe().map_err(CommandError::file("this executable"))?;
    let output = std::process::Command::new(executable)
        .arg("local")
        .arg(&file)
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| failed(error.to_string()))
}

fn distributed(job: &Job, workers: u32) -> Result<Row, CommandError> {
    let dir = tempfile::tempdir().map_err(CommandError::file("a temporary folder"))?;
    let mut job = job.clone();
    job.run_dir = Some(dir.path().to_owned());
    job.cluster.workers = Some(workers);
    let summary = train::train(job, "cpu", true)?.summary;
    let share = |name: &str| summary.times.get(name).copied();
    let plural = if workers == 1 { "" } else { "s" };
    Ok(Row {
        configuration: format!(
            "{workers} worker{plural}, {} ps, {}",
            summary.ps, summary.mode
        ),
        samples_per_second: summary.samples_per_second,
        test_accuracy: summary.test_accuracy,
        share_pull: share("share_pull"),
        share_compute: share("share_compute"),
        share_push: share("share_push"),
        share_wait: share("share_wait"),
    })
}

/// Trains in this process, and prints a [`Row`] as JSON.
pub(crate) fn local(arguments: LocalArguments, registry: &Registry) -> Result<(), CommandError> {
    let job = read_job(arguments.job.file.as_deref(), arguments.job.flags)?;
    let device = device::open(device::Choice::Cpu)?;
    let outcome = local::train(&job, registry, &device, None)?;
    let row = Row {
        configuration: "single process, candle alone, 1 thread".to_owned(),
        samples_per_second: outcome.samples as f64 / outcome.seconds,
        test_accuracy: outcome.metrics.get("accuracy").copied(),
        ..Row::default()
    };
    println!("{}", serde_json::json!(row));
    Ok(())
}

fn table(rows: &[Row]) -> Table {
    let percent =
        |share: Option<f64>| share.map_or("-".to_owned(), |s| format!("{:.0} %", 100.0 * s));
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "configuration",
        "samples/s",
        "test accuracy",
        "pull",
        "compute",
        "push",
        "wait",
    ]);
    for row in rows {
        table.add_row([
            row.configuration.clone(),
            format!("{:.0}", row.samples_per_second),
            row.test_accuracy
                .map_or("-".to_owned(), |a| format!("{:.2} %", 100.0 * a)),
            percent(row.share_pull),
            percent(row.share_compute),
            percent(row.share_push),
            percent(row.share_wait),
        ]);
    }
    table
}
