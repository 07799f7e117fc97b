//! A shard's answer to a request, and the check that it fits the request.

use std::collections::HashSet;

use shared_proto::blocks::BlockId;
use shared_proto::wire;
use shared_proto::wire::client_message::Kind as ClientKind;

/// A shard's answer to one request.
#[derive(Debug)]
pub(crate) enum Answer {
    Acknowledged(wire::Acknowledged),
    Weights(wire::Weights),
}

impl Answer {
    /// Returns the blocks that the answer is about.
    fn blocks(&self) -> impl Iterator<Item = Option<wire::BlockId>> + '_ {
        let (versions, weights, others) = match self {
            Self::Acknowledged(taken) => (&taken.blocks[..], &[][..], &[][..]),
            Self::Weights(weights) => (&[][..], &weights.blocks[..], &weights.unchanged[..]),
        };
        let elsewhere = match self {
            Self::Acknowledged(taken) => &taken.elsewhere,
            Self::Weights(weights) => &weights.elsewhere,
        };
        let versions = versions.iter().map(|version| version.block);
        let weights = weights.iter().map(|block| block.version?.block);
        let others = others.iter().chain(elsewhere).copied().map(Some);
        versions.chain(weights).chain(others)
    }

    /// Returns the reason why this cannot be the answer to a request; `None` if it can.
    pub(crate) fn misfit(&self, request: &ClientKind) -> Option<&'static str> {
        let of = |id: Option<wire::BlockId>| id.map(BlockId::from);
        let asked: HashSet<Option<BlockId>> = match (request, self) {
            (ClientKind::Push(push), Self::Acknowledged(_)) => {
                push.gradients.iter().map(|part| of(part.block)).collect()
            }
            (ClientKind::Initialize(initialize), Self::Acknowledged(_)) => initialize
                .blocks
                .iter()
                .map(|part| of(part.block))
                .collect(),
            (ClientKind::Pull(pull), Self::Weights(_)) => {
                pull.blocks.iter().map(|wanted| of(wanted.block)).collect()
            }
            _ => return Some("with a message of another kind than the request needs"),
        };
        let mut named = HashSet::with_capacity(asked.len());
        for id in self.blocks().map(of) {
            if !asked.contains(&id) {
                return Some("about a block that it was not asked about");
            }
            if !named.insert(id) {
                return Some("about a block twice");
            }
        }
        (named.len() < asked.len()).then_some("without one of the blocks that it was asked about")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u32) -> Option<wire::BlockId> {
        Some(wire::BlockId { variable: 0, index })
    }

    fn wanted(index: u32) -> wire::WantedBlock {
        wire::WantedBlock {
            block: id(index),
            ..wire::WantedBlock::default()
        }
    }

    fn version(index: u32) -> wire::BlockVersion {
        wire::BlockVersion {
            block: id(index),
            ..wire::BlockVersion::default()
        }
    }

    fn acknowledged(blocks: &[u32]) -> Answer {
        Answer::Acknowledged(wire::Acknowledged {
            blocks: blocks.iter().copied().map(version).collect(),
            ..wire::Acknowledged::default()
        })
    }

    #[test]
    fn an_answer_is_about_each_block_that_was_asked_about_once() {
        let gradient = |index| wire::Gradient {
            block: id(index),
            ..wire::Gradient::default()
        };
        let push = ClientKind::Push(wire::Push {
            gradients: [1, 2].map(gradient).to_vec(),
            ..wire::Push::default()
        });
        assert_eq!(acknowledged(&[2, 1]).misfit(&push), None);
        let lacks = acknowledged(&[1]).misfit(&push).unwrap();
        assert!(lacks.contains("without"), "{lacks}");
        let other = acknowledged(&[1, 3]).misfit(&push).unwrap();
        assert!(other.contains("not asked about"), "{other}");
        assert!(
            acknowledged(&[1, 1])
                .misfit(&push)
                .unwrap()
                .contains("twice")
        );

        let pull = ClientKind::Pull(wire::Pull {
            blocks: [1, 2].map(wanted).to_vec(),
            ..wire::Pull::default()
        });
        assert!(acknowledged(&[1]).misfit(&pull).unwrap().contains("kind"));
        let weights = |of: u32, unchanged: u32, elsewhere: u32| {
            Answer::Weights(wire::Weights {
                blocks: vec![wire::BlockWeights {
                    version: Some(version(of)),
                    payload: None,
                }],
                unchanged: id(unchanged).into_iter().collect(),
                elsewhere: id(elsewhere).into_iter().collect(),
                ..wire::Weights::default()
            })
        };
        assert!(weights(1, 2, 3).misfit(&pull).is_some());
        assert!(weights(3, 2, 1).misfit(&pull).is_some());
        let nameless = Answer::Weights(wire::Weights {
            blocks: vec![wire::BlockWeights::default()],
            ..wire::Weights::default()
        });
        assert!(nameless.misfit(&pull).is_some());
    }
}
