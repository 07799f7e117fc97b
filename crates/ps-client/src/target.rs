//! The shard at the other end of a session.

use std::sync::Arc;
use std::time::Duration;

use network::Network;
use shared_proto::ids::{Origin, ViewNumber};
use tokio::sync::mpsc;

use crate::losses::Loss;
use crate::maps::Maps;

/// A shard, and the settings of the session with it.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) shard: u32,
    pub(crate) maps: Maps,
    pub(crate) network: Arc<dyn Network>,
    pub(crate) losses: mpsc::Sender<Loss>,
    pub(crate) origin: Origin,
    pub(crate) view: ViewNumber,
    pub(crate) patience: Duration,
}
