//! `flambeau tf-task`: the process that `TF_CONFIG` describes.
//!
//! `evaluator` is the process that evaluates checkpoints while others train.

mod evaluator;

use daemon::noteln;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, FromArgMatches};
use daemon::job_flags::JobFlags;
use daemon::process::{self, Failure, Process};
use daemon::settings::{MemberSettings, ProcessSettings};
use model::registry::Registry;
use network::transport::Listen;
use replica::device::Choices;
use shared_proto::job::StrategyName;
use worker::tf_config::{Part, TfConfig};

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The job file; only the chief reads it. `flambeau job init` writes one. Default: digits, MLP.
    #[arg(env = "FLAMBEAU_JOB", value_name = "JOB.toml")]
    file: Option<PathBuf>,
    /// The devices on which workers and the evaluator compute, as `flambeau worker` takes them.
    #[arg(long, env = "FLAMBEAU_DEVICE", default_value = "auto")]
    device: Choices,
    #[command(flatten)]
    process: ProcessSettings,
    #[command(flatten)]
    job: JobFlags,
}

/// The error of a role.
struct Ended {
    message: String,
    code: u8,
}

impl Ended {
    fn of<E: Failure>(error: E) -> Self {
        Self {
            message: error.to_string(),
            code: error.exit_code(),
        }
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl Failure for Ended {
    fn exit_code(&self) -> u8 {
        self.code
    }
}

/// Runs the role that `TF_CONFIG` names.
pub(crate) fn main(arguments: Arguments, registry: Registry) -> ExitCode {
    let config = match TfConfig::of_environment() {
        Ok(config) => config,
        Err(error) => {
            noteln!("flambeau: {error}");
            return ExitCode::FAILURE;
        }
    };
    process::main(arguments.process.clone(), async |process| {
        run(arguments, config, registry, process).await
    })
}

async fn run(
    arguments: Arguments,
    config: TfConfig,
    registry: Registry,
    process: Process,
) -> Result<(), Ended> {
    match config.part.clone() {
        Part::Chief => {
            let coordinator = arguments.coordinator(&config)?;
            // Other workers reach the worker of the chief at a port of its own: the chief's is the coordinator's.
            let loopback = config.chief.to_listen_on().ip().is_loopback();
            let ip = if loopback { "127.0.0.1" } else { "0.0.0.0" };
            let worker = arguments.worker(&config, &format!("{ip}:0"))?;
            let mut of_worker = process.clone();
            of_worker.shutdown = process.shutdown.child_token();
            let stop = of_worker.shutdown.clone();
            let coordinating = async {
                let ended = coordinator::run(coordinator, process).await;
                // Its worker has left by now, or waits in vain.
                stop.cancel();
                ended.map_err(Ended::of)
            };
            let working = async {
                worker::run(worker, registry, of_worker)
                    .await
                    .map_err(Ended::of)
            };
            // The coordinator goes on without its worker: others may take its place.
            let (coordinated, worked) = tokio::join!(coordinating, working);
            match (coordinated, worked) {
                // Others have finished the job.
                (Ok(()), Err(error)) => {
                    tracing::error!("the worker of the chief: {}", error.message);
                    Ok(())
                }
                (coordinated, _) => coordinated,
            }
        }
        Part::Worker(address) => {
            let mut worker = arguments.worker(&config, &address.to_listen_on().to_string())?;
            worker.advertise = Some(address.to_string());
            worker::run(worker, registry, process)
                .await
                .map_err(Ended::of)
        }
        Part::Ps(address) => {
            let mut server: ps_server::Settings = defaults()?;
            server.listen = Listen::Tcp(address.to_listen_on());
            server.advertise = Some(address.to_string());
            server.member = member(&config)?;
            ps_server::run(server, process).await.map_err(Ended::of)
        }
        Part::Evaluator => {
            let patience = member(&config)?.patience_seconds;
            let evaluator = evaluator::Evaluator {
                coordinator: config.chief.to_string(),
                patience: std::time::Duration::from_secs(patience),
                data_dir: arguments.job.data_dir.clone(),
                device: arguments.device.clone(),
                registry,
            };
            evaluator.run(&process).await.map_err(|error| Ended {
                message: error.to_string(),
                code: 1,
            })
        }
    }
}

impl Arguments {
    /// Returns the settings of the coordinator, which has the job and waits for all processes of the cluster.
    fn coordinator(&self, config: &TfConfig) -> Result<coordinator::Settings, Ended> {
        let mut settings: coordinator::Settings = defaults()?;
        settings.job_file.clone_from(&self.file);
        settings.listen = config.chief.to_listen_on();
        settings.job = self.job.clone();
        settings.job.workers = Some(config.workers);
        if config.ps == 0 && self.file.is_none() && self.job.strategy.is_none() {
            // The counterpart of a cluster without servers.
            settings.job.strategy = Some(StrategyName::MultiWorkerMirrored);
        }
        let job = settings.read_job().map_err(Ended::of)?;
        let strategy = job.strategy.name;
        if strategy.has_servers() {
            if config.ps == 0 {
                return Err(Ended {
                    message: format!(
                        "TF_CONFIG has no ps, but the strategy {:?} needs parameter servers; give ps, or --strategy multi-worker-mirrored",
                        strategy.name()
                    ),
                    code: 1,
                });
            }
            settings.job.ps = Some(config.ps);
        }
        Ok(settings)
    }

    /// Returns the settings of a worker that takes links from others at an address.
    fn worker(&self, config: &TfConfig, listen: &str) -> Result<worker::Settings, Ended> {
        let mut settings: worker::Settings = defaults()?;
        settings.device = self.device.clone();
        settings.data_dir.clone_from(&self.job.data_dir);
        settings.run_dir.clone_from(&self.job.run_dir);
        settings.listen = listen.parse().map_err(|error| Ended {
            message: format!("{listen:?} is not an address: {error}"),
            code: 1,
        })?;
        settings.member = member(config)?;
        Ok(settings)
    }
}

/// Returns the settings by which a process finds the coordinator.
fn member(config: &TfConfig) -> Result<MemberSettings, Ended> {
    let mut member: MemberSettings = defaults()?;
    member.coordinator = config.chief.to_string();
    member.identity = Some(config.identity.clone());
    Ok(member)
}

/// Returns settings from the environment, with the default of each setting that the environment lacks.
fn defaults<S: Args + FromArgMatches>() -> Result<S, Ended> {
    let command = S::augment_args(clap::Command::new("flambeau"));
    let matches = command.try_get_matches_from(["flambeau"]);
    let settings = matches.and_then(|matches| S::from_arg_matches(&matches));
    settings.map_err(|error| Ended {
        message: error.to_string(),
        code: 1,
    })
}
