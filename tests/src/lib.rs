//! A cluster of real processes for tests. It runs the program under test on free ports, and ends with the test,
//! whatever its outcome.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

pub mod distant;
#[cfg(doctest)]
mod documents;
pub mod models;
pub mod peer;
pub mod relay;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use daemon::Ready;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;
use tempfile::TempDir;

/// The time limit of any wait in a test. It is generous, because only a failure takes so long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The program under test.
#[derive(Clone, Debug)]
pub struct Program(pub PathBuf);

impl Program {
    /// Runs the program to its end with these arguments.
    pub fn run(&self, arguments: &[&str]) -> std::process::Output {
        self.command(arguments).output().unwrap()
    }

    /// Returns a command without the settings in this process's environment.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.0);
        command.args(arguments).env("RAYON_NUM_THREADS", "1");
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FLAMBEAU_") {
                command.env_remove(name);
            }
        }
        command
    }
}

/// A process of a cluster.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// The addresses on which it listens.
    pub ready: Ready,
    log: PathBuf,
}

impl Daemon {
    /// Starts a process and waits until it prints its addresses.
    pub fn start(
        program: &Program,
        log: PathBuf,
        arguments: &[&str],
        env: &[(&str, &str)],
    ) -> Self {
        let started = Self::try_start(program, log, arguments, env);
        started.unwrap_or_else(|said| panic!("{arguments:?}: {said}"))
    }

    /// Starts a process and waits until it prints its addresses. Returns its output if it ends first.
    pub fn try_start(
        program: &Program,
        log: PathBuf,
        arguments: &[&str],
        env: &[(&str, &str)],
    ) -> Result<Self, String> {
        let mut child = program
            .command(arguments)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        match Ready::parse(line.trim_end()) {
            Some(ready) => Ok(Self { child, ready, log }),
            None => {
                let _ = child.kill();
                let status = child.wait().unwrap();
                Err(format!("{status}, {line:?}: {}", read(&log)))
            }
        }
    }

    /// Returns its address, as host:port.
    pub fn address(&self) -> String {
        self.ready.address.as_ref().unwrap().to_string()
    }

    /// Returns the most memory that it has had resident so far, in MiB.
    pub fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kibibytes = peak.unwrap().trim().trim_end_matches(" kB");
        kibibytes.parse::<u64>().unwrap() >> 10
    }

    /// Returns its log.
    pub fn log(&self) -> String {
        read(&self.log)
    }

    /// Returns the process's number.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Kills it, so that it cannot leave the cluster.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Asks it to end.
    pub fn terminate(&self) {
        terminate(self.child.id());
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        eventually(|| {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// Returns the answer of its metrics endpoint to `/path`.
    pub fn http(&self, path: &str) -> String {
        http_get(&self.ready.metrics.to_string(), path).unwrap()
    }
}

/// Returns the answer of an HTTP server to `/path`.
///
/// # Errors
/// If there is none.
pub fn http_get(address: &str, path: &str) -> std::io::Result<String> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("---- {}\n{}", self.log.display(), self.log());
        }
    }
}

