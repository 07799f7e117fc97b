//! The update rule of one variable, which depends on the job and on the variable's kind.

use std::ops::Range;

use shared_proto::blocks::VariableSpec;
use shared_proto::job::{Job, Optimizer, Schedule, Sgd};
use shared_proto::kernel::Kernel;
use shared_proto::table::TableSpec;

use crate::schedule::factor;
use crate::{Part, Rule, Slots, StaleSteps, Update, rule};

/// The way in which updates change a variable: a rule, and the learning rate of each update. If the job keeps moving
/// averages of the weights, their slot is behind those of the rule.
pub struct VariableRule {
    optimizer: Optimizer,
    rule: Box<dyn Rule>,
    /// The share of a moving average that remains in an update; `None` if there are no averages.
    ema_decay: Option<f32>,
    learning_rate: f32,
    schedule: Schedule,
    /// The number of updates that the job expects.
    total_updates: u64,
    /// The learning rate below which the job's `plateau` does not lower a rate; `None` for a variable that has no
    /// optimizer.
    lowest_rate: Option<f32>,
    stale: Option<StaleSteps>,
}

impl VariableRule {
    /// Returns the rule of a variable in a job that expects `total_updates` updates of each block.
    ///
    /// A trained variable has the optimizer of its group, with the job's schedule, and moving averages if the job keeps
    /// them. An averaged variable changes by each whole update, which is a mean of changes. A frozen variable has no
    /// updates.
    pub fn new(job: &Job, variable: &VariableSpec, total_updates: u64) -> Self {
        let (optimizer, schedule) = match variable.kind.is_optimized() {
            true => (
                job.optimizer_of(&variable.name).into_owned(),
                job.schedule.clone(),
            ),
            false => {
                let whole = Sgd {
                    learning_rate: 1.0,
                    weight_decay: 0.0,
                };
                (Optimizer::Sgd(whole), Schedule::default())
            }
        };
        Self {
            rule: rule(&optimizer),
            ema_decay: job.ema_decay.filter(|_| variable.kind.is_optimized()),
            learning_rate: optimizer.learning_rate(),
            schedule,
            total_updates,
            lowest_rate: variable.kind.is_optimized().then(|| lowest_rate(job)),
            stale: StaleSteps::new(job, &optimizer, variable.kind, total_updates),
            optimizer,
        }
    }

    /// Returns the rule of a table's buckets, which gives the learning rate of each update, with the job's schedule.
    /// The rows have an optimizer of their own ([`crate::row`]), and no moving averages.
    pub fn of_table(job: &Job, table: &TableSpec, total_updates: u64) -> Self {
        let learning_rate = table.optimizer.learning_rate();
        let whole = Sgd {
            learning_rate,
            weight_decay: 0.0,
        };
        let optimizer = Optimizer::Sgd(whole);
        Self {
            rule: rule(&optimizer),
            optimizer,
            ema_decay: None,
            learning_rate,
            schedule: job.schedule.clone(),
            total_updates,
            lowest_rate: Some(lowest_rate(job)),
            stale: StaleSteps::of_rows(job, &table.optimizer),
        }
    }

    /// Returns the optimizer. Its learning rate does not include the schedule.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Returns the share of a moving average that remains in an update; `None` if there are no averages.
    pub fn ema_decay(&self) -> Option<f32> {
        self.ema_decay
    }

    /// Returns whether another rule of the same job makes the same updates.
    pub fn is_like(&self, other: &Self) -> bool {
        let settings = |rule: &Self| (rule.ema_decay, rule.lowest_rate);
        self.optimizer == other.optimizer && settings(self) == settings(other)
    }

    /// Returns the slots of each element, with its moving average.
    pub fn slots(&self) -> Slots {
        let own = self.rule.slots();
        Slots {
            count: own.count + usize::from(self.has_averages()),
            ..own
        }
    }

