//! A cluster on this machine. Its members communicate over socket files or loopback. They are threads of this process,
//! or processes that run this executable. A member process ends with this process, however this process ends, because
//! it reads from a pipe that then closes.

mod brought;
mod exit;
mod member;
mod start;
mod thread;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use daemon::{Ready, clusters};
use model::registry::Registry;
use network::security::Security;
use network::transport::Listen;
use ps_server::RowSettings;
use replica::threads;
use shared_proto::ids::{Role, TaskId};
use shared_proto::job::{Job, run_dir};
use tempfile::TempDir;
use tokio::time::timeout;

pub(crate) use self::brought::{BroughtWorkers, Joining};
use self::exit::{Exit, Said};
use self::member::Running;
pub(crate) use self::start::threads_each;
use self::start::{Start, own, shared_threads};
use self::thread::RoleThread;
use crate::certs;
use crate::error::CommandError;

/// The coordinator's id among the members.
pub(crate) const COORDINATOR: TaskId = TaskId {
    role: Role::Coordinator,
    index: 0,
};

/// The time in which a process must listen. A coordinator may watch for 15 s whether another run owns the
/// location of its checkpoints.
const START: Duration = Duration::from_secs(60);

/// The time in which processes must end after they are told to.
const DRAIN: Duration = Duration::from_secs(12);

/// The length below which every system accepts the path of a socket file. With a longer TMPDIR, ports are
/// used.
const LONGEST_SOCKET_PATH: usize = 100;

/// The number of days for which a cluster's own certificates are valid.
const CERTIFICATE_DAYS: u16 = 365;

/// The number of lines of a dead process's log that are shown.
const TAIL: usize = 12;

/// One member.
struct Member {
    running: Running,
    start: Start,
    log: PathBuf,
    /// The way in which the member has ended; `None` while it runs.
    exit: Option<Exit>,
}

/// The transport between workers and servers of one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Transport {
    /// A port on loopback.
    Tcp,
    /// A socket file.
    Unix,
}

/// Where the roles of a cluster run.
#[derive(Clone, Debug)]
pub(crate) enum Roles {
    /// In processes of their own.
    Processes,
    /// On threads of this process, with these models and data sources.
    Threads(Registry),
}

/// The settings with which a cluster is started.
#[derive(Clone, Debug)]
pub(crate) struct Plan<'a> {
    /// Where the roles run.
    pub(crate) roles: Roles,
    /// The number of workers.
    pub(crate) workers: u32,
    /// The devices on which each worker computes.
    pub(crate) device: &'a str,
    /// The transport between workers and servers.
    pub(crate) transport: Transport,
    /// The checkpoint to begin with.
    pub(crate) restore: Option<&'a str>,
    /// True if all calls are encrypted, with certificates made for this cluster.
    pub(crate) secure: bool,
    /// The memory of each server for rows of tables.
    pub(crate) row_settings: &'a RowSettings,
    /// True if servers answer reads of rows.
    pub(crate) lookups: bool,
    /// The address of the live page; `None` without one.
    pub(crate) http: Option<SocketAddr>,
}

/// The members of a job's cluster.
pub(crate) struct LocalCluster {
    roles: Roles,
    members: BTreeMap<TaskId, Member>,
    logs: PathBuf,
    /// The folder of socket files. It is not in the run directory, whose path may be too long for socket files.
    sockets: TempDir,
    /// The folder of the certificates; `None` without encryption.
    certificates: Option<PathBuf>,
    /// The address on which the coordinator listens.
    pub(crate) coordinator: SocketAddr,
    /// The address of the live page, if there is one.
    page: Option<SocketAddr>,
}

