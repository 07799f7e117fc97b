use std::path::Path;

use ::checkpoint::{FORMAT, FileEntry, SavedBlock, SavedValues, SavedVariable, encode};
use bytes::Bytes;
use clap::FromArgMatches;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{ListAccessor, RowAccessor};
use safetensors::SafeTensors;
use shared_proto::blocks::{BlockId, VariableKind};
use shared_proto::ids::Version;
use shared_proto::job::Adagrad;
use shared_proto::table::{RowOptimizer, SavedRows, TableSpec};

use super::*;

const FILE: &str = "shard-0-part-0000.safetensors";

fn numbers(range: std::ops::Range<u32>) -> Bytes {
    range.flat_map(|i| (i as f32).to_le_bytes()).collect()
}

fn table() -> TableSpec {
    TableSpec {
        name: "items".to_owned(),
        dimension: 2,
        buckets: 1,
        optimizer: RowOptimizer::RowAdagrad(Adagrad::default()),
        ..TableSpec::default()
    }
}

/// The ids of the table's rows, and the values of each.
const ROWS: [(u64, [f32; 2]); 3] = [(7, [0.0, 1.0]), (u64::MAX, [3.0, 4.0]), (1, [6.0, 7.0])];

/// Returns the bucket with these rows. Each has a number of the optimizer's state too.
fn bucket() -> SavedBlock {
    SavedBlock {
        id: BlockId {
            variable: 2,
            index: 0,
        },
        version: Version(3),
        watermarks: vec![],
        values: SavedValues::Rows(SavedRows {
            ids: ROWS.iter().flat_map(|(id, _)| id.to_le_bytes()).collect(),
            numbers: numbers(0..9),
            history: Bytes::new(),
            counts: Bytes::new(),
            updates: 3,
            time: 3,
            changes: None,
        }),
    }
}

/// Saves a checkpoint of a variable `b` of 2 x 5 in blocks of 4, a scalar, and a table of one bucket.
async fn save(store: &Store, number: u64) {
    let block = |variable, index, range| SavedBlock {
        id: BlockId { variable, index },
        version: Version(3),
        watermarks: vec![],
        values: SavedValues::Dense {
            slots: numbers(100..100 + range_len(&range)),
            weights: numbers(range),
        },
    };
    let files = [
        (FILE, vec![block(0, 0, 0..4), block(0, 2, 8..10)]),
        (
            "shard-1-part-0000.safetensors",
            vec![block(0, 1, 4..8), block(1, 0, 77..78), bucket()],
        ),
    ];
    let mut entries = Vec::new();
    for (name, blocks) in files {
        let content = encode(&blocks);
        let ids: Vec<BlockId> = blocks.iter().map(|block| block.id).collect();
        entries.push(FileEntry::new(name, &content, ids));
        store.write_file(number, name, content).await.unwrap();
    }
    let variable = |name: &str, shape: &[u64]| SavedVariable {
        name: name.to_owned(),
        shape: shape.to_vec(),
        kind: VariableKind::Trained,
        slots: 1,
    };
    let manifest = Manifest {
        format: FORMAT,
        number,
        run: String::new(),
        job: "digits".to_owned(),
        job_toml: String::new(),
        mode: "sync".to_owned(),
        epoch: 1,
        clock: 10 * number,
        steps: 10 * number,
        samples: 320 * number,
        began: 1_700_000_000,
        variables: vec![variable("b \"quoted\"", &[2, 5]), variable("c", &[])],
        tables: vec![table()],
        block_elements: 4,
        slots: None,
        shards: 2,
        files: entries,
        progress: json!({
            "ledger": {
                "samples": 100, "epochs": 1, "batch": 10, "budget": null, "shared_steps": false,
                "next_id": 1, "epoch": 0, "position": 0, "returned": [], "leased": {}, "done": {},
            },
            // Earlier releases have written numbers that are NaN or infinite like this.
            "due": [],
            "evaluations": [{"data_epoch": 0, "samples": 10, "metrics": {"loss": null}}],
            "clock": 10, "steps": 10, "samples": 100, "generation": 1,
        }),
        checksum: String::new(),
    };
    store.write_manifest(manifest).await.unwrap();
}

fn range_len(range: &std::ops::Range<u32>) -> u32 {
    range.end - range.start
}

