//! The `coordinator` binary: it listens, prints its address, and ends when it is told to.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use daemon::Ready;

#[test]
fn it_listens_and_ends_with_its_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_coordinator"))
        .args(["--listen", "127.0.0.1:0", "--exit-with-stdin", "--run-dir"])
        .arg(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert!(Ready::parse(line.trim_end()).unwrap().address.is_some());
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn an_address_that_is_taken_is_an_error_that_says_so() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut child = Command::new(env!("CARGO_BIN_EXE_coordinator"))
        .args(["--listen", &address])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    assert!(!child.wait().unwrap().success());
    let mut said = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert!(
        said.contains(&address) && said.contains("--listen"),
        "{said}"
    );
}
