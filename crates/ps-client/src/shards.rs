//! All shards of a job, behind one interface for pushes and pulls.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use shared_proto::blocks::{BlockId, PlacedShard, ShardMap};
use shared_proto::ids::{Clock, Epoch, Origin, Sequence, Task, Version, ViewNumber};
use shared_proto::payload::{Dtype, Elements};
use shared_proto::planted;
use shared_proto::step::{Gradients, Part, PartVersion, Want};
use shared_proto::table::Rows;
use shared_proto::task::boxed;
use shared_proto::wire;
use shared_proto::wire::client_message::Kind as ClientKind;
use tokio::sync::watch;

use crate::answers::Answer;
use crate::error::ClientError;
use crate::held::Held;
use crate::identity::Identity;
use crate::maps::Maps;
use crate::message_plan::MessagePlan;
use crate::reconciled::Reconciled;
use crate::row_plan::RowPart;
use crate::session::{Reply, Session};
use crate::target::Target;

/// All shards of a job.
pub struct Shards {
    pub(crate) map: ShardMap,
    plan: Arc<MessagePlan>,
    pub(crate) sessions: Vec<Session>,
    waiting_on: watch::Receiver<Vec<Task>>,
    /// The origin of the newest message. Each stream sets the epoch to its own when it encodes a message.
    pub(crate) origin: Origin,
    pub(crate) wire: Dtype,
    /// True if this worker computes with look-ahead weights where there is momentum.
    pub(crate) looks_ahead: bool,
    /// What this worker's model holds of each block.
    pub(crate) held: HashMap<BlockId, Held>,
    /// The values that the model had when the gradients of the next push were computed; `None` if they are the values
    /// in `held`.
    pub(crate) computed_with: Option<HashMap<BlockId, Held>>,
}

/// The pending acknowledgements of a push.
#[must_use = "a push counts once it is acknowledged"]
pub struct PushTicket(Vec<Reply>);

/// The pending weights of a pull.
#[must_use = "weights that were asked for must be taken"]
pub struct WeightsTicket {
    replies: VecDeque<Pulling>,
    wants: Vec<Want>,
    /// The outcome of the pull so far.
    pub pulled: PullOutcome,
}

/// A part of a pull that is not answered yet.
pub(crate) struct Pulling {
    pub(crate) reply: Reply,
    /// The rows that this part asks for; empty if it asks for blocks of variables.
    pub(crate) rows: Vec<RowPart>,
}

impl From<Reply> for Pulling {
    fn from(reply: Reply) -> Self {
        let rows = Vec::new();
        Self { reply, rows }
    }
}

impl WeightsTicket {
    fn new(replies: impl IntoIterator<Item = Pulling>, wants: &[Want]) -> Self {
        Self {
            replies: replies.into_iter().collect(),
            wants: wants.to_vec(),
            pulled: PullOutcome {
                min_clock: Clock(u64::MAX),
                waited: Duration::ZERO,
                epoch: Epoch(u64::MAX),
            },
        }
    }
}

/// The acknowledgement of a push by every shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acknowledgement {
    /// The blocks that have taken the push, with the versions that it made.
    pub blocks: Vec<wire::BlockVersion>,
    /// Sync mode: each shard's receipt, for the coordinator.
    pub receipts: Vec<wire::ShardReceipt>,
}

/// The outcome of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullOutcome {
    /// The lowest min clock by which a shard admitted the pull; `u64::MAX` if nothing was asked for.
    pub min_clock: Clock,
    /// The longest time for which a shard held the pull back.
    pub waited: Duration,
    /// The lowest epoch of the shard map among the servers that answered; `u64::MAX` if nothing was asked for.
    pub epoch: Epoch,
}

impl Shards {
    /// Opens a session with each shard, in the background.
    pub fn connect(maps: &Maps, identity: &Identity) -> Self {
        let map = ShardMap::clone(&maps.newest());
        let origin = Origin {
            job: identity.job.clone(),
            run: identity.run,
            task: identity.task,
            epoch: map.epoch,
            clock: Clock(0),
            sequence: Sequence(0),
        };
        let target = |(shard, _): (u32, &PlacedShard)| Target {
            shard,
            maps: maps.clone(),
            network: Arc::clone(&identity.network),
            losses: identity.losses.clone(),
            origin: origin.clone(),
            view: identity.view,
            patience: identity.patience,
        };
        let (tell, waiting_on) = watch::channel(Vec::new());
        Self {
            sessions: (0u32..)
                .zip(&map.shards)
                .map(target)
                .map(|target| Session::open(target, tell.clone()))
                .collect(),
            waiting_on,
            plan: Arc::new(MessagePlan::new(&map)),
            map,
            origin,
            wire: identity.wire,
            looks_ahead: identity.looks_ahead,
            held: HashMap::new(),
            computed_with: None,
        }
    }

    /// Returns the shard map as it was when the sessions were opened. Blocks and their sizes do not change afterwards.
    pub fn map(&self) -> &ShardMap {
        &self.map
    }

