//! Limits on what a caller may name: the coordinator keeps and shows these strings.

use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

/// The most bytes of an identity or an address.
const LONGEST_NAME: usize = 256;

/// The most means of an evaluation.
const MOST_METRICS: usize = 256;

/// Refuses names that no process has.
pub(crate) fn check_lengths(request: &wire::RegisterRequest) -> Result<(), Refusal> {
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

/// Refuses an evaluation with more, or longer, names of metrics than a model has.
pub(crate) fn check_metrics(report: &wire::EvaluationReport) -> Result<(), Refusal> {
    let too_long = |name: &&String| name.len() > LONGEST_NAME;
    let longest = report.metrics.keys().find(too_long).map(String::len);
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
