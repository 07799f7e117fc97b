//! Gradients of the models that come with Flambeau: against finite differences, and against
//! PyTorch over 20 steps of training.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use shared_proto::job;
use shared_proto::payload::{self, Dtype, Elements};
use worker::model::{Batch, Model, ModelError, Setup};
use worker::registry::Registry;
use worker::variables::Variables;

const MODELS: [&str; 3] = ["softmax", "mlp", "cnn"];

fn settings(hidden: &[usize], channels: &[usize]) -> job::Model {
    job::Model {
        hidden: hidden.to_vec(),
        channels: channels.to_vec(),
        ..job::Model::default()
    }
}

/// Compares each element of each gradient with (f(x + e) - f(x - e)) / 2e, in f64, where e is so
/// small that neither rounding nor curvature matters.
fn check_by_finite_differences(
    name: &str,
    sample_shape: &[usize],
    pixel: impl Fn(&mut ChaCha8Rng) -> f64,
) -> f64 {
    const STEP: f64 = 1e-5;
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let settings = settings(&[5, 4], &[2, 3]);
    let setup = Setup {
        settings: &settings,
        sample_shape,
        classes: 3,
    };
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
    let model = Registry::builtin().build(name, &setup, vars).unwrap();
    let vars: BTreeMap<_, _> = map.data().lock().unwrap().clone().into_iter().collect();
    for var in vars.values() {
        let values: Vec<f64> = (0..var.elem_count())
            .map(|_| random.random_range(-0.6..0.6))
            .collect();
        var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap())
            .unwrap();
    }

    let samples = 4;
    let size = sample_shape.iter().product::<usize>();
    let pixels: Vec<f64> = (0..samples * size).map(|_| pixel(&mut random)).collect();
    let shape = [&[samples], sample_shape].concat();
    let batch = Batch {
        inputs: Tensor::from_vec(pixels, shape, &Device::Cpu).unwrap(),
        targets: Tensor::new(&[0u32, 1, 2, 1], &Device::Cpu).unwrap(),
    };
    let loss = || model.loss(&batch).unwrap().to_scalar::<f64>().unwrap();
    let gradients = model.loss(&batch).unwrap().backward().unwrap();

    let mut worst = 0f64;
    for (variable, var) in &vars {
        let gradient = gradients
            .get(var)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f64>()
            .unwrap();
        let at = var.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        for (i, computed) in gradient.iter().enumerate() {
            let moved = |by: f64| {
                let mut values = at.clone();
                values[i] += by;
                var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap())
                    .unwrap();
                loss()
            };
            let measured = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            moved(0.0);
            let error = (computed - measured).abs();
            assert!(
                error < 1e-8 + 1e-6 * measured.abs(),
                "{name}, {variable}[{i}]: {computed} computed, {measured} measured"
            );
            worst = worst.max(error);
        }
    }
    worst
}

#[test]
fn gradients_agree_with_finite_differences() {
    for name in MODELS {
        // Odd sizes, so that pooling has to leave something out.
        let worst =
            check_by_finite_differences(name, &[2, 7, 6], |random| random.random_range(-1.0..1.0));
        eprintln!("{name}: largest difference {worst:.1e}");
    }
}

#[test]
fn equal_maxima_share_one_gradient() {
    // Most windows of a blank picture hold four equal values.
    for blank in [0.0, 1.0] {
        check_by_finite_differences("cnn", &[1, 8, 8], |_| blank);
    }
}

/// Results of PyTorch, made by `vectors/make_model_vectors.py`.
struct Vectors(std::collections::HashMap<String, Tensor>);

impl Vectors {
    fn read(model: &str) -> Self {
        let path = format!(
            "{}/tests/vectors/{model}.safetensors",
            env!("CARGO_MANIFEST_DIR")
        );
        Self(candle_core::safetensors::load(path, &Device::Cpu).unwrap())
    }

    fn numbers(&self, name: &str) -> Vec<f32> {
        self.0[name].flatten_all().unwrap().to_vec1().unwrap()
    }

    fn batch(&self, step: usize) -> Batch {
        Batch {
            inputs: self.0["inputs"].get(step).unwrap(),
            targets: self.0["labels"]
                .get(step)
                .unwrap()
                .to_dtype(DType::U32)
                .unwrap(),
        }
    }
}

fn build(name: &str, setup: &Setup) -> (Variables, Box<dyn Model>) {
    let registry = Registry::builtin();
    Variables::build(1, &Device::Cpu, |vars| registry.build(name, setup, vars)).unwrap()
}

fn numbers(bytes: &bytes::Bytes) -> Vec<f32> {
    payload::elements(bytes).iter().map(|v| v.get()).collect()
}