/// Prints a line past the capture of a test's output.
pub fn say(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Returns whether the slow tests run too, as in CI. Otherwise prints that `what` is not tested here.
pub fn runs_slow_tests(what: &str) -> bool {
    let runs = std::env::var_os(SLOW).is_some();
    if !runs {
        say(&format!("SKIPPED: {what}: set {SLOW}=1, as CI does"));
    }
    runs
}

/// The environment variable with which the slow tests run too.
const SLOW: &str = "FLAMBEAU_TEST_SLOW";

/// Sends SIGTERM.
pub fn terminate(process: u32) {
    let pid = Pid::from_raw(process as i32).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
}

/// Sends SIGINT to a process and all of its group, as Ctrl-C on a terminal does.
pub fn interrupt_group(process: u32) {
    let pid = Pid::from_raw(process as i32).unwrap();
    kill_process_group(pid, Signal::INT).unwrap();
}

/// Returns whether a process exists (and is no zombie).
pub fn exists(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// Returns the child processes of `process`.
pub fn children(process: u32) -> Vec<u32> {
    let list = format!("/proc/{process}/task/{process}/children");
    let list = std::fs::read_to_string(list).unwrap_or_default();
    list.split_whitespace()
        .map(|pid| pid.parse().unwrap())
        .collect()
}

/// Returns an address of this machine with a port that is free. It is below those that the system gives to a process that asks for
/// any port.
pub fn free_address() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test processes that run at the same time begin far from each other.
    let first = (std::process::id() as u16).wrapping_mul(97);
    loop {
        let next = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let address = format!("127.0.0.1:{}", 20_000 + next % 12_000);
        if std::net::TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

/// Waits until something holds.
pub fn eventually(mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(
            begin.elapsed() < PATIENCE,
            "it did not come about in {PATIENCE:?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// A cluster put together process by process.
#[derive(Debug)]
pub struct Cluster {
    program: Program,
    /// The coordinator.
    pub coordinator: Daemon,
    /// Parameter servers, in order of their start.
    pub ps: Vec<Daemon>,
    /// Workers, in order of their start.
    pub workers: Vec<Daemon>,
    /// The folder of the logs. It is dropped last, so that the daemons' logs can still be shown.
    dir: TempDir,
}

impl Cluster {
    /// Starts a coordinator for the job and `ps` servers.
    pub fn start(program: Program, job: &str, ps: usize) -> Self {
        Self::start_with(program, job, ps, &[])
    }

    /// Starts a coordinator and `ps` servers with more arguments for each process.
    pub fn start_with(program: Program, job: &str, ps: usize, more: &[&str]) -> Self {
        Self::start_of(program, job, ps, (more, more))
    }

    /// Starts a coordinator with more arguments, and `ps` servers.
    pub fn start_coordinator_with(program: Program, job: &str, ps: usize, more: &[&str]) -> Self {
        Self::start_of(program, job, ps, (more, &[]))
    }

    /// Starts a coordinator, and `ps` servers with more arguments.
    pub fn start_servers_with(program: Program, job: &str, ps: usize, more: &[&str]) -> Self {
        Self::start_of(program, job, ps, (&[], more))
    }

    fn start_of(program: Program, job: &str, ps: usize, more: (&[&str], &[&str])) -> Self {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("given.toml");
        std::fs::write(&file, job).unwrap();
        let run = dir.path().join("run");
        let mut arguments = vec!["coordinator", file.to_str().unwrap()];
        arguments.extend([
            "--listen",
            "127.0.0.1:0",
            "--run-dir",
            run.to_str().unwrap(),
        ]);
        arguments.extend(more.0);
        let log = dir.path().join("coordinator.log");
        let coordinator = Daemon::start(&program, log, &arguments, &[]);
        let mut cluster = Self {
            program,
            dir,
            coordinator,
            ps: Vec::new(),
            workers: Vec::new(),
        };
        for index in 0..ps {
            let server = cluster.member("ps-server", &format!("ps-{index}"), more.1, &[]);
            cluster.ps.push(server);
        }
        cluster
    }

    /// Adds a worker; `env` is its environment.
    pub fn add_worker(&mut self, env: &[(&str, &str)]) {
        let name = format!("worker-{}", self.workers.len());
        let worker = self.member("worker", &name, &[], env);
        self.workers.push(worker);
    }

    /// Starts a member of the cluster.
    pub fn member(
        &self,
        role: &str,
        identity: &str,
        more: &[&str],
        env: &[(&str, &str)],
    ) -> Daemon {
        self.member_at(&self.coordinator.address(), role, identity, more, env)
    }

    /// Starts a member that reaches the coordinator at another address.
    pub fn member_at(
        &self,
        coordinator: &str,
        role: &str,
        identity: &str,
        more: &[&str],
        env: &[(&str, &str)],
    ) -> Daemon {
        let mut arguments = vec![role, "--identity", identity, "--coordinator", coordinator];
        arguments.extend(more);
        let log = self.dir.path().join(format!("{identity}.log"));
        Daemon::start(&self.program, log, &arguments, env)
    }

    /// Starts a server again, under its name.
    pub fn restart_ps(&mut self, index: usize) {
        self.restart_ps_with(index, &[]);
    }

    /// Starts a server again, under its name, with more arguments.
    pub fn restart_ps_with(&mut self, index: usize, more: &[&str]) {
        let name = format!("ps-{index}");
        self.ps[index] = self.member("ps-server", &name, more, &[]);
    }

    /// Starts a worker again, under its name.
    pub fn restart_worker(&mut self, index: usize, env: &[(&str, &str)]) {
        let name = format!("worker-{index}");
        self.workers[index] = self.member("worker", &name, &[], env);
    }

    /// Starts the coordinator again, at its address.
    pub fn restart_coordinator(&mut self) {
        self.restart_coordinator_with(&[]);
    }

    /// Starts the coordinator again, at its address, with more arguments.
    pub fn restart_coordinator_with(&mut self, more: &[&str]) {
        let address = self.coordinator.address();
        let (file, run) = (self.dir.path().join("given.toml"), self.run_dir());
        let mut arguments = vec![
            "coordinator",
            file.to_str().unwrap(),
            "--listen",
            &address,
            "--run-dir",
            run.to_str().unwrap(),
        ];
        arguments.extend(more);
        let log = self.dir.path().join("coordinator-again.log");
        self.coordinator = Daemon::start(&self.program, log, &arguments, &[]);
    }

    /// Returns the run directory.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Returns the output of `flambeau status --json`.
    pub fn status(&self) -> Value {
        let coordinator = self.coordinator.address();
        let output = self
            .program
            .run(&["status", "--json", "--coordinator", &coordinator]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Waits for the end of all processes, each of which must end well, and reads the summary.
    pub fn finish(mut self) -> (Value, TempDir) {
        let everybody = std::iter::once(&mut self.coordinator)
            .chain(&mut self.ps)
            .chain(&mut self.workers);
        for daemon in everybody {
            let status = daemon.wait();
            assert!(status.success(), "{status}: {}", daemon.log());
        }
        let summary = std::fs::read_to_string(self.run_dir().join("summary.json")).unwrap();
        (serde_json::from_str(&summary).unwrap(), self.dir)
    }
}
