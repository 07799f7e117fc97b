//! A server's part in the job: it follows views, loads its shard's values, writes the checkpoints that views order,
//! sends reports, and registers again if the cluster has continued without it.
//!
//! - `take`: takes the shard that a new map assigns; `load`: loads a shard's values from a checkpoint
//! - `writing`: writes the checkpoints that views order, one at a time; `save`: writes one while training continues
//! - `reports`: calls to the coordinator about the shard

mod load;
mod reports;
mod save;
mod take;
mod writing;

use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::{CheckpointError, Store as Checkpoints};
use daemon::Offload;
use daemon::http::Readiness;
use daemon::membership::{Coordinator, Membership, MembershipError, Registration};
use parking_lot::Mutex;
use shared_proto::ids::{Epoch, Generation, RunNumber};
use shared_proto::task;
use shared_proto::view::{Commit, JobPhase, View};
use shared_proto::wire;
use shared_proto::wire::report_request::Report;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use crate::error::PsError;
use crate::shard::snapshot::{EndOnDrop, Snapshot};
use crate::shard::store::Store;
use crate::shard::{NotCommitted, Shard};
use reports::{fetch_map, report, reports, tell_of_silence};
use save::Saving;
use take::Taken;

/// The pause before another attempt to load values.
const LOAD_AGAIN: Duration = Duration::from_secs(2);

/// The pause before the server registers again.
const REGISTER_AGAIN: Duration = Duration::from_millis(100);

/// Opens the store of checkpoints at a location.
pub type Opener = Arc<dyn Fn(&str) -> Result<Checkpoints, CheckpointError> + Send + Sync>;

/// A member that serves a shard.
pub(crate) struct Follower {
    pub(crate) shard: Arc<Shard>,
    /// The run that the shard belongs to.
    pub(crate) run: RunNumber,
    pub(crate) coordinator: Coordinator,
    pub(crate) registration: Registration,
    pub(crate) offload: Offload,
    /// Opens stores of checkpoints.
    pub(crate) open: Opener,
    /// Ready while the server holds what the shard map assigns to it: the values of its shard, or nothing if it is a
    /// spare.
    pub(crate) readiness: Readiness,
    /// Cancelled to stop the process. Before it stops, a checkpoint with all updates of the shard is written.
    pub(crate) drain: CancellationToken,
    /// The last view that was followed, under any registration. Only its run and its numbers of persisted changes are
    /// kept.
    pub(crate) followed: Mutex<View>,
}

/// The state of one registration.
struct Registered<'a> {
    membership: &'a Membership,
    /// The epoch of the map that was fetched last.
    looked_up: Epoch,
    /// The shard that this server holds, if any.
    store: Option<Arc<Store>>,
    /// The values from an earlier registration, until the shard has followed a view under the present registration.
    held: &'a mut Option<Held>,
    /// The checkpoint that is being written.
    writing: Option<AbortHandle>,
    /// The coordinator's views.
    views: watch::Receiver<View>,
    /// The view whose shard map assigns values that could not be loaded, and the time of the next attempt to load them.
    again: Option<(View, tokio::time::Instant)>,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        if let Some(writing) = self.writing.take() {
            writing.abort();
        }
    }
}

