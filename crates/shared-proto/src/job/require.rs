//! Conditions that a setting must meet.

use std::path::PathBuf;

/// A setting's value, formatted as in a job file.
pub(super) trait Shown {
    fn shown(&self) -> String;
}

macro_rules! shown_as_in_the_file {
    ($($kind:ty),*) => {
        $(impl Shown for $kind {
            fn shown(&self) -> String {
                format!("{self:?}")
            }
        })*
    };
}

shown_as_in_the_file!(String, PathBuf, Vec<usize>, usize, u32, u64, f32, f64);

impl<T: Shown> Shown for Option<T> {
    fn shown(&self) -> String {
        self.as_ref().map_or("absent".to_owned(), T::shown)
    }
}

/// Returns [`JobError::Setting`](super::JobError::Setting) from the function unless a condition holds:
/// `require!(condition, "setting" => value, "what is expected")`.
macro_rules! require {
    ($condition:expr, $field:literal => $value:expr, $expected:literal) => {
        if !$condition {
            return Err($crate::job::JobError::Setting {
                field: $field,
                value: $crate::job::require::Shown::shown(&$value),
                expected: $expected,
            });
        }
    };
}

pub(super) use require;
