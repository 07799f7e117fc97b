//! The live page of a coordinator: its HTML and its data, with the cluster's token and over its TLS.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;
use tests::{Cluster, Daemon, PATIENCE, eventually};

use super::program;
use super::security::{borrowed, certs, shows};

const ENDLESS: &str = "epochs = 100000\n[cluster]\nps = 1\nworkers = 2\n";

/// An answer: its status, its headers and its content.
struct Answer {
    code: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

/// Requests a path over a connection.
fn ask(mut stream: impl Read + Write, path: &str, token: Option<&str>) -> Answer {
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
    let token = token.unwrap_or_default();
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: localhost:1\r\n{token}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = Vec::new();
    stream.read_to_end(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    Answer {
        code: head.split(' ').nth(1).unwrap().parse().unwrap(),
        head: head.to_ascii_lowercase(),
        body: body.to_owned(),
    }
}

fn plain(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Connects as a browser does: it trusts the authority and has no certificate.
fn encrypted(address: SocketAddr, authority: &Path) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(authority).unwrap();
    roots.add(authority).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("coordinator.flambeau").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    StreamOwned::new(connection, plain(address))
}

/// Returns the data of a page without a token.
pub(crate) fn status_of(address: SocketAddr) -> Value {
    ask(plain(address), "/status.json", None).json()
}

#[test]
fn the_page_shows_a_job_while_it_trains() {
    let mut cluster =
        Cluster::start_coordinator_with(program(), ENDLESS, 1, &["--http", "127.0.0.1:0"]);
    let address = cluster.coordinator.ready.page.unwrap();
    let page = ask(plain(address), "/", None);
    assert_eq!(page.code, 200);
    assert!(
        page.head.contains("content-type: text/html"),
        "{}",
        page.head
    );
    assert!(page.head.contains("default-src 'none'"), "{}", page.head);
    assert!(page.body.contains("data-token=\"\""), "no token is needed");
    let starting = ask(plain(address), "/status.json", None).json();
    assert_eq!(starting["status"]["phase"], "starting");
    cluster.add_worker(&[]);
    cluster.add_worker(&[]);
    let mut state = Value::Null;
    eventually(|| {
        state = ask(plain(address), "/status.json", None).json();
        let evaluations = state["history"]["evaluations"].as_array().unwrap();
        !evaluations.is_empty()
            && !state["history"]["steps"]["loss"]
                .as_array()
                .unwrap()
                .is_empty()
    });
    let status = &state["status"];
    assert_eq!(status["phase"], "training");
    let tasks = status["tasks"].as_array().unwrap();
    let worker = tasks
        .iter()
        .find(|task| task["task"] == "worker-1")
        .unwrap();
    assert!(worker["lead"].is_u64() && worker["waiting_on"].is_array());
    assert_eq!(status["shards"][0]["server"], "ps-0");
    assert!(state["history"]["evaluations"][0]["metrics"]["accuracy"].is_f64());
    let remarks = state["history"]["remarks"].as_array().unwrap();
    assert!(
        remarks
            .iter()
            .any(|remark| remark["text"] == "worker-0 joined")
    );
    assert!(
        state["settings"]
            .as_str()
            .unwrap()
            .contains("epochs = 100000")
    );
    // It is the same as `flambeau status --json` says.
    let keys = |value: &Value| {
        value
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect::<Vec<_>>()
    };
    assert_eq!(keys(status), keys(&cluster.status()));
    assert_eq!(ask(plain(address), "/metrics", None).code, 404);

    // A coordinator that is killed and restarted has the curves of before.
    let before = state["history"]["evaluations"][0].clone();
    cluster.coordinator.kill();
    cluster.restart_coordinator_with(&["--http", "127.0.0.1:0"]);
    let address = cluster.coordinator.ready.page.unwrap();
    let state = ask(plain(address), "/status.json", None).json();
    assert_eq!(state["history"]["evaluations"][0], before);
}

#[test]
fn a_website_cannot_read_the_page_of_a_browser_on_the_same_machine() {
    let cluster =
        Cluster::start_coordinator_with(program(), ENDLESS, 0, &["--http", "127.0.0.1:0"]);
    let address = cluster.coordinator.ready.page.unwrap();
    let code = |path: &str, host: &str| {
        let mut stream = plain(address);
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text.split(' ').nth(1).unwrap().to_owned()
    };
    // The name of a website that its owner has made to stand for 127.0.0.1.
    for path in ["/", "/status.json"] {
        assert_eq!(code(path, "website.example:80"), "403", "{path}");
        for host in ["127.0.0.1:80", "localhost", "[::1]:80"] {
            assert_eq!(code(path, host), "200", "{path} of {host}");
        }
    }
}

#[test]
fn a_page_that_is_looked_at_shows_the_end_of_its_job() {
    let job = "epochs = 3\n[cluster]\nps = 1\nworkers = 1\n";
    let mut cluster =
        Cluster::start_coordinator_with(program(), job, 1, &["--http", "127.0.0.1:0"]);
    let address = cluster.coordinator.ready.page.unwrap();
    let mut phases =
        vec![ask(plain(address), "/status.json", None).json()["status"]["phase"].clone()];
    cluster.add_worker(&[]);
    eventually(|| {
        phases.push(ask(plain(address), "/status.json", None).json()["status"]["phase"].clone());
        phases.last().unwrap() == "done"
    });
    assert_eq!(phases[0], "starting");
    // The page does not keep the records open.
    cluster.coordinator.wait();
    let log = cluster.coordinator.log();
    assert!(!log.contains("WARN"), "{log}");
    cluster.finish();
}

#[test]
fn without_the_setting_there_is_no_page() {
    let cluster = Cluster::start(program(), ENDLESS, 0);
    assert_eq!(cluster.coordinator.ready.page, None);
}

fn coordinator(dir: &Path, env: &[(&'static str, String)]) -> Daemon {
    let run = dir.join("run");
    let arguments = [
        "coordinator",
        "--listen",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--run-dir",
        run.to_str().unwrap(),
    ];
    Daemon::start(&program(), dir.join("log"), &arguments, &borrowed(env))
}

/// Checks that the page's data is for those alone who have the token.
fn check_token(ask: impl Fn(&str, Option<&str>) -> Answer, token: &str) {
    let page = ask("/", None);
    assert_eq!(page.code, 200);
    assert!(page.body.contains("data-token=\"required\""));
    for wrong in [None, Some("wrong"), Some("")] {
        let refused = ask("/status.json", wrong);
        assert_eq!(refused.code, 401, "{wrong:?}");
        assert_eq!(
            refused.json().as_object().unwrap().len(),
            1,
            "{}",
            refused.body
        );
    }
    let state = ask("/status.json", Some(token));
    assert_eq!(state.code, 200);
    assert_eq!(state.json()["status"]["phase"], "starting");
}

#[test]
fn the_data_of_a_page_needs_the_token_of_the_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "a-token-of-thirty-two-characters-\n").unwrap();
    let env = [("FLAMBEAU_TOKEN_FILE", file.to_str().unwrap().to_owned())];
    let coordinator = coordinator(dir.path(), &env);
    let address = coordinator.ready.page.unwrap();
    let ask = |path: &str, token: Option<&str>| ask(plain(address), path, token);
    check_token(ask, "a-token-of-thirty-two-characters-");
}

#[test]
fn a_cluster_with_certificates_has_an_encrypted_page_and_browsers_need_none() {
    let dir = tempfile::tempdir().unwrap();
    let files = dir.path().join("certs");
    certs(&files);
    let coordinator = coordinator(dir.path(), &shows(&files, "coordinator"));
    let address = coordinator.ready.page.unwrap();
    let authority = files.join("operator/ca.crt");
    let token = std::fs::read_to_string(files.join("operator/token")).unwrap();
    let ask = |path: &str, token: Option<&str>| ask(encrypted(address, &authority), path, token);
    check_token(ask, token.trim());
    // In the clear there is nothing.
    let mut stream = plain(address);
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[test]
fn a_page_that_everybody_could_read_is_refused_where_processes_need_certificates() {
    let dir = tempfile::tempdir().unwrap();
    certs(dir.path());
    let mut env = shows(dir.path(), "coordinator");
    env.retain(|(name, _)| *name != "FLAMBEAU_TOKEN_FILE");
    let arguments = [
        "coordinator",
        "--listen",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
    ];
    let output = program().command(&arguments).envs(env).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("the live page (--http) needs --token-file"),
        "{said}"
    );
}

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn train_serves_a_page_on_request_and_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let arguments = [
        "train",
        "--http",
        "--quiet",
        "--epochs",
        "100000",
        "--run-dir",
    ];
    let mut command = program().command(&arguments);
    let child = command.arg(&run).stderr(Stdio::piped()).spawn().unwrap();
    let mut train = Running(child);
    let mut said = std::io::BufReader::new(train.0.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).unwrap();
    let address = line.trim_end().strip_prefix("live page: http://");
    let address = address.and_then(|address| address.strip_suffix('/'));
    let address = address
        .unwrap_or_else(|| panic!("{line:?}"))
        .parse()
        .unwrap();
    let state = ask(plain(address), "/status.json", None).json();
    assert_eq!(
        state["run_dir"],
        run.canonicalize().unwrap().to_str().unwrap()
    );
}