    /// Returns the slots of each element without its moving average.
    pub fn rule_slots(&self) -> Slots {
        self.rule.slots()
    }

    /// Returns the slots before the first update. The moving average begins with the weights.
    pub fn initial_slots(&self, weights: &[f32]) -> Vec<f32> {
        let own = self.rule.slots();
        let mut slots = Vec::with_capacity(self.slots().count * weights.len());
        slots.resize(own.count * weights.len(), own.initial);
        if self.has_averages() {
            slots.extend_from_slice(weights);
        }
        slots
    }

    /// Returns whether moving averages of the weights are kept.
    pub fn has_averages(&self) -> bool {
        self.ema_decay.is_some()
    }

    /// Returns the range of the moving averages in the slots of `elements` elements; `None` if there are no averages.
    pub fn averages(&self, elements: usize) -> Option<Range<usize>> {
        let start = self.rule.slots().count * elements;
        self.ema_decay.map(|_| start..start + elements)
    }

    /// Returns the parameters of the update that follows `done` updates. `lowered_to` is the fraction of the learning
    /// rate that the job's `plateau` has left; 1 for all of it.
    pub fn update_after(&self, done: u64, lowered_to: f64) -> Update {
        let scheduled = self.learning_rate * factor(&self.schedule, done, self.total_updates);
        Update {
            learning_rate: match self.lowest_rate {
                Some(lowest) => {
                    let lowered = (f64::from(scheduled) * lowered_to) as f32;
                    lowered.max(lowest.min(scheduled))
                }
                None => scheduled,
            },
            factor: 1.0,
            number: done + 1,
            kernel: Kernel::best(),
        }
    }

    /// Applies the part's gradient to its weights, and moves the averages towards the new weights. The first update
    /// sets the averages to the weights, as PyTorch's `AveragedModel` and Keras do.
    pub fn apply(&self, update: Update, part: Part) {
        if !self.has_averages() {
            return self.apply_rule(update, part);
        }
        let Part {
            weights,
            gradient,
            mut slots,
            ahead,
        } = part;
        let own = Part {
            weights: &mut *weights,
            gradient,
            slots: slots.each_mut().map(|slot| &mut **slot),
            ahead,
        };
        self.apply_rule(update, own);
        self.move_averages(update, weights, slots[self.rule.slots().count]);
    }

    /// Applies the part's gradient to its weights. The moving averages stay as they are.
    pub fn apply_rule(&self, update: Update, part: Part) {
        self.rule.apply(update, part);
    }

    /// Returns the corrections for stale gradients; `None` if they are not corrected.
    pub fn stale_steps(&self) -> Option<StaleSteps> {
        self.stale
    }

    /// Returns the distance of look-ahead weights from the weights, as [`Rule::steps_ahead`] does.
    pub fn steps_ahead(&self, update: Update, updates: f64) -> f32 {
        self.rule.steps_ahead(update, updates)
    }

    /// Moves the averages towards the new weights. Does nothing if the job keeps no averages. `averages` must be as
    /// long as `weights`. The first update sets the averages to the weights.
    pub fn move_averages(&self, update: Update, weights: &[f32], averages: &mut [f32]) {
        let Some(decay) = self.ema_decay else {
            return;
        };
        if update.number == 1 {
            return averages.copy_from_slice(weights);
        }
        update.kernel.run(|| {
            for (average, weight) in averages.iter_mut().zip(weights) {
                *average += (1.0 - decay) * (*weight - *average);
            }
        });
    }
}

