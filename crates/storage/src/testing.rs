//! A server of the S3 protocol, for tests.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// An S3 server for one test, with an empty bucket called `bucket`. Dropping this ends the server.
#[derive(Debug)]
pub struct Moto {
    process: Child,
    address: String,
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Moto {
    /// Starts the server. If it is not installed, prints on stderr that `what` is not tested, and returns none.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn start(what: &str) -> Option<Self> {
        let Some(program) = moto() else {
            // Written to the real stderr, which the test harness does not capture.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: {what} over the S3 protocol: moto_server was not found. \
                 pip install 'moto[server]', then put it on the PATH or its path into FLAMBEAU_TEST_MOTO"
            );
            return None;
        };
        let mut process = Command::new(program)
            .args(["-H", "127.0.0.1", "-p", "0"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let address = lines
            .find_map(|line| {
                let line = line.unwrap();
                let (_, address) = line.split_once("Running on ")?;
                Some(address.trim().to_owned())
            })
            .expect("moto_server ended");
        // The server logs each request, so it would block if no thread read the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        let moto = Self { process, address };
        assert!(moto.request("PUT /bucket", "").contains("200"));
        Some(moto)
    }

    /// Returns the server's URL.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends a request, as in `PUT /bucket/file`, and returns the answer.
    ///
    /// # Panics
    /// If the server does not answer.
    pub fn request(&self, what: &str, body: &str) -> String {
        let host = self.address.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(host).unwrap();
        write!(
            stream,
            "{what} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Returns the environment variables by which programs reach the server.
    pub fn variables(&self) -> [(&'static str, String); 5] {
        [
            ("AWS_ACCESS_KEY_ID", "AKIAFLAMBEAUTEST0001".to_owned()),
            (
                "AWS_SECRET_ACCESS_KEY",
                "c3VjaCBhIHNlY3JldCBrZXk".to_owned(),
            ),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ENDPOINT", self.address.clone()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
        ]
    }
}

/// Returns the path of moto's server, if it is installed.
fn moto() -> Option<PathBuf> {
    if let Some(program) = std::env::var_os("FLAMBEAU_TEST_MOTO") {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join("moto_server"))
        .find(|program| program.is_file())
}
