//! The version of the protocol, the sizes of messages, and the addresses of peers.

use http::uri::Authority;

/// The version of the protocol in `proto/`. Peers with another version are refused.
pub const PROTOCOL_VERSION: u32 = 1;

/// The largest message of a session, in bytes: a block, or several small ones, with their names.
pub const MAX_MESSAGE_BYTES: usize = 2 << 20;

/// The number of payload bytes up to which senders fill a message, as a rule.
pub const MESSAGE_PAYLOAD_BYTES: usize = 1 << 20;

/// The prefix of the address of a socket file.
pub const UNIX: &str = "unix:";

/// Returns whether a text is the address of a peer, as host:port or as unix:PATH.
pub fn is_address(text: &str) -> bool {
    match text.strip_prefix(UNIX) {
        Some(path) => !path.is_empty() && !path.contains(char::is_control),
        None => text.parse::<Authority>().is_ok_and(|authority| {
            let port = authority.port_u16().is_some_and(|port| port > 0);
            port && !authority.host().is_empty() && !text.contains('@')
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_from_nonsense() {
        for text in [
            "ps-0:7001",
            "127.0.0.1:1",
            "[::1]:7001",
            "unix:/run/ps.sock",
        ] {
            assert!(is_address(text), "{text}");
        }
        for text in [
            "",
            "ps-0",
            "ps-0:0",
            ":7001",
            "ps 0:7001",
            "ps\u{1b}[2J:7001",
            "a@b:1",
            "unix:",
        ] {
            assert!(!is_address(text), "{text}");
        }
    }
}