    /// Returns a watch on the epoch of the shard map that all sessions have reconciled in.
    pub fn reconciled(&self) -> Reconciled {
        Reconciled(self.sessions.iter().map(Session::reconciled).collect())
    }

    /// Returns a watch on the tasks that this worker's pulls wait for; mostly there are none.
    pub fn waiting_on(&self) -> watch::Receiver<Vec<Task>> {
        self.waiting_on.clone()
    }

    /// Sends initial values, one entry for each variable in the order of the map, and waits until every shard has them.
    ///
    /// # Errors
    /// [`ClientError::NonFinite`] or [`ClientError::WrongSize`] before anything is sent, otherwise the error of a
    /// session.
    #[boxed]
    pub async fn initialize(&mut self, values: &[Elements]) -> Result<(), ClientError> {
        self.check_sizes(values, |_| true)?;
        self.check_finite(Clock(0), values, |_| true)?;
        let mut replies = Vec::new();
        let planned = Arc::clone(&self.plan);
        for (shard, message) in planned.in_turns() {
            let part = |id: &BlockId| {
                Ok(wire::BlockPayload {
                    block: Some((*id).into()),
                    payload: Some(self.part(values, *id)?.into()),
                })
            };
            let blocks = message
                .blocks
                .iter()
                .map(part)
                .collect::<Result<_, ClientError>>()?;
            let origin = self.next_origin(Clock(0));
            let sequence = origin.sequence.0;
            let message = ClientKind::Initialize(wire::Initialize {
                origin: Some(origin.into()),
                blocks,
            });
            replies.push(self.sessions[shard].send(sequence, message).await);
        }
        PushTicket(replies).acknowledged().await.map(|_| ())
    }

    /// Pushes the gradients of the step at `clock`.
    ///
    /// # Errors
    /// [`ClientError::NonFinite`], [`ClientError::TooLarge`], [`ClientError::WrongSize`] or
    /// [`ClientError::TooManyRows`], before anything is sent.
    #[boxed]
    pub async fn push(
        &mut self,
        clock: Clock,
        gradients: &Gradients,
    ) -> Result<PushTicket, ClientError> {
        self.check(clock, gradients)?;
        let mut replies = Vec::new();
        let planned = Arc::clone(&self.plan);
        for (shard, message) in planned.in_turns() {
            let updated = &message.updated;
            let values = &gradients.values;
            replies.extend(self.send_push(shard, updated, clock, values).await?);
        }
        self.send_rows(clock, &gradients.rows, &mut replies).await?;
        self.computed_with = None;
        Ok(PushTicket(replies))
    }

    /// Asks for the weights that the step at `clock` wants, from servers that follow `view` or a later one.
    #[boxed]
    pub async fn pull(&mut self, clock: Clock, view: ViewNumber, wants: &[Want]) -> WeightsTicket {
        let mut replies = Vec::new();
        let planned = Arc::clone(&self.plan);
        for (shard, message) in planned.in_turns() {
            let pull = self.send_pull(shard, &message.blocks, clock, view, wants);
            replies.extend(pull.await.map(Pulling::from));
        }
        self.ask_for_rows(clock, view, wants, &mut replies).await;
        WeightsTicket::new(replies, wants)
    }

    /// Does what [`Self::push`] does for the step at `clock`, and [`Self::pull`] for the step at `next`, message by
    /// message: the first weights are on their way back while the last gradients are still being sent.
    ///
    /// # Errors
    /// As [`Self::push`].
    #[boxed]
    pub async fn push_then_pull(
        &mut self,
        clock: Clock,
        gradients: &Gradients,
        next: Clock,
        wants: &[Want],
    ) -> Result<(PushTicket, WeightsTicket), ClientError> {
        self.check(clock, gradients)?;
        let (mut pushed, mut pulled) = (Vec::new(), Vec::new());
        let planned = Arc::clone(&self.plan);
        let any = ViewNumber(0);
        for (shard, message) in planned.in_turns() {
            let (updated, values) = (&message.updated, &gradients.values);
            pushed.extend(self.send_push(shard, updated, clock, values).await?);
            let pull = self.send_pull(shard, &message.blocks, next, any, wants);
            pulled.extend(pull.await.map(Pulling::from));
        }
        self.send_rows(clock, &gradients.rows, &mut pushed).await?;
        self.computed_with = None;
        self.ask_for_rows(next, any, wants, &mut pulled).await;
        Ok((PushTicket(pushed), WeightsTicket::new(pulled, wants)))
    }

