//! The settings of all processes, by flag or by environment variable, and a job's flags.

use std::net::SocketAddr;
use std::path::PathBuf;

use shared_proto::connections::Limits;
use shared_proto::job::{Job, JobError, Mode, Optimizer, Strategy, StrategyName, Wire};
use shared_proto::security::{Security, SecurityError, SecurityFiles};
use shared_proto::transport::{Listen, socket_address};

use crate::descriptors;

/// The longest time that a flag may give, in seconds: 30 days, as in a job file.
const LONGEST_SECONDS: u64 = 30 * 86_400;

/// The settings of every process.
#[derive(Clone, Debug, clap::Args)]
pub struct ProcessSettings {
    /// Serve /metrics, /healthz and /readyz here; port 0 takes a free one.
    #[arg(long, env = "FLAMBEAU_METRICS_LISTEN", value_name = "HOST:PORT", value_parser = socket_address, default_value = "127.0.0.1:0")]
    pub metrics_listen: SocketAddr,
    /// The time limit of a shutdown after SIGTERM, in seconds. A server waits for a checkpoint in that time. The
    /// supervisor that sends the signal must wait a little longer before it kills the process.
    #[arg(long, env = "FLAMBEAU_SHUTDOWN_SECONDS", default_value_t = 25, value_parser = clap::value_parser!(u64).range(..=LONGEST_SECONDS))]
    pub shutdown_seconds: u64,
    /// The log level: error, warn, info, debug, trace, or a tracing filter.
    #[arg(long, env = "FLAMBEAU_LOG", default_value = "info")]
    pub log: String,
    /// The format of log lines.
    #[arg(long, env = "FLAMBEAU_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// When the job has ended, exit, or stay, healthy and idle, for the next job of a long-lived cluster
    /// (`flambeau submit` adds one). Default: a coordinator without a queue of jobs exits; servers and workers stay if their
    /// coordinator has one. A coordinator that is to wait, and has neither a job file nor settings of a job, begins with
    /// an empty queue, as with --no-job.
    #[arg(long, env = "FLAMBEAU_AFTER_JOB")]
    pub after_job: Option<AfterJob>,
    /// Shut down when standard input is closed, so that the process ends with its parent.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
    /// Ask the process that serves metrics at this --metrics-listen for its health, and exit with 0 if it is
    /// healthy. For the health check of a container.
    #[arg(long)]
    pub check_health: bool,
    /// The settings of TLS and the token.
    #[command(flatten)]
    pub security: SecuritySettings,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The credentials of processes, and those that they demand. `flambeau certs` makes the files for a trial.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Security")]
pub struct SecuritySettings {
    /// The authority that has signed the certificates of all processes, as PEM. With this, calls are encrypted.
    #[arg(long, env = "FLAMBEAU_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// This process's certificate, valid for the name ROLE.flambeau.
    #[arg(long, env = "FLAMBEAU_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of the certificate.
    #[arg(long, env = "FLAMBEAU_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// The callers that are served: with certificates only, or any.
    #[arg(long, env = "FLAMBEAU_TLS_CALLERS", default_value = "certified")]
    pub tls_callers: Callers,
    /// A file with the job's token. With this, every call must carry the token.
    #[arg(long, env = "FLAMBEAU_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

/// The callers that a process with certificates serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Callers {
    /// Only those with certificates of the same authority.
    Certified,
    /// All callers (with the token, if there is one).
    Any,
}

impl SecuritySettings {
    /// Reads the files.
    ///
    /// # Errors
    /// If one cannot be used.
    pub fn load(&self) -> Result<Security, SecurityError> {
        Security::load(&SecurityFiles {
            authority: self.tls_ca.clone(),
            certificate: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            anonymous_callers: self.tls_callers == Callers::Any,
            token: self.token_file.clone(),
        })
    }
}

/// The places that submitted jobs may use.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct LocationSettings {
    /// A folder or an `s3://` URL in which a submitted job may name places too (checkpoint.location and --restore on the
    /// coordinator; data.dir and model.init_from on a worker), besides the run directory and the folder of the data. May be
    /// given more than once, or several separated by semicolons; `any` stands for all.
    #[arg(
        long = "allow-location",
        env = "FLAMBEAU_ALLOW_LOCATION",
        value_delimiter = ';',
        value_name = "DIR|URL"
    )]
    pub allow_location: Vec<String>,
}

