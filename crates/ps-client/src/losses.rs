//! The acknowledged updates of a worker that a restored shard lacks.

use std::collections::HashMap;

use shared_proto::blocks::BlockId;
use shared_proto::ids::{Clock, Epoch};
use shared_proto::wire;
use tokio::sync::oneshot;

/// The number of blocks that one message asks about.
const ASK_AT_ONCE: usize = 4096;

/// Updates that a shard has acknowledged and its restored values lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The number of lost updates, where an update is that of one block in one step.
    pub updates: u64,
    /// The earliest step of which any block has lost the update.
    pub first: Clock,
    /// The latest step of which any block has lost the update.
    pub last: Clock,
}

impl Lost {
    pub(crate) fn sum(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        let both = |one: Self, other: Self| Self {
            updates: one.updates.saturating_add(other.updates),
            first: one.first.min(other.first),
            last: one.last.max(other.last),
        };
        one.map_or(other, |one| {
            Some(other.map_or(one, |other| both(one, other)))
        })
    }
}

/// A loss to be reported.
#[derive(Debug)]
pub struct Loss {
    /// The shard that has lost the updates.
    pub shard: u32,
    /// The epoch of the shard map in which the loss was found.
    pub epoch: Epoch,
    /// The lost updates.
    pub lost: Lost,
    /// Answered once the coordinator has taken the report. Until then no step counts in the new epoch.
    pub told: oneshot::Sender<()>,
}

/// The pushes that a shard has acknowledged to this worker. A block takes pushes in order and counts them, so the count
/// shows which pushes the block has.
#[derive(Debug, Default)]
pub(crate) struct PushLedger {
    blocks: HashMap<BlockId, Counts>,
    /// The clocks of the pushes, as runs within which the clock grows by one with each push.
    runs: Vec<Run>,
    /// The number of pushes that at least one block has acknowledged.
    pushes: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// The number of pushes that were acknowledged.
    acknowledged: u64,
    /// The number of acknowledged pushes that are known to be lost.
    lost: u64,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    push: u64,
    clock: Clock,
}

impl PushLedger {
    /// Notes that updates of a step were applied.
    pub(crate) fn note(&mut self, clock: Clock, blocks: &[wire::BlockVersion]) {
        for version in blocks {
            let Some(id) = version.block else { continue };
            let counts = self.blocks.entry(id.into()).or_default();
            counts.acknowledged += 1;
            if counts.acknowledged > self.pushes {
                let follows = self.clock_of(self.pushes) == Some(clock);
                if !follows {
                    let push = self.pushes;
                    self.runs.push(Run { push, clock });
                }
                self.pushes += 1;
            }
        }
    }

    /// Returns the clock of a push, counted from 0. For a push that is not acknowledged yet, returns the clock that it
    /// has if it continues the last run. Returns `None` if there is no run.
    fn clock_of(&self, push: u64) -> Option<Clock> {
        let after = self.runs.partition_point(|run| run.push <= push);
        let run = self.runs[..after].last()?;
        Some(Clock(run.clock.0.saturating_add(push - run.push)))
    }

    /// Returns the blocks to ask about, one list for each message.
    pub(crate) fn to_ask(&self) -> Vec<Vec<wire::BlockId>> {
        let mut ids: Vec<BlockId> = self.blocks.keys().copied().collect();
        ids.sort_unstable();
        let messages = ids.chunks(ASK_AT_ONCE);
        messages
            .map(|ids| ids.iter().copied().map(Into::into).collect())
            .collect()
    }

    /// Compares the acknowledged pushes with those that the shard has. Returns only lost updates that earlier calls
    /// have not returned.
    pub(crate) fn compare(&mut self, outcomes: &[wire::BlockOutcome]) -> Option<Lost> {
        let mut lost = None;
        for outcome in outcomes {
            let id = outcome.version.and_then(|version| version.block);
            let Some(id) = id.map(BlockId::from) else {
                continue;
            };
            let Some(counts) = self.blocks.get_mut(&id) else {
                continue;
            };
            let missing = counts.acknowledged.saturating_sub(outcome.taken);
            let updates = missing.saturating_sub(counts.lost);
            if updates == 0 {
                continue;
            }
            counts.lost = missing;
            let end = counts.acknowledged;
            let clock = |push| self.clock_of(push).unwrap_or_default();
            // A server that acknowledges out of order makes the clocks go back.
            let (one, other) = (clock(end - updates), clock(end - 1));
            let more = Lost {
                updates,
                first: one.min(other),
                last: one.max(other),
            };
            lost = Lost::sum(lost, Some(more));
        }
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u32) -> BlockId {
        BlockId { variable: 0, index }
    }

    fn version(index: u32) -> wire::BlockVersion {
        wire::BlockVersion {
            block: Some(id(index).into()),
            epoch: 1,
            version: 9,
        }
    }

    fn outcome(index: u32, taken: u64) -> wire::BlockOutcome {
        wire::BlockOutcome {
            version: Some(version(index)),
            taken,
            ..wire::BlockOutcome::default()
        }
    }

    fn lost(updates: u64, first: u64, last: u64) -> Option<Lost> {
        Some(Lost {
            updates,
            first: Clock(first),
            last: Clock(last),
        })
    }

    #[test]
    fn what_was_acknowledged_and_is_not_there_is_lost_once() {
        let mut acknowledged = PushLedger::default();
        for clock in 5..9 {
            acknowledged.note(Clock(clock), &[version(0), version(1), version(2)]);
        }
        assert_eq!(acknowledged.to_ask()[0].len(), 3);
        // Block 0 has everything, block 1 has steps 5 and 6, block 2 nothing.
        let outcomes = [outcome(0, 4), outcome(1, 2), outcome(2, 0)];
        assert_eq!(acknowledged.compare(&outcomes), lost(2 + 4, 5, 8));
        assert_eq!(acknowledged.compare(&outcomes), None);
        // Later updates can be lost too. A loss is not counted twice.
        acknowledged.note(Clock(9), &[version(1)]);
        assert_eq!(acknowledged.compare(&[outcome(1, 2)]), lost(1, 9, 9));
    }

    #[test]
    fn acknowledgements_out_of_order_leave_the_steps_of_a_loss_in_order() {
        let mut acknowledged = PushLedger::default();
        for clock in [7, 5] {
            acknowledged.note(Clock(clock), &[version(0)]);
        }
        assert_eq!(acknowledged.compare(&[outcome(0, 0)]), lost(2, 5, 7));
    }

    #[test]
    fn a_clock_that_has_jumped_loses_no_more_than_was_pushed() {
        let mut acknowledged = PushLedger::default();
        for clock in [0, 1, 50, 51, 52] {
            acknowledged.note(Clock(clock), &[version(0), version(1)]);
        }
        let found = acknowledged.compare(&[outcome(0, 1), outcome(1, 5)]);
        assert_eq!(found, lost(4, 1, 52));
        // The block has taken more than was acknowledged: one acknowledgement was lost.
        assert_eq!(acknowledged.compare(&[outcome(1, 6)]), None);
    }
}
