//! Groups of variables with settings of their own.

use std::borrow::Cow;

use glob::Pattern;
use serde::{Deserialize, Serialize};

use super::{Job, JobError, Optimizer};
use crate::kind::VariableKind;

/// Settings for the variables with names that match a pattern, in place of the job's. A variable belongs to the first
/// group that matches it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// The names of the variables, as in `"*.bias"`: `*` stands for any text, `?` for any character, `[ab]` for one
    /// of these.
    pub variables: String,
    /// True if these variables keep their initial values.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
    /// The learning rate before any schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f32>,
    /// The weight decay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f32>,
    /// The optimizer and its settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<Optimizer>,
}

/// Returns whether a pattern matches the name of a variable.
pub fn matches_pattern(pattern: &str, name: &str) -> bool {
    Pattern::new(pattern).is_ok_and(|pattern| pattern.matches(name))
}

/// Returns whether a text is a pattern of names.
pub(super) fn is_pattern(text: &str) -> bool {
    !text.is_empty() && Pattern::new(text).is_ok()
}

impl Group {
    /// Returns whether the pattern matches the name of a variable.
    pub fn matches(&self, name: &str) -> bool {
        matches_pattern(&self.variables, name)
    }

    /// Returns the optimizer of the group's variables: its own or `base`, with the group's learning rate and weight
    /// decay if these are set.
    fn optimizer(&self, base: &Optimizer) -> Result<Optimizer, JobError> {
        let mut optimizer = self.optimizer.as_ref().unwrap_or(base).clone();
        if let Some(rate) = self.learning_rate {
            *optimizer.learning_rate_mut() = rate;
        }
        if let Some(decay) = self.weight_decay {
            let setting = optimizer.weight_decay_mut();
            *setting.ok_or_else(|| JobError::Setting {
                field: "weight_decay",
                value: decay.to_string(),
                expected: "must be absent with ftrl, which has l2 in its place",
            })? = decay;
        }
        Ok(optimizer)
    }

    pub(super) fn validate(&self, base: &Optimizer) -> Result<(), JobError> {
        let of_group = |error| JobError::Group {
            variables: self.variables.clone(),
            error: Box::new(error),
        };
        if !is_pattern(&self.variables) {
            return Err(of_group(JobError::Setting {
                field: "variables",
                value: format!("{:?}", self.variables),
                expected: "must be a pattern of names, as in \"*.bias\"",
            }));
        }
        let changed = [
            ("learning_rate", self.learning_rate.is_some()),
            ("weight_decay", self.weight_decay.is_some()),
            ("optimizer", self.optimizer.is_some()),
        ];
        if self.frozen
            && let Some((field, _)) = changed.into_iter().find(|(_, given)| *given)
        {
            return Err(of_group(JobError::Unused {
                field,
                value: "given".to_owned(),
                other: "frozen",
                other_value: "true".to_owned(),
                advice: "frozen variables do not change; leave one of them out",
            }));
        }
        let optimizer = self.optimizer(base).map_err(of_group)?;
        optimizer.validate().map_err(of_group)
    }
}

impl Job {
    /// Returns the first group that a variable of this name belongs to.
    pub fn group_of(&self, name: &str) -> Option<&Group> {
        self.groups.iter().find(|group| group.matches(name))
    }