/// The limits on connections of a port.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Connections")]
pub struct ConnectionSettings {
    /// Connections at a time. Default: what the limit of open files allows, 16384 at the most. A
    /// quarter, 256 at the most, is for callers that are not members yet; the rest is for
    /// members.
    #[arg(long, env = "FLAMBEAU_MAX_CONNECTIONS", value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_connections: Option<u32>,
    /// Connections from one address at a time. Default: three quarters of all. Workers behind one
    /// gateway share an address.
    #[arg(long, env = "FLAMBEAU_MAX_CONNECTIONS_PER_ADDRESS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections_per_address: Option<u32>,
}

impl ConnectionSettings {
    /// Returns the limits of a port or a socket file, within the files that this process may have open.
    pub fn limits(&self, listen: &Listen) -> Limits {
        let [total, per_address] = [self.max_connections, self.max_connections_per_address]
            .map(|number| number.map(|number| number as usize));
        descriptors::limits(listen, total, per_address)
    }
}

/// The action of a process when the job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum AfterJob {
    /// Exit, with code 0 if it ended well.
    Exit,
    /// Stay until the shutdown, and work on one job after the other.
    Wait,
}

/// The settings by which a process finds its cluster.
#[derive(Clone, Debug, clap::Args)]
pub struct MemberSettings {
    /// The coordinator, as host:port.
    #[arg(long, env = "FLAMBEAU_COORDINATOR", default_value = "127.0.0.1:7070")]
    pub coordinator: String,
    /// The name of this process, which stays the same when it is restarted and differs between processes.
    /// Default: host name and port if the port is fixed, otherwise a new name at each start.
    #[arg(long, env = "FLAMBEAU_IDENTITY")]
    pub identity: Option<String>,
    /// The time for which to continue without an answer of the coordinator, in seconds.
    #[arg(long, env = "FLAMBEAU_PATIENCE_SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(..=LONGEST_SECONDS))]
    pub patience_seconds: u64,
}

impl MemberSettings {
    /// Returns the identity to register under. If none was given, it is made of the host's name and the configured
    /// listening address.
    pub fn identity(&self, listen: &Listen) -> String {
        let host = || {
            hostname::get().map_or_else(|_| "host".to_owned(), |h| h.to_string_lossy().into_owned())
        };
        match (&self.identity, listen) {
            (Some(identity), _) => identity.clone(),
            (None, Listen::Tcp(address)) if address.port() == 0 => {
                format!("{}:{:08x}", host(), rand::random::<u32>())
            }
            (None, Listen::Tcp(address)) => format!("{}:{}", host(), address.port()),
            (None, Listen::Unix(path)) => format!("{}:{}", host(), path.display()),
        }
    }
}