/// Returns the learning rate below which a job's `plateau` does not lower a rate; 0 if the job has no `plateau`.
fn lowest_rate(job: &Job) -> f32 {
    let plateau = job.plateau.as_ref();
    plateau.map_or(0.0, |plateau| plateau.min_learning_rate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::blocks::VariableKind;
    use shared_proto::payload::{self, LeF32};

    fn variable(name: &str, kind: VariableKind) -> VariableSpec {
        VariableSpec {
            name: name.to_owned(),
            shape: vec![2],
            kind,
        }
    }

    fn apply(rule: &VariableRule, done: u64, weights: &mut [f32], gradient: &mut [f32]) {
        let gradient: &[LeF32] = payload::in_place(gradient);
        let part = Part {
            weights,
            gradient,
            slots: Default::default(),
            ahead: None,
        };
        rule.apply(rule.update_after(done, 1.0), part);
    }

    #[test]
    fn each_variable_has_the_rule_of_its_kind_and_group() {
        let job = Job::from_toml(
            r#"
            [optimizer]
            name = "sgd"
            learning_rate = 0.5
            [schedule]
            warmup_steps = 2
            [[groups]]
            variables = "head.*"
            learning_rate = 0.25
            [[groups]]
            variables = "gate"
            optimizer = { name = "adam" }
            "#,
        )
        .unwrap();
        let of = |name, kind| VariableRule::new(&job, &variable(name, kind), 10);
        let rate = |rule: &VariableRule, done| rule.update_after(done, 1.0).learning_rate;
        let body = of("body.weight", VariableKind::Trained);
        assert_eq!([rate(&body, 0), rate(&body, 2)], [0.25, 0.5]);
        let head = of("head.weight", VariableKind::Trained);
        assert_eq!([rate(&head, 0), rate(&head, 2)], [0.125, 0.25]);
        assert_eq!(of("gate", VariableKind::Trained).slots().count, 2);
        let average = of("head.running_mean", VariableKind::Averaged);
        assert_eq!((rate(&average, 0), average.slots().count), (1.0, 0));
        assert_eq!(of("gate", VariableKind::Frozen).slots().count, 0);
    }

    #[test]
    fn a_plateau_lowers_rates_down_to_its_limit_and_leaves_averages_alone() {
        let job = Job::from_toml(
            "optimizer = { name = \"sgd\", learning_rate = 0.5 }\nschedule = { warmup_steps = 2 }\nplateau = { min_learning_rate = 0.3 }",
        );
        let job = job.unwrap();
        let of = |kind| VariableRule::new(&job, &variable("w", kind), 10);
        let trained = of(VariableKind::Trained);
        for (done, lowered_to, rate) in [
            (5, 1.0, 0.5),
            (5, 0.8, 0.4),
            (5, 0.1, 0.3),
            // The schedule may go below it.
            (0, 0.1, 0.25),
        ] {
            let found = trained.update_after(done, lowered_to).learning_rate;
            assert_eq!(found, rate, "{done} {lowered_to}");
        }
        let averaged = of(VariableKind::Averaged).update_after(5, 0.1);
        assert_eq!(averaged.learning_rate, 1.0);
    }

    #[test]
    fn only_trained_variables_have_a_moving_average() {
        let job = Job::from_toml("ema_decay = 0.5").unwrap();
        let of = |kind| VariableRule::new(&job, &variable("w", kind), 10);
        let trained = of(VariableKind::Trained);
        assert_eq!(
            (trained.slots().count, trained.averages(2)),
            (3, Some(4..6))
        );
        for kind in [VariableKind::Averaged, VariableKind::Frozen] {
            assert_eq!((of(kind).slots().count, of(kind).averages(2)), (0, None));
        }
    }

    #[test]
    fn an_averaged_variable_becomes_the_mean_of_what_workers_measured() {
        let job = Job::default();
        let rule = VariableRule::new(&job, &variable("running_var", VariableKind::Averaged), 10);
        let (mut value, measured) = ([1.0, 2.0], [[3.0, 2.0], [5.0, 1.0]]);
        // A step's update is the mean of the old value less each new one.
        let mut mean = [0, 1].map(|i| value[i] - (measured[0][i] + measured[1][i]) / 2.0);
        apply(&rule, 7, &mut value, &mut mean);
        assert_eq!(value, [4.0, 1.5]);
    }
}
