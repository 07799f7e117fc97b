//! Follows metrics from evaluation to evaluation, to stop a job early and to lower the learning rate, as the job's
//! settings say.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shared_proto::job::{EarlyStopping, Goal, Job, Plateau};

use super::Cluster;

/// The data epoch and the metrics of an evaluation.
#[derive(Clone, Copy)]
pub(super) struct Measured<'a> {
    pub(super) data_epoch: u32,
    pub(super) metrics: &'a BTreeMap<String, f64>,
}

/// The state of the metrics that the job's settings follow.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Monitors {
    /// The metric of `early_stopping`.
    early: Trend,
    /// The metric of `plateau`, and the learning rate that it lowers.
    plateau: OnPlateau,
}

/// The best value of a metric so far, and the evaluations since.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Trend {
    /// The metric, and the direction in which it improves; `None` before the first evaluation.
    of: Option<(String, Goal)>,
    /// The best value; `None` if all values were NaN.
    #[serde(with = "shared_proto::number::option")]
    value: Option<f64>,
    /// The data epoch of the evaluation with the best value.
    data_epoch: u32,
    /// The number of evaluations since the best value. A fall of the learning rate and each evaluation of a cooldown
    /// also reset it.
    since: u32,
}

/// A learning rate that falls on a plateau.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct OnPlateau {
    trend: Trend,
    /// The number of evaluations that are left of the cooldown.
    cooldown: u32,
    /// The product of all factors by which the learning rate has fallen.
    #[serde(with = "shared_proto::number")]
    factor: f64,
}

impl Default for OnPlateau {
    fn default() -> Self {
        Self {
            trend: Trend::default(),
            cooldown: 0,
            factor: 1.0,
        }
    }
}

impl Trend {
    /// Returns whether this trend follows `metric` with this goal.
    fn is_of(&self, metric: &str, goal: Goal) -> bool {
        let of = self.of.as_ref();
        of.is_some_and(|(own, towards)| own == metric && *towards == goal)
    }

    /// Adds the evaluation's value of a metric. Returns whether the value is better than the best one by more than
    /// `delta`; `None` if the evaluation lacks the metric. A trend of another metric or goal begins anew.
    fn add(
        &mut self,
        evaluation: Measured<'_>,
        (metric, goal): (&str, Goal),
        delta: f64,
    ) -> Option<bool> {
        let value = *evaluation.metrics.get(metric)?;
        if !self.is_of(metric, goal) {
            *self = Self {
                of: Some((metric.to_owned(), goal)),
                ..Self::default()
            };
        }
        let improves = goal.is_better(value, self.value, delta);
        match improves {
            true => {
                (self.value, self.data_epoch, self.since) = (Some(value), evaluation.data_epoch, 0);
            }
            false => self.since = self.since.saturating_add(1),
        }
        Some(improves)
    }
}

impl OnPlateau {
    /// Adds an evaluation. Returns whether the learning rate falls. `highest` is the highest learning rate of any
    /// variable or table, before all falls. `patience` counts as in Keras's `ReduceLROnPlateau`. A cooldown counts as
    /// in PyTorch: none of its evaluations counts towards `patience`, while in Keras the last one does.
    fn add(&mut self, evaluation: Measured<'_>, plateau: &Plateau, highest: f32) -> bool {
        let of = (plateau.metric.as_str(), plateau.goal());
        if self.trend.add(evaluation, of, plateau.min_delta).is_none() {
            return false;
        }
        if self.cooldown > 0 {
            (self.cooldown, self.trend.since) = (self.cooldown - 1, 0);
        }
        let is_least = f64::from(highest) * self.factor <= f64::from(plateau.min_learning_rate);
        let lowered = self.factor * plateau.factor;
        if self.trend.since < plateau.patience || is_least || lowered < f64::from(f32::MIN_POSITIVE)
        {
            return false;
        }
        self.factor = lowered;
        (self.cooldown, self.trend.since) = (plateau.cooldown, 0);
        true
    }
}

