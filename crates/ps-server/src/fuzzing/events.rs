//! The input: what happens to a shard.

use arbitrary::Arbitrary;
use bytes::Bytes;
use fuzz_input::Near;
use shared_proto::blocks::BlockId;
use shared_proto::job::{self, Job, Optimizer};
use shared_proto::payload;
use shared_proto::table::ids_to_bytes;
use shared_proto::wire;
use shared_proto::wire::client_message;

use super::map::TABLE;

/// The staleness bound.
pub(super) const STALENESS: u64 = 2;

/// The blocks that messages name: two of the shard, one of another shard, two that are unknown, a frozen one of the
/// shard, and a bucket of its table.
const BLOCKS: [BlockId; 7] = [
    block(0, 0),
    block(0, 1),
    block(1, 0),
    block(0, 2),
    block(9, 0),
    block(2, 0),
    block(TABLE, 0),
];

/// Ids of the table, in the order of their hashes.
const IDS: [u64; 2] = [2, 1];

const fn block(variable: u32, index: u32) -> BlockId {
    BlockId { variable, index }
}

/// The job.
#[derive(Arbitrary, Debug, Default)]
pub(super) struct Setting {
    pub(super) mode: Mode,
    optimizer: u8,
    /// True if the job keeps moving averages.
    averages: bool,
    /// True if the initial values are still to come.
    pub(super) fresh: bool,
}

impl Setting {
    pub(super) fn job(&self) -> Job {
        let mut job = Job {
            name: "j".to_owned(),
            ..Job::default()
        };
        let names = Optimizer::NAMES;
        let name = names[usize::from(self.optimizer) % names.len()];
        job.optimizer = Optimizer::named(name).unwrap_or_default();
        job.ema_decay = self.averages.then_some(0.5);
        job.strategy.staleness = STALENESS;
        job.strategy.mode = match self.mode {
            Mode::Async => job::Mode::Async,
            Mode::Bounded => job::Mode::Bounded,
            Mode::Sync => job::Mode::Sync,
        };
        job
    }
}

/// The mode of the job.
#[derive(Arbitrary, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Mode {
    #[default]
    Async,
    Bounded,
    Sync,
}

/// One thing that happens to a shard.
#[derive(Arbitrary, Debug)]
pub(super) enum Event {
    /// A worker sends a message, which may arrive twice.
    Message { message: Message, twice: bool },
    /// The initialiser has finished, the slowest worker goes on, or a step is committed.
    Advance,
    /// A worker registers.
    Join(u8),
    /// A worker leaves.
    Leave(u8),
    /// The shard map gets another epoch.
    Move,
    /// The shard is saved.
    Save,
    /// The shard goes back to what was saved.
    Restore,
    /// The server loses its lease, and gets it back.
    Forget,
    /// The server is told to stop.
    Drain,
}

/// A message of a worker.
#[derive(Arbitrary, Debug)]
pub(super) struct Message {
    kind: Kind,
    pub(super) worker: u8,
    pub(super) generation: Near,
    pub(super) epoch: Near,
    pub(super) clock: Near,
    pub(super) sequence: Near,
    /// The blocks that the message names. If there are none, it names all blocks of the shard that take updates, but an
    /// `Initialize` leaves out the table's bucket.
    parts: Vec<Part>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Kind {
    Push,
    Pull,
    Initialize,
    AskOutcome,
    Hello,
    Nothing,
}

impl Message {
    /// Returns the message in its wire form.
    pub(super) fn travels(&self, origin: wire::Origin) -> wire::ClientMessage {
        let all = match self.kind {
            Kind::Initialize => Part::of_variables(),
            _ => Part::all(),
        };
        let parts = match self.parts.as_slice() {
            [] => &all[..],
            parts => parts,
        };
        let blocks = parts.iter().map(Part::block);
        let epoch = origin.epoch;
        let origin = Some(origin);
        let kind = match self.kind {
            Kind::Push => client_message::Kind::Push(wire::Push {
                origin,
                gradients: parts.iter().map(Part::gradient).collect(),
            }),
            Kind::Pull => client_message::Kind::Pull(wire::Pull {
                origin,
                dtype: parts[0].dtype(),
                blocks: parts.iter().map(|part| part.wanted(epoch)).collect(),
                view: 0,
            }),
            Kind::Initialize => client_message::Kind::Initialize(wire::Initialize {
                origin,
                blocks: parts.iter().map(Part::value).collect(),
            }),
            Kind::AskOutcome => client_message::Kind::AskOutcome(wire::AskOutcome {
                origin,
                blocks: blocks.collect(),
            }),
            Kind::Hello => client_message::Kind::Hello(wire::Hello {
                origin,
                ..wire::Hello::default()
            }),
            Kind::Nothing => return wire::ClientMessage::default(),
        };
        wire::ClientMessage { kind: Some(kind) }
    }
}

/// A block in a message.
#[derive(Arbitrary, Clone, Debug)]
struct Part {
    block: u8,
    version: Near,
    average: bool,
    values: Values,
}

#[derive(Arbitrary, Clone, Debug)]
enum Values {
    Numbers([f32; 4]),
    Half { dtype: bool, bytes: [u8; 8] },
    Dense { dtype: i32, bytes: Vec<u8> },
    Rows { ids: Vec<u64>, dimension: u32 },
    Missing,
}

impl Part {
    /// Returns all blocks of the shard that take updates, with valid values.
    fn all() -> Vec<Self> {
        let mut all = Self::of_variables();
        all.push(Self::good(6));
        all
    }

