//! A worker that pushes and pulls without a model.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::replica::Description;
use ::worker::strategy::register;
use daemon::membership::{Coordinator, Membership};
use network::SystemNetwork;
use ps_client::{MapSource, PushTicket, Shards, WeightsTicket};
use shared_proto::blocks::VariableSpec;
use shared_proto::ids::Clock;
use shared_proto::step::{EVERY_BATCH, Gradients};

use super::super::{failed, registration};
use crate::cluster::LocalCluster;
use crate::error::CommandError;

/// The longest time for which the coordinator or a server may be unreachable.
const PATIENCE: Duration = Duration::from_secs(20);

/// A worker that pushes the same gradient again and again, and pulls the new weights.
pub(super) struct Worker {
    shards: Shards,
    gradients: Gradients,
    clock: Clock,
    /// The buffer for pulled weights, in place of a model's variables.
    weights: Vec<f32>,
    _membership: Membership,
}

impl Worker {
    /// Registers as a worker with one variable. The worker that the coordinator chooses sends the initial values.
    pub(super) async fn join(
        cluster: &LocalCluster,
        index: u32,
        size: usize,
    ) -> Result<Self, CommandError> {
        let coordinator = Coordinator::at(
            &cluster.coordinator.to_string(),
            PATIENCE,
            cluster.security()?,
        )?;
        let membership = Membership::join(coordinator, registration(index)).await?;
        let elements = size / size_of::<f32>();
        let spec = VariableSpec {
            name: "weights".to_owned(),
            shape: vec![elements],
            ..VariableSpec::default()
        };
        let description = Description {
            variables: vec![spec],
            tables: Vec::new(),
            training_samples: 1,
            evaluation_samples: 1,
            data_digest: Default::default(),
        };
        let registered = register(&membership, &description).await;
        let registered = registered.map_err(|error| failed(&error))?;
        let identity = ps_client::Identity {
            job: membership.job.name.clone(),
            run: membership.run,
            task: membership.task,
            view: registered.view,
            patience: PATIENCE,
            wire: membership.job.strategy.wire.into(),
            looks_ahead: membership.job.looks_ahead(),
            network: Arc::new(SystemNetwork::new(cluster.security()?)),
            losses: tokio::sync::mpsc::channel(1).0,
        };
        let initialize = registered.initialize;
        let (_, maps) = MapSource::new(registered.shard_map().map_err(|e| failed(&e))?);
        let mut shards = Shards::connect(&maps, &identity);
        if initialize {
            let zeros = vec![0.0; elements].into();
            shards.initialize(&[zeros]).await.map_err(|e| failed(&e))?;
            let origin = membership.next_origin();
            membership.coordinator.finish_initialization(origin).await?;
        }
        Ok(Self {
            shards,
            // A worker has the norm from the pass that takes gradients out of candle.
            gradients: Gradients {
                values: vec![vec![1e-3; elements].into()],
                rows: Vec::new(),
                norm: 1.0,
            },
            clock: Clock(0),
            weights: vec![0.0; elements],
            _membership: membership,
        })
    }

    /// Makes round trips for `time`, with up to `in_flight` of them under way at once. Returns the seconds of each.
    pub(super) async fn round_trips(
        &mut self,
        time: Duration,
        in_flight: usize,
    ) -> Result<Vec<f64>, CommandError> {
        let begin = Instant::now();
        let mut seconds = Vec::new();
        let mut under_way: VecDeque<(Instant, PushTicket, WeightsTicket)> = VecDeque::new();
        loop {
            let more = begin.elapsed() < time || seconds.len() + under_way.len() < 3;
            if more && under_way.len() < in_flight {
                let at = Instant::now();
                let (clock, next) = (self.clock, self.clock.next());
                let (push, pull) = self
                    .shards
                    .push_then_pull(clock, &self.gradients, next, EVERY_BATCH)
                    .await
                    .map_err(|error| failed(&error))?;
                self.clock = next;
                under_way.push_back((at, push, pull));
                continue;
            }
            let Some((at, push, mut pull)) = under_way.pop_front() else {
                return Ok(seconds);
            };
            while let Some(blocks) = self
                .shards
                .next_weights(&mut pull)
                .await
                .map_err(|error| failed(&error))?
            {
                for block in blocks {
                    block.values.copy_to(&mut self.weights[block.start..]);
                }
            }
            push.acknowledged().await.map_err(|error| failed(&error))?;
            seconds.push(at.elapsed().as_secs_f64());
        }
    }
}
