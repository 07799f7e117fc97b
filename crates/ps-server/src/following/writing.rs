//! Writes the checkpoints that views order, and reports them.

use super::*;

impl Follower {
    /// Starts to write a checkpoint in a separate task. Gives up an earlier checkpoint that is still being written.
    pub(super) fn begin_writing(
        &self,
        registered: &mut Registered<'_>,
        checkpoints: Option<&Checkpoints>,
        snapshot: Arc<Snapshot>,
    ) {
        let (Some(store), Some(checkpoints)) = (&registered.store, checkpoints) else {
            return;
        };
        let writing = self.write(snapshot, Arc::clone(store), checkpoints.clone(), registered);
        let writing = self.offload.spawn_background(writing);
        if let Some(before) = registered.writing.replace(writing) {
            before.abort();
        }
    }

    /// Returns a future that writes this shard's part of a checkpoint and reports the outcome. The future stops without
    /// a report once a view orders another checkpoint, or none.
    fn write(
        &self,
        snapshot: Arc<Snapshot>,
        store: Arc<Store>,
        to: Checkpoints,
        registered: &Registered<'_>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (shard, offload) = (Arc::clone(&self.shard), self.offload);
        let coordinator = registered.membership.coordinator.clone();
        let sender = registered.membership.sender();
        let mut views = registered.views.clone();
        // The snapshot also ends if the task is aborted before its first poll.
        let end = EndOnDrop(Arc::clone(&snapshot));
        async move {
            let _end = end;
            let began = Instant::now();
            let saving = Saving {
                snapshot: &snapshot,
                store: &store,
                to: &to,
                only_finite: shard.refuses_non_finite(),
                offload,
                counters: &shard.counters,
                on_loss: &|lost| drop(shard.lose("a checkpoint", lost)),
            };
            let written = tokio::select! {
                biased;
                _ = views.wait_for(|view| view.checkpoint != Some(snapshot.order)) => {
                    tracing::warn!(number = snapshot.order.number, "a checkpoint was given up");
                    return;
                }
                written = saving.write() => written,
            };
            let number = snapshot.order.number;
            match &written {
                Ok(files) => {
                    shard.counters.checkpoints.increment(1);
                    shard.counters.checkpoint_seconds.record(began.elapsed());
                    let seconds = began.elapsed().as_secs_f64();
                    tracing::info!(
                        number,
                        files = files.len(),
                        seconds,
                        "wrote a checkpoint's part"
                    );
                }
                Err(error) => {
                    shard.counters.failed_checkpoints.increment(1);
                    tracing::error!(number, "a checkpoint cannot be written: {error}");
                }
            }
            let origin = sender.next_origin(snapshot.order.epoch, Default::default());
            let report = Report::Checkpoint(wire::CheckpointReport {
                number,
                shard: store.shard,
                unfinished: false,
                store_full: written.as_ref().is_err_and(CheckpointError::is_full),
                error: written
                    .as_ref()
                    .err()
                    .map(ToString::to_string)
                    .unwrap_or_default(),
                files: written
                    .unwrap_or_default()
                    .into_iter()
                    .map(Into::into)
                    .collect(),
            });
            if let Err(error) = coordinator.report(origin, report).await {
                tracing::warn!(number, "could not report a checkpoint: {error}");
            }
        }
    }
}
