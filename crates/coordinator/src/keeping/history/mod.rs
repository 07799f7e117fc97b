//! The history of a job for charts. It keeps no more points than a chart can show.

mod series;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::Path;

use cluster::{Record, Timed};
use serde_json::{Value, json};
use shared_proto::job::run_dir;
use shared_proto::number::Number;

use self::series::{Point, Series};

/// The maximum number of points of a curve.
const MOST_POINTS: usize = 512;

/// The maximum number of remarks, and of checkpoints. The oldest ones are dropped.
const MOST_REMARKS: usize = 100;

/// The history of a job so far.
#[derive(Clone, Debug, Default)]
pub struct History {
    steps: Series<Steps, MOST_POINTS>,
    evaluations: Series<Evaluation, MOST_POINTS>,
    checkpoints: VecDeque<Checkpoint>,
    remarks: VecDeque<Remark>,
}

#[derive(Clone, Debug)]
struct Steps {
    seconds: f64,
    steps: u64,
    epoch: f64,
    loss: f64,
    samples_per_second: f64,
}

#[derive(Clone, Debug)]
struct Evaluation {
    seconds: f64,
    epoch: u32,
    steps: u64,
    metrics: BTreeMap<String, f64>,
}

#[derive(Clone, Copy, Debug)]
struct Checkpoint {
    seconds: f64,
    number: u64,
    steps: u64,
}

#[derive(Clone, Debug)]
struct Remark {
    /// Seconds since 1970; `None` in files of earlier releases.
    time: Option<f64>,
    seconds: f64,
    text: String,
}

impl Point for Steps {
    fn merge(&mut self, later: Self, for_records: u32) {
        let records = f64::from(for_records);
        let mean = |one: f64, other: f64| (one * records + other) / (records + 1.0);
        *self = Self {
            loss: mean(self.loss, later.loss),
            samples_per_second: mean(self.samples_per_second, later.samples_per_second),
            ..later
        };
    }
}

impl Point for Evaluation {
    fn merge(&mut self, later: Self, _: u32) {
        *self = later;
    }
}

impl History {
    /// Reads the history of a run from its `metrics.jsonl`. Skips lines that are cut short or of other releases.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(dir: &Path) -> io::Result<Self> {
        Self::read_newest(dir, u64::MAX)
    }

    /// Reads the history from the last `bytes` bytes of a run's `metrics.jsonl`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn read_newest(dir: &Path, bytes: u64) -> io::Result<Self> {
        let mut history = Self::default();
        let mut file = File::open(dir.join(run_dir::METRICS))?;
        let skipped = file.metadata()?.len().saturating_sub(bytes);
        file.seek(SeekFrom::Start(skipped))?;
        for line in BufReader::new(file).split(b'\n') {
            if let Ok(Timed { time, record }) = Timed::of_line(&line?) {
                history.add(time, &record);
            }
        }
        Ok(history)
    }

    /// Adds a record that was made at `time`, in seconds since 1970.
    pub(crate) fn add(&mut self, time: Option<f64>, record: &Record) {
        match record {
            Record::Steps {
                seconds,
                steps,
                epoch,
                loss,
                samples_per_second,
                ..
            } => self.steps.add(Steps {
                seconds: *seconds,
                steps: *steps,
                epoch: *epoch,
                loss: *loss,
                samples_per_second: *samples_per_second,
            }),
            Record::Evaluation {
                seconds,
                epoch,
                steps,
                metrics,
                ..
            } => self.evaluations.add(Evaluation {
                seconds: *seconds,
                epoch: *epoch,
                steps: *steps,
                metrics: metrics.clone(),
            }),
            Record::Checkpoint {
                seconds,
                number,
                steps,
            } => {
                let (seconds, number, steps) = (*seconds, *number, *steps);
                let checkpoint = Checkpoint {
                    seconds,
                    number,
                    steps,
                };
                push(&mut self.checkpoints, checkpoint);
            }
            Record::Restored {
                shard: None, steps, ..
            } => {
                // The training continues at an earlier step.
                let steps = *steps;
                self.steps.retain(|point| point.steps <= steps);
                self.evaluations.retain(|point| point.steps <= steps);
            }
            _ => {}
        }
        if let Some((seconds, text)) = remark(record) {
            push(
                &mut self.remarks,
                Remark {
                    time,
                    seconds,
                    text,
                },
            );
        }
    }

    /// Returns the history as one JSON object.
    pub fn to_json(&self) -> Value {
        let steps = self.steps.points();
        let column = |value: fn(&Steps) -> f64| {
            steps
                .iter()
                .map(|point| Number(value(point)))
                .collect::<Vec<_>>()
        };
        let evaluations = self.evaluations.points().iter().map(|point| {
            let metrics = point
                .metrics
                .iter()
                .map(|(name, value)| (name, Number(*value)));
            json!({
                "seconds": Number(point.seconds),
                "epoch": point.epoch,
                "steps": point.steps,
                "metrics": metrics.collect::<BTreeMap<_, _>>(),
            })
        });
        let checkpoints = self.checkpoints.iter().map(|checkpoint| {
            json!({
                "seconds": Number(checkpoint.seconds),
                "number": checkpoint.number,
                "steps": checkpoint.steps,
            })
        });
        let remarks = self.remarks.iter();
        let remarks = remarks.map(|remark| {
            json!({
                "time": remark.time,
                "seconds": Number(remark.seconds),
                "text": remark.text,
            })
        });
        json!({
            "steps": {
                "seconds": column(|point| point.seconds),
                "steps": column(|point| point.steps as f64),
                "epoch": column(|point| point.epoch),
                "loss": column(|point| point.loss),
                "samples_per_second": column(|point| point.samples_per_second),
            },
            "evaluations": evaluations.collect::<Vec<_>>(),
            "checkpoints": checkpoints.collect::<Vec<_>>(),
            "remarks": remarks.collect::<Vec<_>>(),
        })
    }
}

