//! The first words of a member of a local cluster, and its end.

use std::process::ExitStatus;

use daemon::Ready;

/// The end of a member.
#[derive(Clone, Debug)]
pub(crate) struct Exit {
    /// The exit code; none if a signal has killed the process.
    pub(crate) code: Option<i32>,
    /// The end in words.
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

/// What a member has said first.
pub(super) enum Said {
    /// It listens.
    Ready(Ready),
    /// Something else.
    Other,
    /// Nothing before its end.
    Nothing,
}
