//! A warning when the training loss rises and stays high, as it does where the learning rate is too large.
//!
//! Losses of single reports are noisy, and in a good training the first updates of many workers may raise the loss for a moment. So spans of
//! reports are compared by their medians, and a rise counts once several spans in a row are high. `scripts/measure-quality.py` shows which runs are
//! found (docs/strategies.md).

use std::time::Instant;

use shared_proto::ids::Role;
use shared_proto::job::Mode;

use super::Cluster;
use super::record::Record;

/// The fewest reports that show the loss at the beginning. Each worker's first gradient is of the initial weights.
const FEWEST_FIRST: usize = 4;

/// The number of reports in a span.
const SPAN: usize = 128;

/// The number of reports whose median shows a short rise.
const PEAK: usize = 8;

/// The deviations of the first losses beyond which a short rise is no noise.
const DEVIATIONS: f64 = 3.0;

/// The part of the loss at the beginning below which a training has recovered from a short rise.
const RECOVERED: f64 = 0.4;

/// The multiple of the lowest loss beyond which a span is high.
const HIGH: f64 = 2.0;

/// The part of the loss at the beginning below which no span is high.
const LEAST: f64 = 0.05;

/// The number of high spans in a row that count as a rise.
const HIGH_SPANS: u32 = 4;

/// The multiple of the loss at the beginning that counts as a rise at once.
const EXPLODED: f64 = 100.0;

/// Follows the training loss of a job from its beginning.
#[derive(Debug)]
pub(super) enum LossWatch {
    /// It takes the losses of the initial weights.
    First(Vec<f64>),
    Watching(Watching),
    /// A rise was found, or the beginning is not known.
    Over,
}

impl Default for LossWatch {
    fn default() -> Self {
        Self::First(Vec::new())
    }
}

/// What is known of the losses so far.
#[derive(Debug)]
pub(super) struct Watching {
    /// The mean of the first losses.
    first: f64,
    /// The loss that is above their noise.
    noise: f64,
    /// The losses of the span that is not full.
    span: Vec<f64>,
    /// True once a few losses in a row were above the noise.
    peaked: bool,
    /// The lowest median of a span.
    lowest: f64,
    /// The number of spans that are high, in a row.
    high: u32,
}

/// A rise of the training loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rise {
    /// The loss before.
    pub(super) from: f64,
    /// The loss now.
    pub(super) to: f64,
}

impl LossWatch {
    /// Adds a reported loss. Returns the rise that it completes; at most one is found.
    fn add(&mut self, loss: f64, workers: usize) -> Option<Rise> {
        let loss = if loss.is_nan() { f64::INFINITY } else { loss };
        match self {
            Self::Over => None,
            Self::First(losses) => {
                losses.push(loss);
                if losses.len() >= FEWEST_FIRST.max(workers) {
                    *self = Watching::after(losses).map_or(Self::Over, Self::Watching);
                }
                None
            }
            Self::Watching(watching) => {
                let rise = watching.add(loss)?;
                *self = Self::Over;
                Some(rise)
            }
        }
    }
}

impl Watching {
    /// Returns what the first losses show; none if losses cannot be compared by their ratio.
    fn after(losses: &[f64]) -> Option<Self> {
        let count = losses.len() as f64;
        let first = losses.iter().sum::<f64>() / count;
        let squares: f64 = losses.iter().map(|loss| (loss - first).powi(2)).sum();
        let deviation = (squares / (count - 1.0)).sqrt();
        (first > 0.0 && deviation.is_finite()).then(|| Self {
            first,
            noise: first + DEVIATIONS * deviation,
            span: Vec::with_capacity(SPAN),
            peaked: false,
            lowest: f64::INFINITY,
            high: 0,
        })
    }

    fn add(&mut self, loss: f64) -> Option<Rise> {
        self.span.push(loss);
        let count = self.span.len();
        if count.is_multiple_of(PEAK) {
            let level = median(&mut self.span[count - PEAK..].to_vec());
            self.peaked |= level > self.noise;
            if level > EXPLODED * self.first {
                return Some(Rise {
                    from: self.first.min(self.lowest),
                    to: level,
                });
            }
        }
        if count < SPAN {
            return None;
        }
        let level = median(&mut self.span);
        self.span.clear();
        let from = match self.peaked && level > RECOVERED * self.first {
            true => Some(self.first),
            false => Some(self.lowest)
                .filter(|lowest| level > HIGH * lowest && level > LEAST * self.first),
        };
        self.high = if from.is_some() { self.high + 1 } else { 0 };
        self.lowest = self.lowest.min(level);
        from.filter(|_| self.high >= HIGH_SPANS)
            .map(|from| Rise { from, to: level })
    }
}

