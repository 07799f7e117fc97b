//! Reads a job file, changes single settings, and writes it.

use super::{Job, JobError};

impl Job {
    /// Reads a job file, and checks it.
    ///
    /// # Errors
    /// Names the line and key, or the setting and its value.
    pub fn from_toml(text: &str) -> Result<Self, JobError> {
        let job = Self::parse(text)?;
        job.validate()?;
        Ok(job)
    }

    /// Reads a job file without checking that its settings make sense.
    ///
    /// # Errors
    /// Names the line and key.
    pub fn parse(text: &str) -> Result<Self, JobError> {
        Ok(toml::from_str(text)?)
    }

    /// Returns the job with one setting changed, given as `path.to.key=value`. A change of `strategy.name` also changes
    /// the mode, if this is the usual one of the old strategy.
    ///
    /// # Errors
    /// If there is no such setting, or it cannot have that value.
    pub fn with(&self, setting: &str) -> Result<Self, JobError> {
        let wrong = |expected| JobError::Setting {
            field: "--set",
            value: format!("{setting:?}"),
            expected,
        };
        let (key, value) = setting
            .split_once('=')
            .ok_or_else(|| wrong("must be KEY=VALUE, as in schedule.kind=cosine"))?;
        // A value that is no number, list or quoted text is read as text.
        let parsed: Result<toml::Table, _> = format!("v = {value}").parse();
        let value = match parsed {
            Ok(mut table) => table.remove("v"),
            Err(_) => None,
        }
        .unwrap_or_else(|| toml::Value::String(value.trim().to_owned()));
        let mut table: toml::Table = toml::from_str(&self.to_toml())?;
        let strategy = &self.strategy;
        if key.trim() == "strategy.name" && strategy.mode == strategy.name.usual_mode() {
            // The usual mode of the other strategy may be another one.
            let written = table
                .get_mut("strategy")
                .and_then(toml::Value::as_table_mut);
            written.map(|written| written.remove("mode"));
        }
        let mut place = &mut table;
        let mut keys: Vec<&str> = key.trim().split('.').collect();
        let last = keys.pop().unwrap_or_default();
        for key in keys {
            place = place
                .entry(key)
                .or_insert_with(|| toml::Value::Table(toml::Table::new()))
                .as_table_mut()
                .ok_or_else(|| wrong("has a key below a setting that has none"))?;
        }
        place.insert(last.to_owned(), value);
        Self::parse(&toml::to_string(&table).unwrap_or_default())
    }

    /// Returns the text of the job file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| unreachable!("a job is plain data: {error}"))
    }
}
