//! `flambeau bench scale`: the coordinator, as a process, with many simulated members: they call it, but train no model.
//!
//! - `process`: the coordinator
//! - `members`: workers and servers without a model
//! - `progress`: the progress of the members, as they observe it

mod members;
mod process;
mod progress;

use daemon::{noteln, outln};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{Table, presets};
use daemon::job_flags::named;
use serde::Serialize;
use serde_json::json;
use shared_proto::job::{Job, Mode};
use tempfile::TempDir;
use tokio::task::LocalSet;

use self::members::Members;
use self::process::CoordinatorProcess;
use self::progress::Progress;
use super::{failed, quantile};
use crate::command::block_on;
use crate::error::CommandError;

/// The measurement loses one in this many workers at once.
const LOST: u32 = 10;

/// The time in which a cluster must be ready, and in which it must recover.
const PATIENCE: Duration = Duration::from_secs(120);

/// The length of a lease in seconds. The coordinator notices lost workers when their leases end.
const LEASE_SECONDS: f64 = 3.0;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// Numbers of workers, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "2,32,128,1000", value_parser = clap::value_parser!(u32).range(2..=10_000))]
    workers: Vec<u32>,
    /// Number of servers. Default: a tenth of the workers, 100 at the most.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    servers: Option<u32>,
    /// Modes, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "bounded,sync", value_parser = named::<Mode>)]
    mode: Vec<Mode>,
    /// Steps that each worker makes in a second; 0: as many as it can.
    #[arg(long, default_value_t = 10.0, value_parser = rate)]
    rate: f64,
    /// Seconds of measurement for each row.
    #[arg(long, default_value_t = 5.0, value_parser = super::seconds)]
    seconds: f64,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// The figures of one cluster.
#[derive(Debug, Serialize)]
struct Row {
    workers: u32,
    servers: u32,
    mode: &'static str,
    /// The steps of all workers together. In sync mode, a step of the job counts once for each worker.
    steps_per_second: f64,
    /// The coordinator's processor time for each step of a worker, in microseconds.
    coordinator_us_per_step: f64,
    /// The coordinator's processor time as a share of one core.
    coordinator_core_share: f64,
    /// The time from the report that raises the min clock until the last server has a view with that clock.
    view_p50_ms: f64,
    view_p99_ms: f64,
    kilobytes_per_member: f64,
    /// From the start of the coordinator until each worker has data.
    start_ms: f64,
    /// From the restart of a killed coordinator until each worker has finished a step.
    restart_ms: f64,
    /// From the loss of a tenth of the workers until each server has a view without them, less the length of the lease.
    loss_ms: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let mut rows = Vec::new();
    for workers in &arguments.workers {
        for mode in &arguments.mode {
            let servers = arguments.servers.unwrap_or((workers / 10).clamp(1, 100));
            noteln!(
                "measuring {workers} workers and {servers} servers, {} ...",
                mode.name()
            );
            // Workers share this thread.
            let members = LocalSet::new();
            let measuring = measure(arguments, *workers, servers, *mode);
            let measuring = members.run_until(measuring);
            rows.push(block_on(measuring)?);
        }
    }
    match arguments.json {
        true => outln!("{}", json!({ "rows": rows })),
        false => outln!("{}", table(&rows).trim_fmt()),
    }
    Ok(())
}

/// Returns the job of a measurement. It has more data than the members can use up.
fn job(workers: u32, servers: u32, mode: Mode) -> Job {
    let mut job = Job {
        batch_size: 64,
        ..Job::default()
    };
    "random".clone_into(&mut job.data.kind);
    job.strategy.mode = mode;
    (job.cluster.ps, job.cluster.workers) = (Some(servers), Some(workers));
    job.cluster.lease_seconds = LEASE_SECONDS;
    job.checkpoint.enabled = false;
    job
}

async fn measure(
    arguments: &Arguments,
    workers: u32,
    servers: u32,
    mode: Mode,
) -> Result<Row, CommandError> {
    let dir = TempDir::new().map_err(CommandError::file("a folder for the coordinator"))?;
    let job = job(workers, servers, mode);
    let began = Instant::now();
    let mut coordinator = CoordinatorProcess::start(&job, dir.path())?;
    let progress = Arc::new(Progress::new(workers, servers));
    let mut members = Members::start(&job, coordinator.address(), arguments.rate, &progress);
    members
        .until("each worker has finished a step", || {
            progress.all_have_finished(0)
        })
        .await?;
    let start = began.elapsed();
    // Members that came late have settled by then.
    tokio::time::sleep(Duration::from_secs(1)).await;

    progress.forget_latencies();
    let (steps, cpu, since) = (progress.steps(), coordinator.cpu_seconds(), Instant::now());
    tokio::time::sleep(Duration::from_secs_f64(arguments.seconds)).await;
    let (steps, cpu) = (
        (progress.steps() - steps) as f64,
        coordinator.cpu_seconds() - cpu,
    );
    let seconds = since.elapsed().as_secs_f64();
    let latencies = progress.latencies();
    let memory = coordinator.resident_bytes();

    let count = progress.steps();
    let restarted = Instant::now();
    coordinator.restart()?;
    members
        .until("each worker has finished a step after the restart", || {
            progress.all_have_finished(count)
        })
        .await?;
    let restart = restarted.elapsed();

    let lost = workers.div_ceil(LOST);
    let ended = Instant::now();
    members.lose(lost);
    let left = (workers - lost) as usize;
    members
        .until("each server knows of the loss", || {
            progress.all_servers_see(left)
        })
        .await?;
    let loss = ended.elapsed().as_secs_f64() - LEASE_SECONDS;
    members.stop().await;

    let milliseconds = |share| quantile(&latencies, share) * 1e3;
    Ok(Row {
        workers,
        servers,
        mode: mode.name(),
        steps_per_second: steps / seconds,
        coordinator_us_per_step: cpu / steps * 1e6,
        coordinator_core_share: cpu / seconds,
        view_p50_ms: milliseconds(0.5),
        view_p99_ms: milliseconds(0.99),
        kilobytes_per_member: memory as f64 / f64::from(workers + servers) / 1e3,
        start_ms: start.as_secs_f64() * 1e3,
        restart_ms: restart.as_secs_f64() * 1e3,
        loss_ms: loss.max(0.0) * 1e3,
    })
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "workers",
        "servers",
        "mode",
        "steps/s",
        "us/step",
        "core",
        "view p50",
        "p99 ms",
        "kB/member",
        "start ms",
        "restart",
        "loss",
    ]);
    for row in rows {
        table.add_row([
            row.workers.to_string(),
            row.servers.to_string(),
            row.mode.to_owned(),
            format!("{:.0}", row.steps_per_second),
            format!("{:.1}", row.coordinator_us_per_step),
            format!("{:.2}", row.coordinator_core_share),
            format!("{:.1}", row.view_p50_ms),
            format!("{:.1}", row.view_p99_ms),
            format!("{:.0}", row.kilobytes_per_member),
            format!("{:.0}", row.start_ms),
            format!("{:.0}", row.restart_ms),
            format!("{:.0}", row.loss_ms),
        ]);
    }
    table
}

/// Reads a number of steps in a second.
fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate == 0.0 || (0.001..=1e6).contains(&rate) => Ok(rate),
        _ => Err("must be 0, or a number from 0.001 to 1000000".to_owned()),
    }
}

/// Returns the error of a member that cannot go on.
fn ended(error: impl std::fmt::Display) -> CommandError {
    failed(&error)
}
