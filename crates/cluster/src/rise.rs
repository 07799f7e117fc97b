//! Warns when the training loss rises and stays high, as it does if the learning rate is too large.
//!
//! The losses of single reports are noisy. In a good training, too, the first updates of many workers may raise the
//! loss for a moment. Therefore medians of spans of reports are compared, and only several high spans in a row count as
//! a rise. docs/design/stale-gradients.md says in how many runs this finds a rise.

use std::time::Instant;

use shared_proto::ids::Role;
use shared_proto::job::Mode;

use super::Cluster;
use super::record::Record;

/// The minimum number of reports that give the first loss. With more workers, it takes as many reports as there are
/// workers, which is about one report of each.
const FEWEST_FIRST: usize = 4;

/// The minimum number of reports in a span, and the number of reports of each worker in a span if that gives more.
const FEWEST_IN_SPAN: usize = 128;
const SPAN_OF_WORKER: usize = 8;

/// The number of equal parts of a span. The median of a part reveals a short rise.
const PARTS: usize = 16;

/// A peak exceeds the noise if it is above this multiple of the first loss, and above the first loss by this many
/// standard deviations of the first reports.
const PEAK: f64 = 1.25;
const DEVIATIONS: f64 = 3.0;

/// The fraction of the first loss below which the loss has recovered from a peak.
const RECOVERED: f64 = 0.7;

/// A span is high if its median is above this multiple of the lowest span's median, and above this fraction of the
/// first loss.
const HIGH: f64 = 2.0;
const LEAST: f64 = 0.05;

/// The number of high spans in a row that count as a rise.
const HIGH_SPANS: u32 = 3;

/// The multiple of the first loss that counts as a rise at once.
const EXPLODED: f64 = 100.0;

/// Follows the training loss of a job.
#[derive(Debug)]
pub(super) struct LossWatch {
    /// True if the first losses are those of the initial weights.
    from_the_beginning: bool,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The first losses are being collected.
    First(Vec<f64>),
    Watching(Watching),
    /// A rise was found, or losses cannot be compared by their ratio.
    Over,
}

/// The state of the watch after the first losses.
#[derive(Debug)]
struct Watching {
    /// The median of the first losses.
    first: f64,
    /// The loss above which a peak exceeds the noise.
    noise: f64,
    /// The number of reports in a span.
    reports: usize,
    /// The losses of the span that is not full yet.
    span: Vec<f64>,
    /// The highest peak since the last span that was not high; `None` if no peak exceeds the noise.
    peak: Option<f64>,
    /// The lowest median of a span; infinite before the first span is full.
    lowest: f64,
    /// The number of consecutive high spans.
    high: u32,
}

/// A rise of the training loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rise {
    /// The loss before the rise.
    pub(super) from: f64,
    /// The highest median of a span, or of a part of one, during the rise.
    pub(super) peak: f64,
    pub(super) now: f64,
}

impl Default for LossWatch {
    fn default() -> Self {
        Self {
            from_the_beginning: true,
            stage: Stage::First(Vec::new()),
        }
    }
}

impl LossWatch {
    /// Follows a training whose first losses are unknown. Without them, a peak cannot be distinguished from noise. Only
    /// a loss that has fallen and rises again counts, or one that explodes.
    pub(super) fn from_the_middle() -> Self {
        Self {
            from_the_beginning: false,
            ..Self::default()
        }
    }

    /// Adds the loss of a report. `workers` returns the number of workers. Returns the rise that this loss completes;
    /// there is at most one.
    fn add(&mut self, loss: f64, workers: impl Fn() -> usize) -> Option<Rise> {
        match &mut self.stage {
            Stage::Over => None,
            Stage::First(losses) => {
                losses.push(loss);
                if losses.len() >= FEWEST_FIRST && losses.len() >= workers() {
                    let mut watching = Watching::after(losses, workers());
                    if let (Some(watching), false) = (&mut watching, self.from_the_beginning) {
                        watching.noise = f64::INFINITY;
                    }
                    self.stage = watching.map_or(Stage::Over, Stage::Watching);
                }
                None
            }
            Stage::Watching(watching) => {
                let rise = watching.add(loss)?;
                self.stage = Stage::Over;
                Some(rise)
            }
        }
    }
}

