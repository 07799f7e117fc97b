//! The input: a shard map, and what a worker and its servers do.

use arbitrary::Arbitrary;
use bytes::Bytes;
use fuzz_input::Near;
use shared_proto::wire;
use shared_proto::wire::client_message::Kind as Request;
use shared_proto::wire::server_message::Kind as Reply;

/// The number of elements of a block.
const ELEMENTS: u64 = 2;

/// A shard map.
#[derive(Arbitrary, Debug)]
pub(super) struct Map {
    shards: u8,
    elements: Near,
    servers: Near,
    variables: Vec<Variable>,
}

#[derive(Arbitrary, Debug)]
struct Variable {
    size: u8,
    other: Option<u64>,
    /// The number of blocks, which may differ from the right one.
    blocks: Near,
    shard: Near,
}

impl From<Map> for wire::ShardMap {
    fn from(map: Map) -> Self {
        let shards = 1 + u64::from(map.shards % 2);
        let elements = map.elements.of(ELEMENTS);
        let server = wire::Task {
            role: wire::Role::Ps.into(),
            index: 0,
            generation: 1,
        };
        let variable = |(index, variable): (u64, &Variable)| {
            let size = 1 + u64::from(variable.size % 8);
            let shape: Vec<u64> = [size].into_iter().chain(variable.other).collect();
            let blocks = variable.blocks.of(size.div_ceil(elements.max(1)));
            let shard = variable.shard.of(index % shards) as u32;
            wire::PlacedVariable {
                variable: Some(wire::Variable {
                    name: format!("v{index}"),
                    shape,
                    kind: i32::from(variable.size / 8 % 3),
                }),
                shards: vec![shard; blocks.min(64) as usize],
            }
        };
        Self {
            epoch: 1,
            // No worker connects to a shard without an address.
            shard_addresses: vec![String::new(); shards as usize],
            variables: (0..).zip(&map.variables).map(variable).collect(),
            block_elements: elements,
            total_updates: 1,
            servers: vec![server; map.servers.of(shards).min(8) as usize],
            sources: vec![wire::ShardSource::default(); shards as usize],
            tables: Vec::new(),
        }
    }
}

/// One thing that a worker or a server does.
#[derive(Arbitrary, Debug)]
pub(super) enum Event {
    Push(Near),
    Pull(Near),
    /// A server answers.
    Answer {
        shard: u8,
        answer: Answer,
    },
    /// The values of a shard come from another source.
    Restored {
        shard: u8,
    },
}

/// A server's answer, to the oldest request or to another one.
#[derive(Arbitrary, Debug)]
pub(super) struct Answer {
    kind: Kind,
    number: Near,
    epoch: Near,
    /// The number of pushes that blocks have taken.
    taken: Near,
    /// True if the last block of the request is missing.
    less: bool,
    /// A block that the answer names in addition.
    more: Option<(u8, u8)>,
    values: Option<Vec<u8>>,
}

#[derive(Arbitrary, Debug)]
enum Kind {
    Good,
    Acknowledged,
    Weights,
    Outcome,
    Staged,
    Waiting,
    Refused(u8),
    Welcome,
    Nothing,
}

impl Answer {
    /// Returns the answer as a message of the protocol. `asked` lists the blocks of the outcomes that the session has
    /// requested.
    pub(super) fn message(
        &self,
        oldest: Option<&(u64, Request)>,
        asked: &[wire::BlockId],
        pushes: u64,
    ) -> wire::ServerMessage {
        let number = self.number.of(oldest.map_or(0, |(sequence, _)| *sequence));
        let request = oldest.map(|(_, request)| request);
        let kind = match (&self.kind, request) {
            (Kind::Nothing, _) => None,
            (Kind::Good, _) if !asked.is_empty() => Some(self.outcome(asked, pushes)),
            (Kind::Outcome, _) => Some(self.outcome(asked, pushes)),
            (Kind::Good, Some(Request::Pull(_))) | (Kind::Weights, _) => {
                Some(self.weights(number, request))
            }
            (Kind::Good | Kind::Acknowledged | Kind::Staged, _) => {
                Some(self.acknowledged(number, request))
            }
            (Kind::Waiting, _) => Some(Reply::Waiting(wire::Waiting {
                request: number,
                on: vec![wire::Task::default()],
                min_clock: self.taken.of(0),
            })),
            (Kind::Refused(reason), _) => Some(Reply::Refused(wire::Refused {
                sequence: number,
                reason: (*reason % 24).into(),
                ..wire::Refused::default()
            })),
            (Kind::Welcome, _) => Some(Reply::Welcome(wire::Welcome::default())),
        };
        wire::ServerMessage { kind }
    }

    /// Returns the blocks that the answer names.
    fn blocks(&self, asked: Vec<wire::BlockId>) -> impl Iterator<Item = wire::BlockVersion> {
        let named = asked.len().saturating_sub(usize::from(self.less));
        let more = self.more.map(|(variable, index)| wire::BlockId {
            variable: (variable % 4).into(),
            index: (index % 4).into(),
        });
        let blocks = asked.into_iter().take(named).chain(more);
        let epoch = self.epoch.of(1);
        blocks.map(move |block| wire::BlockVersion {
            block: Some(block),
            epoch,
            version: 1,
        })
    }

    fn outcome(&self, asked: &[wire::BlockId], pushes: u64) -> Reply {
        let outcome = |version| wire::BlockOutcome {
            version: Some(version),
            taken: self.taken.of(pushes / 2),
            ..wire::BlockOutcome::default()
        };
        Reply::Outcome(wire::Outcome {
            request: 0,
            blocks: self.blocks(asked.to_vec()).map(outcome).collect(),
        })
    }

    fn acknowledged(&self, number: u64, request: Option<&Request>) -> Reply {
        let blocks = match request {
            Some(Request::Push(push)) => push.gradients.iter().filter_map(|g| g.block).collect(),
            _ => Vec::new(),
        };
        let level = match self.kind {
            Kind::Staged => wire::AcknowledgementLevel::Staged,
            _ => wire::AcknowledgementLevel::Applied,
        };
        Reply::Acknowledged(wire::Acknowledged {
            sequence: number,
            level: level.into(),
            blocks: self.blocks(blocks).collect(),
            epoch: self.epoch.of(1),
            ..wire::Acknowledged::default()
        })
    }

    fn weights(&self, number: u64, request: Option<&Request>) -> Reply {
        let blocks = match request {
            Some(Request::Pull(pull)) => {
                pull.blocks.iter().filter_map(|known| known.block).collect()
            }
            _ => Vec::new(),
        };
        let values = self
            .values
            .clone()
            .unwrap_or_else(|| vec![0; 4 * ELEMENTS as usize]);
        let weights = |version| wire::BlockWeights {
            version: Some(version),
            payload: Some(wire::Payload {
                dtype: wire::Dtype::F32.into(),
                values: Some(wire::payload::Values::Dense(Bytes::from(values.clone()))),
            }),
        };
        Reply::Weights(wire::Weights {
            request: number,
            blocks: self.blocks(blocks).map(weights).collect(),
            epoch: self.epoch.of(1),
            min_clock: self.taken.of(1),
            waited: f64::from_bits(self.taken.of(0)),
            ..wire::Weights::default()
        })
    }
}
