//! The command lines with which members are started.

use std::ffi::OsString;
use std::net::SocketAddr;

use tokio::process::Command;

use replica::threads;

use crate::error::CommandError;

/// The arguments of a member.
#[derive(Clone, Debug)]
pub(super) struct Start {
    pub(super) arguments: Vec<OsString>,
    /// The number of threads with which candle computes; `None` unless the member is a worker process.
    pub(super) threads: Option<usize>,
}

impl Start {
    pub(super) fn new<const N: usize>(arguments: [&str; N]) -> Self {
        Self {
            arguments: arguments.map(OsString::from).to_vec(),
            threads: None,
        }
    }

    pub(super) fn with(mut self, more: impl IntoIterator<Item: Into<OsString>>) -> Self {
        self.arguments.extend(more.into_iter().map(Into::into));
        self
    }

    /// Adds the address of the live page, if there is one.
    pub(super) fn with_page(self, page: Option<SocketAddr>) -> Self {
        match page {
            Some(address) => self.with(["--http", &address.to_string()]),
            None => self,
        }
    }
}

/// Returns a command that runs this executable, without the settings in this process's environment.
pub(super) fn own() -> Result<Command, CommandError> {
    let path = std::env::current_exe().map_err(CommandError::file("this executable"))?;
    let mut command = Command::new(path);
    for (name, _) in std::env::vars_os() {
        let ours = name.to_str().is_some_and(|n| n.starts_with("FLAMBEAU_"));
        if ours && name != "FLAMBEAU_LOG" && name != "FLAMBEAU_LOG_FORMAT" {
            command.env_remove(name);
        }
    }
    Ok(command)
}

/// Returns the number of threads with which each of several worker processes computes: the number in the environment,
/// otherwise an equal share of the cores.
pub(crate) fn threads_each(workers: u32) -> usize {
    threads::configured().unwrap_or_else(|| share(threads::cores(), workers))
}

/// Returns the number of threads with which each of several workers on threads of this process computes: an equal share
/// of the number in the environment, otherwise of the cores.
pub(super) fn shared_threads(workers: u32) -> usize {
    share(
        threads::configured().unwrap_or_else(threads::cores),
        workers,
    )
}

fn share(of: usize, workers: u32) -> usize {
    (of / workers.max(1) as usize).max(1)
}
