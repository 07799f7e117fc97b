//! The strategy with variables on sharded parameter servers.

mod news;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use ps_client::{Acknowledgement, ClientError, MapSource, PushTicket, Shards, WeightsTicket};
use replica::{
    Computed, Computing, Evaluation, EvaluationPart, Positions, Prepared, Replica, Step,
};
use shared_proto::ids::{Clock, Epoch, ViewNumber};
use shared_proto::planted;
use shared_proto::step::{EVERY_BATCH, Gradients, Want};
use shared_proto::task;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::news::{LOSSES, fetch_maps, tell_losses};
use super::error::StrategyError;
use super::interface::{Evaluated, Joining, Pulled, Pushed, Pushing, Reconciled, Strategy};
use super::register::{Registered, register};
use super::waits::{Waits, tell_waits};

/// Pulls from and pushes to parameter servers. Requests the weights of the next step right after the gradients
/// of this one, on the same streams. With `strategy.pipeline = 1` it requests them when this step's computation begins: then
/// they lack this step's gradients, and wait in the replica's queue until the computation has ended.
pub struct ParameterServer {
    shards: Shards,
    /// The weights that are already requested.
    next: Option<Requested>,
    /// The next step, if the replica has begun it.
    begun: Option<Computing>,
    /// True if the next step is computed before the gradients of this one are acknowledged.
    ahead: bool,
    /// True while a pull waits for weights.
    pulling: watch::Sender<bool>,
    /// What an evaluation measures: the weights, or their averages if the job keeps them.
    evaluated: Want,
    /// Stops the tasks that exchange news with the coordinator.
    _stop: DropGuard,
    /// Stops the reports of waits, unless another strategy makes them.
    telling: Option<DropGuard>,
}

/// Weights that are requested for the step at `clock`.
struct Requested {
    clock: Clock,
    wants: Vec<Want>,
    ticket: WeightsTicket,
    /// The time of the request, if the worker computed meanwhile.
    ahead_since: Option<Instant>,
    /// The error with which taking the weights failed. The next pull returns it.
    error: Option<ClientError>,
}

impl ParameterServer {
    /// Registers the variables, connects to the servers, and sends the initial values if the coordinator asks
    /// this worker for them.
    ///
    /// # Errors
    /// The coordinator's, the servers', or the replica's.
    pub async fn join(joining: &Joining<'_>, replica: &dyn Replica) -> Result<Self, StrategyError> {
        let membership = joining.membership;
        let registered = register(membership, replica.description()).await?;
        let initialize = registered.initialize;
        let mut joined = Self::connect(joining, registered)?;
        joined.telling = Some(tell_waits(membership, [joined.waits()]));
        if initialize {
            let values = replica.initial_values().await?;
            joined.shards.initialize(&values).await?;
            let origin = membership.next_origin();
            membership.coordinator.finish_initialization(origin).await?;
            tracing::info!("sent the initial values");
        }
        Ok(joined)
    }

    /// Connects to the servers. The worker has registered the variables.
    ///
    /// # Errors
    /// [`StrategyError::Answer`] if there is no shard map.
    pub(super) fn connect(
        joining: &Joining<'_>,
        registered: Registered,
    ) -> Result<Self, StrategyError> {
        let &Joining {
            job, membership, ..
        } = joining;
        let view = registered.view;
        let (source, maps) = MapSource::new(registered.shard_map()?);
        let (tell_lost, lost) = mpsc::channel(LOSSES);
        let shards = Shards::connect(
            &maps,
            &ps_client::Identity {
                job: job.name.clone(),
                run: membership.run,
                task: membership.task,
                view,
                patience: joining.patience,
                wire: job.strategy.wire.into(),
                looks_ahead: job.looks_ahead(),
                network: Arc::clone(joining.network),
                losses: tell_lost,
            },
        );
        let stop = CancellationToken::new();
        let maps = fetch_maps(membership, source);
        let losses = tell_losses(membership, lost);
        task::spawn_until(stop.clone(), maps);
        task::spawn_until(stop.clone(), losses);
        Ok(Self {
            shards,
            next: None,
            begun: None,
            ahead: job.strategy.pipeline > 0,
            // Without computing ahead all waits are shown, because a pull follows each request at once.
            pulling: watch::Sender::new(job.strategy.pipeline == 0),
            evaluated: match job.evaluates_averages() {
                true => Want::Averages,
                false => Want::Stored,
            },
            _stop: stop.drop_guard(),
            telling: None,
        })
    }

