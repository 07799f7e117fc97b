//! The record of the best evaluation, beside its weights in the run directory.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shared_proto::ids::RunNumber;
use shared_proto::job::{Best, run_dir};

use crate::model::Metrics;
use crate::variables::VariablesError;

/// The best evaluation of a run. Its weights are saved before the evaluation is reported, and get their name once it counts. The record is
/// written after that. So if the worker dies in between, the weights are better than the record says, and the next evaluation that is
/// better than the record replaces both.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// The metric by which it is the best.
    metric: String,
    /// Its value.
    value: f64,
    /// The pass over the data, from 1.
    epoch: u32,
    /// The run. The record of another one counts for nothing: a directory may be used again.
    #[serde(default)]
    run: String,
}

impl Kept {
    /// Reads the record of a run directory. One of another kind counts for nothing.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, VariablesError> {
        let path = place(dir);
        match std::fs::read(&path) {
            Ok(content) => Ok(serde_json::from_slice(&content).ok()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(VariablesError::File {
                action: "read",
                path,
                source,
            }),
        }
    }

    /// Returns the record of an evaluation of a pass over the data, if it is better than the one that is kept of its run.
    pub(crate) fn better(
        best: &Best,
        kept: Option<Self>,
        (run, data_epoch): (RunNumber, u32),
        metrics: &Metrics,
    ) -> Option<Self> {
        let value = *metrics.get(&best.metric)?;
        let run = format!("{:016x}", run.0);
        let kept = kept.filter(|kept| kept.metric == best.metric && kept.run == run);
        let before = kept.map(|kept| kept.value);
        best.goal().is_better(value, before, 0.0).then(|| Self {
            metric: best.metric.clone(),
            value,
            epoch: data_epoch.saturating_add(1),
            run,
        })
    }

    /// Returns the path of weights whose evaluation does not count yet.
    pub(crate) fn candidate(dir: &Path) -> PathBuf {
        dir.join(run_dir::BEST).with_extension("candidate")
    }

    /// Replaces the best weights by those at [`Self::candidate`], and their record by this one.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(crate) fn keep(&self, dir: &Path) -> Result<(), VariablesError> {
        let path = dir.join(run_dir::BEST);
        std::fs::rename(Self::candidate(dir), &path).map_err(|source| VariablesError::File {
            action: "written",
            path,
            source,
        })?;
        self.write(dir)
    }

    /// Writes the record. It appears whole or not at all.
    fn write(&self, dir: &Path) -> Result<(), VariablesError> {
        let path = place(dir);
        let write = || {
            let partial = path.with_extension("partial");
            std::fs::write(&partial, serde_json::to_vec(self)?)?;
            std::fs::rename(&partial, &path)
        };
        write().map_err(|source| VariablesError::File {
            action: "written",
            path,
            source,
        })
    }
}

fn place(dir: &Path) -> PathBuf {
    dir.join(run_dir::BEST_RECORD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_evaluation_is_kept_over_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let best = Best {
            metric: "accuracy".to_owned(),
            goal: None,
        };
        let mut kept = Vec::new();
        for (epoch, value) in [0.5, f64::NAN, 0.4, 0.6].into_iter().enumerate() {
            let metrics = Metrics::from([("accuracy".to_owned(), value)]);
            let before = Kept::read(dir.path()).unwrap();
            let pass = (RunNumber(7), epoch as u32);
            if let Some(new) = Kept::better(&best, before, pass, &metrics) {
                std::fs::write(Kept::candidate(dir.path()), [new.epoch as u8]).unwrap();
                new.keep(dir.path()).unwrap();
                kept.push(new.epoch);
            }
        }
        assert_eq!(kept, [1, 4]);
        let weights = std::fs::read(dir.path().join(run_dir::BEST)).unwrap();
        assert_eq!(weights, [4]);
        assert!(!Kept::candidate(dir.path()).exists());
        assert_eq!(Kept::read(dir.path()).unwrap().unwrap().value, 0.6);
        // The record of another metric is not comparable.
        let loss = Metrics::from([("loss".to_owned(), 3.0)]);
        let before = Kept::read(dir.path()).unwrap();
        assert!(Kept::better(&Best::default(), before, (RunNumber(7), 0), &loss).is_some());
        // Nor is that of an earlier run in the same directory.
        let worse = Metrics::from([("accuracy".to_owned(), 0.1)]);
        for (run, counts) in [(7, false), (8, true)] {
            let before = Kept::read(dir.path()).unwrap();
            let better = Kept::better(&best, before, (RunNumber(run), 0), &worse);
            assert_eq!(better.is_some(), counts, "{run}");
        }
    }
}
