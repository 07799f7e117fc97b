//! The outcome of a run: its summary, and how it is shown.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use comfy_table::{Table, presets};
use coordinator::Summary;
use serde::Serialize;
use shared_proto::job::Checkpoint;

use crate::status::lost_updates;

/// The mean gradient staleness, in updates, beyond which gradients help little.
const TOO_STALE: f64 = 32.0;

/// The outcome of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    #[serde(flatten)]
    pub(crate) summary: Summary,
    pub(crate) run_dir: PathBuf,
}

/// Returns a warning if gradients were too stale to help.
pub(super) fn stale(summary: &Summary) -> Option<String> {
    let updates = summary.mean_gradient_staleness;
    if updates <= TOO_STALE {
        return None;
    }
    let useful = summary.times.get("share_compute");
    let useful = useful.map_or(String::new(), |share| {
        format!(
            " The workers computed for {:.0} % of their time.",
            100.0 * share
        )
    });
    Some(format!(
        "gradients were {updates:.0} updates old on average when they were applied; beyond some {TOO_STALE:.0} they help little. The staleness bound does not prevent this: it limits the steps of one worker, not the updates of all.{useful} Fewer workers, a larger --batch-size or --mode sync make better use of the same time."
    ))
}

/// Describes how to continue a stopped run.
pub(super) fn next(outcome: &Outcome, checkpoint: &Checkpoint, options: &[OsString]) -> String {
    if !checkpoint.enabled {
        return "it cannot be continued: there are no checkpoints (checkpoint.enabled is false)"
            .to_owned();
    }
    let from = match &*outcome.summary.unsaved {
        "" => "this goes on from the last checkpoint".to_owned(),
        why => format!(
            "the last checkpoint could not be written ({why}); this goes on from the one before"
        ),
    };
    let command = going_on(&outcome.run_dir, options);
    format!("{from}:\n  {command}")
}

/// Returns the command that continues a stopped run from its newest checkpoint, with these options.
fn going_on(dir: &Path, options: &[OsString]) -> String {
    let quoted = |path: &Path| {
        let text = shown(path);
        let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
        match text.chars().all(plain) {
            true => text,
            false => format!("'{}'", text.replace('\'', r"'\''")),
        }
    };
    let program = std::env::args_os().next().unwrap_or_default();
    let mut command = format!("{} resume {}", quoted(Path::new(&program)), quoted(dir),);
    for option in options {
        command += &format!(" {}", quoted(Path::new(option)));
    }
    command
}

/// Returns the path of a new folder beside a run directory. No folder exists there yet.
pub(super) fn next_dir(dir: &Path) -> PathBuf {
    // The path may end in `..`.
    let dir = &dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let folder = |number: u32| dir.with_file_name(format!("{name}-{number}"));
    let mut number = 2;
    while folder(number).exists() {
        number += 1;
    }
    folder(number)
}

pub(super) fn json(outcome: &Outcome) -> String {
    serde_json::to_string(outcome)
        .unwrap_or_else(|error| unreachable!("an outcome is plain data: {error}"))
}