    /// Returns the workers for which servers hold this one back, while it waits for weights.
    pub(super) fn waits(&self) -> Waits {
        Waits::within(self.shards.waiting_on(), self.pulling.subscribe())
    }

    /// Drops the weights that are already requested.
    pub(super) fn drop_requested(&mut self) {
        self.next = None;
    }

    /// Returns a watch on the epoch of the shard map in which all sessions have reconciled.
    pub(super) fn sessions(&self) -> ps_client::Reconciled {
        self.shards.reconciled()
    }

    /// Pulls what a part of an evaluation wants. Returns the epoch of the pulled values, or the largest number if the
    /// part wants nothing.
    async fn pull_part(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        wants: &[Want],
        replica: &dyn Replica,
    ) -> Result<Epoch, ClientError> {
        let ticket = self.shards.pull(clock, view, wants).await;
        let pulled = self.take_all(ticket, replica).await?;
        Ok(pulled.epoch)
    }

    async fn pull_fresh(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        wants: &[Want],
        replica: &dyn Replica,
    ) -> Result<ps_client::PullOutcome, ClientError> {
        // The later answer leaves out unchanged blocks, so both are loaded, in order.
        if let Some(next) = self.next.take() {
            next.error.map_or(Ok(()), Err)?;
            self.take_all(next.ticket, replica).await?;
        }
        let ticket = self.shards.pull(clock, view, wants).await;
        self.take_all(ticket, replica).await
    }

    /// Requests the weights of the step at `clock.next()` while the gradients of the step at `clock` are not pushed
    /// yet, if the job computes ahead. Requests what the batch `next` wants, or what every batch wants if `next` is
    /// none. The request has the clock of the step that computes with the weights, so the staleness bound holds for
    /// that step.
    async fn request_ahead(&mut self, clock: Clock, next: Option<&mut Prepared>) {
        if !self.ahead {
            return;
        }
        let wants = wants_of(next).await;
        let after = clock.next();
        let asked_by = match planted!(AsksByEarlierClock) {
            true => clock,
            false => after,
        };
        let since = Instant::now();
        let ticket = self.shards.pull(asked_by, ViewNumber(0), wants).await;
        self.next = Some(Requested {
            clock: after,
            wants: wants.to_vec(),
            ticket,
            ahead_since: Some(since),
            error: None,
        });
    }

    /// Loads the requested weights into the replica as they arrive, until `is_done`. Returns whether all have arrived.
    async fn take_ahead(&mut self, is_done: &CancellationToken, replica: &dyn Replica) -> bool {
        let Some(next) = self.next.as_mut().filter(|_| self.ahead) else {
            return false;
        };
        self.shards.computes();
        loop {
            let weights = self.shards.next_weights(&mut next.ticket);
            match is_done.run_until_cancelled(weights).await {
                Some(Ok(Some(parts))) => replica.load(parts).await,
                Some(Ok(None)) => return true,
                Some(Err(error)) => {
                    next.error = Some(error);
                    return false;
                }
                None => return false,
            }
        }
    }

    /// Pushes the gradients of the step at `clock`. Unless the job computes ahead, also requests what the next step
    /// wants.
    async fn send_gradients(
        &mut self,
        clock: Clock,
        gradients: &Gradients,
        next: Option<&mut Prepared>,
    ) -> Result<PushTicket, ClientError> {
        if self.ahead {
            return self.shards.push(clock, gradients).await;
        }
        let next = wants_of(next).await;
        let after = clock.next();
        let sent = self.shards.push_then_pull(clock, gradients, after, next);
        let (pushed, ticket) = sent.await?;
        self.next = Some(Requested {
            clock: after,
            wants: next.to_vec(),
            ticket,
            ahead_since: None,
            error: None,
        });
        Ok(pushed)
    }

    async fn take_all(
        &mut self,
        mut ticket: WeightsTicket,
        replica: &dyn Replica,
    ) -> Result<ps_client::PullOutcome, ClientError> {
        if self.ahead {
            self.pulling.send_replace(true);
        }
        let taken = async {
            while let Some(parts) = self.shards.next_weights(&mut ticket).await? {
                replica.load(parts).await;
            }
            Ok(())
        };
        let taken = taken.await;
        if self.ahead {
            self.pulling.send_replace(false);
        }
        taken.map(|()| ticket.pulled)
    }
}

