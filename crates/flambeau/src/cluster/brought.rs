//! Workers on threads of this process, which a program brings to a cluster that runs already.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::registry::Registry;
use network::security::SecurityFiles;

use super::start::shared_threads;
use super::thread::RoleThread;
use super::{DRAIN, tail};
use crate::error::CommandError;

/// Workers that a program brings. Dropping this tells them to end, and waits for them up to the drain time.
pub(crate) struct BroughtWorkers(Vec<Brought>);

struct Brought {
    name: String,
    thread: RoleThread,
    log: PathBuf,
}

/// The cluster that brought workers join, and the settings of the workers.
pub(crate) struct Joining<'a> {
    /// The coordinator, as host:port.
    pub(crate) coordinator: &'a str,
    pub(crate) security: &'a SecurityFiles,
    pub(crate) workers: u32,
    pub(crate) devices: &'a str,
    /// The address on which the workers accept links from other workers.
    pub(crate) listen: IpAddr,
    /// The workers' run directory. Each job's model is in a folder below it; the workers' logs are here too.
    pub(crate) folder: &'a Path,
    /// The beginning of the workers' names. No other program's workers have it.
    pub(crate) names: &'a str,
}

impl BroughtWorkers {
    /// Starts the workers. They register for the running job, and end with it.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub(crate) fn start(joining: &Joining<'_>, registry: &Registry) -> Result<Self, CommandError> {
        let mut brought = Self(Vec::new());
        for number in 0..joining.workers {
            let name = format!("{}-{number}", joining.names);
            let log = joining.folder.join(format!("{name}.log"));
            let arguments = joining.arguments(&name);
            let thread = RoleThread::start(name.clone(), &arguments, registry, &log);
            let thread = thread.map_err(|reason| CommandError::Start {
                name: name.clone(),
                reason,
            })?;
            brought.0.push(Brought { name, thread, log });
        }
        Ok(brought)
    }

    /// Returns the errors of the failed workers once all workers have ended; `None` before, or if none has failed.
    pub(crate) fn all_failed(&mut self) -> Option<String> {
        let mut errors = Vec::new();
        for worker in &mut self.0 {
            if !worker.thread.exit()?.success() {
                errors.push(format!("{}:\n{}", worker.name, tail(&worker.log)));
            }
        }
        (!errors.is_empty()).then(|| errors.join("\n"))
    }
}

impl Drop for BroughtWorkers {
    fn drop(&mut self) {
        for worker in &mut self.0 {
            worker.thread.tell_to_end();
        }
        let deadline = Instant::now() + DRAIN;
        while self.0.iter_mut().any(|w| w.thread.exit().is_none()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Joining<'_> {
    fn arguments(&self, name: &str) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = ["worker", "--coordinator", self.coordinator]
            .map(OsString::from)
            .to_vec();
        arguments.extend(["--identity", name, "--device", self.devices].map(OsString::from));
        arguments.extend(["--after-job", "exit"].map(OsString::from));
        // The job is this program's own.
        arguments.extend(["--allow-location", "any"].map(OsString::from));
        arguments.extend([OsString::from("--run-dir"), self.folder.into()]);
        let threads = shared_threads(self.workers);
        arguments.extend(["--threads".into(), threads.to_string().into()]);
        let listen = SocketAddr::new(self.listen, 0).to_string();
        arguments.extend(["--listen".into(), listen.into()]);
        let files = self.security;
        for (flag, file) in [
            ("--tls-ca", &files.authority),
            ("--tls-cert", &files.certificate),
            ("--tls-key", &files.key),
            ("--token-file", &files.token),
        ] {
            if let Some(file) = file {
                arguments.extend([flag.into(), file.into()]);
            }
        }
        if files.anonymous_callers {
            arguments.extend(["--tls-callers", "any"].map(OsString::from));
        }
        arguments
    }
}