impl Watching {
    /// Begins the watch after the first losses; `None` if losses cannot be compared by their ratio.
    fn after(losses: &mut [f64], workers: usize) -> Option<Self> {
        let count = losses.len() as f64;
        let mean = losses.iter().sum::<f64>() / count;
        let squares: f64 = losses.iter().map(|loss| (loss - mean).powi(2)).sum();
        let deviation = (squares / (count - 1.0)).sqrt();
        let first = median(losses);
        let reports = FEWEST_IN_SPAN.max(SPAN_OF_WORKER * workers) / PARTS * PARTS;
        (first > 0.0 && deviation.is_finite()).then(|| Self {
            first,
            noise: (first + DEVIATIONS * deviation).max(PEAK * first),
            reports,
            span: Vec::with_capacity(reports),
            peak: None,
            lowest: f64::INFINITY,
            high: 0,
        })
    }

    fn add(&mut self, loss: f64) -> Option<Rise> {
        self.span
            .push(if loss.is_nan() { f64::INFINITY } else { loss });
        let count = self.span.len();
        let in_part = self.reports / PARTS;
        if count.is_multiple_of(in_part) {
            let level = median(&mut self.span[count - in_part..].to_vec());
            if level > self.noise.min(EXPLODED * self.first) {
                self.peak = Some(self.peak.map_or(level, |peak| peak.max(level)));
            }
            if level > EXPLODED * self.first {
                return Some(self.rise(self.first.min(self.lowest), level));
            }
        }
        if count < self.reports {
            return None;
        }
        let now = median(&mut self.span);
        self.span.clear();
        let from = if self.peak.is_some() && now > RECOVERED * self.first {
            Some(self.first)
        } else if now > HIGH * self.lowest && now > LEAST * self.first {
            Some(self.lowest)
        } else {
            self.peak = None;
            None
        };
        self.high = if from.is_some() { self.high + 1 } else { 0 };
        self.lowest = self.lowest.min(now);
        let from = from.filter(|_| self.high >= HIGH_SPANS)?;
        Some(self.rise(from, now))
    }

    fn rise(&self, from: f64, now: f64) -> Rise {
        Rise {
            from,
            peak: self.peak.map_or(now, |peak| peak.max(now)),
            now,
        }
    }
}

/// Returns the median of losses. There must be at least one loss. Sorts the losses.
fn median(losses: &mut [f64]) -> f64 {
    losses.sort_unstable_by(f64::total_cmp);
    let middle = losses.len() / 2;
    f64::midpoint(losses[losses.len() - 1 - middle], losses[middle])
}

impl Cluster {
    /// Adds a worker's loss, and warns if the training loss has risen.
    pub(super) fn watch_loss(&mut self, now: Instant, loss: f64) {
        let members = &self.durable.members;
        let live = || {
            let live = members.values().filter(|member| member.is_alive());
            live.filter(|member| member.task.id.role == Role::Worker)
                .count()
        };
        let Some(rise) = self.observed.loss_watch.add(loss, live) else {
            return;
        };
        let Rise {
            from,
            peak,
            now: at,
        } = rise;
        let advice = self.advice_on_rise(live());
        let steps = self.durable.done().0;
        tracing::warn!(
            steps,
            from,
            peak,
            now = at,
            advice,
            "the training loss has risen"
        );
        let warning = format!(
            "the training loss rose from {from:.3e} to {peak:.3e}, and was {at:.3e} after {steps} steps: {advice}"
        );
        self.observed.loss_warning.clone_from(&warning);
        self.records.push_back(Record::LossRose {
            seconds: self.seconds(now),
            steps,
            from,
            peak,
            now: at,
            warning,
        });
    }

    /// Returns whether there is a warning that the training loss has risen.
    pub fn has_risen_loss(&self) -> bool {
        !self.observed.loss_warning.is_empty()
    }

