//! The cluster under its lock. Its changes are persisted before any process sees them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::{Changes, Cluster, Record, StoreTask, Sweep};
use daemon::Offload;
use parking_lot::Mutex;
use shared_proto::ids::{Clock, Epoch};
use shared_proto::planted;
use shared_proto::refusal::Refusal;
use shared_proto::task::{self, boxed};
use shared_proto::view::View;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::state::State;

/// The longest time that a call waits for a result before it answers that there is none yet.
pub(crate) const LONG_POLL: Duration = Duration::from_secs(4);

/// The longest time that a finished part of a step waits for the other parts before it is persisted by itself.
const PARTS_WAIT: Duration = Duration::from_secs(1);

/// The number of calls that return at a time after a commit.
const TURNS: usize = 8;

/// The interval at which a waiting call checks for changes that come with time alone.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// The longest time that a change on which no other call depends waits to be persisted, so that one write persists
/// several such changes.
const BATCH_DELAY: Duration = Duration::from_millis(20);

/// The pause after a write of the state, for each KiB of the write's cost: about four times the processor time of the
/// write. So writes take about a fifth of a core at most, unless the pause reaches `LONGEST_PAUSE`.
const PAUSE_FOR_KILOBYTE: Duration = Duration::from_micros(30);

/// The longest pause after a write of the state.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// The cluster, its state on disk, and the channels by which its changes are published.
pub(crate) struct Shared {
    cluster: Mutex<Cluster>,
    pub(crate) views: watch::Sender<View>,
    /// Wakes waiting calls after a change.
    changed: Notify,
    records: mpsc::Sender<Record>,
    state: Arc<State>,
    offload: Offload,
    /// The changes that are persisted. Locked while the state is written.
    kept: tokio::sync::Mutex<Kept>,
    /// The number of urgent changes that are persisted.
    persisted: watch::Sender<u64>,
    /// Limits how many calls return at a time after a commit.
    turns: Semaphore,
    /// Cancelled when the state cannot be written. No call is answered from then on.
    broken: CancellationToken,
}

/// What the persisted state has, and when it may be written again.
#[derive(Default)]
struct Kept {
    changes: Changes,
    /// The number of records that the cluster had made when the state was persisted.
    records: u64,
    /// The time before which the state is not written again; `None` before the first write.
    next: Option<tokio::time::Instant>,
}

