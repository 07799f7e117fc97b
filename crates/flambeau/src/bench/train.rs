//! `flambeau bench train`: runs the same job in one process, and on clusters.

use candle_core::Tensor;
use candle_nn::{Linear, Module, VarBuilder, linear, loss::cross_entropy};
use clap::Args;
use comfy_table::{Table, presets};
use coordinator::{CoordinatorError, read_job};
use daemon::{noteln, outln};
use model::registry::Registry;
use model::{Batch, Model, Pass, Setup};
use ps_server::RowSettings;
use replica::device;
use serde::{Deserialize, Serialize};
use shared_proto::job::{Job, Mode, Optimizer, Sgd};
use worker::alone::local;

use super::{median, with_threads};
use crate::cluster::{Plan, Roles, Transport, threads_each};
use crate::command::JobArguments;
use crate::error::CommandError;
use crate::train::{self, Watch};

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    job: JobArguments,
    /// Numbers of workers to measure; the job's own number is ignored.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2",
        value_name = "N,..."
    )]
    worker_counts: Vec<u32>,
    /// Turns that the configurations take; the medians count.
    #[arg(long, default_value_t = 5)]
    turns: usize,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(crate) struct LocalArguments {
    #[command(flatten)]
    job: JobArguments,
    /// The device to compute on: auto, cpu or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: device::Choice,
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

/// Returns the job that is trained if no job file is given.
fn usual_job() -> Job {
    let mut job = Job {
        batch_size: 64,
        epochs: 1,
        optimizer: Optimizer::Sgd(Sgd::default()),
        ..Job::default()
    };
    "random".clone_into(&mut job.data.kind);
    job.model.hidden = vec![512, 256];
    job.strategy.mode = Mode::Async;
    job.cluster.ps = Some(1);
    job.checkpoint.enabled = false;
    job
}

pub(crate) fn run(arguments: Arguments) -> Result<(), CommandError> {
    let job = match &arguments.job.file {
        Some(file) => read_job(Some(file), arguments.job.flags)?,
        None => arguments
            .job
            .flags
            .over(Some(usual_job()))
            .map_err(CoordinatorError::from)?,
    };
    let mut turns = Vec::new();
    for turn in 1..=arguments.turns.max(1) {
        noteln!("turn {turn} of {} ...", arguments.turns.max(1));
        let mut rows = Vec::new();
        if job.model.name == "mlp" {
            let mut job = job.clone();
            CANDLE_MLP.clone_into(&mut job.model.name);
            rows.push(single_process(&job)?);
        }
        rows.push(single_process(&job)?);
        for workers in &arguments.worker_counts {
            rows.push(distributed(&job, *workers)?);
        }
        turns.push(rows);
    }
    let rows = medians(&turns);
    if arguments.json {
        outln!("{}", serde_json::json!({ "rows": rows }));
    } else {
        outln!("{}", table(&rows).trim_fmt());
    }
    Ok(())
}

/// Returns each configuration's medians over the turns.
fn medians(turns: &[Vec<Row>]) -> Vec<Row> {
    let Some(first) = turns.first() else {
        return Vec::new();
    };
    let of = |index: usize| {
        let of = |part: fn(&Row) -> Option<f64>| {
            let values: Vec<f64> = turns.iter().filter_map(|rows| part(&rows[index])).collect();
            (!values.is_empty()).then(|| median(values))
        };
        Row {
            configuration: first[index].configuration.clone(),
            samples_per_second: of(|row| Some(row.samples_per_second)).unwrap_or(f64::NAN),
            test_accuracy: of(|row| row.test_accuracy),
            share_pull: of(|row| row.share_pull),
            share_compute: of(|row| row.share_compute),
            share_push: of(|row| row.share_push),
            share_wait: of(|row| row.share_wait),
        }
    };
    (0..first.len()).map(of).collect()
}

/// The name of [`CandleMlp`], which is the model `mlp` with layers of candle only.
const CANDLE_MLP: &str = "mlp of candle's own layers";

struct CandleMlp(Vec<Linear>);

impl Model for CandleMlp {
    fn new(setup: &Setup, vars: VarBuilder) -> candle_core::Result<Self> {
        let mut widths = vec![setup.features()?];
        widths.extend(&setup.settings.hidden);
        widths.push(setup.outputs());
        let layers = widths.windows(2).enumerate();
        let layer = |(i, pair): (usize, &[usize])| linear(pair[0], pair[1], vars.pp(i));
        layers.map(layer).collect::<Result<_, _>>().map(Self)
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> candle_core::Result<Tensor> {
        let mut x = batch.input()?.flatten_from(1)?;
        for (i, layer) in self.0.iter().enumerate() {
            x = layer.forward(&x)?;
            if i + 1 < self.0.len() {
                x = x.relu()?;
            }
        }
        Ok(x)
    }

    fn loss(&self, outputs: &Tensor, batch: &Batch, _: &Pass) -> candle_core::Result<Tensor> {
        cross_entropy(outputs, batch.target()?)
    }
}

/// Trains in a separate process with one thread, like a worker of a cluster that has a worker for each core.
fn single_process(job: &Job) -> Result<Row, CommandError> {
    let dir = tempfile::tempdir().map_err(CommandError::file("a temporary folder"))?;
    let file = dir.path().join("job.toml");
    std::fs::write(&file, job.to_toml()).map_err(CommandError::file(&file))?;
    let printed = with_threads(1, ["local".into(), file.into()])?;
    serde_json::from_slice(&printed).map_err(|error| CommandError::Start {
        name: "the single process".to_owned(),
        reason: error.to_string(),
    })
}

fn distributed(job: &Job, workers: u32) -> Result<Row, CommandError> {
    let dir = tempfile::tempdir().map_err(CommandError::file("a temporary folder"))?;
    let mut job = job.clone();
    job.run_dir = Some(dir.path().to_owned());
    job.cluster.workers = Some(workers);
    let plan = Plan {
        roles: Roles::Processes,
        workers,
        device: "cpu",
        transport: Transport::Unix,
        restore: None,
        secure: false,
        row_settings: &RowSettings::default(),
        lookups: false,
        http: None,
    };
    let summary = train::train(job, plan, Watch::quiet(true))?.summary;
    let share = |name: &str| summary.times.get(name).copied();
    let plural = if workers == 1 { "" } else { "s" };
    let threads = match threads_each(workers) {
        1 => "1 thread".to_owned(),
        threads => format!("{threads} threads"),
    };
    Ok(Row {
        configuration: format!(
            "{workers} worker{plural} of {threads}, {} ps, {}",
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
    let device = device::open(arguments.device)?;
    let registry = registry.clone().model::<CandleMlp>(CANDLE_MLP);
    let outcome = local::train(&job, &registry, &device, None)?;
    let row = Row {
        configuration: match arguments.device {
            device::Choice::Cpu => format!("single process of 1 thread, {}", job.model.name),
            _ => format!(
                "single process on {}, {}",
                device::name(&device),
                job.model.name
            ),
        },
        samples_per_second: outcome.samples as f64 / outcome.seconds,
        test_accuracy: outcome.metrics.get("accuracy").copied(),
        ..Row::default()
    };
    outln!("{}", serde_json::json!(row));
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
