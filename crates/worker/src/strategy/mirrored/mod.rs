//! The strategy with all variables on each worker. The workers of a ring add up their gradients, and each makes the same
//! update, so all hold the same bits.
//!
//! - `ring`: the ring, its links, and the values that its members begin with
//! - `checkpoints`: checkpoints, written and loaded by members of the ring
//! - `gradient`: a step's gradients as one vector
//! - `buckets`: a step's gradients in several vectors, which are sent during the backward pass
//! - `agreed`: the agreement of a ring's members about buckets and devices, and what this member waits for
//! - `shares`: the optimizer's state, shared out among the members
//! - `stages`: a model in stages on several members
//! - `unpushed`: the kinds of steps, and the place of a step's gradients until they are pushed
//! - `devices`: gradients that stay on the members' devices, and are added up there
//! - `together`: work with the other members of a ring, also in the middle of a step's passes
//! - `backup`: steps that do not wait for the slowest members
//! - `open_step`: the answers of members to rank 0; `signals`: how they are sent
//! - `counters`: metrics

mod agreed;
mod backup;
mod buckets;
mod checkpoints;
mod counters;
mod devices;
mod gradient;
mod open_step;
mod ring;
mod shares;
mod signals;
mod stages;
mod together;
mod unpushed;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use collective::{Exchange, Identity};
use daemon::membership::{Coordinator, Sender};
use network::Network;
use replica::{
    Computed, Evaluation, EvaluationPart, Mirror, Positions, Prepared, Replica, ReplicaError, Step,
    StepsMade,
};
use shared_proto::ids::{Clock, Epoch, RunNumber, Task, ViewNumber};
use shared_proto::job::{BatchNorm, CrossDevice, NonFinite, StageGroups};
use shared_proto::payload::Dtype;
use shared_proto::step::Gradients;
use shared_proto::wire;
use tokio::sync::watch;
use tokio_util::sync::DropGuard;

use self::backup::Backup;
use self::buckets::{Buckets, Summed};
use self::checkpoints::Checkpoints;
use self::counters::RingCounters;
use self::devices::device;
use self::ring::Ring;
use self::shares::Shares;
use self::unpushed::{StepKind, Unpushed};
use super::error::StrategyError;
use super::interface::{Evaluated, Joining, Pulled, Pushed, Pushing, Reconciled, Strategy};
use super::register::register;
use super::waits::{Waits, tell_waits};

/// The time after which a worker that waits for another reports it.
const QUIET: Duration = Duration::from_secs(1);
/// The number of looks in a row that must find the worker waiting.
const LOOKS: u32 = 4;
/// The time between two looks.
const LOOK: Duration = QUIET.checked_div(LOOKS).expect("not zero");

/// A member of a ring of workers.
pub struct Mirrored {
    coordinator: Coordinator,
    sender: Sender,
    run: RunNumber,
    task: Task,
    links: Exchange,
    network: Arc<dyn Network>,
    wire: Dtype,
    non_finite: NonFinite,
    batch_norm: BatchNorm,
    stage_groups: StageGroups,
    /// True if the members add up gradients on their devices.
    adds_up_on_devices: bool,
    has_averages: bool,
    /// The shares of the optimizer's state; `None` if each member has all of it.
    shares: Option<Arc<Shares>>,
    /// The time after which the coordinator ends the membership of a silent member. Another member must take a link
    /// within this time.
    lease: Duration,
    ring: Option<Ring>,
    counters: RingCounters,
    checkpoints: Checkpoints,
    /// The number of the newest ring that this worker was in.
    number: watch::Sender<Epoch>,
    /// True while the replica has averages in place of weights.
    swapped: bool,
    backup: Backup,
    /// Memory for gradients, which is used again.
    memory: Vec<Vec<f32>>,
    buckets: Arc<Buckets>,
    /// The gradients of the computed step that is not pushed yet, with the step's clock.
    unpushed: Option<(Clock, Unpushed)>,
    /// The failures of the members' devices since they last added up gradients.
    device_failures: Vec<ReplicaError>,
    /// The member that was lost when the last ring ended.
    lost: Option<Task>,
    /// The clock of the newest step, if this worker's gradient of that step was left out.
    skipped: Option<Clock>,
    waiting_on: watch::Sender<Vec<Task>>,
    /// Stops the reports of waits, unless another strategy makes them.
    telling: Option<DropGuard>,
}

