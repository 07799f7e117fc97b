//! Refusals of messages. A refused message changes nothing, and its refusal tells people the remedy.

use std::borrow::Cow;
use std::fmt;

use tonic::{Code, Status};

pub use crate::wire::Reason;

/// Metadata key under which a [`Status`] carries the number of its [`Reason`].
const REASON_KEY: &str = "flambeau-reason";

/// The refusal of a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The kind of mistake. It decides what the sender does next.
    pub reason: Reason,
    /// The message for people: the fault and its place, the expectation, and the remedy.
    pub message: String,
}

impl Refusal {
    /// Returns a refusal for `reason`, explained by `message`.
    pub fn new(reason: Reason, message: impl fmt::Display) -> Self {
        Self {
            reason,
            message: shortened(message.to_string()),
        }
    }

    /// Returns the gRPC code of the reason.
    pub fn code(&self) -> Code {
        match self.reason {
            Reason::Fenced
            | Reason::NotLeased
            | Reason::Superseded
            | Reason::StaleEpoch
            | Reason::StaleClock => Code::Aborted,
            Reason::NotInitialized | Reason::NoJob | Reason::NoQueue => Code::FailedPrecondition,
            Reason::UnknownVariable | Reason::UnknownBlock | Reason::UnknownJob => Code::NotFound,
            Reason::TooManyRequests => Code::ResourceExhausted,
            Reason::Oversized => Code::OutOfRange,
            Reason::Unspecified
            | Reason::WrongProtocolVersion
            | Reason::ForeignJob
            | Reason::FutureClock
            | Reason::WrongShape
            | Reason::WrongDtype
            | Reason::WrongIds
            | Reason::NonFinite
            | Reason::Malformed
            | Reason::OutOfOrder
            | Reason::VariablesDiffer
            | Reason::DataDiffers => Code::InvalidArgument,
        }
    }

    /// Returns the reason as a metric label, such as `wrong_shape`.
    pub fn label(&self) -> String {
        let name = self.reason.as_str_name();
        name.strip_prefix("REASON_")
            .unwrap_or(name)
            .to_ascii_lowercase()
    }

    /// Reads the refusal in a status, if there is one.
    pub fn from_status(status: &Status) -> Option<Self> {
        let number = status.metadata().get(REASON_KEY)?.to_str().ok()?;
        let reason = Reason::try_from(number.parse::<i32>().ok()?).ok()?;
        Some(Self::new(reason, status.message()))
    }
}

/// The maximum length of another process's text in a message for people, in bytes.
pub const LONGEST_TEXT: usize = 1000;

/// The maximum length of a refusal's message, in bytes.
const LONGEST_MESSAGE: usize = 4000;

/// The number of bytes that are kept of the end of a longer message, because the end has the remedy.
const KEPT_END: usize = 1000;

/// Leaves out the middle of a message that is too long. A message may echo anything that a sender has sent.
fn shortened(message: String) -> String {
    if message.len() <= LONGEST_MESSAGE {
        return message;
    }
    let begin = up_to(&message, LONGEST_MESSAGE - KEPT_END);
    let mut from = message.len() - KEPT_END;
    while !message.is_char_boundary(from) {
        from += 1;
    }
    let left_out = from - begin.len();
    format!(
        "{begin}... ({left_out} bytes left out) ...{}",
        &message[from..]
    )
}

/// Returns the longest prefix of a text that has at most `most` bytes.
fn up_to(text: &str, most: usize) -> &str {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Cuts another process's text to [`LONGEST_TEXT`].
pub fn brief(text: &str) -> Cow<'_, str> {
    if text.len() <= LONGEST_TEXT {
        return Cow::Borrowed(text);
    }
    let begin = up_to(text, LONGEST_TEXT);
    Cow::Owned(format!("{begin}... ({} bytes)", text.len()))
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let mut status = Status::new(refusal.code(), refusal.message);
        status
            .metadata_mut()
            .insert(REASON_KEY, (refusal.reason as i32).into());
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_survives_the_wire() {
        let refusal = Refusal::new(Reason::WrongShape, "block 3 of \"w\" has 7 elements");
        let status = Status::from(refusal.clone());
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(Refusal::from_status(&status), Some(refusal));
        assert_eq!(Refusal::from_status(&Status::internal("x")), None);
    }

    #[test]
    fn a_message_that_echoes_megabytes_is_short_and_keeps_what_to_do() {
        let name = "\u{fc}".repeat(1 << 20);
        let message = format!("job {name:?} is none of ours; give it another address");
        let refusal = Refusal::new(Reason::ForeignJob, message);
        assert!(refusal.message.len() < LONGEST_MESSAGE + 100);
        assert!(refusal.message.starts_with("job \"\u{fc}"));
        assert!(refusal.message.ends_with("give it another address"));
        assert!(refusal.message.contains("bytes left out"));
        let short = Refusal::new(Reason::ForeignJob, "short");
        assert_eq!(short.message, "short");
        assert!(brief(&name).len() < LONGEST_TEXT + 100);
    }

    #[test]
    fn labels_are_lower_case_words() {
        assert_eq!(
            Refusal::new(Reason::StaleEpoch, "").label(),
            "stale_epoch".to_owned()
        );
    }
}
