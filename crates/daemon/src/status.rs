//! The status of a cluster as JSON, for `flambeau status --json` and the live page.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use shared_proto::ids::{Generation, Role, Task};
use shared_proto::number::Number;
use shared_proto::view::JobPhase;
use shared_proto::wire;

/// Returns one word for the job's phase.
pub fn phase(status: &wire::Status) -> &'static str {
    match status.phase() {
        JobPhase::Unspecified | JobPhase::Starting => "starting",
        JobPhase::Training => "training",
        JobPhase::Done => "done",
        JobPhase::Failed => "failed",
        JobPhase::Idle => "idle",
    }
}

/// Returns the task of a message, if it is a valid one.
pub fn task_of(task: Option<&wire::Task>) -> Option<Task> {
    task.and_then(|task| Task::try_from(task).ok())
}

/// Returns the name of a task, or its role alone if it waits for a job.
pub fn task_name(task: Option<&wire::Task>) -> String {
    match (task_of(task), task.map(wire::Task::role)) {
        (Some(task), _) if task.generation > Generation(0) => task.to_string(),
        (_, Some(wire::Role::Ps)) => Role::Ps.to_string(),
        (_, Some(wire::Role::Worker)) => Role::Worker.to_string(),
        _ => String::new(),
    }
}

/// Returns the tasks that a task waits for.
pub fn waits(status: &wire::TaskStatus) -> Vec<Task> {
    status
        .waiting_on
        .iter()
        .filter_map(|t| task_of(Some(t)))
        .collect()
}

/// Returns the status as one JSON object.
pub fn json(status: &wire::Status) -> Value {
    json!({
        "job": status.job,
        "phase": phase(status),
        "error": status.error,
        "waiting_for": status.waiting_for,
        "strategy": status.strategy,
        "mode": status.mode,
        "staleness": status.staleness,
        "pipeline": status.pipeline,
        "view": status.view,
        "epoch": status.epoch,
        "min_clock": status.min_clock,
        "data_epoch": status.data_epoch,
        "data_epochs": status.data_epochs,
        "samples": status.samples,
        "total_samples": status.total_samples,
        "steps": status.steps,
        "seconds": Number(status.seconds),
        "tasks": status.tasks.iter().map(task_json).collect::<Vec<_>>(),
        "shards": status.shards.iter().enumerate().map(shard_json).collect::<Vec<_>>(),
        "tables": status.tables.iter().map(table_json).collect::<Vec<_>>(),
        "ring": status.ring.as_ref().map(ring_json),
        "checkpoint": status.checkpoint.map(|newest| json!({
            "number": newest.number,
            "clock": newest.clock,
            "age_seconds": Number(newest.age),
        })),
        "run": status.run,
        "checkpoint_error": status.checkpoint_error,
        "checkpoint_store_full": status.checkpoint_store_full,
        "loss_warning": status.loss_warning,
        "lost_updates": status.lost_updates,
        "learning_rate_factor": Number(status.learning_rate_factor.unwrap_or(1.0)),
        "evaluations": status.evaluations.iter().map(|e| json!({
            "data_epoch": e.data_epoch,
            "samples": e.samples,
            "metrics": e.metrics.iter().map(|(name, mean)| (name, Number(*mean))).collect::<BTreeMap<_, _>>(),
        })).collect::<Vec<_>>(),
    })
}

fn task_json(status: &wire::TaskStatus) -> Value {
    let place = status.task.clone().unwrap_or_default();
    let task = task_of(place.task.as_ref());
    let waits = waits(status);
    json!({
        "task": task_name(place.task.as_ref()),
        "generation": task.map(|t| t.generation.0),
        "identity": place.identity,
        "address": place.address,
        "metrics_address": place.metrics_address,
        "alive": status.alive,
        "heartbeat_age_seconds": Number(status.heartbeat_age),
        "clock": status.clock,
        "lead": status.lead,
        "samples": status.samples,
        "samples_per_second": Number(status.samples_per_second),
        "loss": Number(status.loss),
        "activity": status.activity,
        "waiting_on": waits.iter().map(Task::to_string).collect::<Vec<_>>(),
        "trouble": status.trouble,
        "failure": failure(status),
    })
}

/// Returns one word for the failure that keeps a worker from working; `None` if it can work.
pub fn failure(status: &wire::TaskStatus) -> Option<String> {
    let name = status.failure().as_str_name();
    let name = name.strip_prefix("WORKER_FAILURE_").unwrap_or(name);
    (status.failure() != wire::WorkerFailure::Unspecified).then(|| name.to_ascii_lowercase())
}

fn shard_json((shard, status): (usize, &wire::ShardStatus)) -> Value {
    let report = status.report.clone().unwrap_or_default();
    let steps = report.corrected_steps.unwrap_or_default();
    json!({
        "shard": shard,
        "server": task_of(status.server.as_ref()).map(|t| t.to_string()),
        "blocks": report.blocks,
        "lookup_address": report.lookup_address,
        "bytes": report.bytes,
        "updates": report.updates,
        "max_clock_lead": report.max_clock_lead,
        "mean_gradient_staleness": Number(report.staleness_sum as f64 / report.updates.max(1) as f64),
        "mean_step_factor": steps.mean_factor().map(Number),
        "mean_synchronous_ratio": steps.mean_synchronous_ratio().map(Number),
        "refused": report.refused,
        "non_finite": report.non_finite,
        "lost_steps": status.lost_steps,
    })
}

fn table_json(status: &wire::TableStatus) -> Value {
    let report = status.report.unwrap_or_default();
    json!({
        "table": status.name,
        "rows": report.rows,
        "bytes": report.bytes,
        "created": report.created,
        "refused": report.refused,
        "evicted": report.evicted,
        "on_disk": report.on_disk,
    })
}

fn stage(ring: &wire::RingStatus) -> &'static str {
    match ring.stage() {
        wire::RingStage::Unspecified | wire::RingStage::Forming => "forming",
        wire::RingStage::Formed => "formed",
        wire::RingStage::Settled => "settled",
    }
}

fn ring_json(ring: &wire::RingStatus) -> Value {
    let broken = ring.broken.iter();
    json!({
        "number": ring.number,
        "stage": stage(ring),
        "seconds": ring.seconds.map(Number),
        "members": ring.members.iter().enumerate().map(member_json).collect::<Vec<_>>(),
        "wanted": ring.wanted,
        "broken": broken
            .map(|broken| (broken.cause.clone(), json!(broken.number)))
            .collect::<serde_json::Map<_, _>>(),
        "evicted": ring.evicted,
    })
}

fn member_json((rank, member): (usize, &wire::RingMemberStatus)) -> Value {
    json!({
        "rank": rank,
        "task": task_of(member.task.as_ref()).map(|task| task.to_string()),
        "joined": member.joined,
        "steps": member.made,
        "waited_for_seconds": member.waited_for.map(Number),
        "place": member.place,
        "spare": member.spare,
    })
}