/// Returns the time of tokio's clock, which in simulations is not the system's.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Shared {
    pub(crate) fn new(
        cluster: Cluster,
        records: mpsc::Sender<Record>,
        state: State,
        offload: Offload,
    ) -> Arc<Self> {
        Arc::new(Self {
            cluster: Mutex::new(cluster),
            views: watch::channel(View::default()).0,
            changed: Notify::new(),
            records,
            state: Arc::new(state),
            offload,
            kept: tokio::sync::Mutex::default(),
            persisted: watch::channel(0).0,
            turns: Semaphore::new(TURNS),
            broken: CancellationToken::new(),
        })
    }

    /// Asks the cluster, persists urgent changes, publishes the view if it is new, and wakes waiting calls.
    pub(crate) async fn ask<T>(
        self: &Arc<Self>,
        ask: impl FnOnce(&mut Cluster, Instant) -> T,
    ) -> T {
        let answer = self.ask_quietly(ask).await;
        self.changed.notify_waiters();
        answer
    }

    /// Asks the cluster, persists urgent changes, and publishes the view if it is new. Wakes no waiting call.
    pub(crate) async fn ask_quietly<T>(
        self: &Arc<Self>,
        ask: impl FnOnce(&mut Cluster, Instant) -> T,
    ) -> T {
        let any = |cluster: &mut Cluster, now| {
            cluster.leave_fast_path();
            ask(cluster, now)
        };
        self.ask_and_settle(any, |_| false).await.0
    }

    /// Asks the cluster on its fast path. Wakes waiting calls only if the call has left the fast path.
    pub(crate) async fn ask_fast<T>(
        self: &Arc<Self>,
        ask: impl FnOnce(&mut Cluster, Instant) -> T,
    ) -> T {
        self.count_steps(ask, |_| false).await
    }

    /// Asks the cluster on its fast path. Wakes no waiting call. If `at_once` accepts the answer, the call returns
    /// without waiting until the changes of other calls are persisted, so the answer must not reveal these changes.
    /// Returns the answer, and whether the call has stayed on the fast path.
    pub(crate) async fn ask_fast_quietly<T>(
        self: &Arc<Self>,
        ask: impl FnOnce(&mut Cluster, Instant) -> T,
        at_once: impl FnOnce(&T) -> bool,
    ) -> (T, bool) {
        let on_fast_path = |cluster: &mut Cluster, now| {
            cluster.begin_fast_path();
            ask(cluster, now)
        };
        self.ask_and_settle(on_fast_path, at_once).await
    }

    /// Runs `count` on the cluster's fast path. Wakes waiting calls if `count` has left the fast path. If `at_once` accepts
    /// the answer, does not wait until the changes of other calls are persisted, so the answer must not reveal these changes.
    pub(crate) async fn count_steps<T>(
        self: &Arc<Self>,
        count: impl FnOnce(&mut Cluster, Instant) -> T,
        at_once: impl FnOnce(&T) -> bool,
    ) -> T {
        let (answer, stayed) = self.ask_fast_quietly(count, at_once).await;
        if !stayed {
            self.changed.notify_waiters();
        }
        answer
    }

    /// Asks the cluster, persists urgent changes, and publishes the view if it is new. `at_once` is as in
    /// [`Self::ask_fast_quietly`]. Returns the answer, and whether the cluster is on its fast path.
    async fn ask_and_settle<T>(
        self: &Arc<Self>,
        ask: impl FnOnce(&mut Cluster, Instant) -> T,
        at_once: impl FnOnce(&T) -> bool,
    ) -> (T, bool) {
        let (answer, unsettled, full) = {
            let mut cluster = self.cluster.lock();
            let (before, records) = (cluster.changes().urgent, cluster.records_made());
            let answer = ask(&mut cluster, now());
            cluster.refresh_view();
            let changes = cluster.changes();
            let persisted = *self.persisted.borrow() == changes.urgent;
            if persisted {
                self.publish_all(&mut cluster);
            }
            let full = cluster.records_made() > records && self.records.capacity() == 0;
            let waits = !persisted && (changes.urgent > before || !at_once(&answer));
            let unsettled = waits.then_some(changes);
            ((answer, cluster.on_fast_path()), unsettled, full)
        };
        if unsettled.is_some() || full {
            Arc::clone(self).wait_until_settled(unsettled, full).await;
        }
        answer
    }

    /// Waits until `changes` are persisted and published, if there are any. If the recorder's queue is `full`, waits
    /// until it has room.
    ///
    /// The function is boxed and not generic, so it is compiled only once, not for each instance of
    /// [`Self::ask_and_settle`].
    #[boxed]
    async fn wait_until_settled(self: Arc<Self>, changes: Option<Changes>, full: bool) {
        if let Some(changes) = changes {
            let shared = Arc::clone(&self);
            // A task of its own, so that the changes are persisted and published even if the caller is cancelled.
            let settled = task::spawn(async move { shared.settle(changes).await });
            let _ = settled.await;
        }
        if full {
            // A caller that makes records waits for the recorder, so that they do not pile up.
            let _ = self.records.reserve().await;
        }
    }

    /// Publishes the view, and passes all records to the recorder. The cluster must have no unpersisted urgent changes.
    /// Returns false if records are left because the recorder's queue is full.
    fn publish_all(&self, cluster: &mut Cluster) -> bool {
        self.publish(cluster.view());
        let all = cluster.records_made();
        self.hand_over(cluster, all)
    }

    /// Passes records to the recorder, up to the first `made` of all records that the cluster has made. Returns false
    /// if some of these are left because the recorder's queue is full.
    fn hand_over(&self, cluster: &mut Cluster, made: u64) -> bool {
        while cluster.records_taken() < made {
            let place = self.records.try_reserve();
            if matches!(place, Err(TrySendError::Full(()))) {
                return false;
            }
            // A queue that is closed belongs to a recorder that has ended, which has logged why.
            if let (Some(record), Ok(place)) = (cluster.take_record(), place) {
                place.send(record);
            }
        }
        true
    }

    /// Sync mode: waits until a worker's finished part of a step is persisted, with the commit of the step, or with the
    /// end of its epoch or of the job. If none of these comes within a second, or if `over` is cancelled, persists the
    /// part by itself.
    ///
    /// A commit ends the waits of all workers of the step. Only a few of the calls return at a time, so that the
    /// servers get the view meanwhile.
    pub(crate) async fn persist_part(
        self: &Arc<Self>,
        step: Clock,
        epoch: Epoch,
        over: &CancellationToken,
    ) {
        if planted!(PartForgotten) {
            return;
        }
        let finished = self.look(|cluster, _| cluster.changes());
        let mut views = self.views.subscribe();
        // A view is published once all that it follows from is persisted.
        let committed = views.wait_for(|view| {
            let commit = view.commit.as_ref();
            commit.is_some_and(|commit| commit.step >= step) || view.epoch > epoch || view.ended()
        });
        let committed = tokio::time::timeout(PARTS_WAIT, committed);
        let is_persisted = matches!(over.run_until_cancelled(committed).await, Some(Ok(_)));
        if !is_persisted && self.kept.lock().await.changes.others < finished.others {
            self.ask_fast(|cluster, _| cluster.persist_parts()).await;
        }
        if let Ok(_turn) = self.turns.acquire().await {
            tokio::task::yield_now().await;
        }
    }

    /// Waits until all urgent changes up to `changes` are persisted and published. One write persists the changes of
    /// all waiting calls.
    async fn settle(&self, changes: Changes) {
        let hurries = async {
            let kept = self.kept.lock().await;
            kept.changes.hurried < changes.hurried
        };
        if !hurries.await {
            // A call that hurries persists these changes with its own.
            let mut persisted = self.persisted.subscribe();
            let by_another = persisted.wait_for(|urgent| *urgent >= changes.urgent);
            let _ = tokio::time::timeout(BATCH_DELAY, by_another).await;
        }
        let mut kept = self.kept.lock().await;
        if kept.changes.urgent < changes.urgent {
            if let Some(next) = kept.next {
                tokio::time::sleep_until(next).await;
            }
            match planted!(AnsweredBeforeKept) {
                true => kept.changes = self.look(|cluster, _| cluster.changes()),
                false => self.keep(&mut kept).await,
            }
        }
        // Only persisted changes may be seen. The calls that made later changes publish their view.
        self.publish_persisted(&kept);
    }

    /// Persists all changes, if there are new ones, and passes all records to the recorder.
    pub(crate) async fn keep_all(&self) {
        loop {
            let mut kept = self.kept.lock().await;
            if self.look(|cluster, _| cluster.changes()) != kept.changes {
                self.keep(&mut kept).await;
            }
            if self.publish_persisted(&kept) {
                return;
            }
            drop(kept);
            let _ = self.records.reserve().await;
        }
    }

    /// Publishes the view, and passes all records to the recorder. While there are unpersisted urgent changes,
    /// publishes no view, and passes only the records that the persisted state has. Returns false if the recorder's
    /// queue is full.
    fn publish_persisted(&self, kept: &Kept) -> bool {
        // Under the lock, so that no call finds its changes unpersisted and leaves the view to a write that has published already.
        let mut cluster = self.cluster.lock();
        self.persisted.send_replace(kept.changes.urgent);
        if cluster.changes().urgent == kept.changes.urgent {
            self.publish_all(&mut cluster)
        } else {
            self.hand_over(&mut cluster, kept.records)
        }
    }

    /// Writes the state, then publishes the view that belongs to the written state.
    async fn keep(&self, kept: &mut Kept) {
        let (durable, changes, records, view) = self.look(|cluster, now| {
            let (changes, records) = (cluster.changes(), cluster.records_made());
            (
                cluster.snapshot(now),
                changes,
                records,
                cluster.view().clone(),
            )
        });
        let state = Arc::clone(&self.state);
        let written = self.offload.run(move || state.write(&durable)).await;
        let cost = match written {
            Ok(cost) => cost,
            Err(error) => {
                // Later answers could promise changes that a restart would forget.
                tracing::error!("the coordinator's state cannot be written: {error}; ending");
                self.broken.cancel();
                return std::future::pending().await;
            }
        };
        let kilobytes = u32::try_from(cost >> 10).unwrap_or(u32::MAX);
        let pause = PAUSE_FOR_KILOBYTE.saturating_mul(kilobytes);
        kept.changes = changes;
        kept.records = records;
        kept.next = Some(tokio::time::Instant::now() + pause.min(LONGEST_PAUSE));
        self.publish(&view);
    }

    fn publish(&self, view: &View) {
        self.views.send_if_modified(|current| {
            let newer = view.number > current.number;
            if newer {
                current.clone_from(view);
                current.persisted = self.state.changes();
                current.opened = self.state.opened();
            }
            newer
        });
    }

    /// Returns when the state cannot be written any more.
    pub(crate) async fn broken(&self) {
        self.broken.cancelled().await;
    }

    /// Takes the next task for the store of checkpoints.
    pub(crate) fn take_store_task(&self) -> Option<StoreTask> {
        self.cluster.lock().take_store_task()
    }

    /// Takes the order to delete the files of given-up checkpoints, if there is one.
    pub(crate) fn take_sweep(&self) -> Option<Sweep> {
        self.cluster.lock().take_sweep(now())
    }

    /// Releases the disk space that is reserved for the state, because the job has ended.
    pub(crate) fn release_reserve(&self) {
        self.state.release();
    }

    pub(crate) fn views(&self) -> watch::Receiver<View> {
        self.views.subscribe()
    }

    /// Looks at the cluster without changing it.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Cluster, Instant) -> T) -> T {
        look(&self.cluster.lock(), now())
    }

    /// Waits for the next change, at most for [`LOOK_AGAIN`].
    pub(crate) async fn changed(&self) {
        let _ = tokio::time::timeout(LOOK_AGAIN, self.changed.notified()).await;
    }

    /// Asks the cluster again and again until `satisfies` accepts the answer or `LONG_POLL` has passed. Returns the
    /// last answer.
    pub(crate) async fn ask_until<T>(
        self: &Arc<Self>,
        ask: impl FnMut(&mut Cluster, Instant) -> Result<T, Refusal>,
        satisfies: impl Fn(&T) -> bool,
    ) -> Result<T, Refusal> {
        self.until(false, ask, satisfies).await
    }

    /// Asks as [`Self::ask_until`] does, on the fast path of the cluster.
    pub(crate) async fn ask_fast_until<T>(
        self: &Arc<Self>,
        ask: impl FnMut(&mut Cluster, Instant) -> Result<T, Refusal>,
        satisfies: impl Fn(&T) -> bool,
    ) -> Result<T, Refusal> {
        self.until(true, ask, satisfies).await
    }

    async fn until<T>(
        self: &Arc<Self>,
        fast: bool,
        mut ask: impl FnMut(&mut Cluster, Instant) -> Result<T, Refusal>,
        satisfies: impl Fn(&T) -> bool,
    ) -> Result<T, Refusal> {
        let deadline = now() + LONG_POLL;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            // A waiting call must not wake the others each time it asks.
            let (answer, stayed) = match fast {
                true => self.ask_fast_quietly(&mut ask, |_| false).await,
                false => (self.ask_quietly(&mut ask).await, false),
            };
            let answer = answer?;
            if satisfies(&answer) || now() >= deadline {
                if !stayed {
                    self.changed.notify_waiters();
                }
                return Ok(answer);
            }
            let _ = tokio::time::timeout(LOOK_AGAIN, changed).await;
        }
    }
}

#[cfg(test)]
mod tests;
