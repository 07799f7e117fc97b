//! Certificates and the job's token: processes that have them train, and no others get in.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use flambeau::Lookup;
use network::security::{Security, SecurityFiles};
use shared_proto::ids::Role;
use shared_proto::wire;
use shared_proto::wire::coordinator_client::CoordinatorClient;
use shared_proto::wire::parameter_server_client::ParameterServerClient;
use tests::{Daemon, eventually, free_address};
use tonic::Code;

use super::program;

const JOB: &str = "epochs = 8\n[cluster]\nps = 1\nworkers = 1\n";

/// Makes an authority, the roles' certificates and a token.
pub(crate) fn certs(dir: &Path) {
    let made = program().run(&["certs", "--dir", dir.to_str().unwrap()]);
    assert!(made.status.success(), "{made:?}");
}

/// Returns the environment of a process with the certificate of `role`.
pub(crate) fn shows(dir: &Path, role: &str) -> Vec<(&'static str, String)> {
    let file = |name| dir.join(role).join(name).to_str().unwrap().to_owned();
    vec![
        ("FLAMBEAU_TLS_CA", file("ca.crt")),
        ("FLAMBEAU_TLS_CERT", file("tls.crt")),
        ("FLAMBEAU_TLS_KEY", file("tls.key")),
        ("FLAMBEAU_TOKEN_FILE", file("token")),
    ]
}