impl LocalCluster {
    /// Starts a coordinator, the job's number of servers, and the plan's number of workers. `dir` is the run directory,
    /// which the job names too; it gets the job and the logs.
    pub(crate) async fn start(job: &Job, dir: &Path, plan: Plan<'_>) -> Result<Self, CommandError> {
        let logs = dir.join("logs");
        std::fs::create_dir_all(&logs).map_err(CommandError::file(&logs))?;
        let job_file = dir.join(run_dir::JOB);
        std::fs::write(&job_file, job.to_toml()).map_err(CommandError::file(&job_file))?;

        let sockets = tempfile::Builder::new().prefix("flambeau-").tempdir();
        let sockets = sockets.map_err(CommandError::file("a folder for socket files"))?;
        let certificates = plan.secure.then(|| sockets.path().join("certs"));
        if let Some(dir) = &certificates {
            certs::make(dir, &certs::ALL, CERTIFICATE_DAYS)?;
        }
        let mut cluster = Self {
            roles: plan.roles.clone(),
            members: BTreeMap::new(),
            logs,
            sockets,
            certificates,
            coordinator: SocketAddr::from(([127, 0, 0, 1], 0)),
            page: None,
        };
        let start = Start::new(["coordinator", &job_file.display().to_string()]);
        let start = cluster.secure(start, Role::Coordinator);
        let fresh = match plan.restore {
            Some(checkpoint) => start.clone().with(["--restore", checkpoint]),
            None => start.clone(),
        };
        let fresh = fresh.with(["--listen", "127.0.0.1:0"]);
        let fresh = fresh.with_page(plan.http);
        if let Some(ready) = cluster.spawn(COORDINATOR, fresh).await? {
            cluster.page = ready.page;
            if let Some(Listen::Tcp(address)) = ready.address {
                cluster.coordinator = address;
            }
        }
        let start = start.with_page(cluster.page);
        // If it is restarted, it listens on the same address and resumes from its state.
        if let Some(coordinator) = cluster.members.get_mut(&COORDINATOR) {
            coordinator.start = start.with(["--listen", &cluster.coordinator.to_string()]);
        }

        for index in 0..job.servers().unwrap_or(1) {
            let mut start = cluster.member("ps-server", Role::Ps, index);
            start = start.with(plan.row_settings.flags());
            if plan.lookups {
                start = start.with(["--lookup-listen", "127.0.0.1:0"]);
            }
            start = start.with(cluster.socket_file(&format!("ps-{index}"), &plan));
            cluster.spawn(TaskId::ps(index), start).await?;
        }
        for index in 0..plan.workers {
            let mut start = cluster.member("worker", Role::Worker, index);
            start = start.with(["--device", plan.device]);
            start = start.with(cluster.socket_file(&format!("worker-{index}"), &plan));
            match &cluster.roles {
                Roles::Processes => start.threads = Some(threads_each(plan.workers)),
                Roles::Threads(_) => {
                    start = start.with(["--threads", &shared_threads(plan.workers).to_string()]);
                }
            }
            cluster.spawn(TaskId::worker(index), start).await?;
        }
        Ok(cluster)
    }

    /// Returns the arguments by which a process listens on a socket file; empty if the process listens on a port
    /// instead.
    fn socket_file(&self, name: &str, plan: &Plan<'_>) -> Vec<String> {
        let file = self.sockets.path().join(format!("{name}.sock"));
        // Traffic through a socket file is not encrypted.
        let unix = plan.transport == Transport::Unix && !plan.secure;
        match unix && file.as_os_str().len() < LONGEST_SOCKET_PATH {
            true => vec!["--listen".to_owned(), Listen::Unix(file).to_string()],
            false => Vec::new(),
        }
    }

    /// Returns the arguments of a server or worker of this cluster.
    fn member(&self, subcommand: &str, role: Role, index: u32) -> Start {
        let identity = TaskId { role, index }.to_string();
        let coordinator = self.coordinator.to_string();
        let start = Start::new([
            subcommand,
            "--coordinator",
            &coordinator,
            "--identity",
            &identity,
        ]);
        self.secure(start, role)
    }

    /// Adds the security arguments of a role.
    fn secure(&self, start: Start, role: Role) -> Start {
        let Some(dir) = &self.certificates else {
            return start;
        };
        let files = certs::files(dir, role);
        let flags = [
            ("--tls-ca", files.authority),
            ("--tls-cert", files.certificate),
            ("--tls-key", files.key),
            ("--token-file", files.token),
        ];
        flags.into_iter().fold(start, |start, (flag, file)| {
            start.with([flag, &file.unwrap_or_default().display().to_string()])
        })
    }

    /// Describes where the live page is, and its token if it needs one; `None` without a page.
    pub(crate) fn page(&self) -> Option<String> {
        let place = clusters::reachable(self.page?);
        Some(match &self.certificates {
            None => format!("http://{place}/"),
            Some(dir) => format!(
                "https://{place}/ (its token is in {})",
                certs::files(dir, Role::Worker)
                    .token
                    .unwrap_or_default()
                    .display()
            ),
        })
    }

    /// Returns the credentials with which this process calls the cluster, those of a worker.
    pub(crate) fn security(&self) -> Result<Security, CommandError> {
        let Some(dir) = &self.certificates else {
            return Ok(Security::default());
        };
        Ok(Security::load(&certs::files(dir, Role::Worker))?)
    }

    /// Restarts a process that has ended, under the same name.
    pub(crate) fn restart(&mut self, task: TaskId) -> Result<(), CommandError> {
        let Some(member) = self.members.get(&task) else {
            return Ok(());
        };
        let start = member.start.clone();
        let (mut running, log) = self.begin(task, &start, false)?;
        running.ignore_what_it_says();
        let member = Member {
            running,
            start,
            log,
            exit: None,
        };
        self.members.insert(task, member);
        Ok(())
    }

