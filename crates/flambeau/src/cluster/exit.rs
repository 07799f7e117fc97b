//! The first output and the exit of a member of a local cluster.

use std::process::ExitStatus;

use daemon::Ready;

/// The way in which a member has ended.
#[derive(Clone, Debug)]
pub(crate) struct Exit {
    /// The exit code; `None` if a signal has killed the process.
    pub(crate) code: Option<i32>,
    /// The exit status in words.
    shown: String,
}

impl Exit {
    pub(super) fn with_code(code: i32) -> Self {
        Self {
            code: Some(code),
            shown: format!("exit code {code}"),
        }
    }

    pub(crate) fn success(&self) -> bool {
        self.code == Some(0)
    }
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        Self {
            code: status.code(),
            shown: status.to_string(),
        }
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.shown)
    }
}

/// The first line that a member has printed.
pub(super) enum Said {
    /// The member is ready, and has printed its addresses.
    Ready(Ready),
    /// Another line.
    Other,
    /// The member has ended without output.
    Nothing,
}
