//! A strategy decides where variables live and how gradients become updates. The training step calls a
//! strategy, never the ps client directly.

mod parameter_server;

pub use parameter_server::ParameterServer;

use std::future::Future;

use ps_client::{Acknowledgement, ClientError, Gradients, Pulled, PulledBlock, Settled};
use shared_proto::ids::{Clock, ViewNumber};

/// A way to train together with others.
pub trait Strategy {
    /// Pulls the weights for the step after `clock` that have changed since the last pull.
    fn pull(
        &mut self,
        clock: Clock,
        take: impl AsyncFnMut(Vec<PulledBlock>),
    ) -> impl Future<Output = Result<Pulled, ClientError>>;

    /// Pulls the newest weights of servers that follow `view` or a later one, whatever was asked for before.
    fn pull_fresh(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        take: impl AsyncFnMut(Vec<PulledBlock>),
    ) -> impl Future<Output = Result<Pulled, ClientError>>;

    /// Pushes the gradients of the step after `clock` and waits until they are acknowledged.
    fn push(
        &mut self,
        clock: Clock,
        gradients: &Gradients,
    ) -> impl Future<Output = Result<Acknowledgement, ClientError>>;

    /// Returns the epoch of the shard map in which the sessions have settled.
    fn settled(&self) -> Settled;
}