pub(super) fn table(outcome: &Outcome) -> Table {
    let summary = &outcome.summary;
    let mut mode = match (summary.mode.as_str(), summary.staleness) {
        ("bounded", Some(bound)) => format!("bounded, staleness at most {bound}"),
        (mode, _) => mode.to_owned(),
    };
    if summary.pipeline > 0 {
        mode = format!("{mode}, pipeline {}", summary.pipeline);
    }
    let steps = summary.lost_steps.iter();
    let lost = match summary.lost_updates {
        0 => "none".to_owned(),
        updates => format!(
            "{}; metrics.jsonl says which",
            lost_updates(updates, steps.map(|(shard, steps)| (*shard, *steps)))
        ),
    };
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let others = summary.metrics.iter();
    let others = others.filter(|(name, _)| !["accuracy", "loss"].contains(&name.as_str()));
    for (name, value) in others {
        table.add_row([format!("test {name}"), format!("{value:.4}")]);
    }
    if let Some(accuracy) = summary.test_accuracy {
        table.add_row(["test accuracy", &format!("{:.2} %", 100.0 * accuracy)]);
    }
    if let Some(loss) = summary.test_loss {
        table.add_row(["test loss", &format!("{loss:.4}")]);
    }
    for (name, value) in [
        ("mode", mode),
        (
            "cluster",
            format!("{} ps, {} workers", summary.ps, summary.workers),
        ),
        ("steps", format!("{} in {}", summary.steps, epochs(summary))),
        (
            "time",
            format!(
                "{:.1} s, {:.0} samples/s",
                summary.seconds, summary.samples_per_second
            ),
        ),
        (
            "largest clock lead",
            format!("{} steps", summary.max_clock_lead),
        ),
        (
            "mean gradient staleness",
            format!("{:.2} updates", summary.mean_gradient_staleness),
        ),
        ("updates lost", lost),
        ("run directory", shown(&outcome.run_dir)),
    ] {
        table.add_row([name, &value]);
    }
    if let Some(why) = ended_early(summary) {
        table.add_row(["ended early", &why]);
    }
    if summary.late_steps > 0 {
        let late = format!("{} were left out", summary.late_steps);
        table.add_row(["late gradients", &late]);
    }
    if !summary.unsaved.is_empty() {
        table.add_row([
            "last checkpoint",
            &format!("not written: {}", summary.unsaved),
        ]);
    }
    table
}

/// Describes the number of passes over the data that a run has begun, and the number in its job if that is larger.
fn epochs(summary: &Summary) -> String {
    let begun = summary.epochs;
    match summary.job_epochs {
        asked if asked > begun => format!("{begun} of {asked} epochs"),
        _ => format!("{begun} epochs"),
    }
}

/// Returns the reason why a run has ended before all of its epochs were trained; `None` if all were.
fn ended_early(summary: &Summary) -> Option<String> {
    if !summary.stopped_early.is_empty() {
        return Some(summary.stopped_early.clone());
    }
    if summary.stopped {
        return Some("it was told to".to_owned());
    }
    let by_steps = summary.error.is_empty() && summary.epochs < summary.job_epochs;
    by_steps.then(|| "the job's number of steps".to_owned())
}

/// Shows a path relative to the working directory, if it lies inside.
pub(super) fn shown(path: &Path) -> String {
    let here = std::env::current_dir().ok();
    let inside = here.and_then(|here| path.strip_prefix(here).ok().map(Path::to_owned));
    inside
        .unwrap_or_else(|| path.to_owned())
        .display()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(staleness: f64) -> Summary {
        let summary = serde_json::json!({
            "mode": "bounded", "staleness": 4, "ps": 2, "workers": 300, "epochs": 1, "steps": 1, "samples": 1,
            "seconds": 1.0, "samples_per_second": 1.0, "test_accuracy": null, "test_loss": null,
            "max_clock_lead": 4, "mean_gradient_staleness": staleness, "share_compute": 0.08,
        });
        serde_json::from_value(summary).unwrap()
    }

    #[test]
    fn late_gradients_are_shown_if_there_are_some() {
        let shown = |late_steps| {
            let outcome = Outcome {
                summary: Summary {
                    late_steps,
                    ..summary(0.0)
                },
                run_dir: "runs/a".into(),
            };
            table(&outcome).to_string().contains("7 were left out")
        };
        assert!(shown(7) && !shown(0));
    }

    #[test]
    fn gradients_that_are_too_old_to_help_are_told_at_the_end() {
        let said = stale(&summary(245.0)).unwrap();
        assert!(
            said.contains("245 updates") && said.contains("8 %"),
            "{said}"
        );
        assert_eq!(stale(&summary(7.0)), None);
    }
}