fn push<T>(queue: &mut VecDeque<T>, item: T) {
    if queue.len() >= MOST_REMARKS {
        queue.pop_front();
    }
    queue.push_back(item);
}

/// Returns the time of a record, in seconds since training began, and its description, if the history lists the record
/// as a remark. `None` for any other record, such as a point of a curve.
fn remark(record: &Record) -> Option<(f64, String)> {
    Some(match record {
        Record::Joined {
            seconds,
            task,
            generation,
        } => match generation {
            0 | 1 => (*seconds, format!("{task} joined")),
            _ => (
                *seconds,
                format!("{task} joined again, for the {generation}. time"),
            ),
        },
        Record::Left { seconds, task, why } if why == "it has left" => {
            (*seconds, format!("{task} left"))
        }
        Record::Left { seconds, task, why } => (*seconds, format!("{task} is gone: {why}")),
        Record::CannotWork {
            seconds,
            task,
            reason,
            ..
        } => (*seconds, format!("{task} cannot work: {reason}")),
        Record::Forgotten {
            seconds,
            task,
            steps,
        } => (
            *seconds,
            format!("the coordinator started again without {steps} steps of {task}"),
        ),
        Record::TakenUp { seconds, error } => (*seconds, format!("resumed after: {error}")),
        Record::Restored {
            seconds,
            checkpoint,
            shard,
            steps,
        } => {
            let what = shard.map_or("training".to_owned(), |shard| format!("shard {shard}"));
            (
                *seconds,
                format!("{what} went back to checkpoint {checkpoint}, of step {steps}"),
            )
        }
        Record::Lost {
            seconds,
            task,
            shard,
            updates,
            ..
        } => (
            *seconds,
            format!("{updates} updates of blocks by {task} are lost with shard {shard}"),
        ),
        Record::LearningRate {
            seconds,
            factor,
            why,
            ..
        } => (
            *seconds,
            format!("the learning rate falls to {factor:.3e} of the job's: {why}"),
        ),
        Record::LossRose {
            seconds, warning, ..
        } => (*seconds, warning.clone()),
        Record::Ended { seconds, error } if error.is_empty() => {
            (*seconds, "the job ended".to_owned())
        }
        Record::Ended { seconds, error } => (*seconds, format!("the job failed: {error}")),
        Record::Began { .. }
        | Record::Loaded { .. }
        | Record::Steps { .. }
        | Record::Evaluation { .. }
        | Record::Checkpoint { .. } => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(lines: &str) -> Value {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(run_dir::METRICS), lines).unwrap();
        History::read(dir.path()).unwrap().to_json()
    }

    const STEPS: &str = r#"{"event":"steps","seconds":1.0,"steps":10,"samples":320,"epoch":0.5,"loss":"NaN","samples_per_second":320.0}"#;
    const EVALUATION: &str = r#"{"event":"evaluation","seconds":2.0,"epoch":1,"steps":20,"samples":640,"metrics":{"loss":0.5}}"#;

    #[test]
    fn a_file_is_read_but_for_lines_that_are_cut_short() {
        let lines = [
            STEPS,
            r#"{"event":"of the future","steps":3}"#,
            r#"{"event":"left","seconds":1.5,"task":"worker-1","why":"its lease has ended"}"#,
            EVALUATION,
            r#"{"event":"checkpoint","seconds":3.0,"number":4,"steps":20}"#,
            r#"{"event":"ev"#,
        ];
        let history = history(&lines.join("\n"));
        assert_eq!(history["steps"]["steps"], json!([10.0]));
        assert_eq!(history["steps"]["loss"], json!(["NaN"]));
        assert_eq!(history["evaluations"][0]["metrics"], json!({"loss": 0.5}));
        assert_eq!(history["checkpoints"][0]["number"], 4);
        assert_eq!(
            history["remarks"][0]["text"],
            "worker-1 is gone: its lease has ended"
        );
    }

    #[test]
    fn the_end_of_a_long_file_is_read_alone() {
        let dir = tempfile::tempdir().unwrap();
        let lines = format!("{EVALUATION}\n{STEPS}\n");
        std::fs::write(dir.path().join(run_dir::METRICS), lines).unwrap();
        let read = |bytes| History::read_newest(dir.path(), bytes).unwrap().to_json();
        let last = STEPS.len() as u64 + 1;
        // The line before is cut short by as much as is left out.
        let newest = read(last + 20);
        assert_eq!(newest["steps"]["steps"], json!([10.0]));
        assert_eq!(newest["evaluations"], json!([]));
        assert_eq!(read(last - 1)["steps"]["steps"], json!([]));
    }

    #[test]
    fn training_that_goes_back_takes_its_later_points_along() {
        let restored = r#"{"event":"restored","seconds":4.0,"checkpoint":2,"steps":15}"#;
        let of_a_shard = r#"{"event":"restored","seconds":4.0,"checkpoint":2,"shard":1,"steps":5}"#;
        let history = history(&[STEPS, EVALUATION, restored, of_a_shard].join("\n"));
        assert_eq!(history["steps"]["steps"], json!([10.0]));
        assert_eq!(history["evaluations"], json!([]));
        let remarks = history["remarks"].as_array().unwrap();
        assert_eq!(remarks.len(), 2);
        assert_eq!(
            remarks[1]["text"],
            "shard 1 went back to checkpoint 2, of step 5"
        );
    }
}
