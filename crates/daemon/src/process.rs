//! A main function: log, metrics, signals, exit code.

use std::fmt::Display;
use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::{Arc, Once};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use network::security::Security;
use network::transport::Listen;
use shared_proto::ids::RunNumber;
use shared_proto::task::{self, block_on, boxed};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::Ready;
use crate::descriptors;
use crate::http::{self, Readiness};
use crate::membership::{Coordinator, Membership, MembershipError};
use crate::output::Log;
use crate::settings::{AfterJob, LogFormat, ProcessSettings};

/// The exit code of a process that a second signal ends during its shutdown: 128 + SIGTERM.
const CUT_SHORT: i32 = 143;

/// The longest time that a role on a thread waits for its last file operations before it ends.
const LAST_WRITES: Duration = Duration::from_secs(5);

/// The process in which a role runs. The role's `run` receives it.
#[derive(Clone, Debug)]
pub struct Process {
    /// Cancelled when the process is to shut down.
    pub shutdown: CancellationToken,
    /// The time limit of the shutdown.
    pub shutdown_within: Duration,
    /// The address of the metrics; port 0 if the process serves none.
    metrics: SocketAddr,
    /// The readiness that `/readyz` shows; not ready at first.
    pub readiness: Readiness,
    /// The action once the job has ended; `None` if the settings name none.
    pub after_job: Option<AfterJob>,
    /// The credentials of this process, and those that it demands of its callers.
    pub security: Security,
    announcement: Announcement,
    /// Done once the addresses are announced.
    announced: Arc<Once>,
}

/// The way in which a process announces its addresses.
#[derive(Clone, Debug)]
enum Announcement {
    /// A line of stdout in this format.
    Stdout(LogFormat),
    /// A channel to the process of which the role is a thread.
    Channel(mpsc::Sender<Ready>),
}

impl Process {
    /// Announces the addresses on which the role listens, on a line of stdout (see [`Ready`]). A role on a thread sends
    /// them to the starter of the thread instead. Only the first call in a process counts: a second role in it has no
    /// line of its own.
    pub fn announce(&self, address: Option<Listen>) {
        self.announce_page(address, None);
    }

    /// Announces the addresses on which the role listens, with the address of its page for browsers.
    pub fn announce_page(&self, address: Option<Listen>, page: Option<SocketAddr>) {
        let ready = Ready {
            address,
            page,
            metrics: self.metrics,
        };
        self.announced.call_once(|| match &self.announcement {
            // A starter that is gone does not need the addresses.
            Announcement::Stdout(format) => {
                let _ = writeln!(std::io::stdout(), "{}", ready.line(*format));
            }
            Announcement::Channel(starter) => drop(starter.try_send(ready)),
        });
    }

    /// Returns the address of the metrics, with which the process registers; empty if the process serves none.
    pub fn metrics_address(&self) -> String {
        match self.metrics.port() {
            0 => String::new(),
            _ => self.metrics.to_string(),
        }
    }

    /// Waits for another job after the end of a job, if the settings say so. If they say nothing, waits if the
    /// coordinator has a queue of jobs. Returns what the process does next.
    #[boxed(?Send)]
    pub async fn next_job<'a>(&'a self, after: After<'a>) -> Onward {
        let stays = match self.after_job {
            Some(choice) => choice == AfterJob::Wait,
            None => after.coordinator().has_queue(),
        };
        if !stays {
            return Onward::Ends;
        }
        // A rolling upgrade must not wait for a process after the end of its job.
        self.readiness.set(true);
        if let Some(error) = after.error() {
            tracing::error!("{error}");
        }
        tracing::info!("waiting for the next job, or to be told to go");
        match self.shutdown.run_until_cancelled(after.over()).await {
            Some(true) => Onward::Registers,
            Some(false) => Onward::Ends,
            None => Onward::ToldToGo,
        }
    }
}

/// What a process does after a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onward {
    /// The process registers for the next job.
    Registers,
    /// The process ends, because it was told to while it waited. The outcome of its last job no longer matters.
    ToldToGo,
    /// The process ends with the outcome of its job.
    Ends,
}

/// The reason why a process waits for the next job.
pub enum After<'a> {
    /// The job is done. The membership remains, so that the cluster shows the process.
    Done(&'a Membership),
    /// The job has failed with this error. The membership remains.
    Failed(&'a Membership, &'a MembershipError),
    /// The process cannot take part in the job, and has left it.
    Unable {
        /// The coordinator.
        coordinator: &'a Coordinator,
        /// The run in which the process cannot take part; `None` if it was not a member.
        run: Option<RunNumber>,
        /// The time after which the process tries to take part in the same run again, as if it had been restarted.
        again: Duration,
        /// The error.
        error: &'a dyn Display,
    },
}

