//! Bounds on the memory of a session, whatever the worker sends: the size of messages, the pulls that wait, and the
//! number of sessions of a worker. docs/design/server-memory.md has the sum.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use network::connections::Caller;
use network::security::crowded;
use network::stream::Bounds;
use parking_lot::Mutex;
use shared_proto::ids::{Task, TaskId};
use shared_proto::planted;
use shared_proto::view::View;
use shared_proto::wire;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::shard::store::Store;

/// The bounds on Hello, the only message before the session is admitted.
pub(crate) const HELLO: Bounds = Bounds {
    bytes: 16 << 10,
    parts: 64,
};

/// The number of parts that a message may have besides those that name blocks.
const OTHER_PARTS: usize = 16;

/// The most blocks in one message, even if the map has more. If all of them are full blocks, they have 128 GiB of
/// values. A message with values has no room for more blocks, not even for the smallest ones.
const MOST_BLOCKS: usize = 131_072;

/// The number of bytes that a session's waiting pulls may take, even if the map has few blocks.
const WAITING_BYTES: usize = 2 << 20;

/// The number of additional bytes for each block of the map. A worker may pull each block in a separate message, and
/// may pull it a second time when the min clock has jumped.
const WAITING_BYTES_A_BLOCK: usize = 1 << 10;

/// The number of additional bytes for each bucket of a table: room for the ids of 4,096 rows, in two steps.
const WAITING_BYTES_A_BUCKET: usize = 64 << 10;

/// Returns the bounds on the messages of a session.
pub(crate) fn of_messages(store: Option<&Arc<Store>>) -> Bounds {
    Bounds {
        parts: match planted!(AnyParts) {
            true => usize::MAX,
            false => blocks(store).min(MOST_BLOCKS) + OTHER_PARTS,
        },
        ..Bounds::default()
    }
}

/// Returns the number of blocks of the map, the buckets of tables included.
fn blocks(store: Option<&Arc<Store>>) -> usize {
    let variables = store.map_or(&[][..], |store| &store.map.variables);
    let blocks: usize = variables.iter().map(|variable| variable.shards.len()).sum();
    blocks + buckets(store)
}

fn buckets(store: Option<&Arc<Store>>) -> usize {
    let tables = store.map_or(&[][..], |store| &store.map.tables);
    tables.iter().map(|table| table.shards.len()).sum()
}

/// Returns the most bytes that the waiting pulls of a session may take together.
pub(crate) fn of_waiting(store: Option<&Arc<Store>>) -> usize {
    let blocks = blocks(store).saturating_mul(WAITING_BYTES_A_BLOCK);
    let buckets = buckets(store).saturating_mul(WAITING_BYTES_A_BUCKET);
    WAITING_BYTES.saturating_add(blocks).saturating_add(buckets)
}

/// Copies the ids of a pull out of its message, so that a waiting pull does not keep the whole message in memory.
pub(crate) fn own_ids(pull: &mut wire::Pull) {
    for wanted in &mut pull.blocks {
        wanted.ids = Bytes::copy_from_slice(&wanted.ids);
    }
}

/// Returns the number of bytes that a pull takes while it waits, without its entry in the queue.
pub(crate) fn cost(pull: &wire::Pull) -> usize {
    let job = pull
        .origin
        .as_ref()
        .map_or(0, |origin| origin.job.capacity());
    // The name of the job is in the message, and in the origin read from it.
    let ids: usize = pull.blocks.iter().map(|wanted| wanted.ids.len()).sum();
    2 * job + ids + pull.blocks.capacity() * size_of::<wire::WantedBlock>()
}

/// The admitted sessions, one for each worker.
#[derive(Default)]
pub(crate) struct Greeted(Mutex<HashMap<TaskId, (Task, CancellationToken)>>);

impl Greeted {
    /// Returns the entrance of a new session.
    pub(crate) fn entrance(self: Arc<Self>, caller: Option<Caller>) -> Entrance {
        Entrance {
            greeted: self,
            caller,
        }
    }

    /// Registers a session of a worker, and returns a token that is cancelled to end it. Ends the worker's earlier
    /// session, and the sessions of workers that are no longer in the view.
    fn begin(&self, task: Task, view: &View) -> CancellationToken {
        let mut sessions = self.0.lock();
        sessions.retain(|_, (other, session)| {
            let stays = view.workers.contains(other) && other.id != task.id;
            if !stays {
                session.cancel();
            }
            stays
        });
        let session = CancellationToken::new();
        sessions.insert(task.id, (task, session.clone()));
        session
    }
}

/// Admits one session, and ends those that it replaces.
pub(crate) struct Entrance {
    greeted: Arc<Greeted>,
    caller: Option<Caller>,
}

impl Entrance {
    /// Admits a worker of the view. Returns a token that is cancelled when another session replaces this one.
    ///
    /// # Errors
    /// If the members' places are all taken.
    pub(crate) fn admit(&self, task: Task, view: &View) -> Result<CancellationToken, Status> {
        if self.caller.as_ref().is_some_and(|caller| !caller.admit()) {
            return Err(crowded());
        }
        Ok(self.greeted.begin(task, view))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::ids::Generation;

    fn worker(index: u32, generation: u64) -> Task {
        Task {
            id: TaskId::worker(index),
            generation: Generation(generation),
        }
    }

    fn view(workers: &[Task]) -> View {
        View {
            workers: workers.to_vec(),
            ..View::default()
        }
    }

    #[test]
    fn a_worker_has_one_session_and_those_who_are_gone_have_none() {
        let greeted = Greeted::default();
        let both = view(&[worker(0, 1), worker(1, 1)]);
        let first = greeted.begin(worker(0, 1), &both);
        let other = greeted.begin(worker(1, 1), &both);
        let second = greeted.begin(worker(0, 1), &both);
        assert!(first.is_cancelled() && !other.is_cancelled() && !second.is_cancelled());
        let again = greeted.begin(worker(0, 2), &view(&[worker(0, 2)]));
        assert!(second.is_cancelled() && other.is_cancelled() && !again.is_cancelled());
        assert_eq!(greeted.0.lock().len(), 1);
    }
}
