//! The values of a block: elements of a variable, or rows of a table.

use crate::payload::Elements;
use crate::table::Rows;

/// The values or gradients of a block, in the form of the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Values {
    /// All elements of a block of a variable.
    Dense(Elements),
    /// Some rows of a table's bucket.
    Rows(Rows),
}

impl Values {
    /// Returns the elements, without the ids of rows.
    pub fn elements(&self) -> &Elements {
        match self {
            Self::Dense(elements) => elements,
            Self::Rows(rows) => &rows.values,
        }
    }

    /// Returns the number of bytes of elements and ids.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Dense(elements) => elements.bytes(),
            Self::Rows(rows) => rows.values.bytes() + size_of_val(&*rows.ids),
        }
    }

    /// Returns the same values, with elements in memory of their own.
    #[must_use]
    pub fn copied(self) -> Self {
        match self {
            Self::Dense(elements) => Self::Dense(elements.copied()),
            Self::Rows(rows) => Self::Rows(Rows {
                values: rows.values.copied(),
                ids: rows.ids,
            }),
        }
    }
}

impl From<Elements> for Values {
    fn from(elements: Elements) -> Self {
        Self::Dense(elements)
    }
}