impl After<'_> {
    /// Returns the error that has kept the process from finishing its job; `None` if the job is done.
    fn error(&self) -> Option<&dyn Display> {
        match self {
            Self::Done(_) => None,
            Self::Failed(_, error) => Some(error),
            Self::Unable { error, .. } => Some(error),
        }
    }

    fn coordinator(&self) -> &Coordinator {
        match self {
            Self::Done(membership) | Self::Failed(membership, _) => &membership.coordinator,
            Self::Unable { coordinator, .. } => coordinator,
        }
    }

    /// Waits until the process should register again. Returns false if another process has taken its identity.
    async fn over(self) -> bool {
        match self {
            Self::Done(membership) | Self::Failed(membership, _) => tokio::select! {
                () = membership.coordinator.has_work(None) => true,
                () = superseded(membership) => false,
            },
            Self::Unable {
                coordinator,
                run,
                again,
                ..
            } => {
                tokio::select! {
                    () = coordinator.has_work(run) => {}
                    () = tokio::time::sleep(again) => {
                        tracing::info!("trying to take part in the same job again");
                    }
                }
                true
            }
        }
    }
}

/// The pauses after which a process tries to take part in a job again.
#[derive(Debug, Default)]
pub struct Again(u32);

impl Again {
    /// Returns the next pause, which is twice the previous one: from 5 s to at most 80 s.
    pub fn next_pause(&mut self) -> Duration {
        let pause = Duration::from_secs(5 << self.0);
        self.0 = (self.0 + 1).min(4);
        pause
    }
}

/// Returns once another process has the member's identity.
async fn superseded(membership: &Membership) {
    if !matches!(membership.lost().await, MembershipError::Superseded(_)) {
        std::future::pending::<()>().await;
    }
}

/// An error of a role, which ends its process.
pub trait Failure: Display {
    /// Returns the process's exit code.
    fn exit_code(&self) -> u8 {
        1
    }
}

/// The error with which a process ends, and its exit code.
#[derive(Clone, Debug)]
pub struct Ending {
    /// The error.
    pub message: String,
    /// The exit code.
    pub code: u8,
}

impl Ending {
    fn of(error: &impl Failure) -> Self {
        Self {
            message: error.to_string(),
            code: error.exit_code(),
        }
    }
}

impl From<String> for Ending {
    fn from(message: String) -> Self {
        Self { message, code: 1 }
    }
}

/// Runs a role as this process: sets up the log, metrics and signals, and turns the role's outcome into an exit
/// code. SIGTERM, SIGINT and, if configured, the end of standard input cancel [`Process::shutdown`]. The role then
/// has [`Process::shutdown_within`] to end. A second signal ends the process at once.
pub fn main<E: Failure>(
    settings: ProcessSettings,
    run: impl AsyncFnOnce(Process) -> Result<(), E>,
) -> ExitCode {
    if settings.check_health {
        return match http::ask_health(settings.metrics_listen) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                crate::noteln!("not well: {error}");
                ExitCode::FAILURE
            }
        };
    }
    if let Err(message) = log_to_stderr(&settings.log, settings.log_format) {
        // Uses the configured format, even if the filter is invalid.
        let _ = log_to_stderr("error", settings.log_format);
        tracing::error!("{message}");
        return ExitCode::FAILURE;
    }
    let run = async |process| run(process).await.map_err(|error| Ending::of(&error));
    match start(&settings, Box::new(|process| Box::pin(run(process)))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Ending { message, code }) => {
            tracing::error!("{message}");
            ExitCode::from(code)
        }
    }
}

/// A role: its work as a process, or as a thread of one.
type Role<'a> = Box<dyn FnOnce(Process) -> LocalBoxFuture<'a, Result<(), Ending>> + 'a>;

