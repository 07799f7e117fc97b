//! A run's `metrics.jsonl`, read back.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use shared_proto::job::run_dir;
use shared_proto::number::{self, Number};

use crate::error::CommandError;

/// A line of `metrics.jsonl`. Lines that no command needs are [`Line::Other`].
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Line {
    Steps {
        #[serde(with = "number")]
        epoch: f64,
        #[serde(with = "number")]
        loss: f64,
        #[serde(default)]
        steps: u64,
        #[serde(default, with = "number")]
        seconds: f64,
        #[serde(default, with = "number")]
        samples_per_second: f64,
    },
    Evaluation {
        epoch: u32,
        metrics: BTreeMap<String, Number>,
        #[serde(default)]
        steps: u64,
        #[serde(default, with = "number")]
        seconds: f64,
    },
    LearningRate {
        epoch: u32,
        steps: u64,
        #[serde(with = "number")]
        factor: f64,
    },
    #[serde(other)]
    Other,
}

/// Reads all lines of a run. Skips lines that were cut short when a coordinator was killed.
pub(crate) fn read(dir: &Path) -> Result<Vec<Line>, CommandError> {
    let path = dir.join(run_dir::METRICS);
    let text = std::fs::read_to_string(&path).map_err(CommandError::file(&path))?;
    parse(&text, &path)
}

/// Reads lines of a file.
fn parse(text: &str, path: &Path) -> Result<Vec<Line>, CommandError> {
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        match serde_json::from_str(line) {
            Ok(line) => lines.push(line),
            Err(error) if error.is_eof() || !line.ends_with('}') => {}
            Err(error) => {
                return Err(CommandError::Content {
                    path: path.to_owned(),
                    reason: format!("line {}: {error}", number + 1),
                });
            }
        }
    }
    Ok(lines)
}

/// Reads the lines that a running job adds.
pub(crate) struct Tail {
    path: PathBuf,
    /// The number of bytes that were read.
    read: u64,
}

impl Tail {
    /// Returns a tail of the metrics file in a run directory, from its first line on.
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self {
            path: run_dir.join(run_dir::METRICS),
            read: 0,
        }
    }

    /// Returns the whole lines since the last call.
    pub(crate) fn read(&mut self) -> Result<Vec<Line>, CommandError> {
        let mut more = self.rest().map_err(CommandError::file(&self.path))?;
        let whole = more.iter().rposition(|byte| *byte == b'\n');
        more.truncate(whole.map_or(0, |end| end + 1));
        self.read += more.len() as u64;
        parse(&String::from_utf8_lossy(&more), &self.path)
    }

    fn rest(&mut self) -> std::io::Result<Vec<u8>> {
        let mut file = match File::open(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            opened => opened?,
        };
        // A run that does not go on from another one begins the file anew.
        if file.metadata()?.len() < self.read {
            self.read = 0;
        }
        file.seek(SeekFrom::Start(self.read))?;
        let mut rest = Vec::new();
        file.read_to_end(&mut rest)?;
        Ok(rest)
    }
}
