//! Limits on names and metrics in calls, because the coordinator stores and shows them.

use shared_proto::ids::Role;
use shared_proto::protocol;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

use crate::DIGEST_BYTES;

/// The maximum length of an identity, an address or the name of a metric, in bytes.
pub const LONGEST_NAME: usize = 256;

/// The maximum number of metrics of an evaluation.
const MOST_METRICS: usize = 256;

/// Checks the lengths of the names in a registration.
///
/// # Errors
/// [`Reason::Oversized`] names the field that is too long.
pub fn check_lengths(request: &wire::RegisterRequest) -> Result<(), Refusal> {
    for (field, value) in [
        ("identity", &request.identity),
        ("address", &request.address),
        ("metrics_address", &request.metrics_address),
    ] {
        if value.len() > LONGEST_NAME {
            return Err(Refusal::new(
                Reason::Oversized,
                format!(
                    "Register has {field} of {} bytes; the coordinator takes {LONGEST_NAME} at the most",
                    value.len()
                ),
            ));
        }
    }
    Ok(())
}

/// Checks the form of the addresses in a registration, because other members connect to them.
///
/// # Errors
/// [`Reason::Malformed`] names an address that is not host:port or unix:PATH.
pub fn check_addresses(role: Role, request: &wire::RegisterRequest) -> Result<(), Refusal> {
    let needed = role == Role::Ps;
    for (field, address, needed) in [
        ("address", &request.address, needed),
        ("metrics_address", &request.metrics_address, false),
    ] {
        let absent = address.is_empty() && !needed;
        if !absent && !protocol::is_address(address) {
            return Err(Refusal::new(
                Reason::Malformed,
                format!(
                    "Register has {field} {address:?}; expected host:port or unix:PATH, such as ps-0.example:7001"
                ),
            ));
        }
    }
    Ok(())
}

/// Checks the sizes of an evaluation's metrics and digest.
///
/// # Errors
/// [`Reason::Oversized`] for too many metrics or a name that is too long, [`Reason::Malformed`] for a digest without
/// the length of a SHA-256.
pub fn check_metrics(report: &wire::EvaluationReport) -> Result<(), Refusal> {
    let too_long = |name: &&String| name.len() > LONGEST_NAME;
    let longest = report.metrics.keys().find(too_long).map(String::len);
    if ![0, DIGEST_BYTES].contains(&report.model_sha256.len()) {
        return Err(Refusal::new(
            Reason::Malformed,
            format!(
                "the evaluation of epoch {} has a model_sha256 of {} bytes; a SHA-256 has {DIGEST_BYTES}",
                report.data_epoch,
                report.model_sha256.len()
            ),
        ));
    }
    if longest.is_none() && report.metrics.len() <= MOST_METRICS {
        return Ok(());
    }
    Err(Refusal::new(
        Reason::Oversized,
        format!(
            "the evaluation of epoch {} has {} metrics{}; the coordinator takes {MOST_METRICS}, with names of {LONGEST_NAME} bytes at the most",
            report.data_epoch,
            report.metrics.len(),
            longest.map_or(String::new(), |bytes| format!(
                ", one with a name of {bytes} bytes"
            ))
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluation_with_a_digest_of_another_length_is_refused() {
        let report = |bytes| wire::EvaluationReport {
            model_sha256: vec![7; bytes].into(),
            ..wire::EvaluationReport::default()
        };
        for bytes in [0, DIGEST_BYTES] {
            check_metrics(&report(bytes)).unwrap();
        }
        for bytes in [1, DIGEST_BYTES - 1, DIGEST_BYTES + 1, 1 << 20] {
            let refused = check_metrics(&report(bytes)).unwrap_err();
            assert_eq!(refused.reason, Reason::Malformed);
        }
    }
}
