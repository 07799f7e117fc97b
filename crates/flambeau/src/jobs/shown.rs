//! Jobs as people and programs read them.

use std::collections::BTreeMap;

use comfy_table::{Table, presets};
use serde_json::{Value, json};
use shared_proto::number::Number;
use shared_proto::wire::{JobState, QueuedJob};

use crate::status::harmless;

/// Returns the name of a job's state.
fn state(job: &QueuedJob) -> &'static str {
    match job.state() {
        JobState::Unspecified | JobState::Queued => "queued",
        JobState::Running if job.cancelling => "cancelling",
        JobState::Running => "running",
        JobState::Done => "done",
        JobState::Failed => "failed",
        JobState::Cancelled => "cancelled",
    }
}

/// Returns a job as one JSON object.
pub(super) fn as_json(job: &QueuedJob) -> Value {
    let metrics: BTreeMap<_, _> = job.metrics.iter().map(|(n, v)| (n, Number(*v))).collect();
    let time = |seconds: u64| (seconds > 0).then_some(seconds);
    json!({
        "id": job.id,
        "name": job.name,
        "state": state(job),
        "error": job.error,
        "waiting_for": job.waiting_for,
        "samples": job.samples,
        "total_samples": job.total_samples,
        "steps": job.steps,
        "seconds": Number(job.seconds),
        "metrics": metrics,
        "lost_updates": job.lost_updates,
        "model_sha256": job.model_sha256,
        "submitted": time(job.submitted),
        "began": time(job.began),
        "ended": time(job.ended),
        "run_dir": job.run_dir,
    })
}

/// Describes the state of a job and its progress.
pub(super) fn progress(job: &QueuedJob) -> String {
    let (id, name, state) = (job.id, &job.name, state(job));
    match (job.state(), job.waiting_for.as_str()) {
        (JobState::Running, "") => format!(
            "job {id} {name:?}: {state}, {} of {} samples",
            job.samples, job.total_samples
        ),
        (JobState::Running, what) => format!("job {id} {name:?}: {state}; {}", harmless(what)),
        _ => format!("job {id} {name:?}: {state}"),
    }
}

/// Returns a job on one line.
pub(super) fn line(job: &QueuedJob) -> String {
    match result(job).as_str() {
        "" => progress(job),
        result => format!("{}: {result}; {}", progress(job), harmless(&job.run_dir)),
    }
}

/// Returns a job's error, or its newest metrics if it has no error; empty without metrics.
fn result(job: &QueuedJob) -> String {
    if !job.error.is_empty() {
        return harmless(&job.error).into_owned();
    }
    let metrics: BTreeMap<_, _> = job.metrics.iter().collect();
    let shown: Vec<_> = metrics
        .into_iter()
        .map(|(name, value)| format!("{} {value:.4}", harmless(name)))
        .collect();
    shown.join(", ")
}

/// Shortens a text to the longest that a cell shows, so that the table fits a screen. `--json` has the whole text.
fn brief(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        Some((at, _)) => format!("{}...", text.get(..at).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// Returns jobs as a table.
pub(super) fn table(jobs: &[QueuedJob]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["id", "name", "state", "progress", "result", "folder"]);
    for job in jobs {
        let done = match (job.state(), job.waiting_for.as_str()) {
            (JobState::Queued, _) => String::new(),
            (JobState::Running, what) if !what.is_empty() => brief(&harmless(what)),
            _ if job.total_samples == 0 => String::new(),
            _ => format!("{} of {} samples", job.samples, job.total_samples),
        };
        table.add_row([
            job.id.to_string(),
            harmless(&job.name).into_owned(),
            state(job).to_owned(),
            done,
            brief(&result(job)),
            harmless(&job.run_dir).into_owned(),
        ]);
    }
    let mut text = table.trim_fmt();
    // The table has only the beginning of a long reason.
    for job in jobs {
        let reason = match job.error.as_str() {
            "" => &job.waiting_for,
            error => error,
        };
        let reason = harmless(reason);
        if brief(&reason) != reason {
            text.push_str(&format!("\njob {}: {reason}", job.id));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(state: JobState) -> QueuedJob {
        QueuedJob {
            id: 7,
            name: "digits".to_owned(),
            state: state.into(),
            samples: 10,
            total_samples: 40,
            run_dir: "/runs/digits-7".to_owned(),
            ..QueuedJob::default()
        }
    }

    #[test]
    fn a_table_shows_each_job_with_its_progress_and_result() {
        let done = QueuedJob {
            metrics: [("accuracy".to_owned(), 0.5)].into(),
            ..job(JobState::Done)
        };
        let failed = QueuedJob {
            error: "x".repeat(100),
            ..job(JobState::Failed)
        };
        let waits = QueuedJob {
            waiting_for: "waiting for 2 workers".to_owned(),
            ..job(JobState::Running)
        };
        let shown = table(&[done, failed, waits, job(JobState::Queued)]);
        for part in [
            "accuracy 0.5000",
            "10 of 40 samples",
            "waiting for 2 workers",
            "queued",
            "/runs/digits-7",
        ] {
            assert!(shown.contains(part), "{shown}");
        }
        // The reason is brief in the table, and whole below it.
        let (last, rows) = shown
            .lines()
            .next_back()
            .zip(shown.rsplit_once('\n'))
            .unwrap();
        assert_eq!(last, format!("job 7: {}", "x".repeat(100)));
        assert!(!rows.0.contains(&"x".repeat(61)), "{shown}");
    }

    #[test]
    fn nothing_of_a_job_acts_on_the_terminal() {
        let evil = "a\x1b[2Jb\nc".to_owned();
        let evil_job = |state| QueuedJob {
            name: evil.clone(),
            run_dir: evil.clone(),
            metrics: [(evil.clone(), 0.5)].into(),
            waiting_for: evil.clone(),
            ..job(state)
        };
        let failed = QueuedJob {
            error: evil.clone(),
            ..evil_job(JobState::Failed)
        };
        for job in [
            failed,
            evil_job(JobState::Running),
            evil_job(JobState::Done),
        ] {
            let shown = line(&job);
            assert!(!shown.contains(char::is_control), "{shown:?}");
            let shown = table(&[job]);
            assert!(!shown.contains('\x1b'), "{shown:?}");
            assert_eq!(shown.lines().count(), 2, "{shown:?}");
        }
    }

    #[test]
    fn a_number_that_is_none_is_shown_in_json_too() {
        let job = QueuedJob {
            metrics: [("loss".to_owned(), f64::NAN)].into(),
            ..job(JobState::Done)
        };
        let object = as_json(&job);
        assert_eq!(object["state"], "done");
        assert!(!object["metrics"]["loss"].is_null(), "{object}");
    }
}
