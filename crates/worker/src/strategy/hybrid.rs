//! The strategy with the dense variables on each worker and the tables on parameter servers. The workers of a ring add up the
//! gradients of the dense variables, and each pushes the gradients of its rows to the servers.
//!
//! A worker takes part in the last sum of a step only after the servers have acknowledged its rows. No sum ends before all members
//! have taken part in it, so the servers have all rows of a step that any member has made. A step that none has made is made
//! again. In sync mode its rows replace those that are staged; in the other modes they are applied once more.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use replica::{Computed, Positions, Prepared, Replica, Step};
use shared_proto::ids::{Clock, ViewNumber};
use shared_proto::payload::Elements;
use shared_proto::planted;
use shared_proto::step::{Gradients, RowGradients, WantedRows};
use shared_proto::wire;
use tokio_util::sync::DropGuard;

use super::error::StrategyError;
use super::interface::{Evaluated, Joining, Pulled, Pushing, Reconciled, Strategy};
use super::mirrored::{Mirrored, mirror};
use super::parameter_server::ParameterServer;
use super::register::register;
use super::waits::tell_waits;

/// A member of a ring of workers that is connected to parameter servers.
pub struct Hybrid {
    dense: Mirrored,
    tables: ParameterServer,
    /// The gradients of a step without rows: an empty list for each table.
    no_rows: Vec<RowGradients>,
    /// Stops the reports of waits.
    _telling: DropGuard,
}

impl Hybrid {
    /// Registers the variables, connects to the servers, and joins a ring.
    ///
    /// # Errors
    /// The coordinator's, the servers', the replica's, or [`StrategyError::Failed`] for a model without tables.
    pub async fn join(joining: &Joining<'_>, replica: &dyn Replica) -> Result<Self, StrategyError> {
        let tables = replica.description().tables.len();
        if tables == 0 {
            let problem = "the model has no tables, so `strategy.name = \"hybrid\"` has nothing for servers; use \"multi-worker-mirrored\", or a model with tables";
            return Err(StrategyError::Failed(problem.into()));
        }
        let no_rows = |table| RowGradients {
            rows: Arc::new(WantedRows {
                table,
                ids: Vec::new(),
            }),
            values: Elements::from(Vec::new()),
        };
        let registered = register(joining.membership, replica.description()).await?;
        let dense = Mirrored::registered(joining, replica).await?;
        let servers = ParameterServer::connect(joining, registered)?;
        let waits = [dense.waits(), servers.waits()];
        let mut joined = Self {
            dense,
            tables: servers,
            no_rows: (0..tables).map(no_rows).collect(),
            _telling: tell_waits(joining.membership, waits),
        };
        joined.regroup(replica).await?;
        Ok(joined)
    }

    /// Does the work unless the ring ends meanwhile. In sync mode servers may have to wait for the next ring before they answer.
    async fn in_ring<T, E: Into<StrategyError>>(
        ring_over: impl Future<Output = ()>,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, StrategyError> {
        tokio::select! {
            biased;
            done = work => done.map_err(Into::into),
            () = ring_over => {
                let why = "the ring is over while servers answer";
                Err(StrategyError::Abandoned(why.to_owned()))
            }
        }
    }

    /// Returns the gradients of table rows to push: no rows if the step has none, or if its gradients are not finite.
    fn rows(&self, gradients: &mut Gradients) -> Gradients {
        let rows = std::mem::take(&mut gradients.rows);
        let counts = !rows.is_empty() && gradients.norm.is_finite();
        Gradients {
            values: Vec::new(),
            rows: if counts { rows } else { self.no_rows.clone() },
            norm: if counts { gradients.norm } else { 0.0 },
        }
    }
}

#[async_trait(?Send)]
impl Strategy for Hybrid {
    async fn scale_learning_rate(
        &mut self,
        factor: f64,
        replica: &dyn Replica,
    ) -> Result<(), StrategyError> {
        self.dense.scale_learning_rate(factor, replica).await
    }

    async fn pull(
        &mut self,
        clock: Clock,
        batch: &mut Prepared,
        replica: &dyn Replica,
    ) -> Result<Pulled, StrategyError> {
        self.dense.pull(clock, batch, replica).await?;
        let ring_over = self.dense.newer_ring();
        Self::in_ring(ring_over, self.tables.pull(clock, batch, replica)).await
    }

    async fn compute(
        &mut self,
        positions: Positions,
        step: Step,
        next: Option<&mut Prepared>,
        replica: &dyn Replica,
    ) -> Result<Computed, StrategyError> {
        self.dense.compute(positions, step, next, replica).await
    }

    async fn push(
        &mut self,
        clock: Clock,
        mut gradients: Gradients,
        samples: u64,
        next: Option<&mut Prepared>,
        replica: &dyn Replica,
    ) -> Result<Pushing, StrategyError> {
        let rows = self.rows(&mut gradients);
        let ring_over = self.dense.newer_ring();
        let pushed = async {
            let mut pushed = self
                .tables
                .push(clock, rows, samples, next, replica)
                .await?;
            pushed.acknowledged().await
        };
        let dense = self.dense.push(clock, gradients, samples, None, replica);
        let dense = async { dense.await?.acknowledged().await };
        let pushed = match planted!(DenseFirst) {
            true => {
                dense.await?;
                Self::in_ring(ring_over, pushed).await?
            }
            false => {
                let pushed = Self::in_ring(ring_over, pushed).await?;
                dense.await?;
                pushed
            }
        };
        Ok(Pushing::done(pushed))
    }

    async fn regroup(&mut self, replica: &dyn Replica) -> Result<Clock, StrategyError> {
        // They are of the step after the one that is given up, so in sync mode they may never come.
        self.tables.drop_requested();
        let mut sessions = self.tables.sessions();
        loop {
            let clock = self.dense.regroup(replica).await?;
            // A ring has the number of the shard map's epoch. Its steps count once the sessions have reconciled there.
            let number = self.dense.ring_number().epoch();
            let ring_over = self.dense.newer_ring();
            match Self::in_ring(ring_over, sessions.reaches(number)).await {
                Ok(()) => return Ok(clock),
                Err(StrategyError::Abandoned(why)) => {
                    tracing::debug!("another ring is needed: {why}")
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn write_checkpoint(
        &mut self,
        order: &wire::CopyValues,
        ordered: ViewNumber,
        replica: &dyn Replica,
    ) -> Result<(), StrategyError> {
        self.dense.write_checkpoint(order, ordered, replica).await
    }

    async fn evaluate(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        replica: &dyn Replica,
    ) -> Result<Evaluated, StrategyError> {
        self.dense.show_evaluated(mirror(replica)?).await?;
        let evaluated = self.tables.evaluate(clock, view, replica).await?;
        // The coordinator repeats an evaluation with rows of another epoch.
        let epoch = evaluated.epoch.min(self.dense.ring_number().epoch());
        Ok(Evaluated { epoch, ..evaluated })
    }

    async fn save(&mut self, path: PathBuf, replica: &dyn Replica) -> Result<(), StrategyError> {
        self.dense.save(path, replica).await
    }

    fn reconciled(&self) -> Box<dyn Reconciled> {
        self.dense.reconciled()
    }
}
