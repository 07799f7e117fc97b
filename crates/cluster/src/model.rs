//! The variables and the tables of a model, as workers state them.

use serde::{Deserialize, Serialize};
use shared_proto::blocks::VariableSpec;
use shared_proto::table::TableSpec;

/// The variables and the tables of a model, each sorted by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelSpecs {
    /// The variables.
    #[serde(rename = "specs")]
    pub variables: Vec<VariableSpec>,
    /// The tables; empty in states of earlier releases.
    #[serde(default)]
    pub tables: Vec<TableSpec>,
}

impl From<Vec<VariableSpec>> for ModelSpecs {
    fn from(variables: Vec<VariableSpec>) -> Self {
        let tables = Vec::new();
        Self { variables, tables }
    }
}
