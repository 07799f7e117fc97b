//! Metrics of evaluations that a job monitors: to keep the best model, to stop early, and to lower the learning rate.

use serde::{Deserialize, Serialize};

use super::JobError;
use super::settings::settings;

/// The passes over the data after which a worker evaluates the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Evaluations {
    /// Each pass.
    #[default]
    EachEpoch,
    /// The last pass. `flambeau evaluator` can evaluate checkpoints meanwhile, so that no worker has to.
    Last,
}

settings! {
    /// When a job stops before its data ends.
    EarlyStopping {
        /// The metric, by its name in evaluations.
        metric: String = "loss".to_owned(),
        /// The direction in which the metric improves. Absent: by the metric's name.
        #[serde(skip_serializing_if = "Option::is_none")]
        goal: Option<Goal> = None,
        /// The number of evaluations in a row without an improvement after which the job stops.
        patience: u32 = 3,
        /// The least change that counts as an improvement.
        min_delta: f64 = 0.0,
    }
}

settings! {
    /// When the learning rate falls because evaluations no longer improve, as Keras's `ReduceLROnPlateau` does it.
    Plateau {
        /// The metric, by its name in evaluations.
        metric: String = "loss".to_owned(),
        /// The direction in which the metric improves. Absent: by the metric's name.
        #[serde(skip_serializing_if = "Option::is_none")]
        goal: Option<Goal> = None,
        /// The factor by which the learning rate is multiplied when it falls.
        factor: f64 = 0.1,
        /// The number of evaluations in a row without an improvement after which the learning rate falls.
        patience: u32 = 10,
        /// The least change that counts as an improvement.
        min_delta: f64 = 1e-4,
        /// The number of evaluations after a fall of the learning rate that do not count towards `patience`.
        cooldown: u32 = 0,
        /// No learning rate is lowered below this one.
        min_learning_rate: f32 = 0.0,
    }
}

settings! {
    /// The metric by which the best model is chosen.
    Best {
        /// The metric, by its name in evaluations.
        metric: String = "loss".to_owned(),
        /// The direction in which the metric improves. Absent: by the metric's name.
        #[serde(skip_serializing_if = "Option::is_none")]
        goal: Option<Goal> = None,
    }
}

/// The direction in which a metric improves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// Smaller values are better.
    Min,
    /// Larger values are better.
    Max,
}

impl Goal {
    /// Returns the direction in which a metric of this name improves, if the name tells it.
    pub fn of(metric: &str) -> Option<Self> {
        match metric {
            "loss" | "log_loss" | "rmse" | "mae" => Some(Self::Min),
            "accuracy" | "auc" | "f1" => Some(Self::Max),
            _ => metric.starts_with("top_").then_some(Self::Max),
        }
    }

    /// Returns whether `value` is better than `than` by more than `delta`. NaN is never better. Any other value is
    /// better than `None`.
    pub fn is_better(self, value: f64, than: Option<f64>, delta: f64) -> bool {
        let Some(than) = than else {
            return !value.is_nan();
        };
        match self {
            Self::Min => value < than - delta,
            Self::Max => value > than + delta,
        }
    }
}

impl EarlyStopping {
    /// Returns the direction in which the metric improves.
    pub fn goal(&self) -> Goal {
        goal(self.goal, &self.metric)
    }

    pub(super) fn validate(&self) -> Result<(), JobError> {
        let checked = check_metric(
            ["early_stopping.metric", "early_stopping.goal"],
            &self.metric,
            self.goal,
        );
        checked?;
        let delta = self.min_delta;
        check(
            self.patience > 0,
            "early_stopping.patience",
            self.patience,
            "must be at least 1",
        )?;
        check(
            delta.is_finite() && delta >= 0.0,
            "early_stopping.min_delta",
            delta,
            "must be at least 0, and finite",
        )
    }
}

impl Plateau {
    /// Returns the direction in which the metric improves.
    pub fn goal(&self) -> Goal {
        goal(self.goal, &self.metric)
    }

