//! A shard that takes one message at a time, without a session: for fuzzing.

use std::sync::Arc;

use shared_proto::blocks::{BlockId, PlacedShard, PlacedVariable, ShardMap, Source, VariableSpec};
use shared_proto::ids::{Epoch, Generation, Origin, Role, Task, TaskId, ViewNumber};
use shared_proto::job::{Job, Mode, Optimizer, Sgd};
use shared_proto::payload::{self, Dtype, Elements};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::{JobPhase, View};
use shared_proto::wire;
use shared_proto::wire::client_message::Kind;

use crate::shard::Shard;
use crate::store::Store;

/// Elements of each of its two blocks.
const ELEMENTS: usize = 4;

/// A shard with a job, a map, a view and values.
pub struct Desk(Shard);

/// Each block's version and weights, as bits.
pub type State = Vec<(u64, Vec<u32>)>;

fn task(role: Role) -> Task {
    Task {
        id: TaskId { role, index: 0 },
        generation: Generation(1),
    }
}

impl Default for Desk {
    fn default() -> Self {
        Self::new(Mode::Async)
    }
}

impl Desk {
    /// A shard of the job `j` at min clock 0 in epoch 1, with a worker of index 0 and generation 1.
    pub fn new(mode: Mode) -> Self {
        let mut job = Job {
            name: "j".to_owned(),
            optimizer: Optimizer::Sgd(Sgd::default()),
            ..Job::default()
        };
        job.strategy.mode = mode;
        let shard = Shard::new(&job);
        let map = ShardMap {
            epoch: Epoch(1),
            shards: vec![PlacedShard {
                address: String::new(),
                server: task(Role::Ps),
                source: Source::initializer(Epoch(1)),
            }],
            variables: vec![PlacedVariable {
                spec: VariableSpec {
                    name: "w".to_owned(),
                    shape: vec![2 * ELEMENTS],
                },
                shards: vec![0, 0],
            }],
            block_elements: ELEMENTS,
            total_updates: 1,
        };
        let store = Store::empty(0, map);
        for block in &store.blocks.by_id {
            let zeros = Elements::of(payload::to_bytes(&[0.0; ELEMENTS]), Dtype::F32);
            block.lock().initialize(&zeros, shard.rule());
        }
        let view = View {
            number: ViewNumber(1),
            epoch: Epoch(1),
            workers: vec![task(Role::Worker)],
            initializer: Some(task(Role::Worker)),
            initialized: true,
            phase: JobPhase::Training,
            ..View::default()
        };
        // Nothing is committed in it, so nothing can be missing.
        let _ = shard.follow(view, Some(Arc::new(store)));
        Self(shard)
    }

    /// Takes a message as a session does.
    ///
    /// # Errors
    /// The refusal that the session would answer with.
    pub fn take(&self, message: wire::ClientMessage) -> Result<(), Refusal> {
        let shard = &self.0;
        match message.kind {
            Some(Kind::Push(push)) => shard.push(push).map(drop),
            Some(Kind::Initialize(initialize)) => shard.initialize(initialize).map(drop),
            Some(Kind::AskOutcome(ask)) => shard.outcome(&ask).map(drop),
            Some(Kind::Pull(pull)) => {
                let origin = Origin::read(pull.origin.as_ref(), "Pull")?;
                let followed = shard.followed();
                shard.pull(&pull, &origin, &followed).map(drop)
            }
            Some(Kind::Hello(hello)) => {
                let origin = Origin::read(hello.origin.as_ref(), "Hello")?;
                shard.gate.member(&origin, &shard.followed().view)
            }
            None => Err(Refusal::new(Reason::Malformed, "a message of no kind")),
        }
    }

    /// Returns the version and weights of each block.
    pub fn state(&self) -> State {
        let Some(store) = self.0.followed().store else {
            return State::new();
        };
        let block = |index| {
            let id = BlockId { variable: 0, index };
            let block = store.blocks.by_id.get(&id)?;
            let block = block.lock();
            let bits = |weights: &bytes::Bytes| {
                let numbers = payload::elements(weights).iter();
                numbers.map(|number| number.get().to_bits()).collect()
            };
            Some((block.version().0, bits(&block.weights())))
        };
        (0..2).filter_map(block).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    /// The server takes or refuses each input that the fuzzer has kept.
    #[test]
    fn the_corpus_does_no_harm() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/messages");
        let mut taken = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            for mode in [Mode::Async, Mode::Sync] {
                let desk = Desk::new(mode);
                let Ok(message) = wire::ClientMessage::decode(&*bytes) else {
                    continue;
                };
                let before = desk.state();
                match desk.take(message) {
                    Ok(()) => taken += 1,
                    Err(refusal) => {
                        assert!(!refusal.message.is_empty());
                        assert_eq!(desk.state(), before, "{path:?}: {refusal}");
                    }
                }
            }
        }
        assert!(taken > 3, "the corpus has no message that is good");
    }

    /// Writes the corpus's seeds anew: `cargo test -p ps-server write_the_corpus -- --ignored`.
    #[test]
    #[ignore = "writes files"]
    fn write_the_corpus() {
        let origin = || {
            Some(wire::Origin {
                job: "j".to_owned(),
                run: 0,
                task: Some(task(Role::Worker).into()),
                epoch: 1,
                clock: 0,
                sequence: 1,
            })
        };
        let block = |index| Some(BlockId { variable: 0, index }.into());
        let payload = || Some(payload::dense(payload::to_bytes(&[1.0; ELEMENTS])));
        let gradient = |index| wire::Gradient {
            block: block(index),
            based_on_version: 0,
            payload: payload(),
        };
        let push = Kind::Push(wire::Push {
            origin: origin(),
            gradients: vec![gradient(0), gradient(1)],
        });
        let strange = Kind::Push(wire::Push {
            origin: origin(),
            gradients: vec![gradient(0), gradient(7)],
        });
        let pull = Kind::Pull(wire::Pull {
            origin: origin(),
            blocks: vec![wire::BlockVersion {
                block: block(1),
                epoch: 0,
                version: 0,
            }],
            dtype: wire::Dtype::Bf16.into(),
            view: 0,
        });
        let initialize = Kind::Initialize(wire::Initialize {
            origin: origin(),
            blocks: vec![wire::BlockPayload {
                block: block(0),
                payload: payload(),
            }],
        });
        let ask = Kind::AskOutcome(wire::AskOutcome {
            origin: origin(),
            blocks: block(0).into_iter().collect(),
        });
        let hello = Kind::Hello(wire::Hello {
            protocol_version: 1,
            origin: origin(),
            view: 1,
        });
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/messages");
        std::fs::create_dir_all(folder).unwrap();
        let all = [
            ("push", push),
            ("push-of-an-unknown-block", strange),
            ("pull", pull),
            ("initialize", initialize),
            ("ask-outcome", ask),
            ("hello", hello),
        ];
        for (name, kind) in all {
            let message = wire::ClientMessage { kind: Some(kind) };
            std::fs::write(format!("{folder}/{name}"), message.encode_to_vec()).unwrap();
        }
        std::fs::write(format!("{folder}/empty"), []).unwrap();
    }
}