/// A job's settings that can be given by flag or environment; they override its file.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
#[command(next_help_heading = "Job")]
pub struct JobFlags {
    /// Name of the job.
    #[arg(long, env = "FLAMBEAU_NAME")]
    pub name: Option<String>,
    /// Data set: digits, mnist, fashion-mnist, cifar10, npy, image-folder, csv, parquet, libsvm, criteo, clicks (generated), random (for
    /// measurements), or a source of your own.
    #[arg(long, env = "FLAMBEAU_DATA")]
    pub data: Option<String>,
    /// The folder or file of the data.
    #[arg(long, env = "FLAMBEAU_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// csv, parquet: the column with the label.
    #[arg(long, env = "FLAMBEAU_LABEL", value_name = "COLUMN")]
    pub label: Option<String>,
    /// Model: logistic, softmax, mlp, factorization-machine, cnn, resnet18, resnet20, resnet34, resnet50, resnet56,
    /// mobilenetv2, transformer, deepfm, wide-deep, dlrm, two-tower, or one of your own.
    #[arg(long, env = "FLAMBEAU_MODEL")]
    pub model: Option<String>,
    /// Widths of the hidden layers, as in 256,64.
    #[arg(
        long,
        env = "FLAMBEAU_HIDDEN",
        value_delimiter = ',',
        value_name = "N,..."
    )]
    pub hidden: Option<Vec<usize>>,
    /// Strategy: parameter-server, multi-worker-mirrored, hybrid, mirrored, central-storage, one-device or model-parallel.
    #[arg(long, env = "FLAMBEAU_STRATEGY", value_parser = named::<StrategyName>)]
    pub strategy: Option<StrategyName>,
    /// Number of parameter servers.
    #[arg(long, env = "FLAMBEAU_PS", value_name = "N")]
    pub ps: Option<u32>,
    /// Number of workers.
    #[arg(long, env = "FLAMBEAU_WORKERS", value_name = "N")]
    pub workers: Option<u32>,
    /// Training mode: sync, bounded or async.
    #[arg(long, env = "FLAMBEAU_MODE", value_parser = named::<Mode>)]
    pub mode: Option<Mode>,
    /// Staleness bound: the steps by which a worker may lead; implies --mode bounded.
    #[arg(long, env = "FLAMBEAU_STALENESS", value_name = "K")]
    pub staleness: Option<u64>,
    /// Steps that a worker computes ahead of the acknowledgement of its gradients, outside sync mode: 0 or 1.
    #[arg(long, env = "FLAMBEAU_PIPELINE", value_name = "N")]
    pub pipeline: Option<u32>,
    /// Numbers in which weights and gradients travel: f32, bf16 or f16.
    #[arg(long, env = "FLAMBEAU_WIRE", value_parser = named::<Wire>)]
    pub wire: Option<Wire>,
    /// sgd, momentum, adagrad, rmsprop, adam, adamw or ftrl, with its default settings.
    #[arg(long, env = "FLAMBEAU_OPTIMIZER", value_name = "NAME", value_parser = Optimizer::NAMES)]
    pub optimizer: Option<String>,
    /// Step size.
    #[arg(
        long,
        env = "FLAMBEAU_LEARNING_RATE",
        value_name = "X",
        allow_negative_numbers = true
    )]
    pub learning_rate: Option<f32>,
    /// Samples in a worker's step.
    #[arg(long, env = "FLAMBEAU_BATCH_SIZE", value_name = "B")]
    pub batch_size: Option<u32>,
    /// Largest global norm of a worker's gradients.
    #[arg(
        long,
        env = "FLAMBEAU_CLIP_NORM",
        value_name = "X",
        allow_negative_numbers = true
    )]
    pub clip_norm: Option<f32>,
    /// Passes over the training data.
    #[arg(long, env = "FLAMBEAU_EPOCHS", value_name = "E")]
    pub epochs: Option<u32>,
    /// Stop after so many steps.
    #[arg(long, env = "FLAMBEAU_STEPS", value_name = "N")]
    pub steps: Option<u64>,
    /// Seed, which decides initial values and the order of samples.
    #[arg(long, env = "FLAMBEAU_SEED", value_name = "S")]
    pub seed: Option<u64>,
    /// The time without a heartbeat after which a process counts as dead, in seconds.
    #[arg(
        long,
        env = "FLAMBEAU_LEASE_SECONDS",
        value_name = "X",
        allow_negative_numbers = true
    )]
    pub lease_seconds: Option<f64>,
    /// The run directory: metrics, summary, checkpoints and the model.
    #[arg(long, env = "FLAMBEAU_RUN_DIR", value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Any setting of the job file, as in schedule.kind=cosine; may be given more than once, or
    /// several separated by semicolons.
    #[arg(
        long,
        env = "FLAMBEAU_SET",
        value_delimiter = ';',
        value_name = "KEY=VALUE"
    )]
    pub set: Vec<String>,
}

/// Reads a value as a job file would.
///
/// # Errors
/// If it is none of the names.
pub fn named<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    let value = serde::de::value::StrDeserializer::<serde::de::value::Error>::new(text);
    T::deserialize(value).map_err(|error| error.to_string())
}

