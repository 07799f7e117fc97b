//! Floods of connections that make no requests, against daemons with few descriptors. The job continues to
//! train, its checkpoints are written, and its members can connect.

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;
use tests::{Daemon, PATIENCE, Program, eventually};

use crate::program;
use crate::security::{certs, shows};

/// Descriptors of each daemon.
const DESCRIPTORS: &str = "1024";

/// The connections of a flood: more than a daemon has descriptors, and no more than the daemon and the
/// system's backlog take together.
const FLOOD: usize = 1500;

/// A job that does not end by itself, and leaves time for other tests; checkpoints come often.
const JOB: &str = r#"
name = "flooded"
epochs = 100000
[model]
name = "odd"
[optimizer]
name = "sgd"
[strategy]
mode = "async"
[cluster]
ps = 1
workers = 1
lease_seconds = 5.0
[checkpoint]
every_seconds = 1.0
keep = 2
"#;

/// The environment of each role's processes.
type Environment = Vec<(&'static str, String)>;

/// A coordinator, a server and a worker, each with few descriptors.
struct Flooded {
    coordinator: Daemon,
    server: Daemon,
    worker: Daemon,
    environment: fn(&Path, &str) -> Environment,
    dir: tempfile::TempDir,
}

impl Flooded {
    fn start(listen: &str, environment: fn(&Path, &str) -> Environment) -> Self {
        let dir = tempfile::tempdir().unwrap();
        certs(dir.path());
        let file = dir.path().join("job.toml");
        std::fs::write(&file, JOB).unwrap();
        let run = dir.path().join("run");
        let start = |role: &str, log: &str, arguments: &[&str]| {
            let environment = environment(dir.path(), role);
            let environment = environment.iter().map(|(n, v)| (*n, v.as_str()));
            let environment: Vec<_> = environment
                .chain([("TEST_STEP_MILLISECONDS", "4")])
                .collect();
            let log = dir.path().join(log);
            let limited = ["-c", "ulimit -n \"$0\" && exec \"$@\"", DESCRIPTORS];
            let Program(path) = program();
            let program = [path.to_str().unwrap()];
            let arguments = [&limited[..], &program, arguments].concat();
            Daemon::start(&Program("/bin/sh".into()), log, &arguments, &environment)
        };
        let arguments = [
            "coordinator",
            file.to_str().unwrap(),
            "--listen",
            "127.0.0.1:0",
            "--run-dir",
            run.to_str().unwrap(),
        ];
        let coordinator = start("coordinator", "coordinator.log", &arguments);
        let address = coordinator.address();
        let at = ["--coordinator", &address];
        let arguments = [&["ps-server", "--listen", listen], &at[..]].concat();
        let server = start("ps", "ps.log", &arguments);
        let worker = start("worker", "worker.log", &[&["worker"], &at[..]].concat());
        let flooded = Self {
            coordinator,
            server,
            worker,
            environment,
            dir,
        };
        flooded.goes_on("before the flood");
        flooded
    }

    fn status(&self) -> Result<Value, String> {
        let address = self.coordinator.address();
        let mut command = program().command(&["status", "--json", "--coordinator", &address]);
        let command = command.envs((self.environment)(self.dir.path(), "operator"));
        let output = command.output().unwrap();
        match output.status.success() {
            true => Ok(serde_json::from_slice(&output.stdout).unwrap()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    fn steps_and_checkpoint(&self, when: &str) -> (u64, f64) {
        let status = self.status();
        let status = status.unwrap_or_else(|error| panic!("{when} there is no status: {error}"));
        let steps = status["steps"].as_u64().unwrap();
        (
            steps,
            figure(&self.coordinator, "flambeau_coordinator_checkpoint"),
        )
    }

    /// Waits for hundreds of steps and a few checkpoints, none of which may fail.
    fn goes_on(&self, when: &str) {
        let (steps, checkpoint) = self.steps_and_checkpoint(when);
        let began = Instant::now();
        loop {
            let now = self.steps_and_checkpoint(when);
            if now.0 >= steps + 300 && now.1 >= checkpoint + 3.0 {
                break;
            }
            assert!(
                began.elapsed() < PATIENCE,
                "{when} the job came from {steps} steps and checkpoint {checkpoint} to {now:?}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        for (daemon, name) in [
            (
                &self.coordinator,
                "flambeau_coordinator_failed_checkpoints_total",
            ),
            (&self.server, "flambeau_ps_failed_checkpoints_total"),
        ] {
            assert_eq!(figure(daemon, name), 0.0, "{when}: {name}");
        }
        let lost = "flambeau_coordinator_lost_leases_total{role=\"worker\"}";
        assert_eq!(figure(&self.coordinator, lost), 0.0, "{when}");
    }

    /// Another worker comes, trains, and leaves.
    fn lets_in_a_worker(&self) {
        let environment = (self.environment)(self.dir.path(), "worker");
        let environment: Vec<_> = environment.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let address = self.coordinator.address();
        let arguments = ["worker", "--coordinator", &address];
        let log = self.dir.path().join("newcomer.log");
        let mut newcomer = Daemon::start(&program(), log, &arguments, &environment);
        eventually(|| figure(&newcomer, "flambeau_worker_steps_total") > 10.0);
        newcomer.terminate();
        assert!(newcomer.wait().success(), "{}", newcomer.log());
    }
}

/// Returns a figure of a daemon's metrics; 0 if there is none.
fn figure(daemon: &Daemon, name: &str) -> f64 {
    let text = daemon.http("/metrics");
    assert!(
        text.starts_with("HTTP/1.1 200"),
        "the metrics port says {text:?}"
    );
    let of = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    text.lines().find_map(of).unwrap_or(0.0)
}

fn in_the_clear(_: &Path, _: &str) -> Environment {
    Environment::new()
}

/// Raises this process's limit of descriptors: a flood takes many.
fn have_descriptors(count: u64) {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < count) {
        let raised = Rlimit {
            current: Some(count),
            maximum: limit.maximum,
        };
        setrlimit(Resource::Nofile, raised).unwrap();
    }
}

/// Connections that are never used; those that are closed are opened again.
struct Flood<S> {
    sockets: Vec<S>,
    open: Box<dyn Fn() -> std::io::Result<S>>,
}

impl<S> Flood<S> {
    fn new(count: usize, open: impl Fn() -> std::io::Result<S> + 'static) -> Self {
        have_descriptors(8192);
        let mut flood = Self {
            sockets: Vec::new(),
            open: Box::new(open),
        };
        flood.again(count);
        flood
    }

    fn again(&mut self, count: usize) {
        self.sockets.clear();
        self.sockets
            .extend((0..count).filter_map(|_| (self.open)().ok()));
        assert!(self.sockets.len() > count / 2);
    }
}

fn tcp(address: String) -> impl Fn() -> std::io::Result<TcpStream> {
    let address = address.parse().unwrap();
    move || TcpStream::connect_timeout(&address, Duration::from_secs(5))
}

#[test]
fn a_job_trains_on_while_its_ports_are_flooded() {
    let job = Flooded::start("127.0.0.1:0", in_the_clear);
    let metrics = [&job.coordinator, &job.server].map(|daemon| daemon.ready.metrics.to_string());
    let [of_coordinator, of_server] = metrics;
    for (port, address) in [
        ("the coordinator's port", job.coordinator.address()),
        ("the coordinator's metrics port", of_coordinator),
        ("the server's data port", job.server.address()),
        ("the server's metrics port", of_server),
    ] {
        let mut flood = Flood::new(FLOOD, tcp(address));
        job.goes_on(&format!("while {port} is flooded"));
        job.lets_in_a_worker();
        flood.again(FLOOD);
        job.goes_on(&format!("while {port} is flooded again"));
    }
    for (daemon, port) in [(&job.coordinator, "coordinator"), (&job.server, "data")] {
        let dropped =
            format!("flambeau_dropped_connections_total{{port=\"{port}\",reason=\"crowded\"}}");
        assert!(figure(daemon, &dropped) > 500.0, "{dropped}");
        // Connections that are not displaced end by themselves.
        let _silent = Flood::new(100, tcp(daemon.address()));
        let silent =
            format!("flambeau_dropped_connections_total{{port=\"{port}\",reason=\"silent\"}}");
        eventually(|| figure(daemon, &silent) > 50.0);
        let newcomers = format!("flambeau_connections{{port=\"{port}\",standing=\"newcomer\"}}");
        eventually(|| figure(daemon, &newcomers) < 10.0);
    }
    assert!(job.worker.log().len() < 1 << 20);
}

/// Returns whether a process has memory of a connection open.
fn shares_memory(daemon: &Daemon) -> bool {
    let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.process())).unwrap();
    // A file may be closed meanwhile.
    let mut files = open.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    files.any(|file| file.to_string_lossy().contains("memfd:flambeau connection"))
}

#[test]
fn a_socket_file_is_flooded_in_vain() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ps.sock");
    let job = Flooded::start(&format!("unix:{}", path.display()), in_the_clear);
    for member in [&job.server, &job.worker] {
        assert!(shares_memory(member), "bytes go through the socket");
    }
    let _flood = Flood::new(FLOOD, move || {
        let stream = UnixStream::connect(&path)?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    });
    job.goes_on("while the socket file is flooded");
    job.lets_in_a_worker();
}

#[test]
fn callers_without_certificates_keep_nobody_out() {
    let job = Flooded::start("127.0.0.1:0", shows);
    for address in [job.coordinator.address(), job.server.address()] {
        let mut flood = Flood::new(2500, tcp(address));
        job.goes_on("while callers without certificates come");
        job.lets_in_a_worker();
        flood.again(2500);
        job.goes_on("while more of them come");
    }
}
