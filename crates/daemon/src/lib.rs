//! What each role's process does around its work, the same for all of them.
//!
//! - [`process`]: a main function: log, metrics, signals, exit code
//! - [`settings`]: what all processes can be told, and a job's flags
//! - [`membership`]: register with the coordinator, keep the lease, follow views, leave
//! - [`Offload`]: where work goes that would hold up messages
//! - [`http`]: `/metrics` and `/healthz`
//!
//! A role is a function `run(settings, process)` of its library; [`process::main`] wraps it.

pub mod http;
pub mod membership;
mod offload;
pub mod process;
pub mod settings;

pub use offload::Offload;

use std::net::SocketAddr;

use shared_proto::transport::Listen;

/// Says, on one line of stdout, where a process listens. Whoever started it with port 0 reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Where the role itself listens; absent for those that do not.
    pub address: Option<Listen>,
    /// Where metrics are served.
    pub metrics: SocketAddr,
}

impl Ready {
    const ADDRESS: &str = "listening on ";
    const METRICS: &str = "metrics on ";

    /// Prints the line.
    pub fn announce(&self) {
        let address = self
            .address
            .as_ref()
            .map(|a| format!("{}{a}, ", Self::ADDRESS))
            .unwrap_or_default();
        println!("{address}{}{}", Self::METRICS, self.metrics);
    }

    /// Reads the line; `None` if it is another.
    pub fn parse(line: &str) -> Option<Self> {
        let (address, rest) = match line.strip_prefix(Self::ADDRESS) {
            Some(rest) => {
                let (address, rest) = rest.split_once(", ")?;
                (Some(address.parse().ok()?), rest)
            }
            None => (None, line),
        };
        let metrics = rest.strip_prefix(Self::METRICS)?.parse().ok()?;
        Some(Self { address, metrics })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ready_line_is_read_back() {
        let with = "listening on 127.0.0.1:7, metrics on 127.0.0.1:8";
        let ready = Ready::parse(with).unwrap();
        assert_eq!(ready.address, Some("127.0.0.1:7".parse().unwrap()));
        let file = "listening on unix:/run/a.sock, metrics on 127.0.0.1:8";
        let file = Ready::parse(file).and_then(|ready| ready.address);
        assert_eq!(file, Some(Listen::Unix("/run/a.sock".into())));
        assert_eq!(Ready::parse("metrics on [::1]:8").unwrap().address, None);
        assert_eq!(Ready::parse("something else"), None);
    }
}
