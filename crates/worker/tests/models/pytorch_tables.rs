//! Models with embedding tables against PyTorch over 20 steps of training in one process.

use std::path::PathBuf;

use flambeau_worker::alone::local;
use shared_proto::job::Job;
use shared_proto::table::SavedRows;

use super::*;

/// Returns the numbers of each row by id: the values, and the optimizer's state behind them.
fn by_id(saved: &SavedRows) -> BTreeMap<u64, Vec<f32>> {
    let (ids, _) = saved.ids.as_chunks::<8>();
    let numbers: Vec<f32> = payload::elements(&saved.numbers)
        .iter()
        .map(|number| number.get())
        .collect();
    let width = numbers.len().checked_div(ids.len()).unwrap_or(1);
    let rows = numbers.chunks(width);
    let ids = ids.iter().map(|id| u64::from_le_bytes(*id));
    ids.zip(rows.map(<[f32]>::to_vec)).collect()
}

/// Returns the rows of a tensor.
fn rows(tensor: &Tensor) -> Vec<Vec<f32>> {
    tensor.to_vec2().unwrap()
}

fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let pairs = found.iter().zip(expected);
    pairs.map(|(f, e)| (f - e).abs()).fold(0.0, f32::max)
}

/// `vectors/make_table_vectors.py` says how PyTorch has trained. All samples are in each step, so their order does not
/// count.
#[test]
fn models_with_tables_train_as_pytorch_does() {
    let vectors = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let adagrad = r#"{ name = "adagrad", learning_rate = 0.1 }"#;
    let sgd = r#"{ name = "sgd", learning_rate = 0.5 }"#;
    let own_loss =
        "options = { item = [\"categories\"], temperature = 0.5 }\n[objective]\nloss = \"model\"";
    for (name, optimizer, more) in [
        ("deepfm", adagrad, ""),
        ("wide-deep", sgd, ""),
        ("dlrm", adagrad, ""),
        ("two-tower", sgd, own_loss),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let expected = vectors.join(format!("{name}.safetensors"));
        let expected = candle_core::safetensors::load(expected, &Device::Cpu).unwrap();
        let initial: std::collections::HashMap<String, Tensor> = expected
            .iter()
            .filter_map(|(name, values)| {
                let name = name.strip_prefix("initial.")?;
                Some((name.to_owned(), values.clone()))
            })
            .collect();
        for part in ["train.tsv", "test.tsv"] {
            std::fs::copy(vectors.join("clicks.tsv"), folder.path().join(part)).unwrap();
        }
        let begin = folder.path().join("initial.safetensors");
        candle_core::safetensors::save(&initial, &begin).unwrap();
        let job = format!(
            r#"
batch_size = 64
epochs = 20
[data]
kind = "criteo"
dir = {folder:?}
options = {{ train = "train.tsv", test = "test.tsv" }}
[model]
name = "{name}"
embedding = 4
hidden = [8, 6]
init_from = {begin:?}
{more}
[optimizer]
name = "sgd"
learning_rate = 0.1
[[tables]]
tables = "*"
initializer = "zeros"
optimizer = {optimizer}
"#,
            folder = folder.path().display().to_string(),
            begin = begin.display().to_string(),
        );
        let job = Job::parse(&job).unwrap();
        let saved = folder.path().join("model.safetensors");
        let registry = Registry::builtin();
        let outcome = local::train(&job, &registry, &Device::Cpu, Some(&saved)).unwrap();
        assert_eq!(outcome.steps, 20);
        let mut found = candle_core::safetensors::load(&saved, &Device::Cpu).unwrap();
        // PyTorch's model has no averages.
        found.retain(|variable, _| !variable.contains("running_"));
        assert_eq!(found.len(), initial.len());
        let mut worst = 0f32;
        for (variable, values) in &found {
            let all = |values: &Tensor| values.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let expected = all(&expected[&format!("final.{variable}")]);
            worst = worst.max(difference(&all(values), &expected));
        }
        let ids: Vec<i64> = expected["ids"].to_vec1().unwrap();
        for (table, buckets) in &outcome.tables {
            let found: BTreeMap<u64, Vec<f32>> =
                buckets.values().flatten().flat_map(by_id).collect();
            assert_eq!(found.len(), ids.len(), "{name}: rows of {table}");
            let values = rows(&expected[table]);
            let state = expected.get(&format!("{table}.state")).map(rows);
            for (place, (id, values)) in ids.iter().zip(values).enumerate() {
                let mut numbers = values;
                numbers.extend(state.iter().flat_map(|state| &state[place]));
                worst = worst.max(difference(&found[&id.cast_unsigned()], &numbers));
            }
        }
        eprintln!("{name}: largest difference from PyTorch: {worst:.1e}");
        assert!(worst < 1e-5, "{name}: {worst}");
    }
}
