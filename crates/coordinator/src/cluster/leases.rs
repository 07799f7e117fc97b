//! The leased splits, found by id and by holder.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use shared_proto::ids::Task;

use super::split::Split;

/// The leased splits. `start` of each is the first position that is not done.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub(super) struct Leases {
    splits: Stored,
    /// The ids of each holder's splits. Each finished step looks up the split of its worker.
    held: BTreeMap<Task, BTreeSet<u64>>,
}

/// The splits by id, each with its holder.
type Stored = BTreeMap<u64, (Task, Split)>;

impl From<Stored> for Leases {
    fn from(splits: Stored) -> Self {
        let mut held: BTreeMap<Task, BTreeSet<u64>> = BTreeMap::new();
        for (id, (task, _)) in &splits {
            held.entry(*task).or_default().insert(*id);
        }
        Self { splits, held }
    }
}

impl From<Leases> for Stored {
    fn from(leases: Leases) -> Self {
        leases.splits
    }
}

impl Leases {
    pub(super) fn insert(&mut self, task: Task, split: Split) {
        self.splits.insert(split.id, (task, split));
        self.held.entry(task).or_default().insert(split.id);
    }

    pub(super) fn remove(&mut self, id: u64) {
        let Some((task, _)) = self.splits.remove(&id) else {
            return;
        };
        if let Some(held) = self.held.get_mut(&task) {
            held.remove(&id);
            if held.is_empty() {
                self.held.remove(&task);
            }
        }
    }

    /// Returns the split of this id, if the task holds it.
    pub(super) fn of_holder(&mut self, task: Task, id: u64) -> Option<&mut Split> {
        let (holder, split) = self.splits.get_mut(&id)?;
        (*holder == task).then_some(split)
    }

    /// Returns the oldest split of a holder.
    pub(super) fn held_by(&self, task: Task) -> Option<Split> {
        let id = self.held.get(&task)?.first()?;
        self.splits.get(id).map(|(_, split)| *split)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.splits.is_empty()
    }

    /// Returns all splits with their holders, in the order of their ids.
    pub(super) fn all(&self) -> impl Iterator<Item = &(Task, Split)> {
        self.splits.values()
    }
}
