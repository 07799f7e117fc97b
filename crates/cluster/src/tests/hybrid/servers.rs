//! The servers of the model.

use super::*;

impl Hybrid {
    pub(super) fn start_server(&mut self, server: usize) {
        let task = self.scene.join(Role::Ps, &format!("ps{server}"));
        self.servers[server] = Some(Server {
            task,
            source: Epoch(0),
            rows: Vec::new(),
            staged: BTreeMap::new(),
            committed: None,
            saved: BTreeMap::new(),
        });
    }

    pub(super) fn kill_server(&mut self, server: usize) {
        if let Some(killed) = self.servers[server].take() {
            let leave = wire::LeaveRequest::default();
            self.scene
                .cluster
                .leave(self.scene.now, killed.task, &leave);
        }
    }

    /// Lets the servers take the newest view: they load values, apply a commit, and begin a checkpoint.
    pub(super) fn follow(&mut self) {
        let view = self.scene.cluster.refresh_view().clone();
        let sources: Vec<Source> = match self.scene.cluster.shard_map() {
            Ok(map) => map
                .shards
                .iter()
                .map(|shard| shard.source.clone())
                .collect(),
            Err(_) => return,
        };
        for (shard, source) in sources.iter().enumerate() {
            let Some(server) = &mut self.servers[shard] else {
                continue;
            };
            if server.source != source.epoch {
                let from = source.checkpoint.as_ref();
                let rows = from.map(|(_, number)| self.whole[number].1[shard].clone());
                (server.source, server.rows) = (source.epoch, rows.unwrap_or_default());
                (server.staged, server.committed) = (BTreeMap::new(), None);
                let report = wire::RestoreReport {
                    shard: shard as u32,
                    epoch: source.epoch.0,
                    ..wire::RestoreReport::default()
                };
                let cluster = &mut self.scene.cluster;
                cluster.shard_restored(self.scene.now, server.task, &report);
            }
            let order = view
                .checkpoint
                .filter(|order| !server.saved.contains_key(&order.number));
            // A view may have both the order and the commit of a step after it.
            let later = |commit: &Commit| order.is_some_and(|order| commit.step >= order.clock);
            let before = view
                .commit
                .as_ref()
                .is_some_and(later)
                .then(|| server.rows.clone());
            if let Some(commit) = &view.commit
                && server.committed.as_ref() != Some(commit)
            {
                for (task, samples) in &commit.contributors {
                    let staged = server.staged.remove(task);
                    let staged = staged.filter(|(clock, _)| *clock == commit.step);
                    let (_, rows) = staged.expect("a contributor has staged its rows");
                    assert_eq!(rows.2 - rows.1, *samples);
                    server.rows.push(rows);
                }
                server.staged.clear();
                server.committed = Some(commit.clone());
            }
            if let Some(order) = order {
                let rows = before.unwrap_or_else(|| server.rows.clone());
                server.saved.insert(order.number, rows);
                let report = wire::CheckpointReport {
                    number: order.number,
                    shard: shard as u32,
                    ..wire::CheckpointReport::default()
                };
                let (now, task) = (self.scene.now, server.task);
                self.scene.cluster.shard_saved(now, task, report);
            }
        }
    }

    /// The worker that has copied its values for the checkpoint reports its part. Returns whether the checkpoint is whole.
    pub(super) fn write(&mut self) -> bool {
        let Some(order) = self.scene.cluster.refresh_view().checkpoint else {
            return false;
        };
        let Some((writer, shard, values)) = self.copies.get(&order.number).cloned() else {
            return false;
        };
        let report = wire::CheckpointReport {
            number: order.number,
            shard,
            ..wire::CheckpointReport::default()
        };
        let now = self.scene.now;
        self.scene.cluster.shard_saved(now, writer, report);
        let Some(StoreTask::Write(manifest, _)) = self.scene.cluster.take_store_task() else {
            return false;
        };
        let rows = self.servers.iter().flatten();
        let rows: Vec<_> = rows
            .map(|server| server.saved[&manifest.number].clone())
            .collect();
        for of_server in &rows {
            assert_eq!(
                counts(of_server),
                counts(&values),
                "one step is in all parts"
            );
        }
        let cluster = &mut self.scene.cluster;
        let whole = cluster.manifest_written(now, manifest.number, Ok(()));
        if whole {
            self.whole.insert(manifest.number, (values, rows));
        }
        whole
    }
}
