//! The limits on open files and connections of this process.

use network::connections::Limits;
use network::transport::Listen;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::http;

/// The number of descriptors that are kept for files, for connections that this process opens, and for connections that
/// are being closed.
const RESERVE: usize = 128;

/// The most connections of a port, however many descriptors there are.
const MOST_CONNECTIONS: usize = 16_384;

/// The number of descriptors to ask for on a system without a maximum.
const ENOUGH: u64 = 65_536;

/// Raises the limit of open descriptors as far as the system lets an ordinary process.
pub(crate) fn raise() {
    let limit = getrlimit(Resource::Nofile);
    let maximum = limit.maximum.unwrap_or(ENOUGH);
    if limit.current.is_none_or(|current| current >= maximum) {
        return;
    }
    let raised = Rlimit {
        current: Some(maximum),
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
}

/// Returns the limits on connections to a role's port or socket file: `total` or the default, as far as the process has
/// descriptors.
pub(crate) fn limits(listen: &Listen, total: Option<usize>, per_address: Option<usize>) -> Limits {
    let descriptors = getrlimit(Resource::Nofile).current;
    let descriptors = descriptors.map_or(usize::MAX, |limit| limit as usize);
    let room = room(descriptors) / each(listen);
    if let Some(total) = total.filter(|total| *total > room) {
        tracing::warn!(
            max_connections = total,
            open_files = descriptors,
            room,
            "there are not enough descriptors for --max-connections; raise the limit of open files"
        );
    }
    Limits::new(total.unwrap_or(MOST_CONNECTIONS).min(room), per_address)
}

/// Returns the number of descriptors of a connection. A connection over a socket file has another for its shared
/// memory.
fn each(listen: &Listen) -> usize {
    match listen {
        Listen::Tcp(_) => 1,
        Listen::Unix(_) => 2,
    }
}

/// Returns the number of descriptors for connections in a process that may open `descriptors` of them.
fn room(descriptors: usize) -> usize {
    let kept = (RESERVE + http::CONNECTIONS).min(descriptors / 2);
    descriptors - kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_left_for_files_and_metrics() {
        assert_eq!(room(1024), 832);
        assert_eq!(room(100), 50);
        let port = Listen::Tcp(([127, 0, 0, 1], 0).into());
        let limits = limits(&port, Some(400), None);
        assert_eq!(
            (limits.total, limits.newcomers, limits.per_address),
            (400, 100, 300)
        );
        assert!(super::limits(&port, None, Some(7)).total <= MOST_CONNECTIONS);
        let file = Listen::Unix("ps.sock".into());
        let [of_port, of_file] =
            [port, file].map(|listen| super::limits(&listen, Some(usize::MAX), None));
        assert_eq!(of_file.total, of_port.total / 2);
    }

    #[test]
    fn the_limit_is_raised_to_what_is_allowed() {
        raise();
        let limit = getrlimit(Resource::Nofile);
        let most = limit.maximum.unwrap_or(ENOUGH);
        assert!(limit.current.is_none_or(|current| current >= most));
    }
}
