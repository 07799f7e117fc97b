//! `flambeau bench dense`: pushes a gradient, which the servers apply, and pulls the new weights, with real servers,
//! the real client and the real wire. In each size, turns alternate with those of references, which do the same over
//! plain TCP.

mod worker;

use daemon::{noteln, outln};
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{Table, presets};
use ps_server::RowSettings;
use serde::Serialize;
use shared_proto::ids::Role;
use shared_proto::job::{Job, Mode, Optimizer, Wire};
use shared_proto::payload::Dtype;
use shared_proto::task;

use self::worker::Worker;
use super::tcp::Reference;
use super::{failed, median, processes, quantile};
use crate::cluster::{LocalCluster, Plan, Roles, Transport};
use crate::error::CommandError;

/// The number of turns that Flambeau and the references take; the figures are medians over the turns.
const TURNS: usize = 5;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// Bytes of the weights; may be given more than once. Default: 16 KiB, 1 MiB, 64 MiB.
    #[arg(long, value_name = "BYTES")]
    size: Vec<usize>,
    /// Parameter servers.
    #[arg(long, default_value_t = 1)]
    ps: u32,
    /// Workers, all of them in this process.
    #[arg(long, default_value_t = 1)]
    workers: u32,
    /// The servers' optimizer.
    #[arg(long, default_value = "sgd", value_parser = Optimizer::NAMES)]
    optimizer: String,
    /// Numbers in which weights and gradients travel.
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16", "f16"])]
    wire: String,
    /// Round trips that a worker has under way. Default: 1, and 8 for the smallest sizes.
    #[arg(long, value_name = "N")]
    in_flight: Option<usize>,
    /// Transport between the worker and the servers; the references always use a port.
    #[arg(long, value_enum, default_value = "tcp")]
    transport: Transport,
    /// Encrypt what travels between worker and servers; the references stay in the clear.
    #[arg(long)]
    secure: bool,
    /// Seconds of measurement for each size and each of the three ways.
    #[arg(long, default_value_t = 3.0, value_parser = super::seconds)]
    seconds: f64,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// The figures of one size and one number of round trips in flight.
#[derive(Debug, Serialize)]
struct Row {
    size_bytes: usize,
    in_flight: usize,
    round_trips_per_second: f64,
    /// The gigabytes that are pushed and pulled in a second, in the wire's type.
    gigabytes_per_second: f64,
    p50_microseconds: f64,
    p99_microseconds: f64,
    sequential_tcp_microseconds: f64,
    overlapped_tcp_microseconds: f64,
    /// Flambeau's speed divided by the sequential reference's, from the median times of round trips. `None` unless one
    /// worker has one round trip in flight, as the references do.
    ratio_sequential_tcp: Option<f64>,
    ratio_overlapped_tcp: Option<f64>,
    client_cpu_seconds_per_gigabyte: f64,
    server_cpu_seconds_per_gigabyte: f64,
    /// The peak memory of all servers, divided by the bytes of the weights and slots that they hold.
    server_peak_over_held: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let sizes = match arguments.size.as_slice() {
        [] => vec![16 << 10, 1 << 20, 64 << 20],
        given => given.to_vec(),
    };
    let mut rows = Vec::new();
    for size in sizes {
        let in_flights = match arguments.in_flight {
            Some(given) => vec![given.max(1)],
            None if size <= 64 << 10 => vec![1, 8],
            None => vec![1],
        };
        for in_flight in in_flights {
            noteln!("measuring {size} bytes, {in_flight} in flight ...");
            rows.push(measure(arguments, size, in_flight)?);
        }
    }
    if arguments.json {
        outln!("{}", serde_json::json!({ "rows": rows }));
    } else {
        outln!("{}", table(&rows).trim_fmt());
    }
    Ok(())
}

/// The measurements of one of Flambeau's turns.
struct Turn {
    /// The seconds of each round trip.
    seconds: Vec<f64>,
    round_trips_per_second: f64,
    client_cpu: f64,
    server_cpu: f64,
}

fn measure(arguments: &Arguments, size: usize, in_flight: usize) -> Result<Row, CommandError> {
    // A worker's network has one thread, so each worker beyond the first adds one here.
    let mut runtime = match arguments.workers {
        1 => tokio::runtime::Builder::new_current_thread(),
        workers => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(workers as usize);
            builder
        }
    };
    let runtime = runtime
        .enable_all()
        .build()
        .map_err(CommandError::file("the runtime"))?;
    let mut bench = task::block_on(&runtime, Bench::start(arguments, size))?;
    let mut sequential = Reference::start(size, false)?;
    let mut overlapped = Reference::start(size, true)?;
    let time = Duration::from_secs_f64(arguments.seconds / TURNS as f64);
    // A short turn warms up before the measured ones.
    task::block_on(&runtime, bench.turn(time / 4, in_flight))?;
    sequential.measure(time / 4)?;
    overlapped.measure(time / 4)?;
    let (mut turns, mut alone, mut beside) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..TURNS {
        alone.push(median(sequential.measure(time)?));
        beside.push(median(overlapped.measure(time)?));
        turns.push(task::block_on(&runtime, bench.turn(time, in_flight))?);
    }
    let (peak, wire) = (bench.peak_over_held(), Dtype::from(bench.wire));
    task::block_on(&runtime, bench.stop());
    let [sequential, overlapped] = [alone, beside].map(median);
    let rate = median(turns.iter().map(|t| t.round_trips_per_second).collect());
    let mut seconds: Vec<f64> = turns.iter().flat_map(|t| t.seconds.clone()).collect();
    seconds.sort_by(f64::total_cmp);
    let trip_bytes = 2 * size / size_of::<f32>() * wire.size();
    let gigabytes = (trip_bytes * seconds.len()) as f64 / 1e9;
    let cpu = |part: fn(&Turn) -> f64| turns.iter().map(part).sum::<f64>() / gigabytes;
    // A median, like the references' figures.
    let trip = median(turns.iter().map(|t| median(t.seconds.clone())).collect());
    let ratio = |reference: f64| {
        let alike = in_flight == 1 && arguments.workers == 1;
        alike.then_some(reference / trip)
    };
    Ok(Row {
        size_bytes: size,
        in_flight,
        round_trips_per_second: rate,
        gigabytes_per_second: rate * trip_bytes as f64 / 1e9,
        p50_microseconds: quantile(&seconds, 0.5) * 1e6,
        p99_microseconds: quantile(&seconds, 0.99) * 1e6,
        sequential_tcp_microseconds: sequential * 1e6,
        overlapped_tcp_microseconds: overlapped * 1e6,
        ratio_sequential_tcp: ratio(sequential),
        ratio_overlapped_tcp: ratio(overlapped),
        client_cpu_seconds_per_gigabyte: cpu(|t| t.client_cpu),
        server_cpu_seconds_per_gigabyte: cpu(|t| t.server_cpu),
        server_peak_over_held: peak,
    })
}