impl JobFlags {
    /// Returns whether these settings say what to train, and not only how large the cluster is and where it keeps its files.
    pub fn name_a_job(&self) -> bool {
        let of_cluster = |setting: &&String| {
            let tables = ["cluster.", "checkpoint."];
            tables
                .iter()
                .any(|table| setting.trim_start().starts_with(table))
        };
        let of_job = self.set.iter().filter(|setting| !of_cluster(setting));
        let job = Self {
            ps: None,
            workers: None,
            lease_seconds: None,
            run_dir: None,
            set: of_job.cloned().collect(),
            ..self.clone()
        };
        job != Self::default()
    }

    /// Returns the job of `file` (or the default job) with these flags applied, and checks it.
    ///
    /// # Errors
    /// If the resulting job is invalid.
    pub fn over(self, file: Option<Job>) -> Result<Job, JobError> {
        fn set<T>(place: &mut T, flag: Option<T>) {
            if let Some(value) = flag {
                *place = value;
            }
        }
        fn set_some<T>(place: &mut Option<T>, flag: Option<T>) {
            if flag.is_some() {
                *place = flag;
            }
        }
        let mut job = file.unwrap_or_default();
        set(&mut job.name, self.name);
        set(&mut job.data.kind, self.data);
        set_some(&mut job.data.dir, self.data_dir);
        set(&mut job.data.label, self.label);
        set(&mut job.model.name, self.model);
        set(&mut job.model.hidden, self.hidden);
        set_some(&mut job.cluster.ps, self.ps);
        set_some(&mut job.cluster.workers, self.workers);
        if let Some(name) = self.strategy.filter(|name| *name != job.strategy.name) {
            (job.strategy.name, job.strategy.mode) = (name, name.usual_mode());
        }
        if let Some(staleness) = self.staleness {
            job.strategy.staleness = staleness;
            job.strategy.mode = self.mode.unwrap_or(Mode::Bounded);
            if job.strategy.mode != Mode::Bounded {
                return Err(JobError::staleness_unused(&job.strategy));
            }
        }
        if self.mode.is_some_and(|mode| mode != job.strategy.mode) {
            // A bound in the file is meant for the file's mode, not for this one.
            job.strategy.staleness = Strategy::default().staleness;
        }
        set(&mut job.strategy.mode, self.mode);
        if self
            .strategy
            .is_some_and(|name| name != StrategyName::ParameterServer)
            || self.mode == Some(Mode::Sync)
        {
            // The file computes ahead with servers that apply gradients as they come, and here there are none.
            job.strategy.pipeline = Strategy::default().pipeline;
        }
        set(&mut job.strategy.pipeline, self.pipeline);
        set(&mut job.strategy.wire, self.wire);
        // If the flag and the file name the same optimizer, the file's settings of it stay.
        if let Some(name) = self.optimizer.filter(|name| name != job.optimizer.name()) {
            set(&mut job.optimizer, Optimizer::named(&name));
        }
        set(job.optimizer.learning_rate_mut(), self.learning_rate);
        set(&mut job.batch_size, self.batch_size);
        set_some(&mut job.clip_norm, self.clip_norm);
        set(&mut job.epochs, self.epochs);
        set_some(&mut job.steps, self.steps);
        set(&mut job.seed, self.seed);
        set(&mut job.cluster.lease_seconds, self.lease_seconds);
        set_some(&mut job.run_dir, self.run_dir);
        for setting in &self.set {
            job = job.with(setting)?;
        }
        job.check_staleness_counts()?;
        job.validate()?;
        Ok(job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_override_the_file_and_the_file_overrides_defaults() {
        let file =
            Job::from_toml("epochs = 7\nbatch_size = 5\n[optimizer]\nname = \"adam\"\nbeta1 = 0.5")
                .unwrap();
        let flags = JobFlags {
            epochs: Some(3),
            optimizer: Some("adam".to_owned()),
            staleness: Some(2),
            ..JobFlags::default()
        };
        let job = flags.over(Some(file)).unwrap();
        assert_eq!((job.epochs, job.batch_size, job.seed), (3, 5, 1));
        assert_eq!(job.strategy.mode, Mode::Bounded);
        assert!(matches!(job.optimizer, Optimizer::Adam(adam) if adam.beta1 == 0.5));
        let other = JobFlags {
            optimizer: Some("sgd".to_owned()),
            learning_rate: Some(0.3),
            ..JobFlags::default()
        };
        let job = other.over(None).unwrap();
        assert!(matches!(job.optimizer, Optimizer::Sgd(sgd) if sgd.learning_rate == 0.3));
    }

    #[test]
    fn steps_computed_ahead_are_of_the_mode_that_the_file_names() {
        let file = || Some(Job::parse("[strategy]\nmode = \"async\"\npipeline = 1").unwrap());
        let pipeline = |flags: JobFlags| flags.over(file()).map(|job| job.strategy.pipeline);
        let flags = JobFlags::default;
        assert_eq!(pipeline(flags()).unwrap(), 1);
        let staleness = Some(3);
        assert_eq!(
            pipeline(JobFlags {
                staleness,
                ..flags()
            })
            .unwrap(),
            1
        );
        let mode = Some(Mode::Sync);
        assert_eq!(pipeline(JobFlags { mode, ..flags() }).unwrap(), 0);
        let strategy = Some(StrategyName::MultiWorkerMirrored);
        assert_eq!(
            pipeline(JobFlags {
                strategy,
                ..flags()
            })
            .unwrap(),
            0
        );
        let given = Some(1);
        let error = pipeline(JobFlags {
            mode,
            pipeline: given,
            ..flags()
        })
        .unwrap_err();
        assert!(
            error.to_string().contains("`strategy.pipeline` is 1"),
            "{error}"
        );
    }

    #[test]
    fn a_staleness_bound_that_would_not_count_is_refused_with_both_settings() {
        let flags = |mode, staleness| JobFlags {
            mode,
            staleness,
            ..JobFlags::default()
        };
        let file = |text: &str| Some(Job::parse(text).unwrap());
        let sync = "[strategy]\nmode = \"sync\"\nstaleness = 3";
        for refused in [
            flags(Some(Mode::Sync), Some(3)).over(None),
            // The mode is the default, but was given as a flag.
            flags(Some(Mode::Async), Some(4)).over(None),
            flags(None, None).over(file(sync)),
        ] {
            let error = refused.unwrap_err().to_string();
            assert!(
                error.contains("`strategy.staleness` is") && error.contains("`strategy.mode`"),
                "{error}"
            );
        }
        let bounded = "[strategy]\nmode = \"bounded\"\nstaleness = 8";
        let job = flags(Some(Mode::Sync), None).over(file(bounded)).unwrap();
        assert_eq!(job.strategy.mode, Mode::Sync);
        let job = flags(None, Some(3))
            .over(file("[strategy]\nmode = \"sync\""))
            .unwrap();
        assert_eq!(
            (job.strategy.mode, job.strategy.staleness),
            (Mode::Bounded, 3)
        );
    }

    #[test]
    fn any_setting_can_be_given_by_its_key() {
        let set = |settings: &[&str]| {
            let set = settings.iter().map(|s| (*s).to_owned()).collect();
            let flags = JobFlags {
                set,
                ..JobFlags::default()
            };
            flags.over(None)
        };
        let job = set(&[
            "optimizer.beta1=0.5",
            "schedule.kind=cosine",
            "model.hidden=[8, 4]",
        ]);
        let job = job.unwrap();
        assert!(matches!(job.optimizer, Optimizer::Adam(adam) if adam.beta1 == 0.5));
        assert_eq!(job.model.hidden, [8, 4]);
        for wrong in ["optimizer.beta3=0.5", "optimizer", "steps=0", "data=5"] {
            let error = set(&[wrong]).unwrap_err().to_string();
            let key = wrong.split('=').next().unwrap().rsplit('.').next().unwrap();
            assert!(error.contains(key), "{error}");
        }
    }

    #[test]
    fn names_are_read_as_in_the_file() {
        assert_eq!(named::<Wire>("bf16"), Ok(Wire::Bf16));
        let wrong = named::<Mode>("eventually").unwrap_err();
        assert!(
            wrong.contains("eventually") && wrong.contains("bounded"),
            "{wrong}"
        );
    }
}
