//! The dense variables in the checkpoints of a ring. The ring's first member writes them while all members train. If
//! all members have died, a member of the next ring loads the newest checkpoint. The format is that of parameter
//! servers.
//!
//! - `layout`: where blocks lie among the numbers of a replica

mod layout;

use std::sync::Arc;
use std::time::Duration;

use checkpoint::{
    CheckpointError, FILE_BYTES, FileEntry, LoadError, Manifest, SavedBlock, Store, Wanted, encode,
};
use daemon::membership::{Coordinator, Sender};
use replica::{Description, MirrorState};
use shared_proto::blocks::{BlockId, VariableSpec};
use shared_proto::ids::{Epoch, ViewNumber};
use shared_proto::job::{Job, NonFinite};
use shared_proto::table::TableSpec;
use shared_proto::view::View;
use shared_proto::wire;
use shared_proto::wire::report_request::Report;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::layout::Layout;
use crate::strategy::{Joining, Stores, StrategyError};

/// The pause before a store that does not answer is asked again.
const AGAIN: Duration = Duration::from_secs(2);

/// The checkpoints of a ring, as one of its members writes and loads them.
pub(super) struct Checkpoints {
    job: Arc<Job>,
    variables: Arc<[VariableSpec]>,
    tables: Arc<[TableSpec]>,
    coordinator: Coordinator,
    sender: Sender,
    stores: Stores,
    /// The store to write to; `None` if the job writes no checkpoints.
    store: Option<Store>,
    /// The coordinator's views. Without a store they do not change.
    views: watch::Receiver<View>,
    /// The checkpoint that is being written.
    writing: Option<AbortHandle>,
    _views: DropGuard,
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        if let Some(writing) = self.writing.take() {
            writing.abort();
        }
    }
}

impl Checkpoints {
    /// Opens the store, and checks that the coordinator sees the same one.
    ///
    /// # Errors
    /// If the store is not the coordinator's, or refuses access.
    pub(super) async fn open(
        joining: &Joining<'_>,
        model: &Description,
    ) -> Result<Self, StrategyError> {
        let &Joining {
            job,
            membership,
            stores,
            ..
        } = joining;
        let stop = CancellationToken::new();
        let (store, views) = match &membership.checkpoints {
            Some((location, run)) => {
                let seen = see(stores, location, run).await;
                let store = seen.map_err(StrategyError::Store)?;
                (Some(store), membership.views(stop.clone()))
            }
            None => (None, watch::channel(View::default()).1),
        };
        Ok(Self {
            job: Arc::new(job.clone()),
            variables: model.variables.as_slice().into(),
            tables: model.tables.as_slice().into(),
            coordinator: membership.coordinator.clone(),
            sender: membership.sender(),
            stores: stores.clone(),
            store,
            views,
            writing: None,
            _views: stop.drop_guard(),
        })
    }

    /// Starts to write values as a checkpoint, in the background, and to report it. Gives up a checkpoint that is still
    /// being written. `ordered` is the first view that orders this checkpoint.
    pub(super) fn write(
        &mut self,
        order: &wire::CopyValues,
        ordered: ViewNumber,
        state: MirrorState,
    ) {
        let Some(store) = self.store.clone() else {
            return;
        };
        let number = order.number;
        let writing = Writing {
            layout: Layout::new(&self.variables, &self.job, order.block_elements as usize),
            state: Arc::new(state),
            only_finite: self.job.non_finite == NonFinite::Fail,
            store,
            number,
            shard: order.shard,
            coordinator: self.coordinator.clone(),
            sender: self.sender.clone(),
        };
        let mut views = self.views.clone();
        let task = async move {
            let is_over = |view: &View| {
                let current = view.checkpoint.map(|order| order.number);
                view.number >= ordered && current != Some(number)
            };
            tokio::select! {
                biased;
                Ok(_) = views.wait_for(is_over) => {
                    tracing::warn!(number, "a checkpoint was given up");
                }
                () = writing.write_and_report() => {}
            }
        };
        let writing = self.stores.offload.spawn_background(task);
        if let Some(before) = self.writing.replace(writing) {
            before.abort();
        }
    }

