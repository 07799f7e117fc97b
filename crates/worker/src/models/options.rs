use candle_core::{Result, bail};
use toml::{Table, Value};

use crate::model::Setup;

/// The settings of a model in `model.options`.
pub(super) struct Options<'a>(&'a Table);

impl<'a> Options<'a> {
    /// Refuses settings with other names than these.
    pub(super) fn of(setup: &Setup<'a>, names: &[&str]) -> Result<Self> {
        let options = &setup.settings.options;
        match options.keys().find(|key| !names.contains(&key.as_str())) {
            Some(key) => bail!(
                "`model.options.{key}` is no setting of it; it takes {}",
                names.join(", ")
            ),
            None => Ok(Self(options)),
        }
    }

    /// Returns a number from 1 on.
    pub(super) fn count(&self, name: &str, default: usize) -> Result<usize> {
        let read = |value: &Value| value.as_integer().and_then(|n| usize::try_from(n).ok());
        self.read(name, default, "a whole number, at least 1", |value| {
            read(value).filter(|n| *n > 0)
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
        read: impl Fn(&Value) -> Option<T>,
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