/// A cluster of servers, and workers in this process.
struct Bench {
    cluster: LocalCluster,
    workers: Vec<Worker>,
    held_bytes: usize,
    wire: Wire,
    _dir: tempfile::TempDir,
}

impl Bench {
    async fn start(arguments: &Arguments, size: usize) -> Result<Self, CommandError> {
        let dir = tempfile::tempdir().map_err(CommandError::file("a temporary folder"))?;
        let mut job = Job {
            run_dir: Some(dir.path().to_owned()),
            ..Job::default()
        };
        job.strategy.mode = Mode::Async;
        job.cluster.ps = Some(arguments.ps);
        // While the references are measured, no heartbeats are sent.
        job.cluster.lease_seconds = job.cluster.stall_seconds;
        job.checkpoint.enabled = false;
        let wire = format!("strategy.wire={:?}", arguments.wire);
        let mut job = job.with(&wire).map_err(|error| failed(&error))?;
        if let Some(optimizer) = Optimizer::named(&arguments.optimizer) {
            job.optimizer = optimizer;
        }
        let slots = optimizer::rule(&job.optimizer).slots().count;
        let plan = Plan {
            roles: Roles::Processes,
            workers: 0,
            device: "cpu",
            transport: arguments.transport,
            restore: None,
            secure: arguments.secure,
            row_settings: &RowSettings::default(),
            lookups: false,
            http: None,
        };
        let cluster = LocalCluster::start(&job, dir.path(), plan).await?;
        let mut workers = Vec::new();
        for index in 0..arguments.workers {
            workers.push(Worker::join(&cluster, index, size).await?);
        }
        Ok(Self {
            cluster,
            workers,
            held_bytes: size * (1 + slots),
            wire: job.strategy.wire,
            _dir: dir,
        })
    }

    async fn turn(&mut self, time: Duration, in_flight: usize) -> Result<Turn, CommandError> {
        let client = std::process::id();
        let cpu = |pids: &[u32]| pids.iter().map(|p| processes::cpu_seconds(*p)).sum::<f64>();
        let servers = self.cluster.processes(Role::Ps);
        let (client_cpu, server_cpu) = (cpu(&[client]), cpu(&servers));
        let begin = Instant::now();
        let mut running = tokio::task::JoinSet::new();
        for mut worker in std::mem::take(&mut self.workers) {
            running.spawn(async move {
                let seconds = worker.round_trips(time, in_flight).await;
                seconds.map(|seconds| (worker, seconds))
            });
        }
        let mut seconds = Vec::new();
        while let Some(joined) = running.join_next().await {
            let (worker, of_worker) = joined.map_err(|error| failed(&error))??;
            self.workers.push(worker);
            seconds.extend(of_worker);
        }
        let elapsed = begin.elapsed().as_secs_f64();
        Ok(Turn {
            round_trips_per_second: seconds.len() as f64 / elapsed,
            seconds,
            client_cpu: cpu(&[client]) - client_cpu,
            server_cpu: cpu(&servers) - server_cpu,
        })
    }

    fn peak_over_held(&self) -> f64 {
        let servers = self.cluster.processes(Role::Ps);
        let peak: u64 = servers.iter().map(|p| processes::peak_bytes(*p)).sum();
        peak as f64 / self.held_bytes as f64
    }

    async fn stop(mut self) {
        self.cluster.stop().await;
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "size",
        "in flight",
        "trips/s",
        "GB/s",
        "p50 us",
        "p99 us",
        "seq. TCP us",
        "ovl. TCP us",
        "of seq. TCP",
        "of ovl. TCP",
        "client s/GB",
        "server s/GB",
        "peak/held",
    ]);
    let ratio = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |r| format!("{r:.2}"));
    for row in rows {
        table.add_row([
            row.size_bytes.to_string(),
            row.in_flight.to_string(),
            format!("{:.1}", row.round_trips_per_second),
            format!("{:.2}", row.gigabytes_per_second),
            format!("{:.0}", row.p50_microseconds),
            format!("{:.0}", row.p99_microseconds),
            format!("{:.0}", row.sequential_tcp_microseconds),
            format!("{:.0}", row.overlapped_tcp_microseconds),
            ratio(row.ratio_sequential_tcp),
            ratio(row.ratio_overlapped_tcp),
            format!("{:.3}", row.client_cpu_seconds_per_gigabyte),
            format!("{:.3}", row.server_cpu_seconds_per_gigabyte),
            format!("{:.2}", row.server_peak_over_held),
        ]);
    }
    table
}