    pub(super) fn validate(&self) -> Result<(), JobError> {
        check_metric(["plateau.metric", "plateau.goal"], &self.metric, self.goal)?;
        let (factor, delta, least) = (self.factor, self.min_delta, self.min_learning_rate);
        check(
            factor > 0.0 && factor < 1.0,
            "plateau.factor",
            factor,
            "must be more than 0 and less than 1",
        )?;
        check(
            self.patience > 0,
            "plateau.patience",
            self.patience,
            "must be at least 1",
        )?;
        check(
            delta.is_finite() && delta >= 0.0,
            "plateau.min_delta",
            delta,
            "must be at least 0, and finite",
        )?;
        check(
            least.is_finite() && least >= 0.0,
            "plateau.min_learning_rate",
            least,
            "must be at least 0, and finite",
        )
    }
}

fn check(
    ok: bool,
    field: &'static str,
    value: impl ToString,
    expected: &'static str,
) -> Result<(), JobError> {
    match ok {
        true => Ok(()),
        false => Err(JobError::Setting {
            field,
            value: value.to_string(),
            expected,
        }),
    }
}

impl Best {
    /// Returns the direction in which the metric improves.
    pub fn goal(&self) -> Goal {
        goal(self.goal, &self.metric)
    }

    pub(super) fn validate(&self) -> Result<(), JobError> {
        check_metric(["best.metric", "best.goal"], &self.metric, self.goal)
    }
}

fn goal(given: Option<Goal>, metric: &str) -> Goal {
    given.or_else(|| Goal::of(metric)).unwrap_or(Goal::Min)
}

fn check_metric(
    [metric_field, goal_field]: [&'static str; 2],
    metric: &str,
    goal: Option<Goal>,
) -> Result<(), JobError> {
    if metric.is_empty() {
        return Err(JobError::Setting {
            field: metric_field,
            value: format!("{metric:?}"),
            expected: "must be the name of a metric",
        });
    }
    match goal.or_else(|| Goal::of(metric)) {
        Some(_) => Ok(()),
        None => Err(JobError::Setting {
            field: goal_field,
            value: format!("absent, and the metric is {metric:?}"),
            expected: "must be \"min\" or \"max\" for a metric whose name does not tell which values are better",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_better_if_it_exceeds_the_best_one_by_more_than_the_delta() {
        for (goal, value, than, delta, better) in [
            (Goal::Min, 1.0, None, 0.0, true),
            (Goal::Min, f64::NAN, None, 0.0, false),
            (Goal::Min, f64::NAN, Some(1.0), 0.0, false),
            (Goal::Min, 0.9, Some(1.0), 0.0, true),
            (Goal::Min, 1.0, Some(1.0), 0.0, false),
            (Goal::Min, 0.95, Some(1.0), 0.1, false),
            (Goal::Max, 0.9, Some(1.0), 0.0, false),
            (Goal::Max, 1.2, Some(1.0), 0.1, true),
        ] {
            let judged = goal.is_better(value, than, delta);
            assert_eq!(judged, better, "{goal:?} {value} {than:?} {delta}");
        }
    }

    #[test]
    fn a_metric_of_unknown_meaning_needs_a_goal() {
        let best = |metric: &str, goal| Best {
            metric: metric.to_owned(),
            goal,
        };
        for known in ["loss", "accuracy", "top_5", "auc", "rmse"] {
            best(known, None).validate().unwrap();
        }
        best("recall", Some(Goal::Max)).validate().unwrap();
        let error = best("recall", None).validate().unwrap_err().to_string();
        assert!(
            error.contains("best.goal") && error.contains("recall"),
            "{error}"
        );
        let stopping = EarlyStopping {
            patience: 0,
            ..EarlyStopping::default()
        };
        assert!(stopping.validate().is_err());
    }

    #[test]
    fn a_plateau_lowers_the_rate_to_a_part_of_it() {
        Plateau::default().validate().unwrap();
        type Change = fn(&mut Plateau);
        let wrong: [(&str, Change); 6] = [
            ("plateau.factor", |plateau| plateau.factor = 1.0),
            ("plateau.factor", |plateau| plateau.factor = f64::NAN),
            ("plateau.patience", |plateau| plateau.patience = 0),
            ("plateau.min_delta", |plateau| plateau.min_delta = -1.0),
            ("plateau.min_learning_rate", |plateau| {
                plateau.min_learning_rate = f32::INFINITY;
            }),
            ("plateau.goal", |plateau| {
                plateau.metric = "recall".to_owned()
            }),
        ];
        for (field, change) in wrong {
            let mut plateau = Plateau::default();
            change(&mut plateau);
            let error = plateau.validate().unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