#[async_trait(?Send)]
impl Strategy for ParameterServer {
    /// Pulls the wanted weights that have changed since the last pull.
    async fn pull(
        &mut self,
        clock: Clock,
        batch: &mut Prepared,
        replica: &dyn Replica,
    ) -> Result<Pulled, StrategyError> {
        let wants = batch.wants().await;
        let fits = |next: &mut Requested| next.clock == clock && next.wants == wants;
        let (pulled, hidden) = match self.next.take_if(fits) {
            Some(next) => {
                // The servers' wait begins with the request, and the worker's with this pull.
                let hidden = next.ahead_since.map(|since| since.elapsed());
                next.error.map_or(Ok(()), Err)?;
                (self.take_all(next.ticket, replica).await?, hidden)
            }
            // The clock has jumped, so the requested weights may be older than the bound allows; or the batch wants
            // other values than were requested.
            None => {
                let any = ViewNumber(0);
                (self.pull_fresh(clock, any, wants, replica).await?, None)
            }
        };
        Ok(Pulled {
            waited: pulled.waited.saturating_sub(hidden.unwrap_or_default()),
        })
    }

    /// If the job computes ahead, requests the weights of the next step during the computation, and lets the replica
    /// begin that step, so that it does not wait for this thread.
    async fn compute(
        &mut self,
        positions: Positions,
        step: Step,
        next: Option<&mut Prepared>,
        replica: &dyn Replica,
    ) -> Result<Computed, StrategyError> {
        if positions.is_empty() {
            return Ok(Computed::nothing());
        }
        let begun = self.begun.take();
        // The replica has to have this computation before the weights of the next one.
        let begun = match begun.filter(|begun| begun.is_of(positions, step)) {
            Some(begun) => Some(begun),
            None => replica.begin(positions, step).await,
        };
        let is_done = CancellationToken::new();
        let computing = async {
            let computed = match begun {
                Some(begun) => begun.computed().await,
                None => replica.compute(positions, step).await,
            };
            is_done.cancel();
            computed
        };
        let after = next.as_ref().map(|next| next.positions());
        let ahead = async {
            self.request_ahead(step.clock, next).await;
            if self.take_ahead(&is_done, replica).await
                && let Some(positions) = after
            {
                let clock = step.clock.next();
                self.begun = replica.begin(positions, Step { clock, ..step }).await;
            }
        };
        let (computed, ()) = tokio::join!(biased; computing, ahead);
        Ok(computed?)
    }

    /// Also requests what the next step wants, right behind the gradients, unless the job computes ahead.
    async fn push(
        &mut self,
        clock: Clock,
        gradients: Gradients,
        _: u64,
        next: Option<&mut Prepared>,
        _: &dyn Replica,
    ) -> Result<Pushing, StrategyError> {
        let pushed = self.send_gradients(clock, &gradients, next).await?;
        Ok(Pushing::until(async {
            let Acknowledgement { blocks, receipts } = pushed.acknowledged().await?;
            Ok(Pushed { receipts, blocks })
        }))
    }

    async fn evaluate(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        replica: &dyn Replica,
    ) -> Result<Evaluated, StrategyError> {
        let wants = [self.evaluated.clone()];
        let pulled = self.pull_fresh(clock, view, &wants, replica).await?;
        let mut epoch = pulled.epoch;
        let mut part = EvaluationPart::First;
        loop {
            match replica.evaluate(part).await? {
                Evaluation::Done(metrics) => return Ok(Evaluated { metrics, epoch }),
                Evaluation::Wants(wants) => {
                    let pulled = self.pull_part(clock, view, &wants, replica).await?;
                    epoch = epoch.min(pulled);
                }
            }
            part = EvaluationPart::Next;
        }
    }

    async fn save(&mut self, path: PathBuf, replica: &dyn Replica) -> Result<(), StrategyError> {
        Ok(replica.save(path).await?)
    }

    fn reconciled(&self) -> Box<dyn Reconciled> {
        Box::new(self.shards.reconciled())
    }
}

/// Returns what a batch wants, or what every batch wants if `batch` is `None`.
async fn wants_of(batch: Option<&mut Prepared>) -> &[Want] {
    match batch {
        Some(batch) => batch.wants().await,
        None => EVERY_BATCH,
    }
}

#[async_trait]
impl Reconciled for ps_client::Reconciled {
    fn epoch(&self) -> Epoch {
        ps_client::Reconciled::epoch(self)
    }

    async fn reaches(&mut self, epoch: Epoch) -> Result<(), StrategyError> {
        Ok(ps_client::Reconciled::reaches(self, epoch).await?)
    }
}

impl From<ClientError> for StrategyError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::NonFinite { .. } => Self::NonFinite(error.to_string()),
            error if error.is_retryable() => Self::Outdated(error.into()),
            error => Self::Failed(error.into()),
        }
    }
}
