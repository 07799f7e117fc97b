//! Models of numbers and categories.

use model::Batch;
use model::input::{Column, InMemory, Values};
use shared_proto::job::Clip;

use super::*;

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
        let objective = Objective::new(&job::Objective::default(), &data).unwrap();
        let settings = job::Model {
            embedding: 3,
            ..settings(&[4], &[])
        };
        let setup = Setup {
            settings: &settings,
            data: &data,
            objective: &objective,
            tables: &Tables::default(),
            stages: &Stages::default(),
        };
        let batch =
            Batch::of_samples(samples.select(&[0, 1, 2, 3]).unwrap(), &Device::Cpu).unwrap();
        let worst = check_by_finite_differences(name, &setup, &batch);
        // A batch in which no sample has a tag.
        let without = Batch::of_samples(samples.select(&[3]).unwrap(), &Device::Cpu).unwrap();
        check_by_finite_differences(name, &setup, &without);
        eprintln!("{name} of a table: largest difference {worst:.1e}");
    }
}

/// The output is the bias, a weight of each feature, and for each pair of features the product of their vectors.
#[test]
fn a_factorization_machine_is_the_sum_over_all_pairs() {
    let samples = table(Column::numbers("price", vec![], vec![0.0; 4]));
    let data = samples.signature();
    let objective = Objective::new(&job::Objective::default(), &data).unwrap();
    let settings = job::Model {
        embedding: 2,
        ..settings(&[], &[])
    };
    let setup = Setup {
        settings: &settings,
        data: &data,
        objective: &objective,
        tables: &Tables::default(),
        stages: &Stages::default(),
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
    let batch = Batch::of_samples(samples.select(&[0, 1, 2, 3]).unwrap(), &Device::Cpu).unwrap();
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
        let objective = Objective::new(&job::Objective::default(), &data).unwrap();
        let settings = settings(&[], &[]);
        let setup = Setup {
            settings: &settings,
            data: &data,
            objective: &objective,
            tables: &Tables::default(),
            stages: &Stages::default(),
        };
        let (variables, model) = build("logistic", &setup);
        // The bias, and the weights of four features.
        for (variable, spec) in variables.specs().iter().enumerate() {
            match spec.elements() {
                1 => write(&variables, variable, &[0.25]),
                _ => write(&variables, variable, &[0.1, -0.2, 0.3, 0.4]),
            }
        }
        let batch = Batch::of_samples(samples.select(&[0, 1, 2]).unwrap(), &Device::Cpu).unwrap();
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
