//! Keys, which no message shows.

use std::fmt;

use crate::error::StorageError;

/// The configured keys, which no message may show.
#[derive(Clone, Default)]
pub struct Secrets(Vec<String>);

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} secrets", self.0.len())
    }
}

impl Secrets {
    /// Collects the secret values among environment variables.
    pub fn new<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
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
    pub fn explain(&self, place: &str, error: &object_store::Error) -> StorageError {
        use object_store::Error as E;
        let text = error.to_string();
        let reason = self.hide(&summary(&text));
        let place = self.hide(place);
        if text.contains("NoSuchBucket") {
            return StorageError::Location {
                location: place,
                reason: "there is no such bucket".to_owned(),
            };
        }
        if is_full(&text) {
            return StorageError::Full { place, reason };
        }
        match error {
            E::AlreadyExists { .. } => StorageError::Exists(place),
            E::NotFound { .. } => StorageError::NotFound(format!("{place} is not there")),
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
                StorageError::Denied { place, reason }
            }
            E::InvalidPath { .. } | E::UnknownConfigurationKey { .. } => StorageError::Location {
                location: place,
                reason,
            },
            _ if is_refusal(&text) => StorageError::Denied { place, reason },
            _ => StorageError::Failed { place, reason },
        }
    }

    /// Returns the text with the secrets hidden.
    pub fn hide(&self, text: &str) -> String {
        let hidden = |text: String, secret: &String| text.replace(secret, "(hidden)");
        self.0.iter().fold(without_user(text), hidden)
    }
}

/// Returns whether a server's error says that the server is full. S3 has no code for this; other servers have.
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
pub fn without_user(text: &str) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_left_out_of_urls() {
        let cases = [
            ("s3://bucket/a@b", "s3://bucket/a@b"),
            ("s3://u:p@bucket", "s3://bucket"),
            (
                "x http://u:p@w@h/x and s3://k@b y@z",
                "x http://h/x and s3://b y@z",
            ),
            ("a://", "a://"),
        ];
        for (text, expected) in cases {
            assert_eq!(without_user(text), expected);
        }
    }
}
