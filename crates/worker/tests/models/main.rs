//! The models that come with Flambeau: gradients against finite differences, and what cannot be built.
//!
//! - `tables`: models of numbers and categories
//! - `pytorch`: training beside PyTorch, and torchvision's names
//! - `pytorch_tables`: the same for models with embedding tables

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use model::input::{Field, Signature};
use model::registry::Registry;
use model::tables::{Table, Tables};
use model::{Batch, Model, ModelError, Objective, Pass, Setup, Stages};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use shared_proto::blocks::VariableKind;
use shared_proto::job::{self, Clip, Job};
use shared_proto::payload::{self, Dtype, Elements};
use variables::Variables;

mod pytorch;
mod pytorch_tables;
mod tables;

const MODELS: [&str; 4] = ["logistic", "softmax", "mlp", "cnn"];

fn settings(hidden: &[usize], channels: &[usize]) -> job::Model {
    job::Model {
        hidden: hidden.to_vec(),
        channels: channels.to_vec(),
        ..job::Model::default()
    }
}

/// Pictures of this shape, and their classes.
struct Pictures {
    data: Signature,
    objective: Objective,
    tables: Tables,
    stages: Stages,
}

impl Pictures {
    fn new(sample_shape: &[usize], classes: u64) -> Self {
        let data = Signature {
            inputs: vec![Field::numbers("image", sample_shape.to_vec())],
            targets: vec![Field::category("label", classes)],
        };
        let objective = Objective::new(&job::Objective::default(), &data).unwrap();
        Self {
            data,
            objective,
            tables: Tables::default(),
            stages: Stages::default(),
        }
    }

    fn setup<'a>(&'a self, settings: &'a job::Model) -> Setup<'a> {
        Setup {
            settings,
            data: &self.data,
            objective: &self.objective,
            tables: &self.tables,
            stages: &self.stages,
        }
    }

    fn loss(&self, model: &dyn Model, batch: &Batch) -> Tensor {
        let pass = Pass::training(&self.objective, 1, 0, 0);
        let outputs = model.forward(batch, &pass).unwrap();
        model.loss(&outputs, batch, &pass).unwrap()
    }
}

fn batch(inputs: Tensor, targets: Tensor) -> Batch {
    let samples = inputs.dims()[0];
    let batch = Batch::new(samples).with_input("image", inputs);
    batch.with_target("label", targets)
}

