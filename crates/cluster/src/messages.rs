//! Checks messages of the service and converts them into the cluster's types, and converts these types into messages.

use std::time::Instant;

use shared_proto::ids::{Origin, Role};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

use super::limits::check_metrics;
use crate::{Cluster, DIGEST_BYTES, Split, Work, WorkerData};

/// Returns the refusal of the call `what`, which the sender's role may not make.
pub fn not_for(what: &str, origin: &Origin) -> Refusal {
    Refusal::new(
        Reason::Malformed,
        format!(
            "{what} is not a call of a {}, but {} has sent it",
            origin.task.id.role, origin.task
        ),
    )
}

/// Reads what a worker states about its data.
///
/// # Errors
/// [`Reason::Malformed`] for a digest without the length of a SHA-256.
pub fn read_data(request: &wire::RegisterVariablesRequest) -> Result<WorkerData, Refusal> {
    let digest = &request.data_digest;
    if !digest.is_empty() && digest.len() != DIGEST_BYTES {
        return Err(Refusal::new(
            Reason::Malformed,
            format!(
                "data_digest has {} bytes; a SHA-256 has {DIGEST_BYTES}",
                digest.len()
            ),
        ));
    }
    Ok(WorkerData {
        training_samples: request.training_samples,
        evaluation_samples: request.evaluation_samples,
        digest: digest.to_vec(),
    })
}

/// Applies a member's report. Returns false for an evaluation that does not count.
///
/// # Errors
/// [`Reason::Malformed`] for an empty report, or a report that the sender's role may not make; otherwise the refusal of
/// the report itself.
pub fn take_report(
    cluster: &mut Cluster,
    now: Instant,
    origin: &Origin,
    report: Option<wire::report_request::Report>,
) -> Result<bool, Refusal> {
    use wire::report_request::Report;
    let task = origin.task;
    let role = task.id.role;
    let (what, allowed) = match &report {
        Some(Report::Shard(_)) => ("Report of a shard", role == Role::Ps),
        Some(Report::Checkpoint(_)) => ("Report of a checkpoint", cluster.keeps_values(role)),
        Some(Report::Restore(_)) => ("Report of a restore", cluster.keeps_values(role)),
        Some(Report::Evaluation(_)) => ("Report of an evaluation", role == Role::Worker),
        Some(Report::Norm(_)) => ("Report of a norm", role == Role::Ps),
        Some(Report::Wait(_)) => ("Report of a wait", role == Role::Worker),
        Some(Report::Lost(_)) => ("Report of losses", role == Role::Worker),
        None => ("Report", true),
    };
    if !allowed {
        return Err(not_for(what, origin));
    }
    match report {
        Some(Report::Shard(report)) => cluster.report_shard(now, task, report),
        Some(Report::Evaluation(report)) => {
            check_metrics(&report)?;
            return cluster.evaluated(now, origin, report);
        }
        Some(Report::Wait(report)) => cluster.waiting(now, task, report.on),
        Some(Report::Checkpoint(report)) => cluster.shard_saved(now, task, report),
        Some(Report::Restore(report)) => cluster.shard_restored(now, task, &report),
        Some(Report::Lost(report)) => cluster.lost(now, origin, &report)?,
        Some(Report::Norm(report)) => cluster.measured(now, task, &report)?,
        None => {
            let empty = "Report has no report in it";
            return Err(Refusal::new(Reason::Malformed, empty));
        }
    }
    Ok(true)
}

/// Converts a worker's work into a message. `error` is the error of a failed job, for [`Work::Done`].
pub fn wire_work(work: Work, error: String) -> wire::lease_work_reply::Work {
    use wire::lease_work_reply::Work as Reply;
    match work {
        Work::Split(split) => Reply::Split(wire_split(split)),
        Work::Shared {
            split,
            rank,
            ranks,
            learning_rate_factor,
        } => Reply::Split(wire::Split {
            rank,
            ranks,
            learning_rate_factor: Some(learning_rate_factor),
            ..wire_split(split)
        }),
        Work::Regroup => Reply::Regroup(wire::Regroup {}),
        Work::CopyValues {
            number,
            block_elements,
            shard,
            helps,
        } => Reply::CopyValues(wire::CopyValues {
            number,
            block_elements,
            shard,
            helps,
        }),
        Work::Evaluate {
            data_epoch,
            save_model,
        } => Reply::Evaluate(wire::Evaluate {
            data_epoch,
            save_model,
        }),
        Work::Idle(reason) => Reply::Idle(wire::Idle { reason }),
        Work::Done => Reply::Done(wire::Done { error }),
    }
}

fn wire_split(split: Split) -> wire::Split {
    wire::Split {
        id: split.id,
        data_epoch: split.data_epoch,
        start: split.start,
        end: split.end,
        ..wire::Split::default()
    }
}