/// Creates a run with checkpoints 1, 2 and 3, and an unfinished checkpoint 4.
fn a_run() -> (tempfile::TempDir, String) {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().to_str().unwrap().to_owned();
    block_on(async {
        let store = Store::open(&format!("{run}/checkpoints"))?;
        for number in 1..=3 {
            save(&store, number).await;
        }
        store.write_file(4, FILE, Bytes::new()).await?;
        Ok(())
    })
    .unwrap();
    (root, run)
}

fn named(location: &str) -> Named {
    Named {
        location: location.to_owned(),
        json: true,
    }
}

fn damage(run: &str, number: u64, file: &str) {
    let path = format!("{run}/checkpoints/{}/{file}", folder_name(number));
    let mut content = std::fs::read(&path).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 1;
    std::fs::write(path, content).unwrap();
}

fn states(location: &str) -> Vec<String> {
    let found = block_on(list(location)).unwrap();
    assert_eq!(list_table(&found).lines().count(), found.len() + 1);
    found.iter().map(Found::state).collect()
}

#[test]
fn a_list_tells_what_is_whole() {
    let (_root, run) = a_run();
    damage(&run, 2, "manifest.json");
    let missing = format!("{run}/checkpoints/{}/{FILE}", folder_name(3));
    std::fs::remove_file(missing).unwrap();
    let expected = [
        "whole".to_owned(),
        "damaged: manifest.json: altered: its checksum is another".to_owned(),
        format!("damaged: {FILE}: it is missing"),
        "unfinished".to_owned(),
    ];
    assert_eq!(states(&run), expected);
    let one = format!("{run}/checkpoints/{}", folder_name(1));
    assert_eq!(states(&one), ["whole"]);
    let found = block_on(list(&one)).unwrap();
    let value = found[0].json();
    assert_eq!(value["steps"], 10);
    assert_eq!(value["location"], one.as_str());
    assert!(
        run_with(&Command::Ls(named(&format!(
            "{run}/checkpoints/{}",
            folder_name(9)
        ))))
        .is_err()
    );
}

fn run_with(command: &Command) -> Result<(), CommandError> {
    super::run(command)
}

#[test]
fn show_has_the_files() {
    let (_root, run) = a_run();
    let (store, manifest) = block_on(pick(&run)).unwrap();
    assert_eq!(manifest.number, 3);
    let text = manifest_text(&store, &manifest);
    assert!(
        text.contains("2 variables, 11 weights, 1 slot beside each"),
        "{text}"
    );
    assert!(text.contains(&manifest.files[1].sha256), "{text}");
    let value = manifest_json(&store, &manifest);
    assert_eq!(value["files"][1]["name"], "shard-1-part-0000.safetensors");
}

#[test]
fn verify_names_all_that_is_damaged() {
    let (_root, run) = a_run();
    let verify = |location: &str| {
        run_with(&Command::Verify {
            named: named(location),
            quiet: true,
        })
    };
    verify(&run).unwrap();
    damage(&run, 1, FILE);
    damage(&run, 3, "manifest.json");
    let Err(CommandError::Damaged { damages }) = verify(&run) else {
        panic!("it found no damage");
    };
    let place = |number| format!("{run}/checkpoints/{}", folder_name(number));
    assert_eq!(damages.len(), 2);
    assert!(damages[0].starts_with(&format!("{}/{FILE} is damaged: altered", place(1))));
    assert!(damages[1].starts_with(&format!("{}/manifest.json is damaged", place(3))));
    verify(&place(2)).unwrap();
    assert!(verify(&place(1)).is_err());
    assert!(verify(&place(4)).is_err());
}

/// Runs `flambeau checkpoint export` with these arguments.
fn export_with(arguments: &[&str]) -> Result<(), CommandError> {
    let command = Command::augment_subcommands(clap::Command::new("checkpoint"));
    let arguments = ["checkpoint", "export", "--quiet"].iter().chain(arguments);
    let matches = command.try_get_matches_from(arguments).unwrap();
    run_with(&Command::from_arg_matches(&matches).unwrap())
}

fn export(location: &str, output: &Path, force: bool) -> Result<(), CommandError> {
    let mut arguments = vec![location, "--output", output.to_str().unwrap()];
    arguments.extend(force.then_some("--force"));
    export_with(&arguments)
}

