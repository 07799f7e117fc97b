//! A shard that takes one message at a time, without a session, and the invariants that must hold.

use std::collections::BTreeMap;
use std::sync::Arc;

use checkpoint::{SavedBlock, decode, encode};
use daemon::membership::Lease;
use shared_proto::blocks::{BlockId, ShardMap};
use shared_proto::ids::{Clock, Epoch, Origin, Role, Task};
use shared_proto::payload;
use shared_proto::receipt::ReceiptKey;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::view::{Commit, JobPhase, View};
use shared_proto::wire;
use shared_proto::wire::client_message::Kind;

use super::events::{Event, Message, Mode, STALENESS, Setting};
use super::map::{elements, map, task};
use crate::row_settings::RowStorage;
use crate::shard::store::{Rules, Store};
use crate::shard::{Block, BucketStorage, PullAnswer, Shard};

const WORKERS: u8 = 3;

/// The number of departed workers whose watermarks a block keeps at least. A block that has dropped a watermark still
/// has more watermarks than this.
const WATERMARKS: usize = 16;

/// A shard, with the state of its workers and of the coordinator that it follows.
pub(super) struct Desk {
    shard: Shard,
    mode: Mode,
    view: View,
    /// The generation of each worker, and the sequence number of its newest message.
    workers: [(u64, u64); WORKERS as usize],
    /// The workers with a receipt for the open step.
    receipts: Vec<Task>,
    saved: Option<(Clock, Vec<SavedBlock>)>,
}

impl Desk {
    /// Returns a shard of the job `j` at min clock 0 in epoch 1, with one worker, which has index 0 and generation 1.
    pub(super) fn new(setting: &Setting) -> Self {
        let shard = Shard::new(&setting.job(), RowStorage::default());
        let store = Store::empty(0, map(Epoch(1)), &shard.job, &RowStorage::default());
        for block in store.blocks.by_id.iter().filter(|_| !setting.fresh) {
            let zeros = vec![0.0; elements(*block.key())];
            let rule = store.rule(*block.key());
            block.lock().initialize(&zeros.into(), rule);
        }
        shard.answer_under(Lease::default(), Some(ReceiptKey([7; 32])));
        let view = View {
            epoch: Epoch(1),
            workers: vec![task(Role::Worker, 0, 1)],
            initializer: Some(task(Role::Worker, 0, 1)),
            initialized: !setting.fresh,
            phase: JobPhase::Training,
            ..View::default()
        };
        let mut desk = Self {
            shard,
            mode: setting.mode,
            view,
            workers: [(1, 0), (0, 0), (0, 0)],
            receipts: Vec::new(),
            saved: None,
        };
        desk.follow(Some(Arc::new(store)));
        desk
    }

    /// Returns the blocks of the shard.
    pub(super) fn store(&self) -> Option<Arc<Store>> {
        self.shard.followed().store
    }

    fn blocks(&self) -> BTreeMap<BlockId, SavedBlock> {
        let Some(store) = self.store() else {
            return BTreeMap::new();
        };
        let blocks = store.blocks.by_id.iter();
        let saved = blocks.map(|block| {
            let shared = block.lock().share(*block.key(), 0);
            let saved = shared.to_saved();
            (*block.key(), saved.expect("all rows are in memory"))
        });
        saved.collect()
    }

    /// Returns a description of everything that a message may change.
    fn state(&self) -> String {
        let store = self.store();
        store.map_or_else(String::new, |store| store.blocks.describe())
    }

    /// Shows the shard a new view.
    fn follow(&mut self, store: Option<Arc<Store>>) {
        self.view.number = self.view.number.next();
        let followed = self.shard.follow(self.view.clone(), store);
        assert_eq!(
            followed,
            Ok(()),
            "a receipt for a gradient that is not there"
        );
    }

