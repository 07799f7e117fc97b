//! The links of a rank of a ring.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::{join_all, try_join_all};
use network::Network;
use parking_lot::Mutex;
use shared_proto::ids::Epoch;
use shared_proto::task::boxed;
use tokio::sync::OnceCell;
use tokio::time::timeout;

use super::dial::Call;
use super::exchange::{Exchange, Identity};
use super::link::Link;
use super::peer::Peer;
use crate::links::{LinkError, Links};
use crate::schedule::{self, Rank};

/// The links of a rank to other processes. Of two ranks, the higher one opens their link.
pub struct StreamLinks {
    exchange: Exchange,
    network: Arc<dyn Network>,
    own: Identity,
    ring: Epoch,
    rank: Rank,
    peers: Vec<Peer>,
    patience: Duration,
    links: Vec<OnceCell<Link>>,
}

impl StreamLinks {
    /// Creates the links of a rank of ring `ring`. `peers` has all ranks of the ring, this one included, in rank order.
    /// Each peer has the time `patience` to open or accept a link.
    ///
    /// # Errors
    /// If this process is not registered, so that `exchange` has no identity.
    pub fn new(
        exchange: &Exchange,
        network: Arc<dyn Network>,
        ring: Epoch,
        rank: Rank,
        peers: Vec<Peer>,
        patience: Duration,
    ) -> Result<Self, LinkError> {
        let own = exchange.identity().ok_or_else(|| LinkError {
            rank,
            reason: "this process is not registered".to_owned(),
        })?;
        exchange.begin(ring);
        Ok(Self {
            exchange: exchange.clone(),
            network,
            own,
            ring,
            rank,
            links: peers.iter().map(|_| OnceCell::new()).collect(),
            peers,
            patience,
        })
    }

    /// Opens the links that all-reduces need, and those of a broadcast of `root`.
    ///
    /// # Errors
    /// The rank that cannot be reached.
    #[boxed]
    pub async fn connect(&self, root: Rank) -> Result<(), LinkError> {
        self.open(schedule::peers(self.rank, root, self.peers.len()))
            .await
    }

    /// Opens the links that sums among `ranks` need. Does nothing if this rank is not among them.
    ///
    /// # Errors
    /// The rank that cannot be reached.
    #[boxed]
    pub async fn connect_among(&self, ranks: Range<Rank>) -> Result<(), LinkError> {
        self.open(schedule::peers_among(self.rank, ranks)).await
    }

    /// Opens this rank's links of a star, which connects the rank `center` with each other rank. Omits those that
    /// [`Self::connect`] opens for the same `root`. The opened links are for signals.
    ///
    /// # Errors
    /// The rank that cannot be reached.
    #[boxed]
    pub async fn connect_star(&self, center: Rank, root: Rank) -> Result<(), LinkError> {
        let ranks = self.peers.len();
        let peers: BTreeSet<Rank> = match self.rank == center {
            true => (0..ranks).filter(|rank| *rank != center).collect(),
            false => [center].into(),
        };
        let pieces = schedule::peers(self.rank, root, ranks);
        let signals = peers.difference(&pieces);
        try_join_all(signals.map(|peer| self.link(*peer))).await?;
        Ok(())
    }

    async fn open(&self, peers: BTreeSet<Rank>) -> Result<(), LinkError> {
        try_join_all(peers.into_iter().map(|peer| self.link(peer))).await?;
        Ok(())
    }

    /// Closes the links so that the peers receive everything that was sent. Returns once the peers have closed their
    /// links too, or after `patience`.
    #[boxed]
    pub async fn close(self, patience: Duration) {
        let open = self.links.into_iter().filter_map(OnceCell::into_inner);
        let _ = timeout(patience, join_all(open.map(Link::close))).await;
    }

    /// Returns the link to a rank, and opens it if it is not open yet.
    async fn link(&self, to: Rank) -> Result<&Link, LinkError> {
        let open = async {
            let peer = &self.peers[to];
            let noted = Mutex::new(None);
            let opened = async {
                match to < self.rank {
                    true => {
                        let call = Call {
                            network: &self.network,
                            own: &self.own,
                            ring: self.ring,
                            peer,
                        };
                        call.dial(&noted).await
                    }
                    false => Ok(self.exchange.take(self.ring, peer.task).await),
                }
            };
            let late = |_| {
                Err(match noted.lock().take() {
                    Some(reason) => format!("it cannot be reached: {reason}"),
                    None => "it has not connected in time".to_owned(),
                })
            };
            timeout(self.patience, opened).await.unwrap_or_else(late)
        };
        let link = self.links[to].get_or_try_init(|| open).await;
        link.map_err(|reason| LinkError { rank: to, reason })
    }
}

#[async_trait(?Send)]
impl Links for StreamLinks {
    async fn send(&self, to: Rank, piece: Bytes) -> Result<(), LinkError> {
        let sent = self.link(to).await?.send(piece).await;
        sent.map_err(|reason| LinkError { rank: to, reason })
    }

    async fn receive(&self, from: Rank) -> Result<Bytes, LinkError> {
        let piece = self.link(from).await?.receive().await;
        piece.map_err(|reason| LinkError { rank: from, reason })
    }
}