    /// Returns the optimizer of a trained variable: its group's, or the job's.
    pub fn optimizer_of(&self, name: &str) -> Cow<'_, Optimizer> {
        let own = self.group_of(name).map(|g| g.optimizer(&self.optimizer));
        match own {
            Some(Ok(optimizer)) => Cow::Owned(optimizer),
            _ => Cow::Borrowed(&self.optimizer),
        }
    }

    /// Returns whether workers compute with look-ahead weights of some variables.
    pub fn looks_ahead(&self) -> bool {
        let of_group = |group: &Group| group.optimizer(&self.optimizer);
        let mut of_groups = self.groups.iter().flat_map(of_group);
        self.strategy.looks_ahead()
            && (self.optimizer.has_momentum() || of_groups.any(|own| own.has_momentum()))
    }

    /// Returns whether evaluations measure averages of the weights, and `model.safetensors` holds them.
    pub fn evaluates_averages(&self) -> bool {
        self.ema_decay.is_some() || self.averages_last_weights()
    }

    /// Returns whether servers average the last weights (`strategy.correction.average`). They do not with a single
    /// worker, with `ema_decay`, or if an FTRL optimizer has `l1`: the mean of a weight that `l1` sets to 0 would not
    /// be 0.
    pub fn averages_last_weights(&self) -> bool {
        let of_group = |group: &Group| group.optimizer(&self.optimizer);
        let mut optimizers = self.groups.iter().flat_map(of_group);
        let is_sparse = |optimizer: &Optimizer| match optimizer {
            Optimizer::Ftrl(ftrl) => ftrl.l1 > 0.0,
            _ => false,
        };
        self.strategy.averages()
            && self.cluster.workers != Some(1)
            && self.ema_decay.is_none()
            && !is_sparse(&self.optimizer)
            && !optimizers.any(|own| is_sparse(&own))
    }

    /// Returns the kind of the model's variable with this name.
    pub fn kind_of(&self, name: &str) -> VariableKind {
        match self.group_of(name) {
            Some(group) if group.frozen => VariableKind::Frozen,
            _ => VariableKind::by_name(name),
        }
    }

    /// Returns the maximum number of values that a server keeps for each element of a variable in addition to those in
    /// checkpoints: look-ahead weights and averages.
    pub fn copies_of(&self, name: &str, kind: VariableKind) -> usize {
        let one_worker = self.cluster.workers == Some(1);
        if !self.strategy.corrects() || one_worker || !kind.takes_updates() {
            return 0;
        }
        let ahead = kind.is_optimized()
            && self.strategy.looks_ahead()
            && self.optimizer_of(name).has_momentum();
        usize::from(ahead) + usize::from(self.averages_last_weights())
    }

    /// Returns the number of values that a server keeps beside each element of a variable, and that checkpoints have:
    /// the optimizer's state, and the average of `ema_decay`.
    pub fn slots_of(&self, name: &str, kind: VariableKind) -> usize {
        match kind.is_optimized() {
            true => {
                let average = usize::from(self.ema_decay.is_some());
                self.optimizer_of(name).slots() + average
            }
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(text: &str) -> Result<Job, JobError> {
        Job::from_toml(text)
    }

    #[test]
    fn a_variable_has_the_settings_of_the_first_group_that_matches_it() {
        let job = job(r#"
            [optimizer]
            name = "adamw"
            weight_decay = 0.1

            [[groups]]
            variables = "*.bias"
            weight_decay = 0.0

            [[groups]]
            variables = "head.*"
            learning_rate = 0.5

            [[groups]]
            variables = "embed*"
            frozen = true

            [[groups]]
            variables = "gate.?"
            optimizer = { name = "ftrl", l1 = 1.0 }
        "#)
        .unwrap();
        assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
        let decay = |name| match job.optimizer_of(name).into_owned() {
            Optimizer::AdamW(s) => (s.learning_rate, s.weight_decay),
            other => panic!("{other:?}"),
        };
        assert_eq!(decay("body.weight"), (0.001, 0.1));
        assert_eq!(decay("head.bias"), (0.001, 0.0));
        assert_eq!(decay("head.weight"), (0.5, 0.1));
        assert_eq!(job.optimizer_of("gate.a").name(), "ftrl");
        assert_eq!(job.optimizer_of("gate.ab").name(), "adamw");
        assert_eq!(job.kind_of("embedding.weight"), VariableKind::Frozen);
        assert_eq!(job.kind_of("norm.running_mean"), VariableKind::Averaged);
        assert_eq!(job.kind_of("norm.weight"), VariableKind::Trained);
    }

    #[test]
    fn groups_without_sense_are_named() {
        for (group, named) in [
            ("variables = \"\"", "must be a pattern"),
            ("variables = \"[a\"", "\"[a\""),
            (
                "variables = \"a\"\nlearning_rate = -1.0",
                "learning_rate` is -1",
            ),
            (
                "variables = \"a\"\nfrozen = true\nweight_decay = 0.1",
                "frozen",
            ),
            (
                "variables = \"a\"\noptimizer = { name = \"ftrl\" }\nweight_decay = 0.1",
                "l2 in its place",
            ),
            ("variables = \"a\"\nrate = 1", "rate"),
        ] {
            let error = job(&format!("[[groups]]\n{group}"))
                .unwrap_err()
                .to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