    /// Returns what may keep a loss from rising.
    fn advice_on_rise(&self, workers: usize) -> &'static str {
        let strategy = &self.job.strategy;
        let many = workers > 1;
        match (strategy.mode, strategy.corrects()) {
            (Mode::Bounded | Mode::Async, true) if many => {
                "lower the learning rate, use fewer workers, or train in sync mode"
            }
            (Mode::Bounded | Mode::Async, false) if many => {
                "set strategy.correction.enabled, lower the learning rate, or train in sync mode"
            }
            _ => "lower the learning rate, or limit gradients with clip_norm",
        }
    }

    /// Forgets the losses and the warning, because values have gone back to a checkpoint, or the coordinator has
    /// restarted.
    pub(super) fn forget_losses(&mut self) {
        self.observed.loss_watch = LossWatch::from_the_middle();
        self.observed.loss_warning.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rise that losses of so many workers end with, and the number of the report that completes it.
    fn found_in(
        mut watch: LossWatch,
        workers: usize,
        losses: impl IntoIterator<Item = f64>,
    ) -> Option<(usize, Rise)> {
        let mut found = None;
        for (number, loss) in (1..).zip(losses) {
            if let Some(rise) = watch.add(loss, || workers) {
                assert_eq!(found.replace((number, rise)), None, "only one is found");
            }
        }
        found
    }

    fn found(losses: impl IntoIterator<Item = f64>) -> Option<(usize, Rise)> {
        found_in(LossWatch::default(), 2, losses)
    }

    /// Returns levels, each for so many reports, with noise of up to 10 %.
    fn noisy(levels: &[(usize, f64)]) -> impl Iterator<Item = f64> {
        let each = levels
            .iter()
            .flat_map(|&(count, level)| std::iter::repeat_n(level, count));
        each.enumerate()
            .map(|(number, level)| level * (1.0 + 0.05 * ((number * 7 % 5) as f64 - 2.0)))
    }

    #[test]
    fn a_loss_that_rises_at_the_beginning_and_does_not_fall_again_is_found() {
        let (number, rise) = found(noisy(&[(8, 2.3), (40, 20.0), (1000, 2.3)])).unwrap();
        assert_eq!(number, 4 + 3 * FEWEST_IN_SPAN);
        assert!((rise.from - 2.3).abs() < 0.3 && (rise.now - 2.3).abs() < 0.3);
        assert!(rise.peak > 19.0, "{rise:?}");
        let recovers = [(8, 2.3), (40, 20.0), (200, 2.3), (2000, 0.3)];
        assert_eq!(found(noisy(&recovers)), None);
        // In the middle of a training, the first losses do not show what is noise.
        let levels = [(8, 2.3), (40, 20.0), (1000, 2.3)];
        assert_eq!(
            found_in(LossWatch::from_the_middle(), 2, noisy(&levels)),
            None
        );
    }

    #[test]
    fn a_loss_that_falls_slowly_is_not_found() {
        assert_eq!(found(noisy(&[(1000, 2.3), (1000, 2.2)])), None);
        // A logistic regression from zeros: all first losses are equal, later ones are noisy and never far below.
        let equal = [0.693; 4].into_iter();
        assert_eq!(
            found(equal.chain(noisy(&[(500, 0.69), (5000, 0.64)]))),
            None
        );
        // A language model with a bump.
        let bump = [(100, 10.8), (30, 16.0), (300, 7.0), (3000, 6.5)];
        assert_eq!(found(noisy(&bump)), None);
    }

    #[test]
    fn a_loss_that_rises_after_it_has_fallen_is_found_once_it_stays_high() {
        let rises = [(500, 2.3), (2000, 0.3), (2000, 0.9)];
        for watch in [LossWatch::default(), LossWatch::from_the_middle()] {
            let (_, rise) = found_in(watch, 2, noisy(&rises)).unwrap();
            assert!((rise.from - 0.3).abs() < 0.05 && (rise.now - 0.9).abs() < 0.1);
        }
        let for_a_moment = [(500, 2.3), (2000, 0.3), (300, 0.9), (2000, 0.3)];
        assert_eq!(found(noisy(&for_a_moment)), None);
        // Hardly anything is left to learn.
        let least = [(500, 2.3), (2000, 0.001), (2000, 0.01)];
        assert_eq!(found(noisy(&least)), None);
    }

    #[test]
    fn one_bad_step_of_many_workers_is_not_found() {
        let workers = 1000;
        let steps = [(3 * workers, 2.3), (workers, 50.0), (30 * workers, 1.0)];
        assert_eq!(found_in(LossWatch::default(), workers, noisy(&steps)), None);
    }

    #[test]
    fn a_loss_that_explodes_is_found_at_once() {
        for huge in [1e4, f64::INFINITY, f64::NAN] {
            let losses = [1.0; 12].into_iter().chain([huge; 8]);
            let (number, rise) = found(losses).unwrap();
            assert_eq!((number, rise.from), (20, 1.0));
        }
    }

    #[test]
    fn losses_that_cannot_be_compared_by_their_ratio_are_left_alone() {
        for first in [-1.0, 0.0, f64::NAN, f64::INFINITY] {
            assert_eq!(found([first; 4].into_iter().chain([1e9; 1000])), None);
        }
        let below_zero = noisy(&[(500, 2.0), (500, -1.0)]);
        assert_eq!(found(below_zero), None);
    }
}