impl Monitors {
    /// Returns the monitors of a job that continues from a checkpoint. `saved` are the checkpoint's monitors, and
    /// `done` are its newest evaluations. If the job follows another metric than the checkpoint's job did, that metric
    /// begins anew; for early stopping, with the evaluations in `done`. The learning rate stays as low as it is, unless
    /// the job has no `plateau`.
    pub(super) fn restored<'a>(
        saved: Option<&Self>,
        done: impl IntoIterator<Item = Measured<'a>>,
        job: &Job,
    ) -> Self {
        let mut monitors = saved.cloned().unwrap_or_default();
        if job.plateau.is_none() {
            monitors.plateau = OnPlateau::default();
        }
        if let Some(early) = &job.early_stopping
            && !monitors.early.is_of(&early.metric, early.goal())
        {
            done.into_iter()
                .for_each(|evaluation| monitors.judge_early(evaluation, early));
        }
        monitors
    }

    fn judge_early(&mut self, evaluation: Measured<'_>, early: &EarlyStopping) {
        let of = (early.metric.as_str(), early.goal());
        self.early.add(evaluation, of, early.min_delta);
    }

    /// Returns the product of all factors by which the learning rate has fallen, 1 before a fall.
    pub(super) fn learning_rate_factor(&self) -> f64 {
        self.plateau.factor
    }

    /// Returns the reason to stop the job early; `None` if there is none.
    pub(super) fn stops_early(&self, early: &EarlyStopping) -> Option<String> {
        let seen = &self.early;
        if seen.since < early.patience || !seen.is_of(&early.metric, early.goal()) {
            return None;
        }
        let best = seen.value.map_or_else(String::new, |value| {
            format!("; the best was {value:.4} in epoch {}", seen.data_epoch + 1)
        });
        Some(format!(
            "{}{best}",
            has_not_improved(&early.metric, seen.since)
        ))
    }

    /// Checks that the state is possible.
    ///
    /// # Errors
    /// Describes the impossible value.
    pub(super) fn check(&self) -> Result<(), String> {
        let factor = self.plateau.factor;
        match factor > 0.0 && factor <= 1.0 {
            true => Ok(()),
            false => Err(format!("the factor of the learning rate is {factor}")),
        }
    }
}

/// Describes why a job stops early or its learning rate falls.
fn has_not_improved(metric: &str, evaluations: u32) -> String {
    let plural = if evaluations == 1 { "" } else { "s" };
    format!("{metric} has not improved for {evaluations} evaluation{plural}")
}

impl Cluster {
    /// Adds an evaluation to the monitors. Returns the reason why the learning rate falls; `None` if it does not.
    pub(super) fn monitor(&mut self, evaluation: Measured<'_>) -> Option<String> {
        let highest = self.highest_learning_rate();
        let monitors = &mut self.durable.evaluations.monitors;
        if let Some(early) = &self.job.early_stopping {
            monitors.judge_early(evaluation, early);
        }
        let plateau = self.job.plateau.as_ref()?;
        let falls = monitors.plateau.add(evaluation, plateau, highest);
        falls.then(|| has_not_improved(&plateau.metric, plateau.patience))
    }

    /// Returns the highest learning rate of any variable or table, before any schedule.
    fn highest_learning_rate(&self) -> f32 {
        let model = self.durable.variables.as_ref().map(|known| &known.model);
        let variables = model.map_or(&[][..], |model| &model.variables).iter();
        let trained = variables.filter(|spec| spec.kind.is_optimized());
        let of_variables = trained.map(|spec| self.job.optimizer_of(&spec.name).learning_rate());
        let tables = model.map_or(&[][..], |model| &model.tables).iter();
        let of_tables = tables.map(|spec| spec.optimizer.learning_rate());
        of_variables.chain(of_tables).fold(0.0, f32::max)
    }

    /// Returns the product of all factors by which `plateau` has lowered the learning rate, 1 before a fall.
    pub(crate) fn learning_rate_factor(&self) -> f64 {
        self.durable.evaluations.monitors.learning_rate_factor()
    }
}