impl Mirrored {
    /// Registers the variables, and joins a ring.
    ///
    /// # Errors
    /// The coordinator's, the replica's, or [`StrategyError::Failed`] for a model that this strategy cannot train.
    pub async fn join(joining: &Joining<'_>, replica: &dyn Replica) -> Result<Self, StrategyError> {
        let job = joining.job;
        if let Some(table) = replica.description().tables.first() {
            let name = job.strategy.name.name();
            return Err(StrategyError::Failed(format!(
                "the model has the table {:?}, whose rows `strategy.name = {name:?}` cannot keep; use \"hybrid\" or \"parameter-server\", or `model.tables = false`",
                table.name
            ).into()));
        }
        register(joining.membership, replica.description()).await?;
        let mut joined = Self::registered(joining, replica).await?;
        joined.telling = Some(tell_waits(joining.membership, [joined.waits()]));
        joined.regroup(replica).await?;
        Ok(joined)
    }

    /// Prepares a worker that has registered the variables for rings.
    ///
    /// # Errors
    /// The replica's, or that of the store of checkpoints.
    pub(super) async fn registered(
        joining: &Joining<'_>,
        replica: &dyn Replica,
    ) -> Result<Self, StrategyError> {
        let &Joining {
            job, membership, ..
        } = joining;
        mirror(replica)?;
        joining.links.belong_to(Identity {
            job: job.name.clone(),
            run: membership.run,
            task: membership.task,
        });
        let checkpoints = Checkpoints::open(joining, replica.description()).await?;
        let shares = Shares::new(job, replica.description());
        let buckets = Buckets::new(job, replica.description());
        Ok(Self::new(joining, checkpoints, shares, buckets))
    }

    fn new(
        joining: &Joining<'_>,
        checkpoints: Checkpoints,
        shares: Option<Shares>,
        buckets: Buckets,
    ) -> Self {
        let &Joining {
            job, membership, ..
        } = joining;
        Self {
            coordinator: membership.coordinator.clone(),
            sender: membership.sender(),
            run: membership.run,
            task: membership.task,
            links: joining.links.clone(),
            network: Arc::clone(joining.network),
            wire: job.strategy.wire.into(),
            non_finite: job.non_finite,
            batch_norm: job.strategy.batch_norm,
            stage_groups: job.strategy.stage_groups(),
            adds_up_on_devices: job.strategy.name.has_many_replicas()
                && job.strategy.cross_device == Some(CrossDevice::Nccl),
            has_averages: job.ema_decay.is_some(),
            shares: shares.map(Arc::new),
            lease: Duration::from_secs_f64(job.cluster.lease_seconds),
            ring: None,
            counters: RingCounters::new(),
            checkpoints,
            number: watch::channel(Epoch(0)).0,
            swapped: false,
            backup: Backup::new(job.strategy.backup_workers.unwrap_or(0)),
            memory: Vec::new(),
            buckets: Arc::new(buckets),
            unpushed: None,
            device_failures: Vec::new(),
            lost: None,
            skipped: None,
            waiting_on: watch::channel(Vec::new()).0,
            telling: None,
        }
    }

    /// Returns whether this member can send gradients in buckets while the replica computes.
    fn fills_buckets(&self, mirror: &dyn Mirror) -> bool {
        self.shares.is_none()
            && !self.adds_up_on_devices
            && self.batch_norm == BatchNorm::PerReplica
            && self.stage_groups.workers == 1
            && !self.backup.has_some()
            && mirror.fills_buckets()
    }

    /// Makes a step together with the other members of the ring, with the gradients of `samples` samples.
    async fn make_step(
        &mut self,
        summed: Option<Summed>,
        (gradients, samples, made): (Gradients, u64, StepsMade),
        replica: &dyn Replica,
    ) -> Result<(), StrategyError> {
        let begun = Instant::now();
        let before = summed.as_ref().map_or(Duration::ZERO, Summed::waited);
        if let Some(shares) = self.shares.clone() {
            let step = (gradients, samples, made);
            self.make_step_of_shares(&shares, step, replica).await?;
            self.counters.reduced(begun.elapsed());
            return Ok(());
        }
        let mean = self.mean_gradient(summed, gradients, samples, replica);
        let mean = mean.await?;
        self.counters.reduced(before + begun.elapsed());
        let mirror = mirror(replica)?;
        match mean {
            Some(mean) => self.memory = mirror.update(mean, made).await?.into_vectors(),
            None => mirror.note_made(made).await?,
        }
        Ok(())
    }

