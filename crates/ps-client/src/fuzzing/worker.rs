//! A worker with sessions that have no streams: the input supplies the answers.

use std::sync::Arc;

use shared_proto::blocks::ShardMap;
use shared_proto::ids::{Clock, Origin, Sequence, ViewNumber};
use shared_proto::payload::Dtype;
use shared_proto::step::{EVERY_BATCH, Gradients, PartOf};
use shared_proto::wire;
use tokio::sync::mpsc;

use super::answers::Event;
use crate::identity::Identity;
use crate::losses::Loss;
use crate::maps::{MapSource, Maps};
use crate::session::fuzzing::Reader;
use crate::shards::{PushTicket, Shards, WeightsTicket};
use crate::target::Target;

/// The number of losses that may wait.
const LOSSES: usize = 1024;

/// A worker, and the reading ends of its sessions.
pub(super) struct Worker {
    shards: Shards,
    readers: Vec<Reader>,
    /// For each shard, the blocks of each question about outcomes that is not answered yet.
    asked: Vec<Vec<Vec<wire::BlockId>>>,
    receipts: Vec<PushTicket>,
    tickets: Vec<WeightsTicket>,
    losses: mpsc::Receiver<Loss>,
    clock: u64,
    _maps: MapSource,
}

impl Worker {
    pub(super) fn new(map: ShardMap) -> Self {
        let count = map.shards.len();
        let (_maps, maps) = MapSource::new(map);
        let (sender, losses) = mpsc::channel(LOSSES);
        let identity = Identity::of_a_test(Dtype::F32, sender);
        let shards = Shards::connect(&maps, &identity);
        let sessions = (0..).zip(&shards.sessions);
        let readers =
            sessions.map(|(shard, session)| session.reader(target(shard, &maps, &identity)));
        Self {
            readers: readers.collect(),
            shards,
            asked: vec![Vec::new(); count],
            receipts: Vec::new(),
            tickets: Vec::new(),
            losses,
            clock: 0,
            _maps,
        }
    }

    pub(super) async fn play(&mut self, event: Event) {
        match event {
            Event::Push(clock) => {
                let clock = clock.of(self.clock);
                let variables = self.shards.map.variables.iter();
                let zeros = variables.map(|v| match v.spec.kind.takes_updates() {
                    true => vec![0.0; v.spec.elements()].into(),
                    false => Vec::new().into(),
                });
                let gradients = Gradients {
                    values: zeros.collect(),
                    rows: Vec::new(),
                    norm: 0.0,
                };
                let pushed = self.shards.push(Clock(clock), &gradients).await;
                self.receipts.push(pushed.expect("zeros travel"));
                self.clock += 1;
            }
            Event::Pull(clock) => {
                let clock = Clock(clock.of(self.clock));
                self.tickets
                    .push(self.shards.pull(clock, ViewNumber(0), EVERY_BATCH).await);
            }
            Event::Answer { shard, answer } => {
                let shard = usize::from(shard) % self.readers.len();
                let asked = self.asked[shard].pop().unwrap_or_default();
                let oldest = self.readers[shard].oldest();
                let message = answer.message(oldest.as_ref(), &asked, self.clock);
                self.readers[shard].take(message, self.shards.map.epoch);
            }
            Event::Restored { shard } => {
                let shard = usize::from(shard) % self.readers.len();
                self.asked[shard] = self.readers[shard].ask();
            }
        }
    }

    /// Ends the sessions. Each request then has an answer.
    pub(super) async fn end(mut self) {
        self.readers.iter().for_each(Reader::end);
        for receipt in std::mem::take(&mut self.receipts) {
            let _ = receipt.acknowledged().await;
        }
        for mut ticket in std::mem::take(&mut self.tickets) {
            while let Ok(Some(parts)) = self.shards.next_weights(&mut ticket).await {
                for part in parts {
                    let PartOf::Variable(variable) = part.of else {
                        panic!("the map has no tables");
                    };
                    let variable = &self.shards.map.variables[variable];
                    assert!(part.start + part.values.len() <= variable.spec.elements());
                }
            }
        }
        self.check_losses().await;
    }

    async fn check_losses(&mut self) {
        let blocks = self.shards.map.blocks().count() as u64;
        let most = self.clock * blocks;
        // Reports are tasks of their own.
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        let mut updates = 0;
        while let Ok(loss) = self.losses.try_recv() {
            assert!(loss.lost.first <= loss.lost.last, "{loss:?}");
            updates += loss.lost.updates;
        }
        assert!(updates <= most, "{updates} of {most} updates are lost");
    }
}

fn target(shard: u32, maps: &Maps, identity: &Identity) -> Target {
    Target {
        shard,
        maps: maps.clone(),
        network: Arc::clone(&identity.network),
        losses: identity.losses.clone(),
        origin: Origin {
            job: identity.job.clone(),
            run: identity.run,
            task: identity.task,
            epoch: maps.newest().epoch,
            clock: Clock(0),
            sequence: Sequence(0),
        },
        view: identity.view,
        patience: identity.patience,
    }
}