#[cfg(test)]
impl Cluster {
    /// Lowers the learning rate without an evaluation.
    pub(crate) fn lower_learning_rate(&mut self, factor: f64) {
        self.durable.evaluations.monitors.plateau.factor = factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the metrics of an evaluation with this loss.
    fn loss(value: f64) -> BTreeMap<String, f64> {
        [("loss".to_owned(), value)].into()
    }

    /// Returns the factor after each of these losses.
    fn factors(plateau: &Plateau, losses: &[f64]) -> Vec<f64> {
        let mut state = OnPlateau::default();
        let add = |(number, loss): (usize, &f64)| {
            let evaluation = Measured {
                data_epoch: number as u32,
                metrics: &self::loss(*loss),
            };
            state.add(evaluation, plateau, 1.0);
            state.factor
        };
        losses.iter().enumerate().map(add).collect()
    }

    #[test]
    fn the_rate_falls_on_a_plateau() {
        let plateau = Plateau {
            factor: 0.5,
            patience: 2,
            min_delta: 0.01,
            ..Plateau::default()
        };
        let losses = [1.0, 0.995, 0.9, f64::NAN, 0.9, 0.9, 0.9, 0.5, 0.5, 0.5];
        // The second is no improvement, the third is one; the fourth and fifth are two without.
        let expected = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125];
        assert_eq!(factors(&plateau, &losses), expected);

        // No evaluation of a cooldown counts.
        let cooling = Plateau {
            cooldown: 2,
            ..plateau.clone()
        };
        let expected = [1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125];
        assert_eq!(factors(&cooling, &[1.0; 11]), expected);

        let limited = Plateau {
            patience: 1,
            min_learning_rate: 0.3,
            ..plateau
        };
        assert_eq!(factors(&limited, &[1.0; 5]), [1.0, 0.5, 0.25, 0.25, 0.25]);
    }

    #[test]
    fn a_job_that_goes_on_keeps_its_rate_and_its_counts() {
        let early = |metric: &str| format!("[early_stopping]\nmetric = \"{metric}\"\n");
        let with = |text: &str| Job::from_toml(text).unwrap();
        let job = with(&(early("loss") + "[plateau]\npatience = 1\n"));
        let mut monitors = Monitors::default();
        // More than the checkpoint's evaluations, of which only the newest are kept.
        let losses: Vec<_> = (0..100).map(|n| loss(1.0 + f64::from(n))).collect();
        let all: Vec<_> = (0u32..)
            .zip(&losses)
            .map(|(data_epoch, metrics)| Measured {
                data_epoch,
                metrics,
            })
            .collect();
        let (stopping, plateau) = (job.early_stopping.clone().unwrap(), job.plateau.clone());
        for evaluation in all.iter().copied() {
            monitors.judge_early(evaluation, &stopping);
            monitors
                .plateau
                .add(evaluation, plateau.as_ref().unwrap(), 1.0);
        }
        let newest = || all[all.len() - 64..].iter().copied();
        let same = Monitors::restored(Some(&monitors), newest(), &job);
        assert_eq!(same, monitors);
        assert!(same.learning_rate_factor() < 0.1);
        let why = same.stops_early(&stopping).unwrap();
        assert!(
            why.contains("for 99 evaluations; the best was 1.0000 in epoch 1"),
            "{why}"
        );

        // Without a plateau the rate is that of the job; another metric is followed anew.
        let without = Monitors::restored(Some(&monitors), newest(), &with(&early("loss")));
        assert_eq!(without.learning_rate_factor(), 1.0);
        let other = with(&early("accuracy"));
        let anew = Monitors::restored(Some(&monitors), newest(), &other);
        assert_eq!(
            anew.stops_early(other.early_stopping.as_ref().unwrap()),
            None
        );
        // A checkpoint of an earlier release has evaluations alone.
        let earlier = Monitors::restored(None, newest(), &job);
        assert!(
            earlier.stops_early(&stopping).unwrap().contains("for 63"),
            "{earlier:?}"
        );
    }
}
