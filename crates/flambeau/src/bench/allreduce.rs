//! `flambeau bench allreduce`: adds up vectors among processes of this machine, with the real links.

mod rank;

use daemon::{noteln, outln};
use std::time::Instant;

use clap::Args;
use collective::Algorithm;
use comfy_table::{Table, presets};
use serde::Serialize;
use serde_json::json;
use shared_proto::task;

use self::rank::Rank;
use super::{failed, median};
use crate::cluster::Transport;
use crate::error::CommandError;

pub(crate) use self::rank::{RankArguments, follow};

/// The number of turns for each row of the table; the row has their median.
const TURNS: usize = 5;

/// The number of bytes that are copied to measure the memory bandwidth.
const COPIED: usize = 256 << 20;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// Bytes of the vector; may be given more than once. Default: 16 KiB, 1 MiB, 64 MiB.
    #[arg(long, value_name = "BYTES")]
    size: Vec<usize>,
    /// Numbers of processes, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "2,4,8", value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: Vec<u32>,
    /// Ways to add up; may be given more than once. Default: the one that is chosen by size.
    #[arg(long, value_parser = ["ring", "doubling", "reduce-to-one"])]
    algorithm: Vec<String>,
    /// Numbers in which the vectors travel.
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16", "f16"])]
    wire: String,
    /// Transport between the processes.
    #[arg(long, value_enum, default_value = "tcp")]
    transport: Transport,
    /// Seconds of measurement for each row.
    #[arg(long, default_value_t = 3.0, value_parser = super::seconds)]
    seconds: f64,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// The figures of one vector size, number of ranks and algorithm.
#[derive(Debug, Serialize)]
struct Row {
    bytes: usize,
    ranks: u32,
    algorithm: String,
    milliseconds: f64,
    /// The bus bandwidth: the bytes that each rank must send, divided by the time. They are `2 (n - 1) / n` of the
    /// `f32` vector's bytes.
    bus_gigabytes_per_second: f64,
    /// The bus bandwidth as a share of the bandwidth with which one thread copies memory.
    share_of_memory_bandwidth: f64,
    /// The bus bandwidth of all ranks together, as a share of the bandwidth with which all cores together copy memory.
    share_of_machine_bandwidth: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let sizes = match arguments.size.as_slice() {
        [] => vec![16 << 10, 1 << 20, 64 << 20],
        given => given.to_vec(),
    };
    let algorithms = match arguments.algorithm.as_slice() {
        [] => vec![None],
        given => given.iter().map(|name| Some(name.as_str())).collect(),
    };
    let (of_thread, of_machine) = (memory_bandwidth(1), memory_bandwidth(cores()));
    let mut rows = Vec::new();
    for ranks in &arguments.ranks {
        for size in &sizes {
            for algorithm in &algorithms {
                noteln!("measuring {size} bytes among {ranks} processes ...");
                let seconds = measure(arguments, *ranks, *size, *algorithm)?;
                let sent = 2.0 * f64::from(ranks - 1) / f64::from(*ranks) * *size as f64;
                let chosen = Algorithm::for_size(*size, 1).name();
                rows.push(Row {
                    bytes: *size,
                    ranks: *ranks,
                    algorithm: algorithm.unwrap_or(chosen).to_owned(),
                    milliseconds: seconds * 1e3,
                    bus_gigabytes_per_second: sent / seconds / 1e9,
                    share_of_memory_bandwidth: sent / seconds / of_thread,
                    share_of_machine_bandwidth: f64::from(*ranks) * sent / seconds / of_machine,
                });
            }
        }
    }
    if arguments.json {
        let memory = json!({ "thread": of_thread / 1e9, "machine": of_machine / 1e9 });
        let figures = json!({ "rows": rows, "memory_gigabytes_per_second": memory });
        outln!("{figures}");
    } else {
        outln!("{}", table(&rows).trim_fmt());
    }
    Ok(())
}

/// Returns the median time of an all-reduce, in seconds.
fn measure(
    arguments: &Arguments,
    ranks: u32,
    size: usize,
    algorithm: Option<&str>,
) -> Result<f64, CommandError> {
    let runtime = rank::runtime()?;
    task::block_on(&runtime, async {
        let plan = rank::Plan {
            elements: size / size_of::<f32>(),
            ranks,
            wire: &arguments.wire,
            algorithm,
            transport: arguments.transport,
        };
        let mut first = Rank::lead(plan).await?;
        // The first calls open links and touch memory.
        let warm = first.all_reduce(3).await.map_err(|error| failed(&error))?;
        let each = warm.into_iter().fold(f64::MAX, f64::min);
        let count = arguments.seconds / TURNS as f64 / each;
        let count = (count as usize).clamp(3, 20_000);
        let mut turns = Vec::new();
        for _ in 0..TURNS {
            let seconds = first.all_reduce(count).await;
            turns.push(median(seconds.map_err(|error| failed(&error))?));
        }
        first.stop().await?;
        Ok(median(turns))
    })
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the number of bytes that `threads` threads together copy in a second.
fn memory_bandwidth(threads: usize) -> f64 {
    let part = COPIED / threads;
    let mut parts: Vec<_> = (0..threads)
        .map(|_| (vec![1u8; part], vec![0u8; part]))
        .collect();
    let copy = |_| {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for (from, to) in &mut parts {
                scope.spawn(|| to.copy_from_slice(from));
            }
        });
        (part * threads) as f64 / begun.elapsed().as_secs_f64()
    };
    median((0..5).map(copy).collect())
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "bytes",
        "ranks",
        "algorithm",
        "ms",
        "bus GB/s",
        "of memory, one thread",
        "of memory, all cores",
    ]);
    for row in rows {
        table.add_row([
            row.bytes.to_string(),
            row.ranks.to_string(),
            row.algorithm.clone(),
            format!("{:.3}", row.milliseconds),
            format!("{:.2}", row.bus_gigabytes_per_second),
            format!("{:.2}", row.share_of_memory_bandwidth),
            format!("{:.2}", row.share_of_machine_bandwidth),
        ]);
    }
    table
}
