//! A reader that applies exports in their order has the rows of the checkpoint.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use ::checkpoint::{FORMAT, FileEntry, SavedBlock, encode, folder_name};
use bytes::Bytes;
use clap::FromArgMatches;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{ListAccessor, Row, RowAccessor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use shared_proto::blocks::BlockId;
use shared_proto::ids::Version;
use shared_proto::job::{Adagrad, Job};
use shared_proto::table::{Changes, RowOptimizer, SavedRows, TableSpec, ids_to_bytes};

use super::*;
use crate::command::block_on;

const BUCKETS: u32 = 3;

/// The value of each row, by id.
type State = BTreeMap<u64, f32>;

fn spec() -> TableSpec {
    TableSpec {
        name: "item".to_owned(),
        dimension: 1,
        buckets: BUCKETS,
        optimizer: RowOptimizer::Adagrad(Adagrad::default()),
        ..TableSpec::default()
    }
}

/// Returns a bucket: the rows of a state, or those that differ from an earlier checkpoint's.
fn bucket(index: u32, state: &State, base: Option<(u64, &State)>) -> SavedBlock {
    let mine = |id: &u64| id % u64::from(BUCKETS) == u64::from(index);
    let earlier = |id| base.and_then(|(_, earlier)| earlier.get(id));
    let rows = state.iter();
    let rows = rows.filter(|(id, value)| mine(id) && earlier(id) != Some(value));
    let (ids, values): (Vec<u64>, Vec<f32>) = rows.unzip();
    let changes = base.map(|(since, earlier)| {
        let removed = earlier
            .keys()
            .filter(|id| mine(id) && !state.contains_key(id));
        Changes {
            since,
            removed: ids_to_bytes(&removed.copied().collect::<Vec<u64>>()),
        }
    });
    SavedBlock {
        id: BlockId { variable: 0, index },
        version: Version(1),
        watermarks: Vec::new(),
        values: ::checkpoint::SavedValues::Rows(SavedRows {
            ids: ids_to_bytes(&ids),
            // The optimizer's state is another number each time.
            numbers: values
                .iter()
                .flat_map(|value| [*value, state.len() as f32])
                .flat_map(f32::to_le_bytes)
                .collect::<Bytes>(),
            changes,
            ..SavedRows::default()
        }),
    }
}

/// Saves a checkpoint, which builds on an earlier one with its state if one is given.
async fn save(
    store: &Store,
    run: &str,
    number: u64,
    state: &State,
    base: Option<(&Manifest, &State)>,
) -> Manifest {
    let before = base.map(|(manifest, earlier)| (manifest.number, earlier));
    let mut files = Vec::new();
    for (part, buckets) in [0..2, 2..BUCKETS].into_iter().enumerate() {
        let blocks: Vec<SavedBlock> = buckets.map(|index| bucket(index, state, before)).collect();
        let name = format!("shard-0-part-{part:04}.safetensors");
        let content = encode(&blocks);
        store
            .write_file(number, &name, content.clone())
            .await
            .unwrap();
        files.push(FileEntry::of_blocks(&name, &content, &blocks));
    }
    if let Some((base, _)) = base {
        let changes: Vec<_> = files.iter().flat_map(|file| file.changes.clone()).collect();
        files.extend(base.files_under(&changes).unwrap());
    }
    let manifest = Manifest {
        format: FORMAT,
        number,
        run: run.to_owned(),
        job: "feed".to_owned(),
        job_toml: Job::default().to_toml(),
        mode: "async".to_owned(),
        epoch: 1,
        clock: number,
        steps: number,
        samples: number,
        began: 1_700_000_000,
        variables: Vec::new(),
        tables: vec![spec()],
        block_elements: 4,
        slots: None,
        shards: 1,
        files,
        progress: json!({}),
        checksum: String::new(),
    };
    store.write_manifest(manifest).await.unwrap()
}

/// Exports the newest checkpoint.
fn export(run: &Path, output: &Path) -> Result<(), CommandError> {
    let command = crate::checkpoint::Export::augment_args(clap::Command::new("export"));
    let (run, output) = (run.to_str().unwrap(), output.to_str().unwrap());
    let arguments = ["export", run, "--table=item", "--output", output];
    let more = ["--follow", "--once", "--changes=4"];
    let matches = command.try_get_matches_from(arguments.iter().chain(&more));
    let export = crate::checkpoint::Export::from_arg_matches(&matches.unwrap()).unwrap();
    block_on(export.run())
}

fn rows(folder: &Path, files: &[entry::File], mut take: impl FnMut(Row)) {
    for file in files {
        let file = File::open(folder.join(&file.name)).unwrap();
        let rows = SerializedFileReader::new(file).unwrap();
        rows.get_row_iter(None)
            .unwrap()
            .for_each(|row| take(row.unwrap()));
    }
}

/// Applies all exports. Returns the rows, and the number of exports of changes.
fn applied(output: &Path) -> (State, usize) {
    let (mut state, mut of_changes) = (State::new(), 0);
    for number in 0.. {
        let folder = output.join(entry::folder(number));
        let Ok(text) = std::fs::read(folder.join("manifest.json")) else {
            break;
        };
        let entry: Entry = serde_json::from_slice(&text).unwrap();
        if entry.full {
            state.clear();
        } else {
            of_changes += 1;
        }
        rows(&folder, &entry.removed_files, |row| {
            // It may have been created after the export before.
            state.remove(&row.get_ulong(0).unwrap());
        });
        rows(&folder, &entry.files, |row| {
            let values = row.get_list(1).unwrap();
            state.insert(row.get_ulong(0).unwrap(), values.get_float(0).unwrap());
        });
    }
    (state, of_changes)
}

/// Checkpoints of all kinds: full ones, changes since the one before or, as after a loss, since an earlier one, of which
/// some are exported and old ones are deleted.
#[test]
fn exports_add_up_to_the_checkpoint() {
    let mut of_changes = 0;
    for seed in 0..40 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let root = tempfile::tempdir().unwrap();
        let (run, output) = (root.path().join("run"), root.path().join("feed"));
        let checkpoints = run.join("checkpoints");
        std::fs::create_dir_all(&checkpoints).unwrap();
        let store = Store::open(checkpoints.to_str().unwrap()).unwrap();
        let mut saved: Vec<(Manifest, State)> = Vec::new();
        for number in 1..14 {
            // After a loss, training goes on from an earlier checkpoint.
            let back = if random.random_bool(0.2) { 2 } else { 1 };
            let base = saved.len().checked_sub(back).map(|place| &saved[place]);
            let mut state = base.map(|(_, state)| state.clone()).unwrap_or_default();
            for _ in 0..random.random_range(0..12) {
                let id = random.random_range(0..20);
                match random.random_bool(0.3) {
                    true => drop(state.remove(&id)),
                    false => drop(state.insert(id, random.random())),
                }
            }
            let base = base.filter(|_| random.random_bool(0.7));
            let base = base.map(|(manifest, state)| (manifest, state));
            let manifest = block_on(async {
                Ok::<_, CommandError>(save(&store, "r", number, &state, base).await)
            });
            saved.push((manifest.unwrap(), state));
            if random.random_bool(0.6) {
                export(&run, &output).unwrap();
                let (found, changes) = applied(&output);
                assert_eq!(
                    found,
                    saved[saved.len() - 1].1,
                    "seed {seed}, checkpoint {number}"
                );
                of_changes += changes;
                // Nothing is new, so nothing is exported.
                let before = std::fs::read_dir(&output).unwrap().count();
                export(&run, &output).unwrap();
                assert_eq!(std::fs::read_dir(&output).unwrap().count(), before);
            }
            if random.random_bool(0.15) {
                let newest = saved.pop().unwrap();
                let needed = newest.0.builds_on();
                for (manifest, _) in saved.drain(..) {
                    if !needed.contains(&manifest.number) {
                        let folder = checkpoints.join(folder_name(manifest.number));
                        std::fs::remove_dir_all(folder).unwrap();
                    }
                }
                saved.push(newest);
            }
        }
    }
    assert!(of_changes > 100, "only {of_changes} exports of changes");
}

#[test]
fn a_feed_of_another_table_or_a_damaged_one_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let (run, output) = (root.path().join("run"), root.path().join("feed"));
    std::fs::create_dir_all(run.join("checkpoints")).unwrap();
    let store = Store::open(run.join("checkpoints").to_str().unwrap()).unwrap();
    let state = State::from([(1, 1.0)]);
    block_on(async { Ok(save(&store, "r", 1, &state, None).await) }).unwrap();
    export(&run, &output).unwrap();
    let path = output.join(entry::folder(0)).join("manifest.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"item\"", "\"user\"")).unwrap();
    let error = export(&run, &output).unwrap_err().to_string();
    assert!(
        error.contains("\"user\"") && error.contains("another folder"),
        "{error}"
    );
    std::fs::write(&path, &text[..40]).unwrap();
    let error = export(&run, &output).unwrap_err().to_string();
    assert!(
        error.contains("manifest.json") && error.contains("damaged"),
        "{error}"
    );
}
