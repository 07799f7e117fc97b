//! The progress bars of a job: one for each worker, and one for the epochs. `pace` estimates the time that is left.

mod pace;

use daemon::noteln;
use std::collections::BTreeMap;

use self::pace::Pace;
use crate::metrics::Line;
use crate::status::harmless;
use indicatif::{HumanCount, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use shared_proto::ids::{Role, Task, names};
use shared_proto::view::JobPhase;
use shared_proto::wire;

/// The templates of the whole job's bar and of a worker's bar. Each bar has one line, of at most 80 columns.
const WHOLE: &str = "{prefix:<12} [{bar:12}] {percent:>3} % {wide_msg}";
const WORKER: &str = "{prefix:<10} [{bar:8}] {wide_msg}";

/// Progress bars on stderr, or a line for each evaluation if stderr is no terminal.
pub(crate) struct Progress {
    bars: MultiProgress,
    whole: ProgressBar,
    workers: BTreeMap<u32, ProgressBar>,
    evaluations: usize,
    /// The newest data epoch with an evaluation that was shown; `None` before the first.
    shown: Option<u32>,
    pace: Pace,
    quiet: bool,
    /// The factor of the learning rate that was shown last.
    learning_rate_factor: f64,
    /// True if the store of checkpoints was full at the last look.
    store_is_full: bool,
    /// The warning that was shown last.
    warning: String,
}

impl Progress {
    pub(crate) fn new(quiet: bool) -> Self {
        let target = if quiet {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr_with_hz(10)
        };
        let bars = MultiProgress::with_draw_target(target);
        let whole = bars.add(ProgressBar::new(1));
        whole.set_style(style(WHOLE));
        whole.set_prefix("starting");
        Self {
            bars,
            whole,
            workers: BTreeMap::new(),
            evaluations: 0,
            shown: None,
            pace: Pace::default(),
            quiet,
            learning_rate_factor: 1.0,
            store_is_full: false,
            warning: String::new(),
        }
    }

    /// Shows a status.
    pub(crate) fn show(&mut self, status: &wire::Status) {
        if status.checkpoint_store_full != self.store_is_full {
            self.store_is_full = status.checkpoint_store_full;
            let error = harmless(&status.checkpoint_error);
            self.say(&match self.store_is_full {
                true => format!(
                    "there is no room for checkpoints: {error}. Training goes on; make room, or the job cannot end with its last checkpoint"
                ),
                false => "checkpoints have room again".to_owned(),
            });
        }
        if self.warning != status.loss_warning {
            self.warning.clone_from(&status.loss_warning);
            self.say(&harmless(&status.loss_warning));
        }
        if status.phase() == JobPhase::Starting {
            self.whole
                .set_message(harmless(&status.waiting_for).into_owned());
            return;
        }
        self.whole.set_length(status.total_samples.max(1));
        self.whole.set_position(status.samples);
        let epoch = (status.data_epoch + 1).min(status.data_epochs);
        self.whole
            .set_prefix(format!("epoch {epoch}/{}", status.data_epochs));
        self.pace.note(status.seconds, status.samples);
        let left = self.pace.left(status.total_samples);
        self.whole.set_message(whole_line(status, left));
        for task in &status.tasks {
            self.show_worker(task, status.samples);
        }
        // A status has only the newest evaluations.
        let new = |e: &&wire::EvaluationReport| self.shown.is_none_or(|shown| e.data_epoch > shown);
        for evaluation in status.evaluations.iter().filter(new).collect::<Vec<_>>() {
            self.evaluated(evaluation.data_epoch + 1, &evaluation.metrics);
            self.shown = Some(evaluation.data_epoch);
        }
        let factor = status.learning_rate_factor.unwrap_or(1.0);
        if factor != self.learning_rate_factor {
            self.learning_rate_factor = factor;
            self.say(&format!(
                "the learning rate is now {factor:.3e} of the job's"
            ));
        }
    }

    /// Removes the bars, and shows the evaluations among `lines` that were not shown yet.
    pub(crate) fn finish(&mut self, lines: &[Line]) {
        self.close();
        let evaluations = lines.iter().filter_map(|line| match line {
            Line::Evaluation { epoch, metrics, .. } => Some((epoch, metrics)),
            _ => None,
        });
        for (epoch, metrics) in evaluations.skip(self.evaluations) {
            let metrics = metrics.iter().map(|(name, value)| (name, &value.0));
            self.evaluated(*epoch, metrics);
        }
    }

    fn evaluated<'a>(
        &mut self,
        epoch: u32,
        metrics: impl IntoIterator<Item = (&'a String, &'a f64)>,
    ) {
        let mut metrics: Vec<_> = metrics.into_iter().collect();
        metrics.sort_by_key(|(name, _)| *name);
        let named = |(name, value): (&String, &f64)| format!("  {} {value:.4}", harmless(name));
        let metrics: String = metrics.into_iter().map(named).collect();
        self.say(&format!("epoch {epoch:>3}:{metrics}"));
        self.evaluations += 1;
    }

    fn show_worker(&mut self, status: &wire::TaskStatus, all: u64) {
        let task = status.task.as_ref().and_then(|t| t.task.as_ref());
        let Some(task) = task.and_then(|task| Task::try_from(task).ok()) else {
            return;
        };
        if task.id.role != Role::Worker {
            return;
        }
        let bar = self.workers.entry(task.id.index).or_insert_with(|| {
            let bar = self.bars.add(ProgressBar::new(1));
            bar.set_style(style(WORKER));
            bar.set_prefix(task.to_string());
            bar
        });
        // The worker's share of all samples that are done.
        bar.set_length(all.max(1));
        bar.set_position(status.samples);
        bar.set_message(worker_line(status));
    }

    /// Prints a text above the bars.
    pub(crate) fn say(&self, text: &str) {
        if self.quiet {
            return;
        }
        if self.bars.is_hidden() {
            noteln!("{text}");
        } else {
            let _ = self.bars.println(text);
        }
    }

    /// Removes the bars.
    pub(crate) fn close(&mut self) {
        let _ = self.bars.clear();
        self.bars.set_draw_target(ProgressDrawTarget::hidden());
    }
}

