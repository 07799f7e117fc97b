//! Links between ranks of one process.

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{Mutex, mpsc};

use super::{LinkError, Links};
use crate::schedule::Rank;

/// The number of pieces that may be on their way between two ranks.
const ON_THE_WAY: usize = 4;

/// The links of a rank to ranks of the same process.
pub struct MemoryLinks {
    outgoing: Vec<mpsc::Sender<Bytes>>,
    incoming: Vec<Mutex<mpsc::Receiver<Bytes>>>,
}

impl MemoryLinks {
    /// Returns the links of each of `ranks` ranks.
    pub fn among(ranks: usize) -> Vec<Self> {
        let none = || Self {
            outgoing: Vec::new(),
            incoming: Vec::new(),
        };
        let mut all: Vec<Self> = (0..ranks).map(|_| none()).collect();
        for from in 0..ranks {
            for to in 0..ranks {
                let (sender, receiver) = mpsc::channel(ON_THE_WAY);
                all[from].outgoing.push(sender);
                // In the order of `from`, because that is the outer loop.
                all[to].incoming.push(Mutex::new(receiver));
            }
        }
        all
    }
}

fn gone(rank: Rank) -> LinkError {
    LinkError {
        rank,
        reason: "it has left the group".to_owned(),
    }
}

#[async_trait(?Send)]
impl Links for MemoryLinks {
    async fn send(&self, to: Rank, piece: Bytes) -> Result<(), LinkError> {
        let sent = self.outgoing[to].send(piece).await;
        sent.map_err(|_| gone(to))
    }

    async fn receive(&self, from: Rank) -> Result<Bytes, LinkError> {
        let piece = self.incoming[from].lock().await.recv().await;
        piece.ok_or_else(|| gone(from))
    }
}
