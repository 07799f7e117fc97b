//! Variables: initial values, writing in place, gradients; `files`: files; `optimizer`: updates.

#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use flambeau_variables::{Variables, VariablesError};
use model::ModelError;
use shared_proto::blocks::VariableKind;
use shared_proto::job::Clip;
use shared_proto::payload::{self, Dtype, Elements};

mod files;
mod on_device;
mod optimizer;

type Make = fn(&VarBuilder) -> candle_core::Result<Vec<Tensor>>;

/// Variables that `make` asks for, and the tensors that it got.
fn try_build(seed: u64, make: Make) -> Result<(Variables, Vec<Tensor>), String> {
    Variables::build(seed, VariableKind::by_name, &Device::Cpu, |vars| {
        make(&vars).map_err(|source| ModelError::Build {
            name: "test".to_owned(),
            source,
        })
    })
    .map_err(|error| error.to_string())
}

fn build(seed: u64, make: Make) -> (Variables, Vec<Tensor>) {
    try_build(seed, make).unwrap()
}

fn numbers(variables: &Variables, variable: usize) -> Vec<f32> {
    let bytes = variables.values(variable).unwrap();
    payload::elements(&bytes).iter().map(|v| v.get()).collect()
}

fn a_and_b(vars: &VarBuilder) -> candle_core::Result<Vec<Tensor>> {
    let init = Init::Randn {
        mean: 0.0,
        stdev: 1.0,
    };
    let a = vars.get_with_hints((2, 3), "a", init)?;
    let b = vars.pp("inner").get_with_hints(4, "b", init)?;
    Ok(vec![a, b])
}

#[test]
fn initial_values_depend_on_seed_and_name_alone() {
    let (one, _) = build(5, a_and_b);
    let (other, _) = build(5, |vars| {
        let b = vars.get_with_hints(
            4,
            "inner.b",
            Init::Randn {
                mean: 0.0,
                stdev: 1.0,
            },
        )?;
        vars.get_with_hints(1000, "before", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
        let a = vars.get_with_hints(
            (2, 3),
            "a",
            Init::Randn {
                mean: 0.0,
                stdev: 1.0,
            },
        )?;
        Ok(vec![b, a])
    });
    let names = |v: &Variables| v.specs().into_iter().map(|s| s.name).collect::<Vec<_>>();
    assert_eq!(names(&one), ["a", "inner.b"]);
    assert_eq!(names(&other), ["a", "before", "inner.b"]);
    assert_eq!(numbers(&one, 0), numbers(&other, 0));
    assert_eq!(numbers(&one, 1), numbers(&other, 2));
    assert_ne!(numbers(&one, 0)[..4], numbers(&one, 1)[..]);
    assert_ne!(numbers(&one, 0), numbers(&build(6, a_and_b).0, 0));
}

#[test]
fn initial_values_are_pinned() {
    // Two versions that differ here would begin the same job differently.
    let (variables, _) = build(1, |vars| {
        let uniform = Init::Uniform { lo: -1.0, up: 1.0 };
        Ok(vec![
            vars.get_with_hints(
                3,
                "normal",
                Init::Randn {
                    mean: 0.0,
                    stdev: 1.0,
                },
            )?,
            vars.get_with_hints(3, "uniform", uniform)?,
        ])
    });
    assert_eq!(
        numbers(&variables, 0),
        [-0.57249796, -0.42550135, 2.0022697]
    );
    assert_eq!(numbers(&variables, 1), [-0.6860349, -0.74087596, 0.8165889]);
}

#[test]
fn initial_values_have_the_distribution_asked_for() {
    use candle_nn::init::{FanInOut, NonLinearity, NormalOrUniform};
    let kaiming = |dist, fan, non_linearity| Init::Kaiming {
        dist,
        fan,
        non_linearity,
    };
    // Fan in: 50 * 4 = 200; fan out: 100 * 4 = 400.
    for (init, mean, deviation, bound) in [
        (Init::Const(2.5), 2.5, 0.0, 2.5),
        (
            Init::Randn {
                mean: 1.0,
                stdev: 0.5,
            },
            1.0,
            0.5,
            4.0,
        ),
        (
            Init::Uniform { lo: -1.0, up: 3.0 },
            1.0,
            4.0 / 12f64.sqrt(),
            3.0,
        ),
        (
            kaiming(NormalOrUniform::Normal, FanInOut::FanIn, NonLinearity::ReLU),
            0.0,
            0.1,
            0.6,
        ),
        (
            kaiming(
                NormalOrUniform::Uniform,
                FanInOut::FanOut,
                NonLinearity::Linear,
            ),
            0.0,
            0.05,
            0.05 * 3f64.sqrt() + 1e-7,
        ),
    ] {
        let device = Device::Cpu;
        let (variables, _) = Variables::build(9, VariableKind::by_name, &device, |vars| {
            vars.get_with_hints((100, 50, 2, 2), "w", init)
                .map_err(|source| ModelError::Build {
                    name: "test".to_owned(),
                    source,
                })
        })
        .unwrap();
        let values: Vec<f64> = numbers(&variables, 0).into_iter().map(f64::from).collect();
        let count = values.len() as f64;
        let found = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|v| (v - found).powi(2)).sum::<f64>() / count;
        assert!(
            (found - mean).abs() <= 0.02 * deviation + 1e-9,
            "{init:?}: mean {found}"
        );
        assert!(
            (variance.sqrt() - deviation).abs() <= 0.02 * deviation,
            "{init:?}: variance {variance}"
        );
        assert!(values.iter().all(|v| v.abs() <= bound), "{init:?}");
    }
}

