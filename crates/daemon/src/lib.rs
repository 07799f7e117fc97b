//! The parts of a process that are the same for all roles.
//!
//! - [`process`]: a main function: log, metrics, signals, exit code
//! - [`settings`]: the settings of all processes; [`job_flags`]: a job's settings by flag
//! - [`membership`]: register with the coordinator, keep the lease, follow views, leave
//! - [`Offload`]: runs work that would hold up messages
//! - [`output`]: the log, and what is printed
//! - [`http`]: `/metrics`, `/healthz` and `/readyz`
//! - [`status`]: the status of a cluster as JSON
//! - [`clusters`]: the running coordinators of this machine, for `flambeau status`
//!
//! A role is a function `run(settings, process)` of its library; [`process::main`] wraps it.

pub mod clusters;
mod descriptors;
pub mod http;
pub mod job_flags;
pub mod membership;
mod offload;
pub mod output;
pub mod process;
pub mod settings;
pub mod status;

pub use http::memory_limit;
pub use offload::{Offload, lower_priority};

use std::net::SocketAddr;

use network::transport::Listen;
use serde::{Deserialize, Serialize};
use settings::LogFormat;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// The addresses of a process, which it prints on one line of stdout. A parent that has started it with
/// port 0 reads them there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The address on which the role listens; `None` for a role that does not listen.
    pub address: Option<Listen>,
    /// The address of the process's page for browsers; `None` if the process serves none.
    pub page: Option<SocketAddr>,
    /// The address of the process's metrics.
    pub metrics: SocketAddr,
}

/// [`Ready`] as a JSON object, with the fields that each log line has.
#[derive(Serialize, Deserialize)]
struct ReadyObject {
    timestamp: String,
    level: String,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    listening: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    page: Option<SocketAddr>,
    metrics: SocketAddr,
}

impl Ready {
    const ADDRESS: &str = "listening on ";
    const PAGE: &str = "page on ";
    const METRICS: &str = "metrics on ";

    /// Returns the line that the process prints, in the format of its log.
    pub fn line(&self, format: LogFormat) -> String {
        let address = self.address.as_ref().map(Listen::to_string);
        match format {
            LogFormat::Text => {
                let address = address.map(|address| format!("{}{address}, ", Self::ADDRESS));
                let address = address.unwrap_or_default();
                let page = self.page.map(|page| format!("{}{page}, ", Self::PAGE));
                let page = page.unwrap_or_default();
                format!("{address}{page}{}{}", Self::METRICS, self.metrics)
            }
            LogFormat::Json => {
                let object = ReadyObject {
                    timestamp: now(),
                    level: tracing::Level::INFO.to_string(),
                    message: "ready".to_owned(),
                    listening: address,
                    page: self.page,
                    metrics: self.metrics,
                };
                serde_json::to_string(&object).unwrap_or_default()
            }
        }
    }

    /// Reads a line of this kind; `None` for any other line.
    pub fn parse(line: &str) -> Option<Self> {
        if let Ok(object) = serde_json::from_str::<ReadyObject>(line) {
            let address = object.listening.map(|address| address.parse());
            return Some(Self {
                address: address.transpose().ok()?,
                page: object.page,
                metrics: object.metrics,
            });
        }
        let (address, rest) = match line.strip_prefix(Self::ADDRESS) {
            Some(rest) => {
                let (address, rest) = rest.split_once(", ")?;
                (Some(address.parse().ok()?), rest)
            }
            None => (None, line),
        };
        let (page, rest) = match rest.strip_prefix(Self::PAGE) {
            Some(rest) => {
                let (page, rest) = rest.split_once(", ")?;
                (Some(page.parse().ok()?), rest)
            }
            None => (None, rest),
        };
        let metrics = rest.strip_prefix(Self::METRICS)?.parse().ok()?;
        Some(Self {
            address,
            page,
            metrics,
        })
    }
}

/// Returns the time in the format of log lines.
fn now() -> String {
    let mut now = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut now));
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ready_line_is_read_back() {
        let metrics = "127.0.0.1:8".parse().unwrap();
        for address in [Some("127.0.0.1:7"), Some("unix:/run/a.sock"), None] {
            let address: Option<Listen> = address.map(|address| address.parse().unwrap());
            for page in [None, Some("127.0.0.1:9".parse().unwrap())] {
                let ready = Ready {
                    address: address.clone(),
                    page,
                    metrics,
                };
                for format in [LogFormat::Text, LogFormat::Json] {
                    assert_eq!(Ready::parse(&ready.line(format)), Some(ready.clone()));
                }
            }
        }
        assert_eq!(Ready::parse("something else"), None);
    }

    #[test]
    fn among_json_lines_it_has_what_they_have() {
        let metrics = "127.0.0.1:8".parse().unwrap();
        let ready = Ready {
            address: None,
            page: None,
            metrics,
        };
        let line = ready.line(LogFormat::Json);
        let object: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(object["level"], "INFO", "{line}");
        assert_eq!(object["message"], "ready", "{line}");
        let timestamp = object["timestamp"].as_str().unwrap();
        let now = now();
        assert_eq!(timestamp.len(), now.len());
        assert!(
            timestamp[..10] <= now[..10] && timestamp.ends_with('Z'),
            "{line}"
        );
    }
}
