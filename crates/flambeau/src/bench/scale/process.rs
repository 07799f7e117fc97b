//! The coordinator that is measured, in a process of its own.

use std::fs::OpenOptions;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use shared_proto::job::{Job, run_dir};

use crate::bench::processes::{cpu_seconds, resident_bytes};
use crate::error::CommandError;

/// A coordinator's process, which is killed when this is dropped.
pub(super) struct CoordinatorProcess {
    job: PathBuf,
    dir: PathBuf,
    listen: SocketAddr,
    child: Child,
}

impl CoordinatorProcess {
    /// Starts a coordinator for `job`. Its files are in `dir`.
    pub(super) fn start(job: &Job, dir: &Path) -> Result<Self, CommandError> {
        let file = dir.join(run_dir::JOB);
        std::fs::write(&file, job.to_toml()).map_err(CommandError::file(&file))?;
        // A restarted coordinator needs the same port.
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let listen = port.map_err(CommandError::file("a port of loopback"))?;
        let child = spawn(&file, dir, listen)?;
        Ok(Self {
            job: file,
            dir: dir.to_owned(),
            listen,
            child,
        })
    }

    pub(super) fn address(&self) -> String {
        self.listen.to_string()
    }

    /// Kills the process, and starts another one with its state.
    pub(super) fn restart(&mut self) -> Result<(), CommandError> {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.child = spawn(&self.job, &self.dir, self.listen)?;
        Ok(())
    }

    pub(super) fn cpu_seconds(&self) -> f64 {
        cpu_seconds(self.child.id())
    }

    pub(super) fn resident_bytes(&self) -> u64 {
        resident_bytes(self.child.id())
    }
}

impl Drop for CoordinatorProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(job: &Path, dir: &Path, listen: SocketAddr) -> Result<Child, CommandError> {
    let executable = std::env::current_exe().map_err(CommandError::file("this executable"))?;
    let log = dir.join("coordinator.log");
    let file = OpenOptions::new().create(true).append(true).open(&log);
    let file = file.map_err(CommandError::file(&log))?;
    Command::new(executable)
        .arg("coordinator")
        .arg(job)
        .args(["--listen", &listen.to_string(), "--exit-with-stdin"])
        .arg("--run-dir")
        .arg(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(file)
        .spawn()
        .map_err(|error| CommandError::Start {
            name: "the coordinator".to_owned(),
            reason: error.to_string(),
        })
}
