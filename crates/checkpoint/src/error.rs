//! The errors of checkpoints, and the secrets that no message shows.

use std::io;

use crate::format::{FORMAT, folder_name};

/// An error of a checkpoint. The variants differ in what the caller does next.
///
/// No variant has a source: the errors of object stores quote requests and answers with keys in them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The storage does not answer, or fails. The fault may pass: try again.
    #[error("{place}: {reason}")]
    Storage {
        /// File or folder.
        place: String,
        /// The storage's message.
        reason: String,
    },
    /// The storage refuses access. A person has to check credentials, region and permissions.
    #[error("{place}: refused: {reason}")]
    Denied {
        /// File or folder.
        place: String,
        /// The storage's message.
        reason: String,
    },
    /// The storage is full. Free some space, or wait.
    #[error("{place}: no room: {reason}")]
    Full {
        /// File or folder.
        place: String,
        /// The storage's message.
        reason: String,
    },
    /// The file to be created exists already, with other content. Nothing was changed.
    #[error("{0} is there already, and is another writer's")]
    Exists(String),
    /// Another run is at work at the location. Give this one another location, or end the other.
    #[error(
        "another run is at work at {location}: {owner}; give this run another checkpoint.location, or end the other one"
    )]
    Taken {
        /// The location.
        location: String,
        /// A description of the other run.
        owner: String,
    },
    /// The content differs from the written one. Use an older checkpoint.
    #[error("{file} is damaged: {reason}{}", before(instead.as_ref()))]
    Damaged {
        /// The file.
        file: String,
        /// The reason why the file counts as damaged.
        reason: String,
        /// The number and location of an older checkpoint that is whole.
        instead: Option<(u64, String)>,
    },
    /// A newer release wrote the file. Use a program of that release.
    #[error(
        "{file} was written by a newer release: format {format}, this program reads {}",
        FORMAT
    )]
    Newer {
        /// The file.
        file: String,
        /// The file's format.
        format: u64,
    },
    /// There is no such checkpoint, or none at all.
    #[error("{0}")]
    NotFound(String),
    /// The location cannot hold checkpoints. Give another one.
    #[error("{location:?} is no place for checkpoints: {reason}")]
    Location {
        /// The location as it was given, without user and password.
        location: String,
        /// The reason why the location cannot hold checkpoints.
        reason: String,
    },
}

impl CheckpointError {
    /// Returns whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Storage { .. } | Self::Full { .. })
    }

    /// Returns whether the store is at fault rather than its content. The store may recover, and
    /// another checkpoint would be no better.
    pub fn is_of_store(&self) -> bool {
        matches!(self, Self::Denied { .. }) || self.is_retryable()
    }

    /// Returns whether the storage is full.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Returns whether an older checkpoint may serve instead.
    pub fn is_damaged(&self) -> bool {
        matches!(self, Self::Damaged { .. })
    }

    pub(crate) fn damaged(file: &str, reason: impl Into<String>) -> Self {
        Self::Damaged {
            file: file.to_owned(),
            reason: reason.into(),
            instead: None,
        }
    }

    /// Converts the operating system's error about a file.
    pub(crate) fn io(place: &str, error: &io::Error) -> Self {
        let (place, reason) = (place.to_owned(), error.to_string());
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound(format!("{place}: {reason}")),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                Self::Denied { place, reason }
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::Full { place, reason }
            }
            _ => Self::Storage { place, reason },
        }
    }
}

fn before(instead: Option<&(u64, String)>) -> String {
    let Some((number, location)) = instead else {
        return String::new();
    };
    format!(
        "; {} before it is whole: --restore {location}",
        folder_name(*number)
    )
}

/// The configured keys, which no message may show.
#[derive(Clone, Default)]
pub(crate) struct Secrets(Vec<String>);

impl Secrets {
    /// Collects the secret values among environment variables.
    pub(crate) fn of<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let secret = |name: &str| {
            let name = name.to_ascii_uppercase();
            ["ACCESS_KEY", "SECRET", "TOKEN"]
                .iter()
                .any(|part| name.contains(part))
        };
        let mut values: Vec<String> = variables
            .into_iter()
            .filter(|(name, value)| secret(name) && value.len() >= 4)
            .map(|(_, value)| value.to_owned())
            .collect();
        // The longest first: one may be the beginning of another.
        values.sort_by_key(|value| std::cmp::Reverse(value.len()));
        Self(values)
    }

    /// Converts a store's error about a place, with the secrets hidden.
    pub(crate) fn explain(&self, place: &str, error: &object_store::Error) -> CheckpointError {
        use object_store::Error as E;
        let text = error.to_string();
        let reason = self.hide(&summary(&text));
        let place = self.hide(place);
        if text.contains("NoSuchBucket") {
            return CheckpointError::Location {
                location: place,
                reason: "there is no such bucket".to_owned(),
            };
        }
        if is_full(&text) {
            return CheckpointError::Full { place, reason };
        }
        match error {
            E::AlreadyExists { .. } => CheckpointError::Exists(place),
            E::NotFound { .. } => CheckpointError::NotFound(format!("{place} is not there")),
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
                CheckpointError::Denied { place, reason }
            }
            E::InvalidPath { .. } | E::UnknownConfigurationKey { .. } => {
                CheckpointError::Location {
                    location: place,
                    reason,
                }
            }
            _ if is_refusal(&text) => CheckpointError::Denied { place, reason },
            _ => CheckpointError::Storage { place, reason },
        }
    }

    /// Returns the text with the secrets hidden.
    pub(crate) fn hide(&self, text: &str) -> String {
        let hidden = |text: String, secret: &String| text.replace(secret, "(hidden)");
        self.0.iter().fold(without_user(text), hidden)
    }
}

/// Returns whether a server's error says that it is full. S3 has no code for this; other servers have.
fn is_full(text: &str) -> bool {
    let codes = ["QuotaExceeded", "StorageFull", "InsufficientStorage"];
    codes.iter().any(|code| text.contains(code)) || text.contains("non-2xx status code: 507")
}

/// Returns whether a server's error says that the same request would fail later too. `object_store`
/// has variants of its own for some such errors only.
fn is_refusal(text: &str) -> bool {
    let Some((_, status)) = text.split_once("non-2xx status code: ") else {
        return false;
    };
    status.starts_with('4') && !status.starts_with("408") && !status.starts_with("429")
}

/// Returns the code and the message of an S3 error; its other elements only repeat the request. Returns
/// other text unchanged.
fn summary(text: &str) -> String {
    let element = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        let (content, _) = rest.split_once(&format!("</{name}>"))?;
        Some(content.to_owned())
    };
    match (element("Code"), element("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code,
        (None, _) => text.to_owned(),
    }
}

/// Removes user and password from the URLs in a text.
pub(crate) fn without_user(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        shown.push_str(before);
        shown.push_str("://");
        let end = after
            .find(|c: char| matches!(c, '/' | '?' | '#' | '"' | ')') || c.is_whitespace())
            .unwrap_or(after.len());
        let host = after[..end].rfind('@').map_or(0, |at| at + 1);
        rest = &after[host..];
    }
    shown + rest
}