impl Follower {
    /// Follows views until the job has ended or the server has drained, and registers again as often as necessary. If
    /// `place` has a membership afterwards, the caller must end it.
    pub(crate) async fn follow(
        &self,
        place: &mut Option<Membership>,
        stop: &CancellationToken,
    ) -> Result<(), PsError> {
        let mut held: Option<Held> = None;
        loop {
            let membership = match place.take() {
                Some(membership) => membership,
                None => {
                    let who = Registration {
                        holding: held.as_ref().and_then(Held::to_tell),
                        ..self.registration.clone()
                    };
                    Membership::join(self.coordinator.clone(), who).await?
                }
            };
            let membership = place.insert(membership);
            // A run that begins anew may have the same job, but the shard belongs to the run before.
            if membership.job != self.shard.job || membership.run != self.run {
                return Err(PsError::OtherRun);
            }
            if let Some(held) = &mut held {
                held.generation = membership.task.generation;
            }
            match self.follow_as(membership, &mut held, stop).await {
                Err(PsError::Membership(error)) if error.is_retryable() => {
                    tracing::warn!("{error}; registering again");
                    self.readiness.set(false);
                    // Another server may have the shard by now.
                    let generation = membership.task.generation;
                    let forgotten = self.shard.forget();
                    held = forgotten.map(|store| Held { store, generation }).or(held);
                    *place = None;
                    tokio::time::sleep(REGISTER_AGAIN).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn follow_as(
        &self,
        membership: &Membership,
        held: &mut Option<Held>,
        stop: &CancellationToken,
    ) -> Result<(), PsError> {
        let checkpoints = tokio::select! {
            biased;
            lost = membership.lost() => return Err(lost.into()),
            seen = self.see_store(membership) => seen?,
        };
        self.shard
            .answer_under(membership.lease(), membership.receipt_key);
        let over = stop.child_token();
        let _over = over.clone().drop_guard();
        let mut views = membership.views(over.clone());
        // The reports have a task of their own: a commit may wait for a checkpoint, and the reports show its progress.
        task::spawn_until(over, reports(Arc::clone(&self.shard), membership));
        let mut registered = Registered {
            membership,
            looked_up: Epoch(0),
            store: held.as_ref().map(|held| Arc::clone(&held.store)),
            held,
            writing: None,
            views: views.clone(),
            again: None,
        };
        let drained = CancellationToken::new();
        let mut draining = false;
        loop {
            let again = registered.again.as_ref().map(|(_, at)| *at);
            let again = async {
                match again {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                view = next_view(&mut views) => {
                    let (phase, error) = (view.phase, view.error.clone());
                    let caught_up = self.catch_up(&mut registered, checkpoints.as_ref(), view).await;
                    match phase {
                        // The job has ended: a server that joins now has not taken part in its last step.
                        JobPhase::Done => {
                            report(&self.shard, &membership.coordinator, &membership.sender(), true).await;
                            return Ok(());
                        }
                        JobPhase::Failed => {
                            report(&self.shard, &membership.coordinator, &membership.sender(), true).await;
                            return Err(MembershipError::JobFailed(error).into());
                        }
                        _ => caught_up?,
                    }
                }
                () = self.drain.cancelled(), if !draining => {
                    draining = true;
                    self.begin_to_drain(membership, drained.clone());
                }
                () = drained.cancelled() => return Ok(()),
                lost = self.shard.has_lost_rows() => return Err(PsError::RowsLost(lost.to_string())),
                () = again => {
                    if let Some((view, _)) = registered.again.take() {
                        self.catch_up(&mut registered, checkpoints.as_ref(), view).await?;
                    }
                }
                lost = membership.lost() => {
                    report(&self.shard, &membership.coordinator, &membership.sender(), true).await;
                    return Err(lost.into());
                }
            }
        }
    }

    /// Asks for a checkpoint that has all pushes that the shard has taken, and stops taking pushes. If all workers make
    /// each step together, in sync mode or in a ring, the server continues to take pushes: the coordinator lets the
    /// workers finish the open steps, and plans no further steps. Cancels `drained` once the server may stop.
    fn begin_to_drain(&self, membership: &Membership, drained: CancellationToken) {
        tracing::info!("about to stop; waiting for a checkpoint of the shard");
        if !self.shard.job.strategy.name.has_ring() && !self.shard.is_sync() {
            self.shard.close();
        }
        let saved = membership.drained();
        task::spawn(async move {
            if saved.await {
                drained.cancel();
            }
        });
    }

    /// Opens the store of checkpoints, and checks that it is the store that the coordinator uses. Tries again while the
    /// store cannot be reached. Returns `None` if the job has no checkpoints.
    async fn see_store(&self, membership: &Membership) -> Result<Option<Checkpoints>, PsError> {
        let Some((location, probe)) = &membership.checkpoints else {
            return Ok(None);
        };
        let store = (self.open)(location)?;
        loop {
            match store.owned_by(probe).await {
                Err(error) if error.is_retryable() => {
                    tracing::warn!("cannot see the checkpoints at present: {error}");
                    if let Err(untold) = tell_of_silence(membership, &error).await {
                        tracing::debug!(%untold, "could not report");
                    }
                    tokio::time::sleep(LOAD_AGAIN).await;
                }
                seen => return Ok(seen.map(Some)?),
            }
        }
    }

    async fn catch_up(
        &self,
        registered: &mut Registered<'_>,
        checkpoints: Option<&Checkpoints>,
        view: View,
    ) -> Result<(), PsError> {
        let strategy = registered.membership.job.strategy.name;
        if !strategy.has_servers() {
            // The epoch is the number of a ring of workers, and there is no map. The server is idle until the job ends.
            self.readiness.set(true);
            return Ok(());
        }
        {
            let mut followed = self.followed.lock();
            if view.is_older_than(&followed) {
                return Err(PsError::OlderState {
                    held: followed.persisted,
                    known: view.opened.min(view.persisted),
                });
            }
            *followed = View {
                run: view.run,
                persisted: view.persisted,
                opened: view.opened,
                ..View::default()
            };
        }
        if view.epoch > registered.looked_up {
            self.readiness.set(false);
            let map = fetch_map(registered.membership).await?;
            let epoch = map.epoch;
            if let Some(writing) = registered.writing.take() {
                writing.abort();
            }
            match self.take_shard(registered, map).await? {
                Taken::Store(store) => registered.store = store,
                // The coordinator may choose another checkpoint, in another epoch.
                Taken::Failed => {
                    let at = tokio::time::Instant::now() + LOAD_AGAIN;
                    registered.again = Some((view, at));
                    return Ok(());
                }
            }
            registered.again = None;
            registered.looked_up = epoch;
        }
        if registered.looked_up > view.epoch {
            // The map is newer than the view: a newer view is on its way.
            return Ok(());
        }
        let step = view.commit.as_ref().map_or(0, |commit| commit.step.0);
        let not_committed = |why| match why {
            NotCommitted::NotStaged(task) => PsError::Diverged { step, task },
            NotCommitted::RowsLost(lost) => PsError::RowsLost(lost.to_string()),
        };
        let (shard, store) = (Arc::clone(&self.shard), registered.store.clone());
        let measured = view.measured.clone().zip(store.clone());
        let mut snapshot = shard.begin_snapshot(&view, store.as_deref());
        // A commit that is no part of the checkpoint may wait for its writer.
        if let Some(snapshot) = snapshot.take_if(|snapshot| !snapshot.has(&view)) {
            self.begin_writing(registered, checkpoints, snapshot);
        }
        let followed = if shard.has_work_for(&view) {
            // A commit updates every block. Heartbeats continue beside it.
            self.offload.run(move || shard.follow(view, store)).await
        } else {
            shard.follow(view, store)
        };
        followed.map_err(not_committed)?;
        if let Some((step, store)) = measured {
            let squares = self.report_norm(registered.membership, step, store).await;
            squares.map_err(not_committed)?;
        }
        *registered.held = None;
        self.readiness.set(true);
        if let Some(snapshot) = snapshot {
            self.begin_writing(registered, checkpoints, snapshot);
        }
        Ok(())
    }

    /// Computes this shard's part of the norm of a step, and sends it to the coordinator.
    async fn report_norm(
        &self,
        membership: &Membership,
        step: Commit,
        store: Arc<Store>,
    ) -> Result<(), NotCommitted> {
        let shard = Arc::clone(&self.shard);
        let (number, epoch, clock) = (store.shard, store.map.epoch.0, step.step.0);
        let samples = step.samples();
        let squares = self.offload.run(move || shard.squares(&step, &store)).await;
        let report = Report::Norm(wire::NormReport {
            shard: number,
            epoch,
            step: clock,
            squares: squares?,
            samples,
        });
        let (coordinator, origin) = (membership.coordinator.clone(), membership.next_origin());
        // Another view may come before the answer.
        task::spawn(async move {
            if let Err(error) = coordinator.report(origin, report).await {
                tracing::warn!(%error, "could not report the norm of a step");
            }
        });
        Ok(())
    }
}

/// The values that a server still holds after its membership has ended.
struct Held {
    store: Arc<Store>,
    generation: Generation,
}

impl Held {
    fn to_tell(&self) -> Option<wire::Holding> {
        let source = self.store.source()?;
        Some(wire::Holding {
            shard: self.store.shard,
            source_epoch: source.epoch.0,
            generation: self.generation.0,
        })
    }
}

async fn next_view(views: &mut watch::Receiver<View>) -> View {
    if views.changed().await.is_err() {
        // The stream of views ends only with this process.
        std::future::pending::<()>().await;
    }
    views.borrow_and_update().clone()
}
