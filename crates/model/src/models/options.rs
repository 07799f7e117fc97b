use candle_core::{Result, bail};
use toml::{Table, Value};

use crate::Setup;

/// The settings of a model in `model.options`.
pub(super) struct Options<'a>(&'a Table);

impl<'a> Options<'a> {
    /// Returns the settings. Refuses settings other than those in `names`.
    pub(super) fn new(setup: &Setup<'a>, names: &[&str]) -> Result<Self> {
        let options = &setup.settings.options;
        match options.keys().find(|key| !names.contains(&key.as_str())) {
            Some(key) if names.is_empty() => {
                bail!("`model.options.{key}` is unknown; this model takes no options")
            }
            Some(key) => bail!(
                "`model.options.{key}` is unknown; this model takes {}",
                names.join(", ")
            ),
            None => Ok(Self(options)),
        }
    }

    /// Returns a whole number, at least 1 and at most `most`.
    pub(super) fn count(&self, name: &str, default: usize, most: usize) -> Result<usize> {
        let expected = format!("a whole number, at least 1 and at most {most}");
        self.read(name, default, &expected, |value| {
            let number = usize::try_from(value.as_integer()?).ok()?;
            (1..=most).contains(&number).then_some(number)
        })
    }

    /// Returns a list of names, at least one.
    pub(super) fn names(&self, name: &str) -> Result<Vec<&'a str>> {
        let names = self.read(name, Vec::new(), "a list of names", |value| {
            value.as_array()?.iter().map(Value::as_str).collect()
        })?;
        match names.is_empty() {
            true => bail!("`model.options.{name}` is missing, but must be a list of names"),
            false => Ok(names),
        }
    }

    /// Returns a number above 0.
    pub(super) fn positive(&self, name: &str, default: f64) -> Result<f64> {
        self.read(name, default, "a number above 0", |value| {
            let number = value.as_float().or(value.as_integer().map(|n| n as f64));
            number.filter(|number| *number > 0.0 && number.is_finite())
        })
    }

    /// Returns a share, from 0 to below 1.
    pub(super) fn share(&self, name: &str, default: f64) -> Result<f64> {
        let expected = "a number from 0 to below 1";
        self.read(name, default, expected, |value| {
            let number = value.as_float().or(value.as_integer().map(|n| n as f64));
            number.filter(|share| (0.0..1.0).contains(share))
        })
    }

    fn read<T>(
        &self,
        name: &str,
        default: T,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<T> {
        let Some(value) = self.0.get(name) else {
            return Ok(default);
        };
        match read(value) {
            Some(read) => Ok(read),
            None => bail!("`model.options.{name}` is {value}, but must be {expected}"),
        }
    }
}