fn without(mut env: Vec<(&'static str, String)>, names: &[&str]) -> Vec<(&'static str, String)> {
    env.retain(|(name, _)| !names.contains(name));
    env
}

fn with(
    mut env: Vec<(&'static str, String)>,
    name: &'static str,
    value: &str,
) -> Vec<(&'static str, String)> {
    env.retain(|(other, _)| *other != name);
    env.push((name, value.to_owned()));
    env
}

/// A cluster of processes with these environments.
struct Secured {
    coordinator: Daemon,
    server: Daemon,
    dir: tempfile::TempDir,
}

impl Secured {
    fn start(coordinator: &[(&'static str, String)], server: &[(&'static str, String)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (job, run) = (dir.path().join("job.toml"), dir.path().join("run"));
        std::fs::write(&job, JOB).unwrap();
        let arguments = [
            "coordinator",
            job.to_str().unwrap(),
            "--listen",
            "127.0.0.1:0",
            "--run-dir",
            run.to_str().unwrap(),
        ];
        let log = |name| dir.path().join(name);
        let coordinator = Daemon::start(&program(), log("c"), &arguments, &borrowed(coordinator));
        let address = coordinator.address();
        let arguments = ["ps-server", "--coordinator", &address];
        let server = Daemon::start(&program(), log("s"), &arguments, &borrowed(server));
        Self {
            coordinator,
            server,
            dir,
        }
    }

    /// Runs a process that talks to the coordinator to its end.
    fn run(&self, command: &str, env: &[(&'static str, String)]) -> Output {
        let address = self.coordinator.address();
        let mut command = program().command(&[command, "--coordinator", &address]);
        command.envs(borrowed(env)).output().unwrap()
    }

    /// Checks that the process is refused with this text, and that the refusal is counted.
    fn refuses(&self, command: &str, env: &[(&'static str, String)], reason: &str, why: &str) {
        let before = counted(&self.coordinator, reason);
        let impatient = with(env.to_vec(), "FLAMBEAU_PATIENCE_SECONDS", "2");
        let output = self.run(command, &impatient);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command}: {said}");
        assert!(said.contains(why), "{command}: {why:?} is not in {said}");
        assert!(counted(&self.coordinator, reason) > before, "{command}");
    }

    /// Trains with a worker to the end.
    fn finish(mut self, worker: &[(&'static str, String)]) {
        let output = self.run("worker", worker);
        assert!(output.status.success(), "{output:?}");
        assert!(self.server.wait().success(), "{}", self.server.log());
        assert!(self.coordinator.wait().success());
        let summary = std::fs::read_to_string(self.dir.path().join("run/summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        assert!(
            summary["test_accuracy"].as_f64().unwrap() > 0.9,
            "{summary}"
        );
    }
}

pub(crate) fn borrowed<'a>(env: &'a [(&'static str, String)]) -> Vec<(&'static str, &'a str)> {
    env.iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect()
}

fn counted(daemon: &Daemon, reason: &str) -> u64 {
    let name = format!("flambeau_refused_connections_total{{reason=\"{reason}\"}} ");
    let metrics = daemon.http("/metrics");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
    line.map_or(0, |count| count.parse().unwrap())
}

#[test]
fn with_certificates_and_a_token_nobody_else_is_let_in() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [ours, theirs] = dirs.each_ref().map(|dir| dir.path());
    certs(ours);
    certs(theirs);
    let lookups = free_address();
    let server = with(shows(ours, "ps"), "FLAMBEAU_LOOKUP_LISTEN", &lookups);
    let cluster = Secured::start(&shows(ours, "coordinator"), &server);

    let (certificate, token) = ("certificate", "token");
    let stranger = "the other side speaks TLS and this process does not; set --tls-ca here";
    cluster.refuses("worker", &[], certificate, stranger);
    let untrusted = "do not trust each other";
    cluster.refuses("worker", &shows(theirs, "worker"), certificate, untrusted);
    let tls = ["FLAMBEAU_TLS_CERT", "FLAMBEAU_TLS_KEY"];
    let anonymous = without(shows(ours, "worker"), &tls);
    cluster.refuses("worker", &anonymous, certificate, untrusted);

    // A process with a worker's certificate cannot act as a server, or the other way round.
    let posing = shows(ours, "worker");
    let why = "not valid for ps.flambeau";
    cluster.refuses("ps-server", &posing, certificate, why);
    let why = "not valid for worker.flambeau";
    cluster.refuses("worker", &shows(ours, "ps"), certificate, why);

    let other = theirs.join("worker/token");
    let other = other.to_str().unwrap();
    let wrong = with(shows(ours, "worker"), "FLAMBEAU_TOKEN_FILE", other);
    cluster.refuses("worker", &wrong, token, "token is wrong");
    let missing = without(shows(ours, "worker"), &["FLAMBEAU_TOKEN_FILE"]);
    cluster.refuses("status", &missing, token, "token is missing");

    // A process may not speak for another role, nor open a session with a server's certificate.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let files = |role: &str, token: &Path| SecurityFiles {
        authority: Some(ours.join(role).join("ca.crt")),
        certificate: Some(ours.join(role).join("tls.crt")),
        key: Some(ours.join(role).join("tls.key")),
        anonymous_callers: false,
        token: Some(token.join(role).join("token")),
    };
    let coordinator = cluster.coordinator.address();
    let left = runtime.block_on(leave_as_worker(&coordinator, &files("operator", ours)));
    assert_eq!(left, Code::PermissionDenied);
    let server = cluster.server.address();
    for (role, secret, reason, code) in [
        ("ps", ours, certificate, Code::PermissionDenied),
        ("worker", theirs, token, Code::Unauthenticated),
    ] {
        let before = counted(&cluster.server, reason);
        let opened = runtime.block_on(open_session(&server, &files(role, secret)));
        assert_eq!(opened, code, "{role}");
        assert_eq!(counted(&cluster.server, reason), before + 1, "{role}");
    }
    // Readers of rows need the token and a certificate, too.
    let read = |files: &SecurityFiles| {
        let security = Security::load(files).unwrap();
        let patience = Duration::from_secs(5);
        runtime.block_on(async {
            let mut lookup =
                Lookup::new(std::slice::from_ref(&lookups), &security, patience).unwrap();
            lookup.rows("items", &[1]).await.unwrap_err().to_string()
        })
    };
    let admitted = read(&files("operator", ours));
    assert!(admitted.contains("holds no shard"), "{admitted}");
    assert!(read(&files("operator", theirs)).contains("token is wrong"));
    assert!(!read(&SecurityFiles::default()).contains("holds no shard"));
    // The server does not accept unencrypted bytes either.
    let before = counted(&cluster.server, certificate);
    let mut plain = std::net::TcpStream::connect(server).unwrap();
    std::io::Write::write_all(&mut plain, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    eventually(|| counted(&cluster.server, certificate) == before + 1);

    let status = cluster.run("status", &shows(ours, "operator"));
    assert!(status.status.success(), "{status:?}");
    cluster.finish(&shows(ours, "worker"));
}

/// Jobs of a long-lived cluster are submitted and cancelled with a worker's certificate, and listed with an operator's.
#[test]
fn jobs_are_submitted_and_cancelled_by_workers_alone() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [ours, theirs] = dirs.each_ref().map(|dir| dir.path());
    certs(ours);
    certs(theirs);
    let run = ours.join("run");
    let arguments = [
        "coordinator",
        "--no-job",
        "--listen",
        "127.0.0.1:0",
        "--run-dir",
        run.to_str().unwrap(),
    ];
    let env = shows(ours, "coordinator");
    let coordinator = Daemon::start(&program(), ours.join("log"), &arguments, &borrowed(&env));
    let address = coordinator.address();
    let job = ours.join("job.toml");
    std::fs::write(&job, JOB).unwrap();
    let call = |arguments: &[&str], env: &[(&'static str, String)]| {
        let mut command = program().command(arguments);
        command
            .args(["--coordinator", &address])
            .env("FLAMBEAU_PATIENCE_SECONDS", "2");
        let output = command.envs(borrowed(env)).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), said)
    };
    let submit = ["submit", job.to_str().unwrap()];
    let (cancel, list) = (["cancel", "1"], ["jobs"]);
    let stranger = without(shows(ours, "worker"), &["FLAMBEAU_TOKEN_FILE"]);
    let other = theirs.join("worker/token");
    let wrong = with(
        shows(ours, "worker"),
        "FLAMBEAU_TOKEN_FILE",
        other.to_str().unwrap(),
    );
    for arguments in [&submit[..], &cancel, &list] {
        for (env, why) in [
            (&Vec::new(), "set --tls-ca here"),
            (&shows(theirs, "worker"), "do not trust each other"),
            (&stranger, "token is missing"),
            (&wrong, "token is wrong"),
        ] {
            let (fine, said) = call(arguments, env);
            assert!(!fine && said.contains(why), "{arguments:?}: {said}");
        }
    }
    for arguments in [&submit[..], &cancel] {
        let (fine, said) = call(arguments, &shows(ours, "operator"));
        assert!(
            !fine && said.contains("not valid for worker.flambeau"),
            "{arguments:?}: {said}"
        );
    }
    assert!(call(&list, &shows(ours, "operator")).0);
    for arguments in [&submit[..], &list, &cancel] {
        let (fine, said) = call(arguments, &shows(ours, "worker"));
        assert!(fine, "{arguments:?}: {said}");
    }
    coordinator.terminate();
}

#[test]
fn a_token_alone_and_certificates_of_servers_alone_serve_too() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    certs(dir);
    let tls = ["FLAMBEAU_TLS_CA", "FLAMBEAU_TLS_CERT", "FLAMBEAU_TLS_KEY"];
    let token = without(shows(dir, "worker"), &tls);
    let cluster = Secured::start(&token, &token);
    cluster.refuses("worker", &[], "token", "token is missing");
    cluster.finish(&token);

    let open = |role| with(shows(dir, role), "FLAMBEAU_TLS_CALLERS", "any");
    let cluster = Secured::start(&open("coordinator"), &open("ps"));
    cluster.finish(&without(shows(dir, "worker"), &tls[1..]));
}

#[test]
fn a_process_with_certificates_says_that_the_other_side_has_none() {
    let dir = tempfile::tempdir().unwrap();
    certs(dir.path());
    let cluster = Secured::start(&[], &[]);
    for command in ["worker", "ps-server", "status"] {
        let role = if command == "worker" { "worker" } else { "ps" };
        let output = cluster.run(command, &shows(dir.path(), role));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command}: {said}");
        let address = cluster.coordinator.address();
        let wrong = "the other side does not speak TLS and this process does; set --tls-ca";
        for part in [address.as_str(), wrong] {
            assert!(said.contains(part), "{command}: {part:?} is not in {said}");
        }
    }
}

#[test]
fn what_secures_a_process_is_checked_when_it_starts() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    certs(dir);
    let again = program().run(&["certs", "--dir", dir.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&again.stdout);
    assert!(said.contains("nothing was changed"), "{said}");
    let empty = dir.join("empty");
    std::fs::write(&empty, "\n").unwrap();
    let empty = empty.to_str().unwrap();
    let all = || shows(dir, "coordinator");
    let cases = [
        (without(all(), &["FLAMBEAU_TLS_KEY"]), "only together"),
        (without(all(), &["FLAMBEAU_TLS_CA"]), "--tls-ca"),
        (
            without(all(), &["FLAMBEAU_TLS_CERT", "FLAMBEAU_TLS_KEY"]),
            "a process that listens needs",
        ),
        (
            with(all(), "FLAMBEAU_TLS_CA", empty),
            "no certificate in it",
        ),
        (
            with(
                without(
                    all(),
                    &["FLAMBEAU_TLS_CA", "FLAMBEAU_TLS_CERT", "FLAMBEAU_TLS_KEY"],
                ),
                "FLAMBEAU_TLS_CALLERS",
                "any",
            ),
            "--tls-callers need",
        ),
        (with(all(), "FLAMBEAU_TLS_KEY", empty), "cannot be used"),
        (with(all(), "FLAMBEAU_TLS_CERT", "/nowhere"), "cannot read"),
        (with(all(), "FLAMBEAU_TOKEN_FILE", empty), "no token"),
    ];
    for (env, why) in cases {
        let mut command = program().command(&["coordinator", "--listen", "127.0.0.1:0"]);
        let output = command.envs(env).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{why}: {said}");
        assert!(said.contains(why), "{why:?} is not in {said}");
    }
}

#[test]
fn a_local_cluster_trains_encrypted() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let arguments = |epochs| {
        let run = run.to_str().unwrap();
        [
            "train",
            "--secure",
            "--json",
            "--quiet",
            "--run-dir",
            run,
            "--epochs",
            epochs,
        ]
    };
    let output = program().run(&arguments("8"));
    assert!(output.status.success(), "{output:?}");
    let outcome: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(
        outcome["test_accuracy"].as_f64().unwrap() > 0.9,
        "{outcome}"
    );

    // While the job trains, no caller gets an unencrypted answer.
    std::fs::remove_dir_all(&run).unwrap();
    let train = program().command(&arguments("10000")).spawn().unwrap();
    let mut train = Running(train);
    let log = run.join("logs/coordinator-0.log");
    let mut address = None;
    eventually(|| {
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        let found = log.split_once("address=").map(|(_, rest)| rest.to_owned());
        address = found.and_then(|rest| rest.split_whitespace().next().map(str::to_owned));
        address.is_some()
    });
    let status = program().run(&["status", "--coordinator", &address.unwrap()]);
    let said = String::from_utf8_lossy(&status.stderr);
    assert!(said.contains("the other side speaks TLS"), "{said}");
    tests::terminate(train.0.id());
    assert_eq!(train.0.wait().unwrap().code(), Some(130));
}

/// A process that ends with the test.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

/// Calls Leave in a worker's name. Returns the status.
async fn leave_as_worker(address: &str, files: &SecurityFiles) -> Code {
    let security = Security::load(files).unwrap();
    let endpoint = security.endpoint(address, Role::Coordinator).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let mut client = CoordinatorClient::with_interceptor(channel, security.credentials());
    let origin = wire::Origin {
        job: "job".to_owned(),
        task: Some(wire::Task {
            role: wire::Role::Worker.into(),
            index: 0,
            generation: 1,
        }),
        sequence: 1,
        ..wire::Origin::default()
    };
    let request = wire::LeaveRequest {
        origin: Some(origin),
        error: "it is over".to_owned(),
        ..wire::LeaveRequest::default()
    };
    client.leave(request).await.unwrap_err().code()
}

/// Opens a session with a server. Returns the status.
async fn open_session(address: &str, files: &SecurityFiles) -> Code {
    let security = Security::load(files).unwrap();
    let endpoint = security.endpoint(address, Role::Ps).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let mut client = ParameterServerClient::with_interceptor(channel, security.credentials());
    let session = client.session(tokio_stream::empty()).await;
    session.unwrap_err().code()
}
