//! A place in a file of text or rows, for messages.

use std::path::Path;
use std::sync::Arc;

use crate::error::InputError;

/// A place in a file.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) file: Arc<Path>,
    pub(crate) unit: Unit,
    /// The number of the line or row, from 1.
    pub(crate) number: u64,
}

/// The parts of a file that are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Line,
    Row,
}

impl Place {
    /// Returns the line with this number.
    pub(crate) fn line(file: &Arc<Path>, number: u64) -> Self {
        Self {
            file: file.clone(),
            unit: Unit::Line,
            number,
        }
    }

    /// Returns the row with this number.
    pub(crate) fn row(file: &Arc<Path>, number: u64) -> Self {
        Self {
            unit: Unit::Row,
            ..Self::line(file, number)
        }
    }

    /// Returns the error of a problem at this place.
    pub(crate) fn wrong(&self, problem: String) -> InputError {
        let path = self.file.to_path_buf();
        match self.unit {
            Unit::Line => InputError::Line {
                path,
                line: self.number,
                problem,
            },
            Unit::Row => InputError::Row {
                path,
                row: self.number,
                problem,
            },
        }
    }
}
