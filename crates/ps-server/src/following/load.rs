//! Loads a shard's values from a checkpoint. The shards that wrote the checkpoint may have had other blocks.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use checkpoint::{CheckpointError, FileEntry, LoadError, Manifest, NewestFirst, Piece, Wanted};
use daemon::Offload;
use shared_proto::blocks::{BlockId, ShardMap};
use shared_proto::ids::{Task, Version};
use shared_proto::job::Job;
use shared_proto::planted;
use shared_proto::wire;

use crate::row_settings::RowStorage;
use crate::shard::Block;
use crate::shard::store::{Rules, Store, TableStorage};

/// Loads the blocks of `shard`.
///
/// # Errors
/// See the variants of [`LoadError`].
pub(crate) async fn load(
    shard: u32,
    map: ShardMap,
    from: &checkpoint::Store,
    manifest: &Manifest,
    job: &Job,
    rows: &RowStorage,
    offload: Offload,
) -> Result<Store, LoadError> {
    let source = map.shards.get(shard as usize).map(|shard| &shard.source);
    let model = Wanted {
        variables: map.variables.iter().map(|placed| &placed.spec).collect(),
        tables: map.tables.iter().map(|placed| &placed.spec).collect(),
        run: source.map_or("", |source| &source.run),
    };
    model.check(from, manifest, job)?;
    if manifest.block_elements != map.block_elements as u64 {
        return Err(LoadError::OtherJob {
            number: manifest.number,
            location: from.location().to_owned(),
            what: "its blocks have another size",
        });
    }
    let wanted: HashSet<BlockId> = map.blocks_of(shard).collect();
    let map = Arc::new(map);
    let has_wanted = |file: &&FileEntry| {
        let mut ids = file.blocks.iter().flat_map(|range| range.ids());
        ids.any(|id| wanted.contains(&id))
    };
    let tables = Arc::new(TableStorage::new(&map, rows));
    let mut blocks = BTreeMap::new();
    let mut reading = NewestFirst::default();
    let damaged =
        |file: &FileEntry, why| CheckpointError::damaged(&from.place_of(manifest, file), why);
    for file in NewestFirst::files(manifest).into_iter().filter(has_wanted) {
        let mut pieces = Vec::new();
        for block in from.read_file(manifest, file).await? {
            if wanted.contains(&block.id) {
                let piece = reading.take(manifest, file, block);
                pieces.extend(piece.map_err(|why| damaged(file, why))?);
            }
        }
        let (under, tables) = (Arc::clone(&map), Arc::clone(&tables));
        let restored = offload.run(move || {
            for piece in pieces {
                restore(&mut blocks, piece, &under, &tables)?;
            }
            Ok(blocks)
        });
        blocks = restored.await.map_err(|why| damaged(file, why))?;
    }
    let ended = reading.finish(manifest);
    let place = from.checkpoint_location(manifest.number);
    ended.map_err(|why| CheckpointError::damaged(&place, why))?;
    let rules = Rules::new(&map, job);
    let map = Arc::unwrap_or_clone(map);
    Ok(Store::of_blocks(
        shard,
        map,
        blocks.into_iter().collect(),
        rules,
    ))
}

/// Restores a block, or adds older rows to a restored bucket.
fn restore(
    blocks: &mut BTreeMap<BlockId, Block>,
    piece: Piece,
    map: &ShardMap,
    tables: &TableStorage,
) -> Result<(), String> {
    let (id, restored) = match piece {
        Piece::Newest(saved) => {
            let id = saved.id;
            let table = map.table(id).unwrap_or_default();
            let block = Block::restore(saved, table, tables.of_block(id));
            (id, block.map(|block| drop(blocks.insert(id, block))))
        }
        Piece::Older(..) if planted!(NewestRowsAlone) => return Ok(()),
        Piece::Older(id, rows) => {
            let table = map.table(id).unwrap_or_default();
            let block = blocks.get_mut(&id).ok_or("its newest rows are missing");
            let added = block.map_err(str::to_owned);
            (id, added.and_then(|block| block.add_rows(&rows, table)))
        }
    };
    restored.map_err(|why| format!("{}: {why}", map.describe(id)))
}

/// Returns the versions of a shard's restored blocks. Neighbouring blocks of the same version share an entry.
pub(crate) fn versions(store: &Store) -> Vec<wire::RestoredBlocks> {
    let mut found: Vec<wire::RestoredBlocks> = Vec::new();
    for id in store.map.blocks_of(store.shard) {
        let block = store.blocks.by_id.get(&id);
        let version = block.map_or(Version(0), |block| block.lock().version());
        let last = found.last_mut().filter(|found| found.version == version.0);
        match last.and_then(|found| found.blocks.as_mut()) {
            Some(range) if range.variable == id.variable && range.last + 1 == id.index => {
                range.last = id.index;
            }
            _ => found.push(wire::RestoredBlocks {
                blocks: Some(wire::BlockRange {
                    variable: id.variable,
                    first: id.index,
                    last: id.index,
                }),
                version: version.0,
            }),
        }
    }
    found
}

/// Returns how many blocks have taken how many pushes of each worker. An entry has a worker, a number of pushes, and
/// the number of blocks that have taken exactly this number of the worker's pushes.
pub(crate) fn watermarks(store: &Store) -> Vec<wire::Watermark> {
    let mut blocks = BTreeMap::<(Task, u64), u64>::new();
    for block in &store.blocks.by_id {
        for last in block.lock().watermarks() {
            *blocks.entry((last.task, last.taken)).or_default() += 1;
        }
    }
    let watermark = |((task, taken), blocks): ((Task, u64), u64)| wire::Watermark {
        task: Some(task.into()),
        taken,
        blocks,
    };
    blocks.into_iter().map(watermark).collect()
}
