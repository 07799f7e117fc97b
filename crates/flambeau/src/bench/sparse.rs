//! `flambeau bench sparse`: measures embedding tables with real servers, the real client and the real wire. Rows are
//! pulled and pushed without a model (`communication`), by a model that has only lookups in a table (`step`), or by
//! DeepFM (`deepfm`).

mod replicas;
mod worker;

use daemon::{noteln, out, outln};
use std::ffi::OsString;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ::model::input::category_id;
use ::replica::threads::VARIABLE as THREADS;
use clap::Args;
use comfy_table::{Table, presets};
use ps_server::RowSettings;
use serde::{Deserialize, Serialize};
use shared_proto::ids::Role;
use shared_proto::job::{Adagrad, Job, Mode, RowOptimizer, Sgd, Storage, TableSettings, Wire};
use shared_proto::task;

use self::replicas::Kind;
use self::worker::Worker;
use super::{failed, median, processes, with_threads};
use crate::cluster::{LocalCluster, Plan, Roles, Transport};
use crate::error::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// What is measured; may be given more than once. Default: all of it.
    #[arg(long, value_enum)]
    kind: Vec<Kind>,
    /// Rows of the table; may be given more than once.
    #[arg(long, value_name = "N", default_value = "1000000")]
    rows: Vec<u64>,
    /// Values in a row.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    dimension: u32,
    /// The optimizer of the rows; may be given more than once. Default: sgd for communication, sgd and adagrad for steps,
    /// row-adagrad for DeepFM.
    #[arg(long, value_parser = ["sgd", "adagrad", "row-adagrad"])]
    optimizer: Vec<String>,
    /// Samples of a step.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    batch: u32,
    /// Ids of a sample.
    #[arg(long, default_value_t = 26, value_parser = clap::value_parser!(u32).range(1..=1024))]
    fields: u32,
    /// The form of the values on servers.
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16", "f16"])]
    storage: String,
    /// The form in which rows and gradients travel.
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16", "f16"])]
    wire: String,
    /// Parameter servers.
    #[arg(long, default_value_t = 2)]
    ps: u32,
    /// Workers. Default: 1 for communication, 2 for steps and DeepFM.
    #[arg(long)]
    workers: Option<u32>,
    /// Buckets of the table.
    #[arg(long, default_value_t = 64)]
    buckets: u32,
    /// Batches in rotation.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    batches: u32,
    /// The exponent of Zipf's law, by which ids are drawn.
    #[arg(long, default_value_t = 1.1)]
    exponent: f64,
    /// The memory of each server for rows.
    #[command(flatten)]
    row_settings: RowSettings,
    /// Seconds of each of the turns.
    #[arg(long, default_value_t = 3.0, value_parser = super::seconds)]
    seconds: f64,
    /// Turns; the medians count.
    #[arg(long, default_value_t = 3)]
    turns: usize,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// One configuration's figures.
#[derive(Debug, Serialize)]
struct Row {
    kind: &'static str,
    table_rows: u64,
    dimension: u32,
    fields: u32,
    optimizer: String,
    storage: String,
    wire: String,
    /// The number of workers; 0 for training in one process with one thread, without servers.
    workers: u32,
    ps: u32,
    /// The limit on each server's memory for rows; `None` if there is no limit.
    table_mebibytes: Option<u64>,
    /// The rows that are pulled or pushed in a second: each distinct row of a worker's step counts twice. `None` without
    /// servers.
    distinct_rows_per_second: Option<f64>,
    steps_per_second: f64,
    samples_per_second: f64,
    /// The servers' processor time in nanoseconds for each row that is pulled or pushed. The next field has the
    /// processor time of the workers, which includes the client. Both are `None` without servers.
    server_ns_per_row: Option<f64>,
    worker_ns_per_row: Option<f64>,
    /// The growth of the servers' peak memory while the rows are created, divided by the number of rows. It includes
    /// the index and the optimizer's state.
    bytes_per_row: Option<f64>,
    /// The 99.9th percentile of a second worker's pull times while the rows are created, in milliseconds. `None` without
    /// a second worker.
    growing_pull_p999_ms: Option<f64>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    // candle learns its number of threads when a process begins. Workers on this machine share its cores.
    if std::env::var_os(THREADS).is_none() {
        let printed = with_threads(1, std::env::args_os().skip(1))?;
        out!("{}", String::from_utf8_lossy(&printed));
        return Ok(());
    }
    let kinds = match arguments.kind.as_slice() {
        [] => Kind::ALL.to_vec(),
        given => given.to_vec(),
    };
    let mut rows = Vec::new();
    for kind in kinds {
        let optimizers = match arguments.optimizer.as_slice() {
            [] => kind.optimizers().to_vec(),
            given => given.iter().map(String::as_str).collect(),
        };
        for table_rows in &arguments.rows {
            for optimizer in &optimizers {
                noteln!(
                    "measuring {} of {table_rows} rows, {optimizer} ...",
                    kind.name()
                );
                if kind == Kind::Deepfm {
                    rows.push(alone(arguments, *table_rows, optimizer)?);
                }
                rows.push(measure(arguments, kind, *table_rows, optimizer)?);
            }
        }
    }
    if arguments.json {
        outln!("{}", serde_json::json!({ "rows": rows }));
    } else {
        outln!("{}", table(&rows).trim_fmt());
    }
    Ok(())
}

