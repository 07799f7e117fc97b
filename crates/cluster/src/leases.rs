//! The leased splits, found by id and by holder.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize, Serializer};
use shared_proto::ids::Task;

use super::split::Split;

/// The leased splits. The `start` of each split is its first position that is not done.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(from = "Stored")]
pub(super) struct Leases {
    splits: Stored,
    /// The holder and id of each split. Each report of finished steps looks up its worker's split here.
    held: BTreeSet<(Task, u64)>,
}

/// The splits by id, each with its holder.
type Stored = BTreeMap<u64, (Task, Split)>;

impl From<Stored> for Leases {
    fn from(splits: Stored) -> Self {
        let held = splits.iter().map(|(id, (task, _))| (*task, *id));
        let held = held.collect();
        Self { splits, held }
    }
}

impl Serialize for Leases {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.splits.serialize(serializer)
    }
}

impl Leases {
    pub(super) fn insert(&mut self, task: Task, split: Split) {
        self.splits.insert(split.id, (task, split));
        self.held.insert((task, split.id));
    }

    pub(super) fn remove(&mut self, id: u64) {
        if let Some((task, _)) = self.splits.remove(&id) {
            self.held.remove(&(task, id));
        }
    }

    /// Returns the split of this id, if the task holds it.
    pub(super) fn of_holder(&mut self, task: Task, id: u64) -> Option<&mut Split> {
        let (holder, split) = self.splits.get_mut(&id)?;
        (*holder == task).then_some(split)
    }

    /// Returns the oldest split of a holder.
    pub(super) fn held_by(&self, task: Task) -> Option<Split> {
        let (_, id) = self.held.range((task, 0)..=(task, u64::MAX)).next()?;
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