    /// Plays an event, and checks the invariants afterwards.
    pub(super) fn play(&mut self, event: Event) {
        let store = self.store();
        match event {
            Event::Message { message, twice } => {
                let message = self.message(&message);
                self.offer(message, twice);
            }
            Event::Advance => self.advance(),
            Event::Join(index) => self.join(index % WORKERS, true),
            Event::Leave(index) => self.join(index % WORKERS, false),
            Event::Move => self.go_to(|map| store.map(|store| store.under(map))),
            Event::Save => self.save(),
            Event::Restore => self.restore(),
            Event::Forget => {
                let store = self.shard.forget();
                assert!(self.state().is_empty());
                self.follow(store);
            }
            Event::Drain => self.shard.close(),
        }
        self.check();
    }

    fn check(&self) {
        let Some(store) = self.store() else { return };
        let mut versions = Vec::new();
        for (id, block) in self.blocks() {
            if !store.map.takes_updates(id) {
                let untouched = block.version.0 == 0 && block.watermarks.is_empty();
                assert!(untouched, "an update of a frozen block: {block:?}");
                continue;
            }
            let taken: u64 = block.watermarks.iter().map(|last| last.taken).sum();
            let all = block.watermarks.len() > WATERMARKS || taken == block.version.0;
            assert!(
                self.mode == Mode::Sync || all,
                "an update without a watermark: {block:?}"
            );
            let values = block.values.numbers().into_iter();
            let finite = values.map(payload::elements).all(payload::all_finite);
            let told = store
                .blocks
                .by_id
                .get(&id)
                .is_none_or(|block| !block.lock().is_finite());
            assert!(finite || told, "values that are not finite: {block:?}");
            versions.push(block.version);
        }
        let same = versions.windows(2).all(|pair| pair[0] == pair[1]);
        assert!(self.mode != Mode::Sync || same, "half a step: {versions:?}");
    }

    fn advance(&mut self) {
        if !self.view.initialized {
            self.view.initialized = self
                .blocks()
                .values()
                .all(|block| block.values.weights().is_none_or(|w| !w.is_empty()));
            return self.follow(self.store());
        }
        if self.mode == Mode::Sync {
            let contributors = (1..).map(|samples| (samples % 5) * 8);
            let contributors = std::mem::take(&mut self.receipts)
                .into_iter()
                .zip(contributors);
            self.view.commit = Some(Commit {
                step: self.view.min_clock,
                contributors: contributors.collect(),
                clip_factor: None,
            });
        }
        self.view.min_clock = self.view.min_clock.next();
        self.follow(self.store());
    }

    /// Lets a worker register, or leave.
    fn join(&mut self, index: u8, joins: bool) {
        self.view
            .workers
            .retain(|task| task.id.index != u32::from(index));
        if joins {
            let (generation, newest) = &mut self.workers[usize::from(index)];
            (*generation, *newest) = (*generation + 1, 0);
            let joined = task(Role::Worker, index.into(), *generation);
            self.view.workers.push(joined);
        }
        self.view.workers.sort_unstable_by_key(|task| task.id.index);
        self.follow(self.store());
    }

    fn go_to(&mut self, store: impl FnOnce(ShardMap) -> Option<Store>) {
        self.view.epoch = self.view.epoch.next();
        let store = store(map(self.view.epoch));
        self.follow(store.map(Arc::new));
    }

    fn save(&mut self) {
        let blocks: Vec<SavedBlock> = self.blocks().into_values().collect();
        if self.view.initialized {
            let file = encode(&blocks);
            let read = decode(&file, "what was saved").expect("what was encoded");
            assert_eq!(read, blocks);
            self.saved = Some((self.view.min_clock, read));
        }
    }