#[test]
fn an_export_is_what_safetensors_would_write() {
    use safetensors::tensor::TensorView;
    let (root, run) = a_run();
    let output = root.path().join("model.safetensors");
    export(&run, &output, false).unwrap();
    let found = std::fs::read(&output).unwrap();
    let (b, c) = (numbers(0..10), numbers(77..78));
    let f32s = safetensors::Dtype::F32;
    let views = [
        (
            "b \"quoted\"",
            TensorView::new(f32s, vec![2, 5], &b).unwrap(),
        ),
        ("c", TensorView::new(f32s, vec![], &c).unwrap()),
    ];
    assert_eq!(found, safetensors::serialize(views, None).unwrap());
    assert_eq!(SafeTensors::deserialize(&found).unwrap().len(), 2);

    let refused = export(&run, &output, false).unwrap_err().to_string();
    assert!(refused.contains("--force"), "{refused}");
    std::fs::write(&output, "other").unwrap();
    export(&run, &output, true).unwrap();
    assert_eq!(std::fs::read(&output).unwrap(), found);
}

fn export_table(location: &str, table: &str, output: &Path) -> Result<(), CommandError> {
    export_with(&[
        location,
        "--table",
        table,
        "--output",
        output.to_str().unwrap(),
    ])
}

#[test]
fn a_table_is_exported_in_both_forms_as_its_rows_are() {
    let (root, run) = a_run();
    let output = root.path().join("items.safetensors");
    export_table(&run, "items", &output).unwrap();
    let file = std::fs::read(&output).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let (ids, values) = (
        tensors.tensor("ids").unwrap(),
        tensors.tensor("values").unwrap(),
    );
    assert_eq!((ids.shape(), values.shape()), (&[3][..], &[3, 2][..]));
    let expected: Vec<u8> = ROWS.iter().flat_map(|(id, _)| id.to_le_bytes()).collect();
    assert_eq!(ids.data(), expected);
    let all = ROWS.iter().flat_map(|(_, values)| values);
    let expected: Vec<u8> = all.flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(values.data(), expected);

    let output = root.path().join("items.parquet");
    export_table(&run, "items", &output).unwrap();
    let file = std::fs::File::open(&output).unwrap();
    let reader = SerializedFileReader::new(file).unwrap();
    let rows = reader.get_row_iter(None).unwrap().map(Result::unwrap);
    let found: Vec<(u64, Vec<f32>)> = rows
        .map(|row| {
            let list = row.get_list(1).unwrap();
            let values = (0..list.len()).map(|i| list.get_float(i).unwrap());
            (row.get_ulong(0).unwrap(), values.collect())
        })
        .collect();
    let expected: Vec<(u64, Vec<f32>)> = ROWS.map(|(id, values)| (id, values.to_vec())).into();
    assert_eq!(found, expected);
}

#[test]
fn an_export_of_rows_that_cannot_be_says_what_there_is() {
    let (root, run) = a_run();
    for (table, file, expected) in [
        ("users", "users.parquet", "it has items"),
        ("items", "items.csv", ".parquet or .safetensors"),
    ] {
        let output = root.path().join(file);
        let error = export_table(&run, table, &output).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!output.exists());
    }
}

#[test]
fn averages_are_exported_only_where_there_are_some() {
    let (root, run) = a_run();
    let output = root.path().join("model.safetensors");
    let error = export_with(&[&run, "--averages", "--output", output.to_str().unwrap()]);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("ema_decay"), "{error}");
    assert!(!output.exists());
}

#[test]
fn nothing_is_exported_from_what_is_damaged() {
    let (root, run) = a_run();
    damage(&run, 3, FILE);
    let output = root.path().join("model.safetensors");
    let error = export(&run, &output, false).unwrap_err();
    assert!(error.to_string().contains("altered"), "{error}");
    assert!(!output.exists());
    let left = std::fs::read_dir(root.path()).unwrap().count();
    assert_eq!(left, 1, "only the checkpoints");

    // If the newest manifest is damaged, the previous checkpoint is used.
    damage(&run, 3, "manifest.json");
    export(&run, &output, false).unwrap();
}
