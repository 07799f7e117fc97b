//! The `worker` binary: without a coordinator it waits, and then names the address that does not answer.

#![allow(clippy::unwrap_used)]

use std::process::Command;

#[test]
fn a_coordinator_that_does_not_answer_is_named() {
    // A port that was free a moment ago, and on which no process listens.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let output = Command::new(env!("CARGO_BIN_EXE_worker"))
        .args(["--coordinator", &address, "--patience-seconds", "1"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains(&address) && said.contains("is it running"),
        "{said}"
    );
}