    fn restore(&mut self) {
        let Some((clock, blocks)) = self.saved.clone() else {
            return;
        };
        if self.mode == Mode::Sync {
            (self.view.min_clock, self.view.commit) = (clock, None);
            self.receipts.clear();
        }
        let job = self.shard.job.clone();
        self.go_to(|map| {
            let rules = Rules::new(&map, &job);
            let restored = |block: SavedBlock| {
                let id = block.id;
                let table = map.table(id).expect("a block of the map");
                (
                    id,
                    Block::restore(block, table, BucketStorage::default()).expect("what was saved"),
                )
            };
            let blocks = blocks.into_iter().map(restored).collect();
            Some(Store::of_blocks(0, map, blocks, rules))
        });
    }

    /// Offers a message, perhaps twice. Returns whether it was taken.
    pub(super) fn offer(&mut self, message: wire::ClientMessage, twice: bool) -> bool {
        let before = self.state();
        if let Err(refusal) = self.take(message.clone()) {
            assert_eq!(
                self.state(),
                before,
                "{refusal} changes something: {message:?}"
            );
            assert!(!refusal.message.is_empty());
            return false;
        }
        let after = self.state();
        if twice && self.take(message.clone()).is_ok() {
            assert_eq!(self.state(), after, "counted twice: {message:?}");
        }
        true
    }

    /// Takes a message as a session does.
    fn take(&mut self, message: wire::ClientMessage) -> Result<(), Refusal> {
        let shard = &self.shard;
        match message.kind {
            Some(Kind::Push(push)) => {
                let origin = Origin::read(push.origin.as_ref(), "Push")?;
                let acknowledged = shard.push(push)?;
                self.note(&origin, &acknowledged);
                Ok(())
            }
            Some(Kind::Initialize(initialize)) => shard.initialize(initialize).map(drop),
            Some(Kind::AskOutcome(ask)) => shard.outcome(&ask).map(drop),
            Some(Kind::Pull(pull)) => self.pull(&pull),
            Some(Kind::Hello(hello)) => {
                let origin = Origin::read(hello.origin.as_ref(), "Hello")?;
                shard.gate.member(&origin, &shard.followed().view)
            }
            None => Err(Refusal::new(Reason::Malformed, "a message of no kind")),
        }
    }

    fn note(&mut self, origin: &Origin, acknowledged: &wire::Acknowledged) {
        let open = origin.clock == self.view.min_clock;
        if !acknowledged.receipt.is_empty() && open && !self.receipts.contains(&origin.task) {
            self.receipts.push(origin.task);
        }
        if let Some((_, newest)) = self.workers.get_mut(origin.task.id.index as usize) {
            *newest = (*newest).max(origin.sequence.0);
        }
    }

    fn pull(&self, pull: &wire::Pull) -> Result<(), Refusal> {
        let origin = Origin::read(pull.origin.as_ref(), "Pull")?;
        let followed = self.shard.followed();
        let PullAnswer::Weights(weights) = self.shard.pull(pull, &origin, &followed)? else {
            return Ok(());
        };
        let ahead = origin.clock.0.saturating_sub(self.view.min_clock.0);
        let bound = match self.mode {
            Mode::Async => u64::MAX,
            Mode::Bounded => STALENESS,
            Mode::Sync => 0,
        };
        assert!(ahead <= bound, "{} is ahead by {ahead}", origin.task);
        let parts = [
            weights.blocks.len(),
            weights.unchanged.len(),
            weights.elsewhere.len(),
        ];
        assert_eq!(parts.iter().sum::<usize>(), pull.blocks.len());
        Ok(())
    }

    /// Returns a message in its wire form.
    fn message(&self, message: &Message) -> wire::ClientMessage {
        let index = message.worker % WORKERS;
        let (generation, newest) = self.workers[usize::from(index)];
        let generation = message.generation.of(generation);
        message.travels(wire::Origin {
            job: "j".to_owned(),
            run: 0,
            task: Some(task(Role::Worker, index.into(), generation).into()),
            epoch: message.epoch.of(self.view.epoch.0),
            clock: message.clock.of(self.view.min_clock.0),
            sequence: message.sequence.of(newest.saturating_add(1)),
        })
    }
}