/// Returns the job of a measurement.
fn job(arguments: &Arguments, table_rows: u64, optimizer: &str) -> Job {
    let rate = 0.05;
    let adagrad = Adagrad {
        learning_rate: rate,
        ..Adagrad::default()
    };
    let optimizer = match optimizer {
        "adagrad" => RowOptimizer::Adagrad(adagrad),
        "row-adagrad" => RowOptimizer::RowAdagrad(adagrad),
        _ => RowOptimizer::Sgd(Sgd {
            learning_rate: rate,
            ..Sgd::default()
        }),
    };
    let mut job = Job {
        batch_size: arguments.batch,
        epochs: 1,
        tables: vec![TableSettings {
            tables: "*".to_owned(),
            optimizer: Some(optimizer),
            buckets: Some(arguments.buckets),
            storage: Some(match arguments.storage.as_str() {
                "bf16" => Storage::Bf16,
                "f16" => Storage::F16,
                _ => Storage::F32,
            }),
            ..TableSettings::default()
        }],
        ..Job::default()
    };
    "clicks".clone_into(&mut job.data.kind);
    let samples = u64::from(arguments.batches) * u64::from(arguments.batch);
    let options = [
        ("samples", i64::try_from(samples).unwrap_or(i64::MAX)),
        ("fields", arguments.fields.into()),
        ("rows", table_rows as i64),
    ];
    for (name, value) in options {
        job.data.options.insert(name.to_owned(), value.into());
    }
    for (name, value) in [
        ("shared", true.into()),
        ("exponent", arguments.exponent.into()),
    ] {
        job.data.options.insert(name.to_owned(), value);
    }
    "deepfm".clone_into(&mut job.model.name);
    job.model.embedding = arguments.dimension as usize;
    job.model.hidden = vec![256, 128];
    *job.optimizer.learning_rate_mut() = 1e-3;
    job.strategy.mode = Mode::Async;
    job.strategy.wire = match arguments.wire.as_str() {
        "bf16" => Wire::Bf16,
        "f16" => Wire::F16,
        _ => Wire::F32,
    };
    job.cluster.ps = Some(arguments.ps);
    // The coordinator has nothing to do while rows are measured.
    job.cluster.lease_seconds = job.cluster.stall_seconds;
    job.checkpoint.enabled = false;
    job
}

/// The output of `flambeau local`, which trains in one process.
#[derive(Deserialize)]
struct Alone {
    samples_per_second: f64,
}

/// Trains DeepFM in a process of one thread, without servers.
fn alone(arguments: &Arguments, table_rows: u64, optimizer: &str) -> Result<Row, CommandError> {
    let dir = tempfile::tempdir().map_err(CommandError::file("a temporary folder"))?;
    let file = dir.path().join("job.toml");
    let mut job = job(arguments, table_rows, optimizer);
    // Long enough for a measurement.
    job.epochs = 4;
    std::fs::write(&file, job.to_toml()).map_err(CommandError::file(&file))?;
    let mut rates = Vec::new();
    for _ in 0..arguments.turns.max(1) {
        let command: [OsString; 2] = ["local".into(), file.clone().into()];
        let printed = with_threads(1, command)?;
        let alone: Alone = serde_json::from_slice(&printed).map_err(|error| failed(&error))?;
        rates.push(alone.samples_per_second);
    }
    let samples_per_second = median(rates);
    Ok(Row {
        kind: Kind::Deepfm.name(),
        table_rows,
        dimension: arguments.dimension,
        fields: arguments.fields,
        optimizer: optimizer.to_owned(),
        storage: arguments.storage.clone(),
        wire: arguments.wire.clone(),
        workers: 0,
        ps: 0,
        table_mebibytes: None,
        distinct_rows_per_second: None,
        steps_per_second: samples_per_second / f64::from(arguments.batch),
        samples_per_second,
        server_ns_per_row: None,
        worker_ns_per_row: None,
        bytes_per_row: None,
        growing_pull_p999_ms: None,
    })
}

