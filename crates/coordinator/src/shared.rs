//! The cluster under its lock: asked, kept on disk, and only then shown to those who listen.

use std::sync::Arc;
use std::time::{Duration, Instant};

use daemon::Offload;
use parking_lot::Mutex;
use shared_proto::refusal::Refusal;
use shared_proto::view::View;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::cluster::{Changes, Cluster, Errand, Sweep};
use crate::record::Record;
use crate::state::State;

/// How long a call waits for something to come up before it answers "nothing yet".
const LONG_POLL: Duration = Duration::from_secs(4);

/// How often a waiting call looks again at what changes with time alone.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// The cluster and those who listen to it.
pub(crate) struct Shared {
    cluster: Mutex<Cluster>,
    pub(crate) views: watch::Sender<View>,
    /// Something has happened that may be work for those who wait.
    changed: Notify,
    records: mpsc::Sender<Record>,
    state: Arc<State>,
    offload: Offload,
    /// What is kept in the state. Held by whoever writes it.
    kept: tokio::sync::Mutex<Changes>,
    /// The state cannot be written: nobody is answered any more.
    broken: CancellationToken,
}

/// The time. In simulations it is not the system's.
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
            broken: CancellationToken::new(),
        })
    }

    /// Asks the cluster something, keeps what has to be kept, and then tells everybody.
    pub(crate) async fn ask<T>(
        self: &Arc<Self>,
        ask: impl FnOnce(&mut Cluster, Instant) -> T,
    ) -> T {
        let answer = self.ask_quietly(ask).await;
        self.changed.notify_waiters();
        answer
    }

    /// Asks the cluster something, keeps what has to be kept, and then publishes the view if it is
    /// new; wakes nobody else.
    pub(crate) async fn ask_quietly<T>(
        self: &Arc<Self>,
        ask: impl FnOnce(&mut Cluster, Instant) -> T,
    ) -> T {
        let (answer, urgent, records) = {
            let mut cluster = self.cluster.lock();
            let answer = ask(&mut cluster, now());
            cluster.refresh_view();
            (answer, cluster.changes().urgent, cluster.take_records())
        };
        let shared = Arc::clone(self);
        // Whoever has asked may go away meanwhile; what it has changed is kept and told all the same.
        let settled = tokio::spawn(async move {
            shared.settle(urgent).await;
            for record in records {
                // The recorder is gone only when the run directory could not be written: said there.
                let _ = shared.records.send(record).await;
            }
        });
        let _ = settled.await;
        answer
    }

    /// Returns when urgent changes up to this one are kept, and everybody can see them. Whoever
    /// finds others waiting keeps theirs as well.
    async fn settle(&self, urgent: u64) {
        let mut kept = self.kept.lock().await;
        if kept.urgent < urgent {
            *kept = self.keep().await;
        }
        // Only what is kept may be seen; later changes publish their view themselves.
        let cluster = self.cluster.lock();
        if cluster.changes().urgent == kept.urgent {
            self.publish(cluster.view());
        }
    }

    /// Keeps what may be forgotten too, where there is something new.
    pub(crate) async fn keep_all(&self) {
        let mut kept = self.kept.lock().await;
        if self.look(|cluster, _| cluster.changes()) != *kept {
            *kept = self.keep().await;
        }
    }

    async fn keep(&self) -> Changes {
        let (saved, changes) = self.look(|cluster, now| (cluster.save_all(now), cluster.changes()));
        let state = Arc::clone(&self.state);
        if let Err(error) = self.offload.run(move || state.write(&saved)).await {
            // To go on would be to promise what a restart forgets.
            tracing::error!("the coordinator's state cannot be written: {error}; ending");
            self.broken.cancel();
            std::future::pending::<()>().await;
        }
        changes
    }

    fn publish(&self, view: &View) {
        self.views.send_if_modified(|current| {
            let newer = view.number > current.number;
            if newer {
                current.clone_from(view);
            }
            newer
        });
    }

    /// Returns when the state cannot be written any more.
    pub(crate) async fn broken(&self) {
        self.broken.cancelled().await;
    }

    /// What is to be done with the store of checkpoints.
    pub(crate) fn take_errand(&self) -> Option<Errand> {
        self.cluster.lock().take_errand()
    }

    /// What is to be deleted from the store of checkpoints.
    pub(crate) fn take_sweep(&self) -> Option<Sweep> {
        self.cluster.lock().take_sweep(now())
    }

    /// The job has ended, so the room that is kept free for the state may be used by others.
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

    /// Waits for the next change, or a moment.
    pub(crate) async fn changed(&self) {
        let _ = tokio::time::timeout(LOOK_AGAIN, self.changed.notified()).await;
    }

    /// Asks until the answer satisfies, or for as long as a call may wait.
    pub(crate) async fn ask_until<T>(
        self: &Arc<Self>,
        mut ask: impl FnMut(&mut Cluster, Instant) -> Result<T, Refusal>,
        satisfies: impl Fn(&T) -> bool,
    ) -> Result<T, Refusal> {
        let deadline = now() + LONG_POLL;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            // Whoever waits must not wake the others by looking.
            let answer = self.ask_quietly(&mut ask).await?;
            if satisfies(&answer) || now() >= deadline {
                self.changed.notify_waiters();
                return Ok(answer);
            }
            let _ = tokio::time::timeout(LOOK_AGAIN, changed).await;
        }
    }
}
