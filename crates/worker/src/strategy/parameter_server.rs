//! Variables on sharded parameter servers.

use ps_client::{ClientError, Gradients, ParameterServers, Weights, WeightsTicket};
use shared_proto::ids::Clock;

use super::Strategy;

/// Pulls from and pushes to parameter servers. The weights of the next step are asked for right
/// behind the gradients of this one, on the same streams.
pub struct ParameterServer {
    servers: ParameterServers,
    /// Asked for already, for this clock.
    next: Option<(Clock, WeightsTicket)>,
}

impl ParameterServer {
    /// A strategy on these servers.
    pub fn new(servers: ParameterServers) -> Self {
        Self {
            servers,
            next: None,
        }
    }
}

impl Strategy for ParameterServer {
    async fn pull(&mut self, clock: Clock) -> Result<Weights, ClientError> {
        match self.next.take_if(|(asked, _)| *asked == clock) {
            Some((_, ticket)) => self.servers.weights(ticket).await,
            // The clock has jumped: what was asked for may be older by now than the bound allows.
            None => self.pull_fresh(clock).await,
        }
    }

    async fn pull_fresh(&mut self, clock: Clock) -> Result<Weights, ClientError> {
        let mut early = Vec::new();
        if let Some((_, ticket)) = self.next.take() {
            early = self.servers.weights(ticket).await?.blocks;
        }
        let ticket = self.servers.pull(clock).await;
        let mut weights = self.servers.weights(ticket).await?;
        // What has not changed since is not sent again: both answers count, the later one more.
        weights.blocks.splice(0..0, early);
        Ok(weights)
    }

    async fn push(&mut self, clock: Clock, gradients: &Gradients) -> Result<(), ClientError> {
        let next = clock.next();
        let (receipt, ticket) = self.servers.push_then_pull(clock, gradients, next).await?;
        self.next = Some((next, ticket));
        receipt.acknowledged().await?;
        Ok(())
    }
}
