//! The settings of all processes, by flag or by environment variable.

use std::net::SocketAddr;
use std::path::PathBuf;

use network::connections::Limits;
use network::security::{Security, SecurityError, SecurityFiles};
use network::transport::{Listen, socket_address};

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
    /// Returns the limits on connections to a port or a socket file, within this process's limit of open files.
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
    /// Returns the identity to register under. If none was given, it is made of the host's name and the configured port
    /// or socket file. With port 0, a random number takes the place of the port.
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