/// Compares each element of each gradient with (f(x + e) - f(x - e)) / 2e, in f64, where e is so
/// small that neither rounding nor curvature matters. Returns the largest difference.
fn check_by_finite_differences(name: &str, setup: &Setup, batch: &Batch) -> f64 {
    const STEP: f64 = 1e-5;
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
    let model = Registry::builtin().build(name, setup, vars).unwrap();
    let vars: BTreeMap<_, _> = map.data().lock().unwrap().clone().into_iter().collect();
    for var in vars.values() {
        let values: Vec<f64> = (0..var.elem_count())
            .map(|_| random.random_range(-0.6..0.6))
            .collect();
        var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap())
            .unwrap();
    }
    let pass = Pass::training(setup.objective, 1, 0, 0);
    let loss = || {
        let outputs = model.forward(batch, &pass).unwrap();
        model.loss(&outputs, batch, &pass).unwrap()
    };
    let gradients = loss().backward().unwrap();
    let loss = || loss().to_scalar::<f64>().unwrap();

    let mut worst = 0f64;
    for (variable, var) in &vars {
        let gradient = gradients
            .get(var)
            .unwrap_or_else(|| panic!("{name}: {variable} has no gradient"))
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

/// Checks a model's gradients on four pictures.
fn check_on_pictures(
    name: &str,
    sample_shape: &[usize],
    pixel: impl Fn(&mut ChaCha8Rng) -> f64,
) -> f64 {
    let mut random = ChaCha8Rng::seed_from_u64(4);
    let samples = 4;
    let size = sample_shape.iter().product::<usize>();
    let pixels: Vec<f64> = (0..samples * size).map(|_| pixel(&mut random)).collect();
    let shape = [&[samples], sample_shape].concat();
    let batch = batch(
        Tensor::from_vec(pixels, shape, &Device::Cpu).unwrap(),
        Tensor::new(&[0u32, 1, 2, 1], &Device::Cpu).unwrap(),
    );
    let settings = settings(&[5, 4], &[2, 3]);
    let pictures = Pictures::new(sample_shape, 3);
    check_by_finite_differences(name, &pictures.setup(&settings), &batch)
}

#[test]
fn gradients_agree_with_finite_differences() {
    for name in MODELS {
        // Odd sizes, so that pooling has to leave something out.
        let worst = check_on_pictures(name, &[2, 7, 6], |random| random.random_range(-1.0..1.0));
        eprintln!("{name}: largest difference {worst:.1e}");
    }
}

#[test]
fn equal_maxima_share_one_gradient() {
    // Most windows of a blank picture hold four equal values.
    for blank in [0.0, 1.0] {
        check_on_pictures("cnn", &[1, 8, 8], |_| blank);
    }
}

/// With precision bf16, a network computes what it computes in f32, but for rounding.
#[test]
fn networks_compute_with_products_of_bf16() {
    const SAMPLES: usize = 16;
    let settings = settings(&[16], &[4, 8]);
    for (name, shape) in [
        ("mlp", &[1, 8, 8][..]),
        ("cnn", &[1, 8, 8]),
        ("resnet20", &[3, 16, 16]),
        ("transformer", &[8, 12]),
    ] {
        let pictures = Pictures::new(shape, 3);
        let (variables, model) = build(name, &pictures.setup(&settings));
        let inputs = [&[SAMPLES], shape].concat();
        let mut random = ChaCha8Rng::seed_from_u64(5);
        let values = (0..inputs.iter().product()).map(|_| random.random_range(-1f32..1.0));
        let inputs = Tensor::from_iter(values, &Device::Cpu)
            .unwrap()
            .reshape(inputs);
        let labels = Tensor::from_iter((0u32..).take(SAMPLES).map(|i| i % 3), &Device::Cpu);
        let batch = batch(inputs.unwrap(), labels.unwrap());
        let loss = || pictures.loss(&*model, &batch);
        let (exact, rounded) = (loss(), nn::autocast(DType::BF16, loss));
        let gradients = |loss: &Tensor| {
            let measured = variables.measured().unwrap();
            let gradients = nn::backward(loss).unwrap();
            variables
                .gradients(&gradients, measured, Clip::default())
                .unwrap()
        };
        let (exact, rounded) = (gradients(&exact), gradients(&rounded));
        let pairs = exact.values.iter().zip(&rounded.values);
        let square = |(exact, rounded): (&Elements, &Elements)| -> f64 {
            let pairs = exact.to_vec().into_iter().zip(rounded.to_vec());
            pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum()
        };
        let differs = pairs.map(square).sum::<f64>().sqrt() / exact.norm;
        println!("{name}: the gradient differs by {differs:.1e} of its norm");
        // Some arguments of ReLU near zero change their sign, and each takes its whole share of the gradient.
        assert!((1e-4..0.5).contains(&differs), "{name}: {differs}");
    }
}

fn build(name: &str, setup: &Setup) -> (Variables, Box<dyn Model>) {
    let registry = Registry::builtin();
    Variables::build(1, VariableKind::by_name, &Device::Cpu, |vars| {
        registry.build(name, setup, vars)
    })
    .unwrap()
}

fn numbers(bytes: &bytes::Bytes) -> Vec<f32> {
    payload::elements(bytes).iter().map(|v| v.get()).collect()
}

fn write(variables: &Variables, variable: usize, values: &[f32]) {
    variables
        .write(
            variable,
            0,
            &Elements::new(payload::to_bytes(values), Dtype::F32),
        )
        .unwrap();
}

fn refusal(name: &str, sample_shape: &[usize]) -> String {
    let settings = settings(&[6], &[2, 2, 2]);
    let pictures = Pictures::new(sample_shape, 10);
    let setup = pictures.setup(&settings);
    let registry = Registry::builtin();
    let built = Variables::build(1, VariableKind::by_name, &Device::Cpu, |vars| {
        registry.build(name, &setup, vars)
    });
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
        error.contains("\"cnm\"")
            && error.contains(
                "cnn, deepfm, dlrm, factorization-machine, logistic, mlp, mobilenetv2, resnet18"
            ),
        "{error}"
    );
    let error = refusal("cnn", &[64]);
    assert!(
        error.contains("[64]") && error.contains("[channels, height, width]"),
        "{error}"
    );
    let error = refusal("cnn", &[1, 8, 6]);
    assert!(error.contains("2x1 before convolution 2"), "{error}");
    let error = refusal("factorization-machine", &[6]);
    assert!(error.contains("has 10 outputs"), "{error}");
    let error = refusal("transformer", &[3, 8, 8]);
    assert!(error.contains("[length, features]"), "{error}");
    let error = refusal("resnet18", &[3, 7, 8]);
    assert!(error.contains("at least 8 x 8"), "{error}");
    let error = refusal("mlp", &[3, 0]);
    assert!(error.contains("hidden.0.weight"), "{error}");
}

#[test]
fn a_model_for_a_loop_of_ones_own_has_no_tables() {
    let job = Job::from_toml("model = { hidden = [8] }").unwrap();
    let data = Signature {
        inputs: vec![Field::numbers("x", vec![3]), Field::category("city", 5)],
        targets: vec![Field::category("y", 4)],
    };
    let sizes = Setup::with(&job, &data, |setup| {
        Ok((setup.settings.hidden.clone(), setup.outputs()))
    });
    assert_eq!(sizes.unwrap(), (vec![8], 4));
    let asked = Setup::with(&job, &data, |setup| {
        setup
            .table("cities", Table::dim(4).column("city"))
            .map(drop)
    });
    let error = asked.unwrap_err().to_string();
    assert!(
        error.contains("\"cities\"") && error.contains("Trainer"),
        "{error}"
    );
    let wrong = Job::from_toml("objective = { loss = \"mean-squared-error\" }").unwrap();
    let error = Setup::with(&wrong, &data, |_| Ok(()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("mean-squared-error"), "{error}");
}