fn start(settings: &ProcessSettings, run: Role<'_>) -> Result<(), Ending> {
    descriptors::raise();
    let security = settings
        .security
        .load()
        .map_err(|error| error.to_string())?;
    // One thread suffices for a process's messages; work that needs more has threads of its own.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start the runtime: {error}"))?;
    let outcome = block_on(&runtime, async {
        let shutdown = CancellationToken::new();
        watch_signals(settings, shutdown.clone())?;
        let recorder = http::install_recorder().map_err(|error| error.to_string())?;
        security.begin_to_count();
        task::spawn(security.clone().follow_files());
        let listen = settings.metrics_listen;
        let within = Duration::from_secs(settings.shutdown_seconds);
        let readiness = Readiness::default();
        let metrics = http::serve(listen, recorder, readiness.clone(), shutdown.clone())
            .await
            .map_err(|error| {
                format!("cannot serve metrics on {listen}: {error}; give another --metrics-listen")
            })?;
        let process = Process {
            shutdown: shutdown.clone(),
            shutdown_within: within,
            metrics,
            readiness,
            after_job: settings.after_job,
            security,
            announcement: Announcement::Stdout(settings.log_format),
            announced: Arc::new(Once::new()),
        };
        let deadline = async {
            shutdown.cancelled().await;
            tokio::time::sleep(within).await;
        };
        tokio::select! {
            outcome = run(process) => outcome,
            () = deadline => Err(Ending::from(format!(
                "did not shut down within {} s of being told to; gave up",
                within.as_secs()
            ))),
        }
    });
    // The tasks that still run were told to stop, and have had their time.
    runtime.shutdown_background();
    outcome
}

/// Runs a role on this thread of a process that does other work too. The role has no signals and metrics of its own,
/// and uses the log of the process, if there is one. The role shuts down when `shutdown` is cancelled, and sends the
/// addresses on which it listens to `ready`.
///
/// # Errors
/// The error with which a process of this role would end.
pub fn on_this_thread<E: Failure>(
    settings: &ProcessSettings,
    shutdown: CancellationToken,
    ready: mpsc::Sender<Ready>,
    run: impl AsyncFnOnce(Process) -> Result<(), E>,
) -> Result<(), Ending> {
    let run = async |process| run(process).await.map_err(|error| Ending::of(&error));
    start_on_this_thread(
        settings,
        shutdown,
        ready,
        Box::new(|process| Box::pin(run(process))),
    )
}

fn start_on_this_thread(
    settings: &ProcessSettings,
    shutdown: CancellationToken,
    ready: mpsc::Sender<Ready>,
    run: Role<'_>,
) -> Result<(), Ending> {
    descriptors::raise();
    let security = settings.security.load();
    let security = security.map_err(|error| Ending::from(error.to_string()))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start the runtime: {error}"))?;
    let process = Process {
        shutdown,
        shutdown_within: Duration::from_secs(settings.shutdown_seconds),
        metrics: SocketAddr::from(([127, 0, 0, 1], 0)),
        readiness: Readiness::default(),
        after_job: settings.after_job,
        security,
        announcement: Announcement::Channel(ready),
        announced: Arc::new(Once::new()),
    };
    let outcome = block_on(&runtime, run(process));
    // A write that is under way holds its file open, and another role may want the file next.
    runtime.shutdown_timeout(LAST_WRITES);
    outcome
}

/// Sends log lines to stderr; stdout belongs to results.
///
/// # Errors
/// If `filter` is no tracing filter.
pub fn log_to_stderr(filter: &str, format: LogFormat) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| format!("--log {filter:?} is not a log filter: {error}"))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Log::to_stderr)
        .log_internal_errors(false)
        .with_ansi(false)
        .with_target(false);
    match format {
        LogFormat::Text => log.try_init().map_err(|error| error.to_string())?,
        LogFormat::Json => {
            let log = log.json().flatten_event(true).try_init();
            log.map_err(|error| error.to_string())?;
            // A panic is logged as one line too.
            std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
        }
    }
    Ok(())
}

fn watch_signals(settings: &ProcessSettings, shutdown: CancellationToken) -> Result<(), String> {
    let cannot = |error| format!("cannot listen for signals: {error}");
    let mut terminate = signal(SignalKind::terminate()).map_err(cannot)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(cannot)?;
    let exit_with_stdin = settings.exit_with_stdin;
    task::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = stdin_closed(), if exit_with_stdin => {}
        }
        tracing::info!("shutting down");
        shutdown.cancel();
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        std::process::exit(CUT_SHORT);
    });
    Ok(())
}

async fn stdin_closed() {
    let mut stdin = tokio::io::stdin();
    let mut buffer = [0; 64];
    while !matches!(stdin.read(&mut buffer).await, Ok(0) | Err(_)) {}
}