/// Describes the whole job, in the space beside its bar. The most important figures come first, since the end is cut
/// off on a narrow terminal.
fn whole_line(status: &wire::Status, left: Option<f64>) -> String {
    let rate = status.samples as f64 / status.seconds.max(f64::MIN_POSITIVE);
    let mut line = left.map_or(String::new(), |left| format!("{} left, ", pace::time(left)));
    line += &format!("{rate:.0}/s");
    let metric = status.evaluations.last().and_then(newest_metric);
    line += &metric.unwrap_or_default();
    let reports = status.tables.iter().filter_map(|table| table.report);
    if !status.tables.is_empty() {
        let rows: u64 = reports.map(|report| report.rows).sum();
        line += &format!(", {} rows", HumanCount(rows));
    }
    line
}

/// Returns the first metric of an evaluation by name, except the loss, as a part of a message; `None` if it has no other.
fn newest_metric(evaluation: &wire::EvaluationReport) -> Option<String> {
    let metrics = evaluation.metrics.iter();
    let (name, value) = metrics
        .filter(|(name, _)| *name != "loss")
        .min_by_key(|(name, _)| *name)?;
    Some(format!(", {} {value:.4}", harmless(name)))
}

/// Describes what a worker does, in the space beside its bar.
fn worker_line(status: &wire::TaskStatus) -> String {
    let waiting: Vec<Task> = status
        .waiting_on
        .iter()
        .filter_map(|task| Task::try_from(task).ok())
        .collect();
    let activity = if waiting.is_empty() {
        harmless(&status.activity).into_owned()
    } else {
        format!("waiting for {}", names(&waiting))
    };
    format!(
        "step {:>5}, loss {:.4}, {:>5.0}/s, +{} ahead, {activity}",
        status.clock, status.loss, status.samples_per_second, status.lead
    )
}

pub(crate) fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_has_one_line_of_80_columns_with_the_time_left() {
        let evaluation = wire::EvaluationReport {
            metrics: [("accuracy".to_owned(), 0.9639), ("loss".to_owned(), 0.1)].into(),
            ..wire::EvaluationReport::default()
        };
        let status = wire::Status {
            samples: 1_234_567,
            seconds: 10.0,
            evaluations: vec![evaluation],
            ..wire::Status::default()
        };
        let line = whole_line(&status, Some(359_999.0));
        assert_eq!(line, "99:59:59 left, 123457/s, accuracy 0.9639");
        // The prefix, the bar in its brackets, the share, and spaces; `wide_msg` cuts what is longer.
        let before = 12 + 1 + (12 + 2) + 1 + 5 + 1;
        assert!(before + line.chars().count() <= 80, "{line}");
        assert!(!whole_line(&status, None).contains("left"));
    }

    #[test]
    fn a_worker_has_one_line_of_80_columns() {
        let status = wire::TaskStatus {
            activity: "evaluating".to_owned(),
            clock: 12345,
            loss: 0.1234,
            samples_per_second: 12345.0,
            lead: 4,
            ..wire::TaskStatus::default()
        };
        // The prefix, the bar in its brackets, and spaces; `wide_msg` cuts what is longer.
        let before = 10 + 1 + (8 + 2) + 1;
        let line = worker_line(&status);
        assert!(before + line.chars().count() <= 80, "{line}");
        assert!(line.ends_with("+4 ahead, evaluating"), "{line}");
        assert!(WORKER.ends_with("{wide_msg}") && WHOLE.ends_with("{wide_msg}"));
    }
}