    /// Makes a step of a job that shares out the optimizer's state, with the gradients of `samples` samples.
    async fn make_step_of_shares(
        &mut self,
        shares: &Shares,
        (gradients, samples, made): (Gradients, u64, StepsMade),
        replica: &dyn Replica,
    ) -> Result<(), StrategyError> {
        let mirror = mirror(replica)?;
        let mut memory = self.memory.pop().unwrap_or_default();
        let counts = self.counts(samples);
        let model = replica.description();
        let counted = counts.counted;
        let make = async |ring: &Ring| {
            gradient::fill(&mut memory, &gradients, counts, ring.factor(samples), model);
            ring.make_step(shares, memory, counted, made, mirror).await
        };
        self.memory = vec![self.in_ring(make).await?];
        Ok(())
    }

    /// Returns the members that this one waits for.
    pub(super) fn waits(&self) -> Waits {
        Waits::always(self.waiting_on.subscribe())
    }

    /// Returns a watch on the number of the newest ring that this worker was in.
    pub(super) fn ring_number(&self) -> InRing {
        InRing(self.number.subscribe())
    }

    /// Gives the replica the values that an evaluation measures: the averages of the weights if the job keeps them,
    /// otherwise the weights.
    pub(super) async fn show_evaluated(
        &mut self,
        mirror: &dyn Mirror,
    ) -> Result<(), StrategyError> {
        self.restore_weights(mirror).await?;
        if self.has_averages {
            mirror.first().swap_averages().await?;
            self.swapped = true;
        }
        Ok(())
    }

    /// Puts the weights back in place of their averages, if an evaluation has exchanged them.
    async fn restore_weights(&mut self, mirror: &dyn Mirror) -> Result<(), StrategyError> {
        if std::mem::take(&mut self.swapped) {
            mirror.first().swap_averages().await?;
        }
        Ok(())
    }
}

/// Returns the interface of a replica that keeps the values.
pub(super) fn mirror(replica: &dyn Replica) -> Result<&dyn Mirror, StrategyError> {
    let missing = || {
        let what = "this replica keeps no values, so `strategy.name = \"parameter-server\"` alone can train it";
        StrategyError::Failed(what.into())
    };
    replica.mirror().ok_or_else(missing)
}

#[async_trait(?Send)]
impl Strategy for Mirrored {
    async fn scale_learning_rate(
        &mut self,
        factor: f64,
        replica: &dyn Replica,
    ) -> Result<(), StrategyError> {
        Ok(mirror(replica)?.scale_learning_rate(factor).await?)
    }

    async fn pull(
        &mut self,
        _: Clock,
        batch: &mut Prepared,
        replica: &dyn Replica,
    ) -> Result<Pulled, StrategyError> {
        if !self.backup.has_some() {
            // Waiting for data is no part of the computation. A member that may be late takes part in sums meanwhile.
            batch.wants().await;
        }
        self.restore_weights(mirror(replica)?).await?;
        Ok(Pulled::default())
    }

    async fn compute(
        &mut self,
        positions: Positions,
        step: Step,
        next: Option<&mut Prepared>,
        replica: &dyn Replica,
    ) -> Result<Computed, StrategyError> {
        // The step before may have been abandoned.
        self.unpushed = None;
        let mirror = mirror(replica)?;
        let clock = step.clock;
        let (computed, unpushed) = match self.kind_of_step(&positions, mirror) {
            StepKind::Synchronised => {
                let computed = self.compute_together(positions, step, mirror).await?;
                (computed, Unpushed::InMemory)
            }
            StepKind::OnDevice(device) => {
                let computed = device.compute_on_device(positions, step).await?;
                (computed, Unpushed::OnDevice)
            }
            StepKind::InBuckets => {
                let computed = self.compute_in_buckets(positions, step, replica).await?;
                (computed.0, Unpushed::InBuckets(computed.1))
            }
            StepKind::UnlessLate => {
                let is_last = next.is_none();
                self.compute_unless_late(positions, step, is_last, replica)
                    .await?
            }
            StepKind::Nothing => (Computed::nothing(), Unpushed::InMemory),
            StepKind::InStages => {
                let computed = self.compute_in_stages(positions, step, mirror).await?;
                (computed, Unpushed::InMemory)
            }
            StepKind::Whole => (replica.compute(positions, step).await?, Unpushed::InMemory),
        };
        self.unpushed = Some((clock, unpushed));
        Ok(computed)
    }

