//! The strategy with variables on sharded parameter servers.

use ps_client::{
    Acknowledgement, ClientError, Gradients, ParameterServers, Pulled, PulledBlock, Settled,
    WeightsTicket,
};
use shared_proto::ids::{Clock, ViewNumber};

use super::Strategy;

/// Pulls from and pushes to parameter servers. Requests the weights of the next step right after the gradients
/// of this one, on the same streams.
pub struct ParameterServer {
    servers: ParameterServers,
    /// The weights that are already requested, and the clock that they are for.
    next: Option<(Clock, WeightsTicket)>,
}

impl ParameterServer {
    /// Creates a strategy on these servers.
    pub fn new(servers: ParameterServers) -> Self {
        Self {
            servers,
            next: None,
        }
    }

    async fn take_all(
        &mut self,
        mut ticket: WeightsTicket,
        mut take: impl AsyncFnMut(Vec<PulledBlock>),
    ) -> Result<Pulled, ClientError> {
        while let Some(blocks) = self.servers.next_weights(&mut ticket).await? {
            take(blocks).await;
        }
        Ok(ticket.pulled)
    }
}

impl Strategy for ParameterServer {
    async fn pull(
        &mut self,
        clock: Clock,
        take: impl AsyncFnMut(Vec<PulledBlock>),
    ) -> Result<Pulled, ClientError> {
        match self.next.take_if(|(asked, _)| *asked == clock) {
            Some((_, ticket)) => self.take_all(ticket, take).await,
            // The clock has jumped, so the requested weights may be older than the bound allows.
            None => self.pull_fresh(clock, ViewNumber(0), take).await,
        }
    }

    async fn pull_fresh(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        mut take: impl AsyncFnMut(Vec<PulledBlock>),
    ) -> Result<Pulled, ClientError> {
        // The later answer leaves out what has not changed since, so both are taken in, in order.
        if let Some((_, ticket)) = self.next.take() {
            self.take_all(ticket, &mut take).await?;
        }
        let ticket = self.servers.pull(clock, view).await;
        self.take_all(ticket, take).await
    }

    async fn push(
        &mut self,
        clock: Clock,
        gradients: &Gradients,
    ) -> Result<Acknowledgement, ClientError> {
        let next = clock.next();
        let (receipt, ticket) = self.servers.push_then_pull(clock, gradients, next).await?;
        self.next = Some((next, ticket));
        receipt.acknowledged().await
    }

    fn settled(&self) -> Settled {
        self.servers.settled()
    }
}
