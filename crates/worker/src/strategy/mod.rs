//! Where variables live and how gradients become updates. The training step calls a strategy, never
//! the ps client directly.

mod parameter_server;

pub use parameter_server::ParameterServer;

use std::future::Future;

use ps_client::{Acknowledgement, ClientError, Gradients, Pulled, PulledBlock, Settled};
use shared_proto::ids::{Clock, ViewNumber};

/// A way to train together with others.
pub trait Strategy {
    /// Hands over the weights for the step after `clock`: what has changed since the last pull.
    fn pull(
        &mut self,
        clock: Clock,
        take: impl AsyncFnMut(Vec<PulledBlock>),
    ) -> impl Future<Output = Result<Pulled, ClientError>>;

    /// Hands over the newest weights, whatever was asked for before, of servers that follow `view` or a
    /// later one.
    fn pull_fresh(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        take: impl AsyncFnMut(Vec<PulledBlock>),
    ) -> impl Future<Output = Result<Pulled, ClientError>>;

    /// Hands over the gradients of the step after `clock` and waits until
    /// they are safe.
    fn push(
        &mut self,
        clock: Clock,
        gradients: &Gradients,
    ) -> impl Future<Output = Result<Acknowledgement, ClientError>>;

    /// The epoch of the shard map by which what was handed over counts.
    fn settled(&self) -> Settled;
}