    /// Loads the values of a checkpoint for the ring `number`, and reports that. If they cannot be loaded, reports the
    /// error and tries again, until the caller drops the future because the coordinator has named another ring.
    pub(super) async fn load(&self, number: Epoch, from: &wire::RingCheckpoint) -> MirrorState {
        loop {
            let loaded = self.try_to_load(from).await;
            let mut report = wire::RestoreReport {
                epoch: number.0,
                shard: from.shard,
                ..wire::RestoreReport::default()
            };
            if let Err(error) = &loaded {
                tracing::error!(checkpoint = from.number, "cannot load values: {error}");
                report.error = error.to_string();
                report.set_failure(error.failure());
            }
            let origin = self.sender.next_origin_here();
            let told = self.coordinator.report(origin, Report::Restore(report));
            if let Err(error) = told.await {
                tracing::warn!("could not report: {error}");
            } else if let Ok(state) = loaded {
                tracing::info!(
                    checkpoint = from.number,
                    location = from.location,
                    "loaded the values"
                );
                return state;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn try_to_load(&self, from: &wire::RingCheckpoint) -> Result<MirrorState, LoadError> {
        let store = (self.stores.open)(&from.location)?;
        let loaded = async {
            let manifest = store.manifest(from.number).await?;
            let wanted = Wanted {
                variables: self.variables.iter().collect(),
                tables: self.tables.iter().collect(),
                run: &from.run,
            };
            wanted.check(&store, &manifest, &self.job)?;
            self.read(&store, &manifest).await
        };
        match loaded.await {
            Err(LoadError::Checkpoint(error)) => Err(store.advise(from.number, error).await.into()),
            loaded => loaded,
        }
    }

    async fn read(&self, store: &Store, manifest: &Manifest) -> Result<MirrorState, LoadError> {
        let layout = Layout::new(&self.variables, &self.job, manifest.block_elements as usize);
        let mut state = MirrorState {
            values: vec![0.0; layout.numbers()],
            updates: 0,
            made_in: Epoch(0),
        };
        let mut blocks = 0;
        // Servers have the rows of tables, and each checkpoint has all dense values in files of its own.
        let is_dense = |id: BlockId| (id.variable as usize) < self.variables.len();
        let has_dense = |file: &&FileEntry| {
            file.checkpoint.is_none()
                && file
                    .blocks
                    .iter()
                    .flat_map(|range| range.ids())
                    .any(is_dense)
        };
        for file in manifest.files.iter().filter(has_dense) {
            let read = store.read_file(manifest, file).await?;
            for block in read.into_iter().filter(|block| is_dense(block.id)) {
                if self.job.non_finite == NonFinite::Fail && !block.values.all_finite() {
                    return Err(LoadError::NotFinite {
                        number: manifest.number,
                        location: store.location().to_owned(),
                        block: layout.describe(block.id),
                    });
                }
                let place = || store.place_of(manifest, file);
                let placed = layout.place(&block, &mut state);
                placed.map_err(|why| CheckpointError::damaged(&place(), why))?;
                blocks += 1;
            }
        }
        if blocks != layout.blocks().count() {
            let place = store.checkpoint_location(manifest.number);
            return Err(CheckpointError::damaged(&place, "blocks are missing").into());
        }
        Ok(state)
    }
}

/// Opens the store of a run's checkpoints, and waits until it answers.
async fn see(stores: &Stores, location: &str, run: &str) -> Result<Store, CheckpointError> {
    let store = (stores.open)(location)?;
    loop {
        match store.owned_by(run).await {
            Err(error) if error.is_retryable() => {
                tracing::warn!("cannot see the checkpoints at present: {error}");
                tokio::time::sleep(AGAIN).await;
            }
            seen => return seen,
        }
    }
}

/// A checkpoint that is being written.
struct Writing {
    layout: Layout,
    state: Arc<MirrorState>,
    /// True if values that are NaN or infinite must not be written.
    only_finite: bool,
    store: Store,
    number: u64,
    /// The index of this part of the checkpoint.
    shard: u32,
    coordinator: Coordinator,
    sender: Sender,
}

impl Writing {
    async fn write_and_report(self) {
        let number = self.number;
        let mut files = Vec::new();
        let written = self.write(&mut files).await;
        let mut report = wire::CheckpointReport {
            number,
            shard: self.shard,
            ..wire::CheckpointReport::default()
        };
        match written {
            Ok(()) => {
                tracing::info!(number, files = files.len(), "wrote a checkpoint");
                report.files = files.into_iter().map(Into::into).collect();
            }
            Err(error) => {
                tracing::error!(number, "a checkpoint cannot be written: {error}");
                self.store.remove_files(number, &files).await;
                report.store_full = error.is_full();
                report.error = error.to_string();
            }
        }
        self.report(report).await;
    }

    /// Writes the files, and adds each one to `files` once it is written.
    async fn write(&self, files: &mut Vec<FileEntry>) -> Result<(), CheckpointError> {
        self.store.check_writable(self.number).await?;
        let mut ids = self.layout.blocks();
        loop {
            let (mut blocks, mut bytes) = (Vec::<SavedBlock>::new(), 0);
            while bytes < FILE_BYTES
                && let Some(block) = ids.next().and_then(|id| self.layout.save(id, &self.state))
            {
                if self.only_finite && !block.values.all_finite() {
                    return Err(CheckpointError::Storage {
                        place: self.store.checkpoint_location(self.number),
                        reason: format!(
                            "{} has values that are NaN or infinite",
                            self.layout.describe(block.id)
                        ),
                    });
                }
                bytes += block
                    .values
                    .numbers()
                    .map(|numbers| numbers.len())
                    .iter()
                    .sum::<usize>();
                blocks.push(block);
            }
            if blocks.is_empty() {
                return Ok(());
            }
            let name = self.store.part_name(self.shard, files.len());
            let content = encode(&blocks);
            let file = FileEntry::of_blocks(&name, &content, &blocks);
            self.store.write_file(self.number, &name, content).await?;
            files.push(file);
            self.report(wire::CheckpointReport {
                number: self.number,
                shard: self.shard,
                unfinished: true,
                ..wire::CheckpointReport::default()
            })
            .await;
        }
    }

    async fn report(&self, report: wire::CheckpointReport) {
        let origin = self.sender.next_origin_here();
        if let Err(error) = self
            .coordinator
            .report(origin, Report::Checkpoint(report))
            .await
        {
            tracing::warn!(self.number, "could not report a checkpoint: {error}");
        }
    }
}