fn write(variables: &Variables, variable: usize, values: &[f32]) {
    variables
        .write(
            variable,
            0,
            &Elements::of(payload::to_bytes(values), Dtype::F32),
        )
        .unwrap();
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

#[test]
fn training_agrees_with_pytorch() {
    const LEARNING_RATE: f32 = 0.1;
    for (name, hidden, channels) in [
        ("softmax", vec![], vec![]),
        ("mlp", vec![32, 16], vec![]),
        ("cnn", vec![16], vec![4, 8]),
    ] {
        let vectors = Vectors::read(name);
        let sample_shape = &vectors.0["inputs"].dims()[2..];
        let settings = settings(&hidden, &channels);
        let setup = Setup {
            settings: &settings,
            sample_shape,
            classes: 10,
        };
        let (variables, model) = build(name, &setup);
        let specs = variables.specs();
        let in_file = vectors
            .0
            .keys()
            .filter(|k| k.starts_with("initial."))
            .count();
        assert_eq!(specs.len(), in_file);
        for (i, spec) in specs.iter().enumerate() {
            write(
                &variables,
                i,
                &vectors.numbers(&format!("initial.{}", spec.name)),
            );
        }

        let losses = vectors.numbers("losses");
        let mut worst = (0f32, 0f32, 0f32);
        for (step, expected) in losses.iter().enumerate() {
            let loss = model.loss(&vectors.batch(step)).unwrap();
            let gradients = variables
                .gradients(&loss.backward().unwrap(), None)
                .unwrap();
            worst.0 = worst
                .0
                .max((loss.to_scalar::<f32>().unwrap() / expected - 1.0).abs());
            for (i, spec) in specs.iter().enumerate() {
                let gradient = numbers(&gradients.values[i]);
                if step == 0 {
                    let expected = vectors.numbers(&format!("gradient.{}", spec.name));
                    worst.1 = worst.1.max(largest_difference(&gradient, &expected));
                }
                let values = numbers(&variables.values(i).unwrap());
                let values = values
                    .iter()
                    .zip(&gradient)
                    .map(|(v, g)| v - LEARNING_RATE * g);
                write(&variables, i, &values.collect::<Vec<f32>>());
            }
        }
        for (i, spec) in specs.iter().enumerate() {
            let values = numbers(&variables.values(i).unwrap());
            let expected = vectors.numbers(&format!("final.{}", spec.name));
            worst.2 = worst.2.max(largest_difference(&values, &expected));
        }
        eprintln!(
            "{name}: largest differences from PyTorch: losses {:.1e} (relative), first gradient {:.1e}, final weights {:.1e}",
            worst.0, worst.1, worst.2
        );
        assert!(worst.0 < 1e-5 && worst.1 < 1e-5 && worst.2 < 1e-5);
    }
}

#[test]
fn metrics_are_means_over_the_batch() {
    for name in MODELS {
        let settings = settings(&[6], &[2]);
        let setup = Setup {
            settings: &settings,
            sample_shape: &[1, 12, 12],
            classes: 10,
        };
        let (_, model) = build(name, &setup);
        let batch = Vectors::read("cnn").batch(0);
        let metrics = model.metrics(&batch).unwrap();
        let loss = f64::from(model.loss(&batch).unwrap().to_scalar::<f32>().unwrap());
        assert!((metrics["loss"] - loss).abs() < 1e-6);
    }
    let logits = Tensor::new(
        &[[0f32, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]],
        &Device::Cpu,
    )
    .unwrap();
    let targets = Tensor::new(&[1u32, 1, 1, 0], &Device::Cpu).unwrap();
    let metrics = worker::model::classification_metrics(&logits, &targets).unwrap();
    assert_eq!(metrics["accuracy"], 0.5);
}

fn refusal(name: &str, sample_shape: &[usize]) -> String {
    let settings = settings(&[6], &[2, 2, 2]);
    let setup = Setup {
        settings: &settings,
        sample_shape,
        classes: 10,
    };
    let registry = Registry::builtin();
    let built = Variables::build(1, &Device::Cpu, |vars| registry.build(name, &setup, vars));
    match built {
        Ok(_) => panic!("{name} takes {sample_shape:?}"),
        Err(error @ (ModelError::Unknown { .. } | ModelError::Build { .. })) => error.to_string(),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn what_cannot_be_built_is_explained() {
    let error = refusal("cnm", &[1, 8, 8]);
    assert!(
        error.contains("\"cnm\"") && error.contains("cnn, mlp, softmax"),
        "{error}"
    );
    let error = refusal("cnn", &[64]);
    assert!(
        error.contains("[64]") && error.contains("[channels, height, width]"),
        "{error}"
    );
    let error = refusal("cnn", &[1, 8, 6]);
    assert!(error.contains("2x1 before convolution 2"), "{error}");
    let error = refusal("mlp", &[3, 0]);
    assert!(error.contains("hidden.0.weight"), "{error}");
}