    fn of_variables() -> Vec<Self> {
        vec![Self::good(0), Self::good(1)]
    }

    fn good(block: u8) -> Self {
        Self {
            block,
            version: Near::Expected,
            average: false,
            values: Values::Numbers([1.0; 4]),
        }
    }

    fn is_of_table(&self) -> bool {
        self.id().variable == TABLE
    }

    fn id(&self) -> BlockId {
        BLOCKS[usize::from(self.block) % BLOCKS.len()]
    }

    fn block(&self) -> wire::BlockId {
        self.id().into()
    }

    fn gradient(&self) -> wire::Gradient {
        wire::Gradient {
            block: Some(self.block()),
            based_on_version: self.version.of(0),
            payload: self.payload(),
        }
    }

    fn value(&self) -> wire::BlockPayload {
        wire::BlockPayload {
            block: Some(self.block()),
            payload: self.payload(),
        }
    }

    fn wanted(&self, epoch: u64) -> wire::WantedBlock {
        wire::WantedBlock {
            block: Some(self.block()),
            epoch,
            version: self.version.of(0),
            average: self.average,
            look_ahead: epoch.is_multiple_of(2),
            ids: match &self.values {
                Values::Rows { ids, .. } => ids_to_bytes(ids),
                _ if self.is_of_table() => ids_to_bytes(&IDS),
                _ => Bytes::new(),
            },
        }
    }

    fn dtype(&self) -> i32 {
        match self.values {
            Values::Numbers(_) | Values::Missing => wire::Dtype::F32.into(),
            Values::Half { dtype, .. } => half(dtype),
            Values::Dense { dtype, .. } => dtype,
            Values::Rows { .. } => wire::Dtype::F32.into(),
        }
    }

    fn payload(&self) -> Option<wire::Payload> {
        let elements = super::map::elements(self.id());
        let dense = |bytes| Some(wire::payload::Values::Dense(bytes));
        let rows = |ids: &[u64], dimension, values| {
            Some(wire::payload::Values::Rows(wire::Rows {
                ids: ids_to_bytes(ids),
                dimension,
                values,
            }))
        };
        let values = match &self.values {
            Values::Numbers(numbers) if self.is_of_table() => {
                rows(&IDS, 2, payload::to_bytes(numbers))
            }
            Values::Numbers(numbers) => dense(payload::to_bytes(&numbers[..elements])),
            Values::Half { bytes, .. } => dense(Bytes::copy_from_slice(&bytes[..2 * elements])),
            Values::Dense { bytes, .. } => dense(Bytes::copy_from_slice(bytes)),
            Values::Rows { ids, dimension } => rows(
                ids,
                *dimension,
                payload::to_bytes(&vec![0.5; 2 * ids.len()]),
            ),
            Values::Missing => return None,
        };
        let dtype = self.dtype();
        Some(wire::Payload { dtype, values })
    }
}

fn half(bf16: bool) -> i32 {
    match bf16 {
        true => wire::Dtype::Bf16.into(),
        false => wire::Dtype::F16.into(),
    }
}
