//! A role on a thread of this process.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use clap::builder::Resettable;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use daemon::Ready;
use daemon::process::{self, Ending};
use model::registry::Registry;
use replica::panic_message;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::exit::{Exit, Said};

/// The exit code of a process that has panicked.
const PANICKED: i32 = 101;

/// The command line of a role.
#[derive(Parser)]
#[command(name = "flambeau", no_binary_name = true)]
struct Arguments {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    Coordinator(Box<coordinator::Settings>),
    PsServer(ps_server::Settings),
    Worker(worker::Settings),
}

impl Role {
    /// Reads the arguments. This process's environment has no effect, as it has none on the processes of a local cluster.
    fn parse(arguments: &[OsString]) -> Result<Self, clap::Error> {
        let without_environment =
            |role: clap::Command| role.mut_args(|argument| argument.env(Resettable::Reset));
        let command = Arguments::command().mut_subcommands(without_environment);
        let matches = command.try_get_matches_from(arguments)?;
        Ok(Arguments::from_arg_matches(&matches)?.role)
    }

    /// Runs until the job ends, or until `shutdown`.
    fn run(
        self,
        registry: Registry,
        shutdown: CancellationToken,
        ready: mpsc::Sender<Ready>,
    ) -> Result<(), Ending> {
        match self {
            Self::Coordinator(settings) => {
                let of = settings.process.clone();
                process::on_this_thread(&of, shutdown, ready, async |process| {
                    coordinator::run(*settings, process).await
                })
            }
            Self::PsServer(settings) => {
                let of = settings.process.clone();
                process::on_this_thread(&of, shutdown, ready, async |process| {
                    ps_server::run(settings, process).await
                })
            }
            Self::Worker(settings) => {
                let of = settings.process.clone();
                process::on_this_thread(&of, shutdown, ready, async |process| {
                    worker::run(settings, registry, process).await
                })
            }
        }
    }
}

/// A role on a thread, which is told to end when this is dropped.
pub(super) struct RoleThread {
    thread: Option<JoinHandle<Result<(), Ending>>>,
    ready: mpsc::Receiver<Ready>,
    shutdown: Option<DropGuard>,
    /// The file to which the role's error is written.
    log: PathBuf,
    exit: Option<Exit>,
}

impl RoleThread {
    /// Starts the role that the arguments name.
    ///
    /// # Errors
    /// If the arguments are not those of a role, or the thread cannot be started.
    pub(super) fn start(
        name: String,
        arguments: &[OsString],
        registry: &Registry,
        log: &Path,
    ) -> Result<Self, String> {
        let role = Role::parse(arguments).map_err(|error| error.to_string())?;
        let (announce, ready) = mpsc::channel(1);
        let shutdown = CancellationToken::new();
        let (token, registry) = (shutdown.clone(), registry.clone());
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || role.run(registry, token, announce))
            .map_err(|error| error.to_string())?;
        Ok(Self {
            thread: Some(thread),
            ready,
            shutdown: Some(shutdown.drop_guard()),
            log: log.to_owned(),
            exit: None,
        })
    }

    /// Waits until the role is ready, or ends.
    pub(super) async fn said(&mut self) -> Said {
        self.ready.recv().await.map_or(Said::Nothing, Said::Ready)
    }

    /// Returns the way in which the role has ended; `None` while it runs. The role's error is written to the log.
    pub(super) fn exit(&mut self) -> Option<Exit> {
        if let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) {
            let (code, message) = match thread.join() {
                Ok(Ok(())) => (0, String::new()),
                Ok(Err(ending)) => (i32::from(ending.code), ending.message),
                Err(panic) => {
                    let message = panic_message(&*panic);
                    (PANICKED, format!("it has panicked: {message}"))
                }
            };
            if !message.is_empty() {
                // The error is shown in any case.
                let _ = std::fs::write(&self.log, format!("{message}\n"));
            }
            self.exit = Some(Exit::with_code(code));
        }
        self.exit.clone()
    }

    pub(super) fn tell_to_end(&mut self) {
        drop(self.shutdown.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_those_of_the_role_alone() {
        let parse = |arguments: &[&str]| {
            let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
            Role::parse(&arguments)
        };
        let role = parse(&["worker", "--coordinator", "127.0.0.1:1", "--device", "cpu"]);
        assert!(matches!(role, Ok(Role::Worker(_))));
        let refused = parse(&["worker", "--no-such-flag"]).err();
        assert!(refused.unwrap().to_string().contains("--no-such-flag"));
    }
}
