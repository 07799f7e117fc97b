//! Settings of embedding tables in the job.

use serde::{Deserialize, Serialize};

use super::groups::{is_pattern, matches_pattern};
use super::table::{Admission, Eviction, Initializer, RowOptimizer, Storage, TableSpec};
use super::{Job, JobError};

/// Settings for the tables with names that match a pattern, in place of the model's. A table belongs to the first entry that
/// matches it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSettings {
    /// The names of the tables, as in `"user_*"`: a pattern as in a group.
    pub tables: String,
    /// The optimizer of the rows, and its settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<RowOptimizer>,
    /// The values of new rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initializer: Option<Initializer>,
    /// The condition on which an id gets a row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admission: Option<Admission>,
    /// The rows that are evicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<Eviction>,
    /// The form of the values on servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<Storage>,
    /// The number of buckets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buckets: Option<u32>,
}

impl TableSettings {
    /// Returns whether the pattern matches the name of a table.
    pub fn matches(&self, name: &str) -> bool {
        matches_pattern(&self.tables, name)
    }

    fn apply(&self, spec: &mut TableSpec) {
        fn set<T: Clone>(to: &mut T, given: Option<&T>) {
            if let Some(given) = given {
                to.clone_from(given);
            }
        }
        set(&mut spec.optimizer, self.optimizer.as_ref());
        set(&mut spec.initializer, self.initializer.as_ref());
        set(&mut spec.admission, self.admission.as_ref());
        set(&mut spec.eviction, self.eviction.as_ref());
        set(&mut spec.storage, self.storage.as_ref());
        set(&mut spec.buckets, self.buckets.as_ref());
    }

    /// Checks the pattern and the optimizer. The other settings are checked when the model is built, together with the
    /// model's own.
    pub(super) fn validate(&self) -> Result<(), JobError> {
        let of_table = |error| JobError::Table {
            tables: self.tables.clone(),
            error: Box::new(error),
        };
        if !is_pattern(&self.tables) {
            return Err(of_table(JobError::Setting {
                field: "tables",
                value: format!("{:?}", self.tables),
                expected: "must be a pattern of names, as in \"user_*\"",
            }));
        }
        match &self.optimizer {
            Some(optimizer) => optimizer.validate().map_err(of_table),
            None => Ok(()),
        }
    }
}

impl Job {
    /// Returns a model's table with the settings that the job has for it.
    #[must_use]
    pub fn table(&self, mut spec: TableSpec) -> TableSpec {
        if let Some(own) = self.tables.iter().find(|own| own.matches(&spec.name)) {
            own.apply(&mut spec);
        }
        spec
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Sgd;

    #[test]
    fn a_table_has_the_settings_of_the_first_entry_that_matches_it() {
        let job = Job::from_toml(
            r#"
            [[tables]]
            tables = "item*"
            buckets = 8
            optimizer = { name = "row-adagrad", learning_rate = 0.5 }
            admission = { sights = { count = 3, width = 64 } }
            [[tables]]
            tables = "*"
            storage = "bf16"
            initializer = { normal = { deviation = 0.5 } }
            eviction = { capacity = { rows = 100, order = "rarest" } }
            "#,
        )
        .unwrap();
        let spec = |name: &str| TableSpec {
            name: name.to_owned(),
            dimension: 4,
            buckets: 16,
            initializer: Initializer::Zeros,
            optimizer: RowOptimizer::Sgd(Sgd::default()),
            seed: 1,
            admission: Admission::All,
            eviction: Eviction::default(),
            ..TableSpec::default()
        };
        let item = job.table(spec("items"));
        assert_eq!((item.buckets, item.initializer), (8, Initializer::Zeros));
        assert_eq!(item.optimizer.learning_rate(), 0.5);
        assert_ne!(item.admission, Admission::All);
        let other = job.table(spec("user"));
        assert_eq!(other.buckets, 16);
        assert_eq!(other.initializer, Initializer::Normal { deviation: 0.5 });
        assert_ne!(other.eviction, Eviction::default());
        assert_eq!((item.storage, other.storage), (Storage::F32, Storage::Bf16));
        assert_eq!(Job::parse(&job.to_toml()).unwrap(), job);
    }

    #[test]
    fn settings_without_sense_are_named() {
        for (text, said) in [
            ("tables = \"\"", "pattern"),
            (
                "tables = \"*\"\noptimizer = { name = \"sgd\", learning_rate = -1.0 }",
                "learning_rate",
            ),
            ("tables = \"*\"\ncolour = 1", "colour"),
        ] {
            let error = Job::from_toml(&format!("[[tables]]\n{text}")).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