    async fn push(
        &mut self,
        clock: Clock,
        mut gradients: Gradients,
        samples: u64,
        _: Option<&mut Prepared>,
        replica: &dyn Replica,
    ) -> Result<Pushing, StrategyError> {
        let made = StepsMade {
            run: self.run,
            ring: *self.number.borrow(),
            clock: clock.next(),
        };
        let mirror = mirror(replica)?;
        let mut unpushed = self.take_unpushed(clock, samples, mirror)?;
        let finite = gradients.norm.is_finite();
        if !finite {
            gradients = unpushed.take_back(gradients, samples, mirror).await?;
        }
        let not_finite = || StrategyError::NonFinite(gradient::not_finite(&gradients, replica));
        let problem = (!finite).then(not_finite);
        if self.non_finite == NonFinite::Fail
            && let Some(problem) = problem
        {
            return Err(problem);
        }
        self.skipped = (!finite).then_some(clock);
        // The others wait for this worker's part also if it counts for nothing.
        let samples = if finite { samples } else { 0 };
        let step = (gradients, samples, made);
        match unpushed {
            Unpushed::Late => self.make_missed(clock, made, mirror).await?,
            Unpushed::InGroup => self.make_step_on_devices(samples, made, mirror).await?,
            Unpushed::OnDevice if samples > 0 => device(mirror)?.update_on_device(made).await?,
            Unpushed::InBuckets(summed) => self.make_step(Some(summed), step, replica).await?,
            Unpushed::OnDevice | Unpushed::InMemory => self.make_step(None, step, replica).await?,
        }
        match problem {
            None => Ok(Pushing::done(Pushed::default())),
            Some(problem) => Err(problem),
        }
    }

    async fn regroup(&mut self, replica: &dyn Replica) -> Result<Clock, StrategyError> {
        let mirror = mirror(replica)?;
        self.restore_weights(mirror).await?;
        self.form(mirror).await
    }

    async fn write_checkpoint(
        &mut self,
        order: &wire::CopyValues,
        ordered: ViewNumber,
        replica: &dyn Replica,
    ) -> Result<(), StrategyError> {
        let mirror = mirror(replica)?;
        self.restore_weights(mirror).await?;
        let state = match self.shares.clone() {
            Some(shares) => {
                let (number, writes) = (order.number, !order.helps);
                let copy =
                    async |ring: &Ring| ring.copy_state(&shares, number, writes, mirror).await;
                self.in_ring(copy).await?
            }
            None => Some(mirror.state().await?),
        };
        if let Some(state) = state {
            self.checkpoints.write(order, ordered, state);
        }
        Ok(())
    }

    async fn evaluate(
        &mut self,
        _: Clock,
        _: ViewNumber,
        replica: &dyn Replica,
    ) -> Result<Evaluated, StrategyError> {
        self.show_evaluated(mirror(replica)?).await?;
        let mut part = EvaluationPart::First;
        loop {
            match replica.evaluate(part).await? {
                Evaluation::Done(metrics) => {
                    let epoch = *self.number.borrow();
                    return Ok(Evaluated { metrics, epoch });
                }
                // Each variable is there, and there are no tables.
                Evaluation::Wants(_) => part = EvaluationPart::Next,
            }
        }
    }

    async fn save(&mut self, path: PathBuf, replica: &dyn Replica) -> Result<(), StrategyError> {
        Ok(replica.save(path).await?)
    }

    fn reconciled(&self) -> Box<dyn Reconciled> {
        Box::new(self.ring_number())
    }
}

/// A watch on the number of the ring that a worker is in.
pub(super) struct InRing(watch::Receiver<Epoch>);

#[async_trait]
impl Reconciled for InRing {
    fn epoch(&self) -> Epoch {
        *self.0.borrow()
    }

    async fn reaches(&mut self, epoch: Epoch) -> Result<(), StrategyError> {
        let reached = self.0.wait_for(|number| *number >= epoch).await;
        let ended = |_| StrategyError::Outdated("the worker has left the cluster".into());
        reached.map(drop).map_err(ended)
    }
}