    /// Starts a member without waiting until it listens. If `fresh` is true, its log is emptied first.
    fn begin(
        &self,
        task: TaskId,
        start: &Start,
        fresh: bool,
    ) -> Result<(Running, PathBuf), CommandError> {
        let failed = |reason: String| CommandError::Start {
            name: task.to_string(),
            reason,
        };
        let log = self.logs.join(format!("{task}.log"));
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .map_err(CommandError::file(&log))?;
        if fresh {
            file.set_len(0).map_err(CommandError::file(&log))?;
        }
        if let Roles::Threads(registry) = &self.roles {
            let thread = RoleThread::start(task.to_string(), &start.arguments, registry, &log);
            return Ok((Running::Thread(thread.map_err(failed)?), log));
        }
        let mut command = own()?;
        if let Some(number) = start.threads {
            command.env(threads::VARIABLE, number.to_string());
        }
        let child = command
            .args(&start.arguments)
            .arg("--exit-with-stdin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file)
            // The child has its own process group, so that Ctrl-C on a terminal reaches this process alone, which then
            // ends the job early.
            .process_group(0)
            .kill_on_drop(true)
            .spawn();
        let child = child.map_err(|error| failed(error.to_string()))?;
        Ok((Running::Process(child), log))
    }

    async fn spawn(&mut self, task: TaskId, start: Start) -> Result<Option<Ready>, CommandError> {
        let (mut running, log) = self.begin(task, &start, true)?;
        let said = timeout(START, running.said(&log));
        // A member without a coordinator does not report that it listens.
        let said = match self.members.get_mut(&COORDINATOR) {
            Some(coordinator) => tokio::select! {
                said = said => said,
                () = ended(&mut coordinator.running) => Ok(Said::Nothing),
            },
            None => said.await,
        };
        let member = Member {
            running,
            start,
            log: log.clone(),
            exit: None,
        };
        self.members.insert(task, member);
        match said {
            Ok(Said::Ready(ready)) => Ok(Some(ready)),
            // It has ended. `ended` reports that.
            Ok(Said::Nothing) if task != COORDINATOR => Ok(None),
            Ok(Said::Nothing | Said::Other) | Err(_) => {
                // A thread writes its error when its end is noticed.
                self.ended();
                let said = tail(&log);
                Err(CommandError::Start {
                    name: task.to_string(),
                    reason: format!("it does not say where it listens; its log says:\n{said}"),
                })
            }
        }
    }

    /// Returns the members that have ended since the last call.
    pub(crate) fn ended(&mut self) -> Vec<(TaskId, Exit)> {
        let mut ended = Vec::new();
        for (task, member) in self.members.iter_mut().filter(|(_, m)| m.exit.is_none()) {
            if let Some(exit) = member.running.exit() {
                member.exit = Some(exit.clone());
                ended.push((*task, exit));
            }
        }
        ended
    }

    /// Returns whether any worker is running.
    pub(crate) fn has_workers(&self) -> bool {
        let mut members = self.members.iter();
        members.any(|(task, member)| task.role == Role::Worker && member.exit.is_none())
    }

    /// Returns the process ids of the running processes of a role.
    pub(crate) fn processes(&self, role: Role) -> Vec<u32> {
        let of_role = self.members.iter().filter(|(task, _)| task.role == role);
        of_role
            .filter_map(|(_, member)| member.running.process_id())
            .collect()
    }

    /// Tells all remaining members to end, and kills processes that do not.
    pub(crate) async fn stop(&mut self) {
        for member in self.members.values_mut() {
            member.running.tell_to_end();
        }
        self.wait().await;
        for member in self.members.values_mut().filter(|m| m.exit.is_none()) {
            member.running.kill().await;
        }
        self.ended();
    }

    async fn wait(&mut self) {
        let all_gone = async {
            while self.members.values().any(|member| member.exit.is_none()) {
                self.ended();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = timeout(DRAIN, all_gone).await;
    }

    /// Returns the failed process that an error names at its beginning, if there is one.
    pub(crate) fn culprit(&self, error: &str) -> Option<TaskId> {
        let named = |task: &&TaskId| error.starts_with(&task.to_string());
        let mut named = self.members.keys().filter(named);
        // The longest matching name: an error of worker-11 begins with worker-1 too.
        named.next_back().copied().filter(|task| {
            let exit = self
                .members
                .get(task)
                .and_then(|member| member.exit.as_ref());
            exit.is_some_and(|exit| !exit.success())
        })
    }

    /// Returns the error for a process that has ended, with the end of its log.
    pub(crate) fn died(&self, task: TaskId) -> CommandError {
        let member = self.members.get(&task);
        let log = member.map(|member| member.log.clone()).unwrap_or_default();
        CommandError::Died {
            name: task.to_string(),
            status: match member.and_then(|member| member.exit.as_ref()) {
                Some(exit) if exit.code.is_none() => format!("was killed ({exit})"),
                Some(exit) => format!("has ended ({exit})"),
                None => "does not answer".to_owned(),
            },
            tail: tail(&log),
            log,
        }
    }
}

impl Drop for LocalCluster {
    /// Waits until threads have ended: they hold files of the run directory, in which another training may begin. Processes are
    /// killed.
    fn drop(&mut self) {
        let Roles::Threads(_) = self.roles else {
            return;
        };
        let members = self.members.values_mut();
        members.for_each(|member| member.running.tell_to_end());
        let deadline = Instant::now() + DRAIN;
        while self
            .members
            .values_mut()
            .any(|m| m.running.exit().is_none())
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Waits for a member's end. `Child::wait` would close the standard input of a process first.
async fn ended(running: &mut Running) {
    while running.exit().is_none() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(TAIL);
    lines[from..]
        .iter()
        .map(|line| format!("  | {line}\n"))
        .collect()
}