/// Returns the median of losses, of which there is at least one. Changes their order.
fn median(losses: &mut [f64]) -> f64 {
    losses.sort_unstable_by(f64::total_cmp);
    let middle = losses.len() / 2;
    f64::midpoint(losses[losses.len() - 1 - middle], losses[middle])
}

impl Cluster {
    /// Adds a worker's loss, and warns if the training loss has risen.
    pub(super) fn watch_loss(&mut self, now: Instant, loss: f64) {
        let workers = match &self.observed.loss_watch {
            LossWatch::First(losses) if losses.is_empty() && self.done().0 > 0 => {
                // The coordinator has started again, so it does not know the beginning.
                self.observed.loss_watch = LossWatch::Over;
                0
            }
            LossWatch::First(_) => self.live(Role::Worker).count(),
            LossWatch::Watching(_) | LossWatch::Over => 0,
        };
        let Some(Rise { from, to }) = self.observed.loss_watch.add(loss, workers) else {
            return;
        };
        let workers = self.live(Role::Worker).count();
        let strategy = &self.job.strategy;
        let advice = if strategy.mode == Mode::Sync || workers < 2 {
            "lower the learning rate, or set clip_norm"
        } else if !strategy.corrects() {
            "set strategy.correction.enabled, lower the learning rate, or train in sync mode"
        } else {
            "lower the learning rate, use fewer workers, or train in sync mode"
        };
        let warning = format!(
            "the training loss has risen from {from:.3e} to {to:.3e}, and stays high: {advice}"
        );
        tracing::warn!("{warning}");
        self.observed.warning.clone_from(&warning);
        self.records.push_back(Record::LossRose {
            seconds: self.seconds(now),
            steps: self.done().0,
            from,
            to,
            warning,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rise that losses end with, and the number of the report that completes it.
    fn found(losses: impl IntoIterator<Item = f64>) -> Option<(usize, Rise)> {
        let mut watch = LossWatch::default();
        let mut found = None;
        for (number, loss) in (1..).zip(losses) {
            if let Some(rise) = watch.add(loss, 2) {
                assert_eq!(found.replace((number, rise)), None, "only one is found");
            }
        }
        found
    }

    /// Returns levels with noise, each for so many reports.
    fn noisy<'a>(levels: &'a [(usize, f64)]) -> impl Iterator<Item = f64> + 'a {
        let each = levels
            .iter()
            .flat_map(|&(count, level)| (0..count).map(move |_| level));
        each.enumerate()
            .map(|(number, level)| level * (1.0 + 0.2 * ((number * 7 % 5) as f64 - 2.0)))
    }

    #[test]
    fn a_loss_that_rises_at_the_beginning_and_does_not_fall_again_is_found() {
        let (number, rise) = found(noisy(&[(8, 2.3), (40, 20.0), (1000, 2.3)])).unwrap();
        assert_eq!(number, 4 + 4 * SPAN);
        assert!(
            (rise.from - 2.3).abs() < 0.5 && (rise.to - 2.3).abs() < 0.5,
            "{rise:?}"
        );
        // One that recovers is not, nor one that learns slowly.
        assert_eq!(
            found(noisy(&[(8, 2.3), (40, 20.0), (300, 2.3), (2000, 0.3)])),
            None
        );
        assert_eq!(found(noisy(&[(1000, 2.3), (1000, 2.2)])), None);
    }

    #[test]
    fn a_loss_that_rises_after_it_has_fallen_is_found_once_it_stays_high() {
        let (_, rise) = found(noisy(&[(500, 2.3), (2000, 0.3), (2000, 0.9)])).unwrap();
        assert!(
            (rise.from - 0.3).abs() < 0.05 && (rise.to - 0.9).abs() < 0.1,
            "{rise:?}"
        );
        assert_eq!(
            found(noisy(&[(500, 2.3), (2000, 0.3), (300, 0.9), (2000, 0.3)])),
            None
        );
        // Hardly anything is left to learn.
        assert_eq!(
            found(noisy(&[(500, 2.3), (2000, 0.001), (2000, 0.01)])),
            None
        );
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
    }
}
