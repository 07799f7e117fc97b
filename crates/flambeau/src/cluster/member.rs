//! A member of a local cluster: a process of its own, or a thread of this one.

use shared_proto::task;
use std::path::Path;

use daemon::Ready;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use super::exit::{Exit, Said};
use super::thread::RoleThread;

/// A member that runs, or has run.
pub(super) enum Running {
    Process(Child),
    Thread(RoleThread),
}

impl Running {
    /// Returns the way in which the member has ended; `None` while it runs.
    pub(super) fn exit(&mut self) -> Option<Exit> {
        match self {
            Self::Process(child) => child.try_wait().ok().flatten().map(Exit::from),
            Self::Thread(thread) => thread.exit(),
        }
    }

    /// Waits for the first line that the member prints. Its later output goes to `log`.
    pub(super) async fn said(&mut self, log: &Path) -> Said {
        let child = match self {
            Self::Process(child) => child,
            Self::Thread(thread) => return thread.said().await,
        };
        let Some(stdout) = child.stdout.take() else {
            return Said::Other;
        };
        let mut lines = BufReader::new(stdout).lines();
        let Ok(Some(line)) = lines.next_line().await else {
            return Said::Nothing;
        };
        let log = log.to_owned();
        task::spawn(async move {
            let mut more = lines.into_inner();
            if let Ok(file) = tokio::fs::OpenOptions::new().append(true).open(&log).await {
                let _ = tokio::io::copy_buf(&mut more, &mut { file }).await;
            }
        });
        Ready::parse(&line).map_or(Said::Other, Said::Ready)
    }

    /// Discards the member's output.
    pub(super) fn ignore_what_it_says(&mut self) {
        if let Self::Process(child) = self
            && let Some(mut said) = child.stdout.take()
        {
            task::spawn(async move {
                let _ = tokio::io::copy(&mut said, &mut tokio::io::sink()).await;
            });
        }
    }

    /// Returns the member's process id; `None` for a thread, or after the process has ended.
    pub(super) fn process_id(&self) -> Option<u32> {
        match self {
            Self::Process(child) => child.id(),
            Self::Thread(_) => None,
        }
    }

    /// Tells the member to end.
    pub(super) fn tell_to_end(&mut self) {
        match self {
            Self::Process(child) => drop(child.stdin.take()),
            Self::Thread(thread) => thread.tell_to_end(),
        }
    }

    /// Kills a process. A thread cannot be killed; it ends when it notices that it was told to end.
    pub(super) async fn kill(&mut self) {
        if let Self::Process(child) = self {
            let _ = child.kill().await;
        }
    }
}
