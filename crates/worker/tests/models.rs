//! Gradients of the models that come with Flambeau: against finite differences, and against
//! PyTorch over 20 steps of training.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use shared_proto::blocks::VariableKind;
use shared_proto::job::{self, Clip};
use shared_proto::payload::{self, Dtype, Elements};
use worker::input::{Column, Field, InMemory, Signature, Values};
use worker::model::{Batch, Model, ModelError, Objective, Pass, Setup};
use worker::registry::Registry;
use worker::variables::Variables;

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
}

impl Pictures {
    fn of(sample_shape: &[usize], classes: u64) -> Self {
        let data = Signature {
            inputs: vec![Field::numbers("image", sample_shape.to_vec())],
            targets: vec![Field::category("label", classes)],
        };
        let objective = Objective::of(&job::Objective::default(), &data).unwrap();
        Self { data, objective }
    }

    fn setup<'a>(&'a self, settings: &'a job::Model) -> Setup<'a> {
        Setup {
            settings,
            data: &self.data,
            objective: &self.objective,
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
    let batch = Batch::of(samples).with_input("image", inputs);
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
    let pictures = Pictures::of(sample_shape, 3);
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

/// Four samples of two numbers, two ids, and any number of weighted ids; the last sample has none.
fn table(target: Column) -> InMemory {
    let weights = Some(vec![0.5, -1.0, 2.0, 1.0]);
    let columns = vec![
        Column::numbers(
            "inputs",
            vec![2],
            vec![0.5, -1.0, 2.0, 0.25, 0.0, 1.5, -0.5, 1.0],
        ),
        Column::values("pair", vec![2], Values::U32(vec![0, 2, 1, 1, 2, 0, 0, 0])).below(3),
        Column::ragged(
            "tags",
            Values::I64(vec![3, 1, 0, 3]),
            vec![0, 2, 3, 4, 4],
            weights,
            Some(4),
        ),
    ];
    InMemory::new(columns, vec![target]).unwrap()
}

#[test]
fn gradients_of_tables_agree_with_finite_differences() {
    let classes = || Column::category("kind", vec![0, 2, 1, 2], 3);
    let numbers = || Column::numbers("price", vec![], vec![1.0, -0.5, 2.0, 0.25]);
    for (name, target) in [
        ("logistic", classes()),
        ("mlp", classes()),
        ("mlp", numbers()),
        ("factorization-machine", numbers()),
    ] {
        let samples = table(target);
        let data = samples.signature();
        let objective = Objective::of(&job::Objective::default(), &data).unwrap();
        let settings = job::Model {
            embedding: 3,
            ..settings(&[4], &[])
        };
        let setup = Setup {
            settings: &settings,
            data: &data,
            objective: &objective,
        };
        let batch = samples.batch(&[0, 1, 2, 3], &Device::Cpu).unwrap();
        let worst = check_by_finite_differences(name, &setup, &batch);
        // A batch in which no sample has a tag.
        let without = samples.batch(&[3], &Device::Cpu).unwrap();
        check_by_finite_differences(name, &setup, &without);
        eprintln!("{name} of a table: largest difference {worst:.1e}");
    }
}

/// The output is the bias, a weight of each feature, and for each pair of features the product of their vectors.
#[test]
fn a_factorization_machine_is_the_sum_over_all_pairs() {
    let samples = table(Column::numbers("price", vec![], vec![0.0; 4]));
    let data = samples.signature();
    let objective = Objective::of(&job::Objective::default(), &data).unwrap();
    let settings = job::Model {
        embedding: 2,
        ..settings(&[], &[])
    };
    let setup = Setup {
        settings: &settings,
        data: &data,
        objective: &objective,
    };
    let (variables, model) = build("factorization-machine", &setup);
    let specs = variables.specs();
    let mut values = BTreeMap::new();
    let mut random = ChaCha8Rng::seed_from_u64(5);
    for (variable, spec) in specs.iter().enumerate() {
        let drawn: Vec<f32> = (0..spec.elements())
            .map(|_| random.random_range(-1.0..1.0))
            .collect();
        write(&variables, variable, &drawn);
        values.insert(spec.name.as_str(), drawn);
    }
    let feature = |value: f32, weight: &str, vectors: &str, place: usize| {
        let vector = [0, 1].map(|i| value * values[vectors][2 * place + i]);
        (value * values[weight][place], vector)
    };
    let number = |value, place| feature(value, "numbers.weight", "numbers.vectors", place);
    let pair = |place| feature(1.0, "linear.pair.weight", "embedding.pair.weight", place);
    let tag = |value, place| feature(value, "linear.tags.weight", "embedding.tags.weight", place);
    let of_samples = [
        vec![
            number(0.5, 0),
            number(-1.0, 1),
            pair(0),
            pair(2),
            tag(0.5, 3),
            tag(-1.0, 1),
        ],
        vec![
            number(2.0, 0),
            number(0.25, 1),
            pair(1),
            pair(1),
            tag(2.0, 0),
        ],
        vec![
            number(0.0, 0),
            number(1.5, 1),
            pair(2),
            pair(0),
            tag(1.0, 3),
        ],
        vec![number(-0.5, 0), number(1.0, 1), pair(0), pair(0)],
    ];
    let batch = samples.batch(&[0, 1, 2, 3], &Device::Cpu).unwrap();
    let outputs = model
        .forward(&batch, &Pass::evaluation(&objective))
        .unwrap();
    let outputs: Vec<f32> = outputs.flatten_all().unwrap().to_vec1().unwrap();
    for (features, found) in of_samples.iter().zip(outputs) {
        let mut expected = values["bias"][0] + features.iter().map(|f| f.0).sum::<f32>();
        for (i, (_, a)) in features.iter().enumerate() {
            for (_, b) in &features[..i] {
                expected += a[0] * b[0] + a[1] * b[1];
            }
        }
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
}

/// Sparse samples, and dense ones with the same values, have the same loss and gradients.
#[test]
fn logistic_regression_is_the_same_on_sparse_samples() {
    let dense = Column::numbers(
        "x",
        vec![4],
        vec![0.5, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.5, -1.0, 0.0],
    );
    let values = Some(vec![0.5, 2.0, 1.5, -1.0]);
    let ids = Values::U32(vec![0, 3, 1, 2]);
    let sparse = Column::ragged("x", ids, vec![0, 2, 2, 4], values, Some(4));
    let results = [dense, sparse].map(|column| {
        let labels = Column::binary("y", vec![1.0, 0.0, 1.0]);
        let samples = InMemory::new(vec![column], vec![labels]).unwrap();
        let data = samples.signature();
        let objective = Objective::of(&job::Objective::default(), &data).unwrap();
        let settings = settings(&[], &[]);
        let setup = Setup {
            settings: &settings,
            data: &data,
            objective: &objective,
        };
        let (variables, model) = build("logistic", &setup);
        // The bias, and the weights of four features.
        for (variable, spec) in variables.specs().iter().enumerate() {
            match spec.elements() {
                1 => write(&variables, variable, &[0.25]),
                _ => write(&variables, variable, &[0.1, -0.2, 0.3, 0.4]),
            }
        }
        let batch = samples.batch(&[0, 1, 2], &Device::Cpu).unwrap();
        let pass = Pass::training(&objective, 1, 0, 0);
        let before = variables.measured().unwrap();
        let outputs = model.forward(&batch, &pass).unwrap();
        let loss = model.loss(&outputs, &batch, &pass).unwrap();
        let gradients = variables
            .gradients(&loss.backward().unwrap(), before, Clip::default())
            .unwrap();
        let mut gradients: Vec<Vec<f32>> = gradients.values.iter().map(Elements::to_vec).collect();
        // The bias first.
        gradients.sort_by_key(Vec::len);
        (loss.to_scalar::<f32>().unwrap(), gradients)
    });
    let [(dense, gradients), (sparse, others)] = results;
    assert!((dense - sparse).abs() < 1e-6);
    for (ours, theirs) in gradients.concat().iter().zip(others.concat()) {
        assert!((ours - theirs).abs() < 1e-6, "{gradients:?} {others:?}");
    }
    // By hand: the mean of sigmoid(logit) - target.
    let logits = [0.1 * 0.5 + 0.4 * 2.0 + 0.25, 0.25, -0.2 * 1.5 - 0.3 + 0.25];
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let bias = (sigmoid(logits[0]) - 1.0 + sigmoid(logits[1]) + sigmoid(logits[2]) - 1.0) / 3.0;
    assert!((f64::from(gradients[0][0]) - bias).abs() < 1e-6);
}

#[test]
fn equal_maxima_share_one_gradient() {
    // Most windows of a blank picture hold four equal values.
    for blank in [0.0, 1.0] {
        check_on_pictures("cnn", &[1, 8, 8], |_| blank);
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
        let labels = self.0["labels"].get(step).unwrap();
        batch(
            self.0["inputs"].get(step).unwrap(),
            labels.to_dtype(DType::U32).unwrap(),
        )
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
        let pictures = Pictures::of(sample_shape, 10);
        let setup = pictures.setup(&settings);
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
            let before = variables.measured().unwrap();
            let loss = pictures.loss(&*model, &vectors.batch(step));
            let gradients = variables
                .gradients(&loss.backward().unwrap(), before, Clip::default())
                .unwrap();
            worst.0 = worst
                .0
                .max((loss.to_scalar::<f32>().unwrap() / expected - 1.0).abs());
            for (i, spec) in specs.iter().enumerate() {
                let gradient = gradients.values[i].to_vec();
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

/// Each variable of torchvision's models (`vectors/make_torchvision_names.py`) belongs to one of the same shape, and each
/// of ours has one, but for torchvision's counts of batches.
#[test]
fn models_know_the_names_of_torchvision() {
    type Shapes = BTreeMap<String, Vec<usize>>;
    let models: BTreeMap<String, Shapes> =
        serde_json::from_str(include_str!("vectors/torchvision.json")).unwrap();
    assert_eq!(models.len(), 3);
    for (name, foreign) in models {
        let settings = settings(&[], &[]);
        let pictures = Pictures::of(&[3, 64, 64], 1000);
        let (variables, model) = build(&name, &pictures.setup(&settings));
        let specs = variables.specs();
        let ours: Shapes = specs.into_iter().map(|s| (s.name, s.shape)).collect();
        let counts = |foreign: &String| foreign.ends_with("num_batches_tracked");
        let named = foreign.into_iter().filter(|(foreign, _)| !counts(foreign));
        let renamed = |(foreign, shape): (String, _)| {
            let name = model.name_of(&foreign);
            (
                name.unwrap_or_else(|| panic!("no variable for {foreign}")),
                shape,
            )
        };
        assert_eq!(named.map(renamed).collect::<Shapes>(), ours, "{name}");
    }
}

fn refusal(name: &str, sample_shape: &[usize]) -> String {
    let settings = settings(&[6], &[2, 2, 2]);
    let pictures = Pictures::of(sample_shape, 10);
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
            && error.contains("cnn, factorization-machine, logistic, mlp, mobilenetv2, resnet18"),
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