    /// Pushes the gradients of these blocks of a shard, if there are any.
    async fn send_push(
        &mut self,
        shard: usize,
        blocks: &[BlockId],
        clock: Clock,
        gradients: &[Elements],
    ) -> Result<Option<Reply>, ClientError> {
        if blocks.is_empty() {
            return Ok(None);
        }
        let part = |id: &BlockId| {
            Ok(wire::Gradient {
                block: Some((*id).into()),
                based_on_version: self.based_on(*id),
                payload: Some(self.part(gradients, *id)?.to(self.wire).into()),
            })
        };
        let gradients = blocks
            .iter()
            .map(part)
            .collect::<Result<_, ClientError>>()?;
        let origin = self.next_origin(clock);
        let sequence = origin.sequence.0;
        let message = ClientKind::Push(wire::Push {
            origin: Some(origin.into()),
            gradients,
        });
        Ok(Some(self.sessions[shard].send(sequence, message).await))
    }

    /// Asks for those of a shard's blocks that the step wants, if there are any.
    async fn send_pull(
        &mut self,
        shard: usize,
        blocks: &[BlockId],
        clock: Clock,
        view: ViewNumber,
        wants: &[Want],
    ) -> Option<Reply> {
        let wanted = |id: &BlockId| self.wanted(wants, *id);
        let blocks: Vec<_> = blocks.iter().filter_map(wanted).collect();
        if blocks.is_empty() {
            return None;
        }
        let origin = self.next_origin(clock);
        let sequence = origin.sequence.0;
        let message = ClientKind::Pull(wire::Pull {
            origin: Some(origin.into()),
            blocks,
            dtype: self.wire.into(),
            view: view.0,
        });
        Some(self.sessions[shard].send(sequence, message).await)
    }

    /// Waits for the next blocks that have changed since they were last pulled. Returns `None` once all have come. Copy
    /// the values into the model at once, because the next messages reuse their memory. Later pulls ask only for newer
    /// versions, so the model must have these values. This method is cancel-safe.
    ///
    /// # Errors
    /// See the variants of [`ClientError`].
    #[boxed]
    pub async fn next_weights(
        &mut self,
        ticket: &mut WeightsTicket,
    ) -> Result<Option<Vec<Part>>, ClientError> {
        let Some(next) = ticket.replies.front_mut() else {
            return Ok(None);
        };
        let answer = next.reply.answer().await;
        let Some(Pulling { reply, rows }) = ticket.replies.pop_front() else {
            return Ok(None);
        };
        let mut blocks = Vec::new();
        let shard = reply.shard;
        let Answer::Weights(part) = answer? else {
            return Ok(Some(blocks));
        };
        if !part.elsewhere.is_empty() {
            return Err(ClientError::Moved { epoch: part.epoch });
        }
        let mut rest = rows.iter();
        let mut parts = 0;
        let pulled = &mut ticket.pulled;
        pulled.min_clock = pulled.min_clock.min(Clock(part.min_clock));
        let waited = Duration::try_from_secs_f64(part.waited).unwrap_or_default();
        pulled.waited = pulled.waited.max(waited);
        pulled.epoch = pulled.epoch.min(Epoch(part.epoch));
        for block in part.blocks {
            let Some(version) = block.version else {
                continue;
            };
            let id = BlockId::read(version.block)?;
            let payload = block.payload.as_ref();
            // An answer has the order of its request.
            let mut part = rest.by_ref().find(|part| part.block == id);
            if planted!(RowsMisplaced) && part.is_some() {
                part = rows.first();
            }
            parts += usize::from(part.is_some());
            let (start, values) = match (part, self.map.table(id)?) {
                (Some(part), Some(spec)) => {
                    let read = Rows::read_answer(payload, spec, part.rows.len());
                    let values = read.map_err(|refusal| self.map.about(id, refusal))?;
                    (part.rows.start * spec.dimension as usize, values)
                }
                _ => (self.map.range(id)?.start, self.map.read(id, payload)?),
            };
            blocks.push(Part {
                of: self.map.part_of(id.variable),
                start,
                values,
                version: Some(PartVersion {
                    epoch: Epoch(version.epoch),
                    version: Version(version.version),
                }),
            });
            self.hold(&ticket.wants, id, version);
        }
        if parts < rows.len() {
            let what = "without rows that it was asked for";
            return Err(ClientError::WrongAnswer { shard, what });
        }
        Ok(Some(blocks))
    }
}

impl PushTicket {
    /// Waits until every shard that the push concerns has acknowledged it.
    ///
    /// # Errors
    /// See the variants of [`ClientError`].
    #[boxed]
    pub async fn acknowledged(self) -> Result<Acknowledgement, ClientError> {
        let (mut blocks, mut receipts) = (Vec::new(), Vec::new());
        for mut reply in self.0 {
            let shard = reply.shard;
            if let Answer::Acknowledged(acknowledged) = reply.answer().await? {
                if !acknowledged.elsewhere.is_empty() {
                    let epoch = acknowledged.epoch;
                    return Err(ClientError::Moved { epoch });
                }
                blocks.extend(acknowledged.blocks);
                if !acknowledged.receipt.is_empty() {
                    let receipt = acknowledged.receipt;
                    receipts.push(wire::ShardReceipt { shard, receipt });
                }
            }
        }
        Ok(Acknowledgement { blocks, receipts })
    }
}
