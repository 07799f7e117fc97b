//! The rule of one variable, as the job and the variable's kind decide it.

use shared_proto::blocks::VariableSpec;
use shared_proto::job::{Job, Optimizer, Schedule, Sgd};
use shared_proto::kernel::Kernel;

use crate::schedule::factor;
use crate::{Part, Rule, Slots, Update, rule};

/// The way in which updates change a variable: a rule, and the learning rate of each update.
pub struct VariableRule {
    rule: Box<dyn Rule>,
    learning_rate: f32,
    schedule: Schedule,
    /// The number of updates that the job expects.
    total_updates: u64,
}

impl VariableRule {
    /// Returns the rule of a variable in a job that expects `total_updates` updates of each block.
    ///
    /// A trained variable has the optimizer of its group, under the job's schedule. An averaged one moves by the
    /// whole of each update, which is a mean of changes. A frozen one takes no updates.
    pub fn of(job: &Job, variable: &VariableSpec, total_updates: u64) -> Self {
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
            learning_rate: optimizer.learning_rate(),
            schedule,
            total_updates,
        }
    }

    /// Returns the slots that the rule needs for each element.
    pub fn slots(&self) -> Slots {
        self.rule.slots()
    }

    /// Returns the parameters of the update that follows `done` others.
    pub fn update_after(&self, done: u64) -> Update {
        Update {
            learning_rate: self.learning_rate * factor(&self.schedule, done, self.total_updates),
            number: done + 1,
            kernel: Kernel::best(),
        }
    }

    /// Applies the part's gradient to its weights.
    pub fn apply(&self, update: Update, part: Part) {
        self.rule.apply(update, part);
    }
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
            slots: [&mut [], &mut []],
        };
        rule.apply(rule.update_after(done), part);
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
        let of = |name, kind| VariableRule::of(&job, &variable(name, kind), 10);
        let rate = |rule: &VariableRule, done| rule.update_after(done).learning_rate;
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
    fn an_averaged_variable_becomes_the_mean_of_what_workers_measured() {
        let job = Job::default();
        let rule = VariableRule::of(&job, &variable("running_var", VariableKind::Averaged), 10);
        let (mut value, measured) = ([1.0, 2.0], [[3.0, 2.0], [5.0, 1.0]]);
        // A step's update is the mean of the old value less each new one.
        let mut mean = [0, 1].map(|i| value[i] - (measured[0][i] + measured[1][i]) / 2.0);
        apply(&rule, 7, &mut value, &mut mean);
        assert_eq!(value, [4.0, 1.5]);
    }
}
