//! The newest shard map. A session asks for a newer map when its own is out of date. The task that calls the
//! coordinator fetches it.

use std::sync::Arc;

use shared_proto::blocks::ShardMap;
use shared_proto::ids::Epoch;
use tokio::sync::{Notify, watch};

/// The newest shard map, as sessions see it.
#[derive(Clone, Debug)]
pub struct Maps {
    newest: watch::Receiver<Arc<ShardMap>>,
    wanted: Arc<Notify>,
}

/// The sender of newer maps.
#[derive(Debug)]
pub struct MapSource {
    newest: watch::Sender<Arc<ShardMap>>,
    wanted: Arc<Notify>,
}

impl MapSource {
    /// Returns a sender of maps and their receiver, which begins with this map.
    pub fn new(map: ShardMap) -> (Self, Maps) {
        let (sender, newest) = watch::channel(Arc::new(map));
        let wanted = Arc::new(Notify::new());
        let source = Self {
            newest: sender,
            wanted: Arc::clone(&wanted),
        };
        (source, Maps { newest, wanted })
    }

    /// Waits until a session wants a newer map.
    pub async fn wanted(&self) {
        self.wanted.notified().await;
    }

    /// Returns the epoch of the newest map.
    pub fn epoch(&self) -> Epoch {
        self.newest.borrow().epoch
    }

    /// Publishes a map, if it is newer than the present one.
    pub fn publish(&self, map: ShardMap) {
        self.newest.send_if_modified(|newest| {
            let newer = map.epoch > newest.epoch;
            if newer {
                *newest = Arc::new(map);
            }
            newer
        });
    }
}

impl Maps {
    /// Returns the newest map.
    pub(crate) fn newest(&self) -> Arc<ShardMap> {
        Arc::clone(&self.newest.borrow())
    }

    /// Asks for a newer map than `map`, if `map` is the newest so far.
    pub(crate) fn ask_beyond(&self, map: &ShardMap) {
        if self.newest.borrow().epoch == map.epoch {
            self.wanted.notify_one();
        }
    }

    /// Waits for a newer map than `map`.
    pub(crate) async fn beyond(&mut self, map: &ShardMap) {
        let newer = |newest: &Arc<ShardMap>| newest.epoch > map.epoch;
        if self.newest.wait_for(newer).await.is_err() {
            // The sender of maps is gone.
            std::future::pending::<()>().await;
        }
    }
}

/// Returns a shard at an address, for tests.
#[cfg(test)]
pub(crate) fn placed(address: &str) -> shared_proto::blocks::PlacedShard {
    use shared_proto::blocks::{PlacedShard, ShardServer, Source};
    use shared_proto::ids::{Generation, Task, TaskId};
    let id = TaskId::ps(0);
    let server = Task {
        id,
        generation: Generation(1),
    };
    PlacedShard {
        server: ShardServer::At(server, address.to_owned()),
        source: Source::initializer(Epoch(1)),
    }
}
