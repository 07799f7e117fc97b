//! Errors of credentials, and the distinction between a refusal by the other side and other faults.

use std::io;
use std::path::PathBuf;

use tonic::Status;

/// The beginning of the error text when a peer refuses a certificate.
const ALERT: &str = "received fatal alert: ";

/// An error in the files that secure a process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecurityError {
    /// A file is set without another that it needs.
    #[error("{0}")]
    Incomplete(&'static str),
    /// A file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// The content of a file is invalid.
    #[error("{} cannot be used: {what}", path.display())]
    Malformed {
        /// The path of the file.
        path: PathBuf,
        /// A description of the fault.
        what: String,
    },
}

/// One side of a connection speaks TLS, and the other does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// This process sends in the clear.
    #[error(
        "the other side speaks TLS and this process does not; set --tls-ca here, and --tls-cert and --tls-key where it demands certificates"
    )]
    OnlyTheOther,
    /// The other side answers in the clear.
    #[error(
        "the other side does not speak TLS and this process does; set --tls-ca, --tls-cert and --tls-key there, or none of them here"
    )]
    OnlyThis,
}

impl Mismatch {
    /// Returns the mismatch that an error comes from. HTTP/2 keeps only the text of the error that ended a connection.
    pub fn of(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        let words = chain_of(error);
        [Self::OnlyTheOther, Self::OnlyThis]
            .into_iter()
            .find(|mismatch| words.contains(&mismatch.to_string()))
    }
}

/// Returns the text of the TLS error that an error comes from, such as a fault of a certificate; `None` if it does not
/// come from TLS.
pub fn certificate_error(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        let inner = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        let tls = error
            .downcast_ref::<rustls::Error>()
            .or_else(|| inner.and_then(|inner| inner.downcast_ref()));
        if let Some(tls) = tls {
            return Some(tls.to_string());
        }
        next = error.source();
    }
    // A listener rejects a certificate after HTTP/2 has begun, which keeps only the text of the error.
    let words = chain_of(error);
    words.find(ALERT).map(|at| words[at..].to_owned())
}

/// Returns the messages of an error and of its causes, each once, in readable form.
pub fn chain_of(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = said(error);
    let mut source = error.source();
    while let Some(error) = source {
        let more = said(error);
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

/// Returns the message of one error. The text of a status would show its cause in debug formatting.
fn said(error: &(dyn std::error::Error + 'static)) -> String {
    match error.downcast_ref::<Status>() {
        Some(status) => status.message().to_owned(),
        None => error.to_string(),
    }
}
