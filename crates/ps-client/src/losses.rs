//! Which of a worker's acknowledged updates are gone, when a shard's values were restored.

use std::collections::HashMap;

use shared_proto::blocks::BlockId;
use shared_proto::ids::Clock;
use shared_proto::wire;

/// Blocks that are asked about in one message.
const ASK_AT_ONCE: usize = 4096;

/// Updates that were acknowledged by a shard and are not in the values that it was restored to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The shard.
    pub shard: u32,
    /// Pairs of a block and a step.
    pub updates: u64,
    /// The earliest step of which any block has lost the update.
    pub first: Clock,
    /// The latest one.
    pub last: Clock,
}

/// What a shard has acknowledged to this worker.
#[derive(Debug, Default)]
pub(crate) struct Acknowledged {
    /// For each block, the first step that is not known to be lost, and the one after the last.
    steps: HashMap<BlockId, (Clock, Clock)>,
}

impl Acknowledged {
    /// Notes that updates of a step were applied.
    pub(crate) fn note(&mut self, clock: Clock, blocks: &[wire::BlockVersion]) {
        for version in blocks {
            if let Some(id) = version.block {
                let steps = self.steps.entry(id.into()).or_insert((clock, clock));
                if steps.0 == steps.1 {
                    *steps = (clock, clock);
                }
                steps.1 = steps.1.max(clock.next());
            }
        }
    }

    /// The blocks to ask about, message by message.
    pub(crate) fn to_ask(&self) -> Vec<Vec<wire::BlockId>> {
        let mut ids: Vec<BlockId> = self.steps.keys().copied().collect();
        ids.sort_unstable();
        let messages = ids.chunks(ASK_AT_ONCE);
        messages
            .map(|ids| ids.iter().copied().map(Into::into).collect())
            .collect()
    }

    /// Compares with what the shard has; what is lost is said once.
    pub(crate) fn compare(&mut self, shard: u32, outcomes: &[wire::BlockOutcome]) -> Option<Lost> {
        let mut lost: Option<Lost> = None;
        for outcome in outcomes {
            let id = outcome.version.and_then(|version| version.block);
            let Some((first, end)) = id.and_then(|id| self.steps.get_mut(&id.into())) else {
                continue;
            };
            let taken = match outcome.sequence {
                0 => *first,
                _ => Clock(outcome.clock).next().max(*first),
            };
            if taken >= *end {
                continue;
            }
            let (updates, last) = (end.0 - taken.0, Clock(end.0 - 1));
            let sum = lost.get_or_insert(Lost {
                shard,
                updates: 0,
                first: taken,
                last,
            });
            sum.updates += updates;
            sum.first = sum.first.min(taken);
            sum.last = sum.last.max(last);
            (*first, *end) = (taken, taken);
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

    fn outcome(index: u32, taken: Option<u64>) -> wire::BlockOutcome {
        wire::BlockOutcome {
            version: Some(version(index)),
            sequence: taken.map_or(0, |clock| clock + 1),
            clock: taken.unwrap_or(0),
        }
    }

    #[test]
    fn what_was_acknowledged_and_is_not_there_is_lost_once() {
        let mut acknowledged = Acknowledged::default();
        for clock in 5..9 {
            acknowledged.note(Clock(clock), &[version(0), version(1), version(2)]);
        }
        assert_eq!(acknowledged.to_ask()[0].len(), 3);
        // Block 0 has everything, block 1 has steps 5 and 6, block 2 nothing.
        let outcomes = [outcome(0, Some(8)), outcome(1, Some(6)), outcome(2, None)];
        let lost = acknowledged.compare(7, &outcomes).unwrap();
        let expected = Lost {
            shard: 7,
            updates: 2 + 4,
            first: Clock(5),
            last: Clock(8),
        };
        assert_eq!(lost, expected);
        assert_eq!(acknowledged.compare(7, &outcomes), None);
        // What comes later can be lost too; what was lost before is not counted again.
        acknowledged.note(Clock(9), &[version(1)]);
        let again = acknowledged.compare(7, &[outcome(1, Some(6))]).unwrap();
        assert_eq!(
            (again.updates, again.first, again.last),
            (1, Clock(9), Clock(9))
        );
    }
}