fn measure(
    arguments: &Arguments,
    kind: Kind,
    table_rows: u64,
    optimizer: &str,
) -> Result<Row, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CommandError::file("the runtime"))?;
    let dir = tempfile::tempdir().map_err(CommandError::file("a temporary folder"))?;
    let mut job = job(arguments, table_rows, optimizer);
    job.run_dir = Some(dir.path().to_owned());
    let plan = Plan {
        roles: Roles::Processes,
        workers: 0,
        device: "cpu",
        transport: Transport::Unix,
        restore: None,
        secure: false,
        row_settings: &arguments.row_settings,
        lookups: false,
        http: None,
    };
    let mut cluster = task::block_on(&runtime, LocalCluster::start(&job, dir.path(), plan))?;
    let workers = arguments.workers.unwrap_or(kind.workers());
    let workers: Vec<Worker> = (0..workers)
        .map(|index| Worker::start(&cluster, kind, &job, index))
        .collect::<Result<_, _>>()?;
    let memory = |cluster: &LocalCluster| -> u64 {
        let servers = cluster.processes(Role::Ps);
        servers.iter().map(|p| processes::peak_bytes(*p)).sum()
    };
    let empty = memory(&cluster);
    let slow_pull_seconds = fill(&workers, table_rows)?;
    let grown = memory(&cluster).saturating_sub(empty);
    // A short turn warms up before the measured ones.
    let time = Duration::from_secs_f64(arguments.seconds);
    turn(&workers, time / 4)?;
    let mut turns = Vec::new();
    let processor_time = |cluster: &LocalCluster| -> [f64; 2] {
        let servers = cluster.processes(Role::Ps);
        let servers = servers.iter().map(|p| processes::cpu_seconds(*p));
        // Workers are threads of this process.
        let own = processes::cpu_seconds(std::process::id());
        [servers.sum(), own]
    };
    let before = processor_time(&cluster);
    for _ in 0..arguments.turns.max(1) {
        turns.push(turn(&workers, time)?);
    }
    let after = processor_time(&cluster);
    let all: f64 = turns.iter().map(|turn| turn.rows_per_second).sum();
    let all = all * time.as_secs_f64();
    let per_row = |place: usize| Some(1e9 * (after[place] - before[place]) / all);
    let rate = |of: fn(&Turn) -> f64| median(turns.iter().map(of).collect());
    let steps_per_second = rate(|turn| turn.steps_per_second);
    let count = workers.len() as u32;
    drop(workers);
    task::block_on(&runtime, cluster.stop());
    Ok(Row {
        kind: kind.name(),
        table_rows,
        dimension: arguments.dimension,
        fields: arguments.fields,
        optimizer: optimizer.to_owned(),
        storage: arguments.storage.clone(),
        wire: arguments.wire.clone(),
        workers: count,
        ps: arguments.ps,
        table_mebibytes: arguments.row_settings.table_mebibytes,
        distinct_rows_per_second: Some(rate(|turn| turn.rows_per_second)),
        steps_per_second,
        samples_per_second: steps_per_second * f64::from(arguments.batch),
        server_ns_per_row: per_row(0),
        worker_ns_per_row: per_row(1),
        bytes_per_row: Some(grown as f64 / table_rows as f64),
        growing_pull_p999_ms: slow_pull_seconds.map(|seconds| 1e3 * seconds),
    })
}

/// Creates the rows of a table with the first worker's gradients. If there is a second worker, it pulls batches
/// meanwhile, and this returns the 99.9th percentile of the times of its pulls, in seconds.
fn fill(workers: &[Worker], rows: u64) -> Result<Option<f64>, CommandError> {
    let Some(first) = workers.first() else {
        return Ok(None);
    };
    let second = workers.get(1).map(|second| (second, second.begin_pulls()));
    let filled = first.fill((0..rows).map(category_id));
    let pulled = second.map(|(second, stop)| {
        stop.store(true, Ordering::Relaxed);
        second.end()
    });
    filled?;
    Ok(pulled.transpose()?.and_then(|turn| turn.slow_pull_seconds))
}

/// The figures of a turn, summed over workers.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    steps_per_second: f64,
    /// Rows pulled and rows pushed.
    rows_per_second: f64,
    /// The 99.9th percentile of the times of pulls; `None` unless the turn makes pulls only.
    slow_pull_seconds: Option<f64>,
}

/// Lets all workers make steps at the same time. Returns the sums of their rates.
fn turn(workers: &[Worker], time: Duration) -> Result<Turn, CommandError> {
    for worker in workers {
        worker.begin(time);
    }
    let mut sum = Turn::default();
    for worker in workers {
        let turn = worker.end()?;
        sum.steps_per_second += turn.steps_per_second;
        sum.rows_per_second += turn.rows_per_second;
    }
    Ok(sum)
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "kind",
        "rows",
        "dimension",
        "optimizer",
        "workers",
        "ps",
        "memory limit",
        "million rows/s",
        "steps/s",
        "samples/s",
        "server ns/row",
        "worker ns/row",
        "bytes/row",
        "pull p99.9, ms",
    ]);
    let optional = |value: Option<f64>, scale: f64| {
        value.map_or("-".to_owned(), |value| format!("{:.1}", value / scale))
    };
    for row in rows {
        table.add_row([
            row.kind.to_owned(),
            row.table_rows.to_string(),
            row.dimension.to_string(),
            row.optimizer.clone(),
            row.workers.to_string(),
            row.ps.to_string(),
            row.table_mebibytes
                .map_or("-".to_owned(), |limit| format!("{limit} MiB")),
            optional(row.distinct_rows_per_second, 1e6),
            format!("{:.0}", row.steps_per_second),
            format!("{:.0}", row.samples_per_second),
            optional(row.server_ns_per_row, 1.0),
            optional(row.worker_ns_per_row, 1.0),
            optional(row.bytes_per_row, 1.0),
            optional(row.growing_pull_p999_ms, 1.0),
        ]);
    }
    table
}
