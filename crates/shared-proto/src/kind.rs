//! The kinds of variables.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::wire;

/// The way in which a variable changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VariableKind {
    /// An optimizer updates the variable with its gradient.
    #[default]
    Trained,
    /// Workers measure the variable, such as the running mean and variance of batch normalisation. Each worker sends
    /// its change like a gradient: the old value less the worker's own new one. The variable moves by the mean of these
    /// changes.
    Averaged,
    /// The variable keeps its initial values.
    Frozen,
}

impl VariableKind {
    /// Returns the kind that a variable has by its name, unless the job sets another kind. A variable is averaged if
    /// the part of its name after the last dot begins with `running_`, like `running_mean` and `running_var` in candle
    /// and PyTorch. Any other variable is trained.
    pub fn by_name(name: &str) -> Self {
        let last = name.rsplit('.').next().unwrap_or(name);
        match last.starts_with("running_") {
            true => Self::Averaged,
            false => Self::Trained,
        }
    }

    /// Reads a kind from the wire.
    ///
    /// # Errors
    /// The number, if no kind has it.
    pub(crate) fn read(kind: i32) -> Result<Self, i32> {
        match wire::VariableKind::try_from(kind) {
            Ok(wire::VariableKind::Trained) => Ok(Self::Trained),
            Ok(wire::VariableKind::Averaged) => Ok(Self::Averaged),
            Ok(wire::VariableKind::Frozen) => Ok(Self::Frozen),
            Err(_) => Err(kind),
        }
    }

    /// Returns whether an optimizer updates the variable with its gradient.
    pub fn is_optimized(self) -> bool {
        self == Self::Trained
    }

    /// Returns whether workers send updates for the variable.
    pub fn takes_updates(self) -> bool {
        self != Self::Frozen
    }
}

impl fmt::Display for VariableKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Trained => "trained",
            Self::Averaged => "averaged",
            Self::Frozen => "frozen",
        })
    }
}

impl From<VariableKind> for wire::VariableKind {
    fn from(kind: VariableKind) -> Self {
        match kind {
            VariableKind::Trained => Self::Trained,
            VariableKind::Averaged => Self::Averaged,
            VariableKind::Frozen => Self::Frozen,
        }
    }
}