#[test]
fn one_name_is_one_variable() {
    let (variables, tensors) = build(1, |vars| {
        Ok(vec![
            vars.get((2, 2), "w")?,
            vars.get((2, 2), "w")?,
            vars.get_unchecked("w")?,
        ])
    });
    assert_eq!(variables.specs().len(), 1);
    assert!(tensors.iter().all(|t| t.id() == tensors[0].id()));

    for (make, parts) in [
        (
            (|vars| Ok(vec![vars.get((2, 2), "w")?, vars.get(4, "w")?])) as Make,
            ["\"w\"", "[2, 2] and [4]"],
        ),
        (
            |vars| Ok(vec![vars.to_dtype(DType::F64).get(4, "w")?]),
            ["\"w\"", "F64"],
        ),
        (|vars| Ok(vec![vars.get((4, 0), "w")?]), ["\"w\"", "empty"]),
        (
            |vars| Ok(vec![vars.get_unchecked("w")?]),
            ["\"w\"", "without a shape"],
        ),
        (
            |vars| {
                Ok(vec![vars.get_with_hints(
                    4,
                    "w",
                    Init::Uniform { lo: 1.0, up: 0.0 },
                )?])
            },
            ["\"w\"", "Uniform"],
        ),
    ] {
        let error = try_build(1, make).err().unwrap();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn values_are_overwritten_where_the_model_sees_them() {
    let (variables, tensors) = build(1, |vars| Ok(vec![vars.get((2, 3), "w")?]));
    // An odd address, as in the midst of a message.
    let mut message = vec![0];
    message.extend_from_slice(&payload::to_bytes(&[7.0, 8.0, 9.0]));
    let values = bytes::Bytes::from(message).slice(1..);
    let values = Elements::new(values, Dtype::F32);
    variables.write(0, 2, &values).unwrap();
    assert_eq!(
        tensors[0].to_vec2::<f32>().unwrap(),
        [[0.0, 0.0, 7.0], [8.0, 9.0, 0.0]]
    );
    assert_eq!(numbers(&variables, 0), [0.0, 0.0, 7.0, 8.0, 9.0, 0.0]);

    for (variable, start) in [(0, 4), (0, usize::MAX), (1, 0)] {
        let error = variables.write(variable, start, &values).unwrap_err();
        assert!(matches!(error, VariablesError::Range(_)), "{error}");
    }
    assert!(variables.values(1).is_err());
    assert_eq!(numbers(&variables, 0), [0.0, 0.0, 7.0, 8.0, 9.0, 0.0]);
}

#[test]
fn gradients_are_taken_whole_and_clipped() {
    let (variables, tensors) = build(1, |vars| {
        Ok(vec![vars.get((2, 3), "a")?, vars.get((), "b")?])
    });
    // The gradient of `a` is a transposed, that is a strided, tensor.
    let factors = Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu).unwrap();
    let a = (tensors[0].t().unwrap() * factors)
        .unwrap()
        .sum_all()
        .unwrap();
    let loss = (a + (&tensors[1] * 3.0).unwrap()).unwrap();
    let store = loss.backward().unwrap();

    let read = |clip| {
        let gradients = variables
            .gradients(&store, variables.measured().unwrap(), clip)
            .unwrap();
        (
            gradients.values[0].to_vec(),
            gradients.values[1].to_vec(),
            gradients.norm,
        )
    };
    let whole = (vec![1.0, 3.0, 5.0, 2.0, 4.0, 6.0], vec![3.0], 10.0);
    let norm = |norm| Clip {
        norm: Some(norm),
        value: None,
    };
    assert_eq!(read(Clip::default()), whole);
    assert_eq!(read(norm(10.0)), whole);
    let half = (vec![0.5, 1.5, 2.5, 1.0, 2.0, 3.0], vec![1.5], 10.0);
    assert_eq!(read(norm(5.0)), half);
    let limit = |most| Clip {
        value: Some(most),
        norm: None,
    };
    let limited = (vec![1.0, 2.5, 2.5, 2.0, 2.5, 2.5], vec![2.5], 10.0);
    assert_eq!(read(limit(2.5)), limited);
    // Seven ones have the norm 7^0.5, of which the norm's limit takes half.
    let both = Clip {
        norm: Some(7f32.sqrt() / 2.0),
        ..limit(1.0)
    };
    let (a, b, _) = read(both);
    let halves = a.iter().chain(&b).all(|value| (value - 0.5).abs() < 1e-6);
    assert!(halves, "{a:?} {b:?}");
}

#[test]
fn a_missing_gradient_is_named() {
    let (variables, tensors) = build(1, |vars| {
        Ok(vec![vars.get(2, "used")?, vars.get(3, "forgotten")?])
    });
    let store = tensors[0].sum_all().unwrap().backward().unwrap();
    let before = variables.measured().unwrap();
    let error = variables.gradients(&store, before, Clip::default());
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("\"forgotten\"") && error.contains("softmax_last_dim"),
        "{error}"
    );
}

