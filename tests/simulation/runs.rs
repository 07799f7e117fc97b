//! The runs of the job in a history.

use std::collections::{BTreeMap, BTreeSet};

use replica::Positions;

use crate::history::{Event, Saved};
use crate::model::Shape;

/// An update: the block, and the epoch and the version in which it was acknowledged.
pub(crate) type Update = (usize, u64, u64);

/// The history of a run of the job, from the coordinator's beginning to the loss of its state.
#[derive(Default)]
pub(crate) struct Run<'a> {
    pub(crate) restored: Option<&'a Saved>,
    pub(crate) positions: BTreeMap<usize, Positions>,
    /// The pushes with gradients that are NaN or infinite.
    pub(crate) poisoned: BTreeSet<usize>,
    /// The time at which each push was acknowledged, and its updates.
    pub(crate) acknowledged: BTreeMap<usize, (u64, &'a [Update])>,
    /// The blocks that went back, each with the epoch in which, and the version to which, it did.
    pub(crate) loads: Vec<Update>,
    /// The time at which each checkpoint was whole.
    pub(crate) checkpoints: BTreeMap<u64, u64>,
    /// The number of lost updates in the summary.
    pub(crate) reported: u64,
}

impl<'a> Run<'a> {
    pub(crate) fn all(events: &'a [(u64, Event)], shape: Shape) -> Vec<Self> {
        let mut runs: Vec<Self> = Vec::new();
        let mut run_of = BTreeMap::new();
        for (at, event) in events {
            match event {
                Event::Run { restored, .. } => runs.push(Self {
                    restored: restored.as_ref(),
                    ..Self::default()
                }),
                Event::Computed {
                    push,
                    run,
                    positions,
                    finite,
                } => {
                    run_of.insert(*push, *run);
                    if !finite {
                        runs[*run].poisoned.insert(*push);
                    }
                    runs[*run].positions.insert(*push, *positions);
                }
                Event::Acknowledged { push, blocks, .. } => {
                    let run = &mut runs[run_of[push]];
                    run.acknowledged.insert(*push, (*at, blocks));
                }
                Event::Recorded(record) => {
                    if let Some(run) = runs.last_mut() {
                        run.record(*at, record, shape);
                    }
                }
                Event::Summary { lost } => {
                    if let Some(run) = runs.last_mut() {
                        run.reported = *lost;
                    }
                }
                _ => {}
            }
        }
        runs
    }

    fn record(&mut self, at: u64, record: &serde_json::Value, shape: Shape) {
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        match record["event"].as_str() {
            Some("loaded") => {
                let epoch = number(&record["epoch"]);
                for range in record["versions"].as_array().unwrap() {
                    let variable = number(&range[0]) as usize;
                    for index in number(&range[1])..=number(&range[2]) {
                        let block = shape.block(variable, index as usize);
                        self.loads.push((block, epoch, number(&range[3])));
                    }
                }
            }
            Some("checkpoint") => {
                self.checkpoints.insert(number(&record["number"]), at);
            }
            _ => {}
        }
    }
}
