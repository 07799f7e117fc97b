//! Variables on sharded parameter servers.

use ps_client::{
    Acknowledgement, ClientError, Gradients, ParameterServers, Pulled, PulledBlock, Settled,
    WeightsTicket,
};
use shared_proto::ids::{Clock, ViewNumber};

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
            // The clock has jumped: what was asked for may be older by now than the bound allows.
            None => self.pull_fresh(clock, ViewNumber(0), take).await,
        }
    }

    async fn pull_fresh(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        mut take: impl AsyncFnMut(Vec<PulledBlock>),
    ) -> Result<Pulled, ClientError> {
        // What has not changed since is not sent again: both answers count, the later one more.
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
