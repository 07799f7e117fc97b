//! Larger models against PyTorch, over some steps of training: `vectors/make_model_digests.py` says how.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use flambeau_model::input::{Field, Signature};
use flambeau_model::registry::Registry;
use flambeau_model::tables::Tables;
use flambeau_model::{Batch, Objective, Pass, Setup, Stages};
use serde::Deserialize;
use shared_proto::job;

const CLASSES: usize = 10;
const LEARNING_RATE: f64 = 1e-4;

/// A tensor's norm, and its product with a vector of hashed values.
type Digest = [f64; 2];

#[derive(Deserialize)]
struct Vectors {
    models: BTreeMap<String, Expected>,
}

#[derive(Deserialize)]
struct Expected {
    batch: usize,
    shape: Vec<usize>,
    losses: Vec<f64>,
    gradients: BTreeMap<String, Digest>,
    #[serde(rename = "final")]
    last: BTreeMap<String, Digest>,
    outputs: Digest,
}

/// The largest relative errors.
#[derive(Debug, Default)]
struct Errors {
    losses: f64,
    gradients: f64,
    last: f64,
    outputs: f64,
}

/// Numbers from -1 to below 1: `SplitMix64` of the place, begun at the FNV-1a hash of the name.
fn values(name: &str, count: usize) -> Vec<f64> {
    let hash = |state: u64, byte| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let state = name.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
    let value = |place: u64| {
        let z = state.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let z = z ^ (z >> 31);
        (z >> 40) as f64 / f64::from(1 << 23) - 1.0
    };
    (1..=count as u64).map(value).collect()
}

/// Returns the initial value of a variable.
fn initial(name: &str, shape: &[usize]) -> Tensor {
    let fan_in: usize = shape.iter().skip(1).product();
    let change = |drawn: f64| match name {
        name if name.ends_with("running_mean") => 0.0,
        name if name.ends_with("running_var") => 1.0,
        _ if shape.len() > 1 => drawn * (3.0 / fan_in as f64).sqrt(),
        name if name.ends_with("norm.weight") => 1.0 + 0.1 * drawn,
        _ => 0.1 * drawn,
    };
    let drawn = values(name, shape.iter().product());
    let values = drawn.into_iter().map(change).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn digest(name: &str, tensor: &Tensor) -> Digest {
    let numbers = tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let probe = values(&format!("probe {name}"), numbers.len());
    [
        numbers.iter().map(|v| v * v).sum::<f64>().sqrt(),
        numbers.iter().zip(probe).map(|(v, p)| v * p).sum(),
    ]
}

/// Returns the larger error of the two numbers, relative to the norm.
fn error(found: Digest, expected: Digest) -> f64 {
    let largest = (found[0] - expected[0]).abs();
    // Biases before a normalisation have no gradient but roundings.
    largest.max((found[1] - expected[1]).abs()) / expected[0].max(1e-3)
}

/// Returns the batch of each step.
fn batches(name: &str, expected: &Expected) -> Vec<Batch> {
    let samples = expected.batch;
    let size = samples * expected.shape.iter().product::<usize>();
    let steps = expected.losses.len();
    let inputs = values(&format!("samples {name}"), steps * size);
    let labels = values(&format!("labels {name}"), steps * samples);
    let shape = [&[samples], &*expected.shape].concat();
    let batch = |(inputs, labels): (&[f64], &[f64])| {
        let inputs = inputs.iter().map(|v| 1.7 * v).collect();
        let labels = labels
            .iter()
            .map(|v| (f64::midpoint(*v, 1.0) * CLASSES as f64) as u32);
        let inputs = Tensor::from_vec(inputs, shape.as_slice(), &Device::Cpu).unwrap();
        let labels = Tensor::from_iter(labels, &Device::Cpu).unwrap();
        Batch::new(samples)
            .with_input("image", inputs)
            .with_target("label", labels)
    };
    let pairs = inputs.chunks_exact(size).zip(labels.chunks_exact(samples));
    pairs.map(batch).collect()
}

/// Trains a model as PyTorch did, and returns the largest differences.
fn train(name: &str, expected: &Expected) -> Errors {
    let mut settings = job::Model::default();
    if name == "transformer" {
        settings.options.insert("size".into(), 32.into());
    }
    let data = Signature {
        inputs: vec![Field::numbers("image", expected.shape.clone())],
        targets: vec![Field::category("label", CLASSES as u64)],
    };
    let objective = Objective::new(&job::Objective::default(), &data).unwrap();
    let setup = Setup {
        settings: &settings,
        data: &data,
        objective: &objective,
        tables: &Tables::default(),
        stages: &Stages::default(),
    };
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
    let model = Registry::builtin().build(name, &setup, vars).unwrap();
    let vars: BTreeMap<_, _> = map.data().lock().unwrap().clone().into_iter().collect();
    let names: Vec<&String> = vars.keys().collect();
    assert_eq!(names, expected.last.keys().collect::<Vec<_>>(), "{name}");
    for (variable, var) in &vars {
        var.set(&initial(variable, var.dims())).unwrap();
    }
    let mut errors = Errors::default();
    let batches = batches(name, expected);
    for (step, (batch, loss)) in batches.iter().zip(&expected.losses).enumerate() {
        let pass = Pass::training(&objective, 1, step as u64, 0);
        let outputs = model.forward(batch, &pass).unwrap();
        let found = model.loss(&outputs, batch, &pass).unwrap();
        let gradients = nn::backward(&found).unwrap();
        let found = found.to_scalar::<f64>().unwrap();
        errors.losses = errors.losses.max((found / loss - 1.0).abs());
        for (variable, var) in &vars {
            // Running statistics have none.
            let Some(expected) = expected.gradients.get(variable) else {
                continue;
            };
            let gradient = gradients.get(var).unwrap();
            if step == 0 {
                let found = digest(variable, gradient);
                errors.gradients = errors.gradients.max(error(found, *expected));
            }
            let change = (gradient * LEARNING_RATE).unwrap();
            var.set(&(var.as_tensor() - change).unwrap()).unwrap();
        }
    }
    for (variable, var) in &vars {
        let found = digest(variable, var);
        errors.last = errors.last.max(error(found, expected.last[variable]));
    }
    let pass = Pass::evaluation(&objective);
    let outputs = model.forward(&batches[0], &pass).unwrap();
    errors.outputs = error(digest("outputs", &outputs), expected.outputs);
    errors
}

#[test]
fn training_agrees_with_pytorch() {
    let text = include_str!("vectors/digests.json");
    let vectors: Vectors = serde_json::from_str(text).unwrap();
    assert_eq!(vectors.models.len(), 7);
    let mut different = Vec::new();
    for (name, expected) in &vectors.models {
        let errors = train(name, expected);
        eprintln!("{name}: largest relative differences from PyTorch: {errors:?}");
        let errors = [errors.losses, errors.gradients, errors.last, errors.outputs];
        if errors.into_iter().any(|error| error > 1e-6) {
            different.push(name);
        }
    }
    assert!(different.is_empty(), "{different:?}");
}