#[test]
fn frozen_running_statistics_normalise_in_training_too() {
    let outputs = |frozen: fn(&str) -> bool| {
        let kind_of = move |name: &str| match frozen(name) {
            true => VariableKind::Frozen,
            false => VariableKind::by_name(name),
        };
        let (variables, norm) = Variables::build(1, kind_of, &Device::Cpu, |vars| {
            nn::BatchNorm::new(2, nn::BatchNormConfig::default(), vars.pp("norm"))
        })
        .unwrap();
        // Values that come after the layer was made, as those of a file do.
        let mean = Elements::new(payload::to_bytes(&[1.0, 2.0]), Dtype::F32);
        variables.write(1, 0, &mean).unwrap();
        let inputs = Tensor::new(&[[1f32, 0.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        let [evaluated, trained] = [false, true].map(|training| {
            let outputs = norm.forward(&inputs, training).unwrap();
            outputs.to_vec2::<f32>().unwrap()
        });
        (evaluated, trained, numbers(&variables, 1))
    };
    for all_or_statistics in [|_: &str| true, |name: &str| name.contains("running")] {
        let (evaluated, trained, mean) = outputs(all_or_statistics);
        assert_eq!(evaluated, trained);
        assert_eq!(mean, [1.0, 2.0]);
    }
    let (evaluated, trained, mean) = outputs(|name| !name.contains("running"));
    assert_ne!(evaluated, trained);
    assert_ne!(mean, [1.0, 2.0]);
}

/// candle's batch normalisation sets its running mean and variance while it computes the loss.
#[test]
fn averaged_variables_travel_as_changes_and_frozen_ones_not_at_all() {
    let kind_of = |name: &str| match name {
        "scale" => VariableKind::Frozen,
        name => VariableKind::by_name(name),
    };
    let (variables, (norm, scale)) = Variables::build(1, kind_of, &Device::Cpu, |vars| {
        let norm = candle_nn::batch_norm(2, candle_nn::BatchNormConfig::default(), vars.pp("norm"));
        Ok::<_, candle_core::Error>((norm?, vars.get_with_hints(2, "scale", Init::Const(3.0))?))
    })
    .unwrap();
    let names = [
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.weight",
        "scale",
    ];
    let specs = variables.specs();
    assert_eq!(
        specs.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(),
        names
    );
    let averaged = |name: &str| name.contains("running");
    for spec in &specs {
        assert_eq!(spec.kind == VariableKind::Averaged, averaged(&spec.name));
    }

    let before = variables.measured().unwrap();
    let inputs = Tensor::new(&[[1f32, 0.0], [3.0, 4.0]], &Device::Cpu).unwrap();
    let normal = norm.forward_train(&inputs).unwrap();
    let loss = (normal.sqr().unwrap().broadcast_mul(&scale).unwrap()).sum_all();
    assert_ne!(numbers(&variables, 1), [0.0, 0.0]);
    let store = loss.unwrap().backward().unwrap();
    // The clip is far below the norm, and leaves the changes alone.
    let clip = Clip {
        norm: Some(1e-6),
        value: None,
    };
    let gradients = variables.gradients(&store, before, clip).unwrap();
    let values = |i: usize| gradients.values[i].to_vec();
    // The mean is (2, 2), the unbiased variance (2, 8), and a tenth of each is taken in.
    assert_eq!(values(1), [-0.2, -0.2]);
    let moved = values(2);
    assert!(
        (moved[0] + 0.1).abs() < 1e-6 && (moved[1] + 0.7).abs() < 1e-6,
        "{moved:?}"
    );
    assert!(values(3).iter().all(|v| v.abs() < 1e-6));
    assert!(gradients.values[4].is_empty());
    assert!(gradients.norm > 1e-6);
    // All variables are as they were pulled.
    assert_eq!(numbers(&variables, 1), [0.0, 0.0]);
    assert_eq!(numbers(&variables, 2), [1.0, 1.0]);
    assert_eq!(variables.trained().len(), 2);
}
