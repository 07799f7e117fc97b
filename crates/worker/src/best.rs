//! The record of the best evaluation, beside its weights in the run directory.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shared_proto::ids::{RunNumber, TaskId};
use shared_proto::job::{Best, run_dir};

use model::Metrics;
use variables::VariablesError;

/// The best evaluation of a run. The worker saves the weights as a candidate before it reports the evaluation, and
/// renames the file once the coordinator has counted the evaluation. The record is written after that. If the worker
/// dies between the count and the rename, the earlier best weights stay. If it dies before the record is written, the
/// weights are better than the record says, and the next evaluation that is better than the record replaces both.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// The metric by which the evaluation is the best.
    metric: String,
    /// The value of the metric.
    value: f64,
    /// The pass over the data, counted from 1.
    epoch: u32,
    /// The id of the run. A record of another run is ignored, because a directory may be used again.
    #[serde(default)]
    run: String,
}

impl Kept {
    /// Reads the record of a run directory, if there is one. Ignores a file that is not a record.
    ///
    /// # Errors
    /// If the file cannot be read.
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

    /// Returns the record of an evaluation after a pass over the data, if the evaluation is better than `kept`. A
    /// `kept` record of another run or metric does not count.
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

    /// Returns the candidate that a worker saves before its evaluation counts.
    pub(crate) fn candidate(self, dir: &Path, worker: TaskId) -> Candidate {
        // Workers may share the directory. A worker whose lease has ended may still write to it.
        let name = format!("candidate-{worker}");
        Candidate {
            path: dir.join(run_dir::BEST).with_extension(name),
            record: self,
        }
    }
}

/// Weights that become the best ones once their evaluation counts. If the candidate is dropped earlier, its file is
/// removed.
pub(crate) struct Candidate {
    /// The path of the weights.
    pub(crate) path: PathBuf,
    record: Kept,
}

impl Candidate {
    /// Replaces the best weights and their record with those of this candidate.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(crate) fn keep(self) -> Result<(), VariablesError> {
        let (weights, record) = (run_dir::BEST, run_dir::BEST_RECORD);
        self.replace(weights, || Ok(()))?;
        // The weights have left the path, so it is free for the record.
        let write = || std::fs::write(&self.path, serde_json::to_vec(&self.record)?);
        self.replace(record, write)
    }

    /// Lets `write` write the file at this candidate's path, then renames the file to `name` in the same folder.
    fn replace(
        &self,
        name: &str,
        write: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), VariablesError> {
        let path = self.path.with_file_name(name);
        let renamed = write().and_then(|()| std::fs::rename(&self.path, &path));
        renamed.map_err(|source| VariablesError::File {
            action: "written",
            path,
            source,
        })
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn place(dir: &Path) -> PathBuf {
    dir.join(run_dir::BEST_RECORD)
}

#[cfg(test)]
mod tests {

    use super::*;

    const WORKER: TaskId = TaskId::worker(1);

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
                let epoch = new.epoch;
                let candidate = new.candidate(dir.path(), WORKER);
                std::fs::write(&candidate.path, [epoch as u8]).unwrap();
                candidate.keep().unwrap();
                kept.push(epoch);
            }
        }
        assert_eq!(kept, [1, 4]);
        let weights = std::fs::read(dir.path().join(run_dir::BEST)).unwrap();
        assert_eq!(weights, [4]);
        // Another candidate does not come to count.
        let not_counted = Kept::read(dir.path()).unwrap().unwrap();
        let candidate = not_counted.candidate(dir.path(), WORKER);
        std::fs::write(&candidate.path, [9]).unwrap();
        drop(candidate);
        let files = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(files, 2, "the weights and their record");
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
