//! A run's `metrics.jsonl`, read back.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use shared_proto::job::run_dir;
use shared_proto::number::{self, Number};

use crate::error::CommandError;

/// The lines that commands show.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Line {
    Steps {
        #[serde(with = "number")]
        epoch: f64,
        #[serde(with = "number")]
        loss: f64,
    },
    Evaluation {
        epoch: u32,
        metrics: BTreeMap<String, Number>,
    },
    #[serde(other)]
    Other,
}

/// Reads all lines of a run. Skips lines that were cut short when a coordinator was killed.
pub(crate) fn read(dir: &Path) -> Result<Vec<Line>, CommandError> {
    let path = dir.join(run_dir::METRICS);
    let text = std::fs::read_to_string(&path).map_err(CommandError::file(&path))?;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        match serde_json::from_str(line) {
            Ok(line) => lines.push(line),
            Err(error) if error.is_eof() || !line.ends_with('}') => {}
            Err(error) => {
                return Err(CommandError::Content {
                    path,
                    reason: format!("line {}: {error}", number + 1),
                });
            }
        }
    }
    Ok(lines)
}
