//! Loops on replicas, compared with one replica that has all samples.

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder};
use nn::BatchNorm;
use shared_proto::job::{Adam, Job, Momentum, Optimizer, Sgd};

use super::distributed::names;
use super::*;

mod hosts;

struct Net {
    first: Linear,
    norm: BatchNorm,
    second: Linear,
}

fn net(vars: VarBuilder) -> candle_core::Result<Net> {
    Ok(Net {
        first: candle_nn::linear(4, 8, vars.pp("first"))?,
        norm: BatchNorm::new(8, nn::BatchNormConfig::default(), vars.pp("norm"))?,
        second: candle_nn::linear(8, 2, vars.pp("second"))?,
    })
}

/// Returns samples from `start` on, each with a class.
fn samples(start: usize, count: usize) -> (Tensor, Tensor) {
    let value = |i: usize| ((i * 7919) % 101) as f32 / 50.0 - 1.0;
    let inputs: Vec<f32> = (start * 4..(start + count) * 4).map(value).collect();
    let labels: Vec<u32> = (start..start + count).map(|i| (i % 2) as u32).collect();
    (
        Tensor::from_vec(inputs, (count, 4), &Device::Cpu).unwrap(),
        Tensor::new(labels, &Device::Cpu).unwrap(),
    )
}

fn weights(model: &Distributed<Net>) -> Vec<Vec<Vec<f32>>> {
    let of = |state: &State<Net>| {
        let values = state.variables.all_values().unwrap();
        let floats = |values: &shared_proto::payload::Elements| {
            let mut all = vec![0.0; values.len()];
            values.copy_to(&mut all);
            all
        };
        values.iter().map(floats).collect()
    };
    model.replicas.iter().map(of).collect()
}

/// Trains on the devices of one process. Returns the weights of each replica.
fn train(parts: &[usize], optimizer: &Optimizer) -> Vec<Vec<Vec<f32>>> {
    let devices = vec!["cpu"; parts.len()].join(",");
    train_by(&Strategy::mirrored(&devices).unwrap(), parts, optimizer)
}

/// Trains without batch normalisation, by global batches of 12 samples cut as `parts` says. Returns the weights of each replica of this
/// process.
fn train_by(strategy: &Strategy, parts: &[usize], optimizer: &Optimizer) -> Vec<Vec<Vec<f32>>> {
    let mut model = strategy.scope(3, net).unwrap();
    let first = model.optimizer("first.*", optimizer.clone()).unwrap();
    let second = model
        .optimizer("second.*", Optimizer::Sgd(Sgd::default()))
        .unwrap();
    for step in 0..20 {
        let losses = model.run(|replica| {
            let before: usize = parts[..replica.index()].iter().sum();
            let own = parts[replica.index()];
            // One without samples computes with any.
            let (inputs, labels) = samples(step * 12 + before, own.max(1));
            let loss = || {
                let net = replica.model();
                let outputs = net.second.forward(&net.first.forward(&inputs)?.tanh()?)?;
                candle_nn::loss::cross_entropy(&outputs, &labels)
            };
            let (one, two) = (loss()?, loss()?);
            replica.minimize(first, &one, own)?;
            replica.minimize(second, &two, own)?;
            replica.sum(&[f64::from(one.to_scalar::<f32>()?) * own as f64])
        });
        let losses = losses.unwrap();
        assert!(losses.iter().all(|sum| *sum == losses[0]), "{losses:?}");
    }
    weights(&model)
}

#[test]
fn replicas_keep_the_same_bits_and_the_weights_of_one_with_all_samples() {
    for optimizer in [
        Optimizer::Sgd(Sgd::default()),
        Optimizer::Momentum(Momentum::default()),
        Optimizer::Adam(Adam::default()),
    ] {
        let alone = train(&[12], &optimizer);
        for parts in [vec![6, 6], vec![5, 4, 3], vec![12, 0]] {
            let together = train(&parts, &optimizer);
            assert!(together.iter().all(|replica| *replica == together[0]));
            assert_eq!(together, train(&parts, &optimizer), "a repeated run");
            let pairs = together[0].iter().flatten().zip(alone[0].iter().flatten());
            let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(largest < 1e-5, "{optimizer:?} {parts:?}: {largest}");
        }
    }
}

#[test]
fn averages_of_batch_normalisation_are_those_of_all_replicas() {
    let strategy = Strategy::mirrored("cpu,cpu").unwrap();
    let mut model = strategy.scope(3, net).unwrap();
    let all = model
        .optimizer("*", Optimizer::Sgd(Sgd::default()))
        .unwrap();
    let before = weights(&model)[0].clone();
    let step = |replica: &mut Replica<'_, Net>| {
        let (inputs, labels) = samples(100 * replica.index(), 6);
        let net = replica.model();
        let hidden = net.norm.forward(&net.first.forward(&inputs)?, true)?;
        let outputs = net.second.forward(&hidden)?;
        let loss = candle_nn::loss::cross_entropy(&outputs, &labels)?;
        replica.minimize(all, &loss, 6)
    };
    model.run(step).unwrap();
    let after = weights(&model);
    assert_eq!(after[0], after[1]);
    let names = names(&model.replicas[0].variables);
    let measured = names.iter().position(|name| name.contains("running_mean"));
    let measured = measured.unwrap();
    assert_ne!(after[0][measured], before[measured]);
}

/// What a replica does in a step.
type Act = fn(&mut Replica<'_, Net>) -> candle_core::Result<()>;

#[test]
fn a_replica_that_fails_panics_or_goes_its_own_way_ends_the_step_of_all() {
    let strategy = Strategy::mirrored("cpu,cpu,cpu").unwrap();
    let begin = || {
        let mut model = strategy.scope(3, net).unwrap();
        let all = model
            .optimizer("second.*", Optimizer::Sgd(Sgd::default()))
            .unwrap();
        (model, all)
    };
    let loss = |net: &Net| {
        net.second
            .forward(&Tensor::ones(
                (1, 8),
                candle_core::DType::F32,
                &Device::Cpu,
            )?)?
            .sum_all()
    };
    let failing: [(&str, Act); 3] = [
        ("the disk is full", |_| {
            Err(candle_core::Error::msg("the disk is full"))
        }),
        ("upside down", |_| panic!("upside down")),
        ("different calls", |replica| replica.sum(&[1.0]).map(drop)),
    ];
    for (expected, act) in failing {
        let (mut model, all) = begin();
        let failed = model.run(|replica| match replica.index() {
            1 => act(replica),
            _ => replica.minimize(all, &loss(replica.model())?, 1),
        });
        let error = failed.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        let error = model.run(|_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("build the model anew"), "{error}");
    }
    // A replica that makes fewer calls is noticed, too.
    let (mut model, all) = begin();
    let failed = model.run(|replica| match replica.index() {
        1 => Ok(()),
        _ => replica.minimize(all, &loss(replica.model())?, 1),
    });
    assert!(failed.unwrap_err().to_string().contains("different calls"));
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing_on_any_replica() {
    let strategy = Strategy::mirrored("cpu,cpu").unwrap();
    let mut model = strategy.scope(3, net).unwrap();
    let all = model
        .optimizer("second.*", Optimizer::Sgd(Sgd::default()))
        .unwrap();
    let before = weights(&model);
    let step = |factor: f64| {
        move |replica: &mut Replica<'_, Net>| {
            let ones = Tensor::ones((1, 8), candle_core::DType::F32, &Device::Cpu)?;
            let loss = replica.model().second.forward(&ones)?.sum_all()?;
            let factor = if replica.index() == 1 { factor } else { 1.0 };
            replica.minimize(all, &(loss * factor)?, 1)
        }
    };
    let failed = model.run(step(f64::NAN)).unwrap_err().to_string();
    assert!(
        failed.contains("no variable of this optimizer was changed"),
        "{failed}"
    );
    assert_eq!(weights(&model), before);
    model.run(step(1.0)).unwrap();
    assert_ne!(weights(&model), before);
}

#[test]
fn statistics_stay_equal_also_if_the_model_computes_after_the_last_update() {
    let strategy = Strategy::mirrored("cpu,cpu").unwrap();
    let mut model = strategy.scope(3, net).unwrap();
    let second = model
        .optimizer("second.*", Optimizer::Sgd(Sgd::default()))
        .unwrap();
    for round in 0..5 {
        let step = |replica: &mut Replica<'_, Net>| {
            let (inputs, labels) = samples(100 * replica.index() + round, 6);
            let net = replica.model();
            let forward = || {
                let hidden = net.norm.forward(&net.first.forward(&inputs)?, true)?;
                candle_nn::loss::cross_entropy(&net.second.forward(&hidden)?, &labels)
            };
            replica.minimize(second, &forward()?, 6)?;
            forward().map(drop)
        };
        model.run(step).unwrap();
        let after = weights(&model);
        assert_eq!(after[0], after[1], "step {round}");
    }
}

#[test]
fn statistics_stay_equal_without_samples_and_after_a_gradient_that_is_not_finite() {
    let strategy = Strategy::mirrored("cpu,cpu").unwrap();
    let mut model = strategy.scope(3, net).unwrap();
    let second = model
        .optimizer("second.*", Optimizer::Sgd(Sgd::default()))
        .unwrap();
    // On replica 1 the inputs are not finite, and so neither is what batch normalisation measures.
    let step = |samples_of_one: usize| {
        move |replica: &mut Replica<'_, Net>| {
            let (mut inputs, labels) = samples(100 * replica.index(), 6);
            let mut own = 6;
            if replica.index() == 1 {
                (inputs, own) = ((inputs * f64::NAN)?, samples_of_one);
            }
            let net = replica.model();
            let hidden = net.norm.forward(&net.first.forward(&inputs)?, true)?;
            let outputs = net.second.forward(&hidden)?;
            let loss = candle_nn::loss::cross_entropy(&outputs, &labels)?;
            replica.minimize(second, &loss, own)
        }
    };
    let finite = |weights: &[Vec<Vec<f32>>]| {
        let all = weights.iter().flatten().flatten();
        assert!(all.clone().all(|value| value.is_finite()));
        assert_eq!(weights[0], weights[1]);
    };
    let before = weights(&model);
    model.run(step(6)).unwrap_err();
    assert_eq!(weights(&model), before);
    model.run(step(0)).unwrap();
    finite(&weights(&model));
    assert_ne!(weights(&model), before);
}

#[test]
fn gradients_are_limited_after_they_were_added_up() {
    let job = Job {
        clip_norm: Some(0.01),
        optimizer: Optimizer::Sgd(Sgd {
            learning_rate: 0.5,
            ..Sgd::default()
        }),
        ..Job::default()
    };
    let train = |parts: usize| {
        let strategy = Strategy::mirrored(&vec!["cpu"; parts].join(",")).unwrap();
        let mut model = strategy.scope(3, net).unwrap();
        let all = model.optimizer_of("second.*", &job).unwrap();
        for _ in 0..10 {
            let step = |replica: &mut Replica<'_, Net>| {
                let count = 12 / parts;
                let (inputs, labels) = samples(replica.index() * count, count);
                let net = replica.model();
                let outputs = net.second.forward(&net.first.forward(&inputs)?)?;
                let loss = candle_nn::loss::cross_entropy(&outputs, &labels)?;
                replica.minimize(all, &loss, count)
            };
            model.run(step).unwrap();
        }
        weights(&model).swap_remove(0)
    };
    let (alone, together) = (train(1), train(3));
    let pairs = alone.iter().flatten().zip(together.iter().flatten());
    let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-6, "{largest}");
}

#[test]
fn settings_without_an_effect_are_refused() {
    let strategy = Strategy::one_device("cpu").unwrap();
    for (setting, named) in [
        ("ema_decay = 0.9", "ema_decay"),
        ("accumulate = 2", "accumulate"),
        ("[schedule]\nkind = \"cosine\"", "total_steps"),
        (
            "[[groups]]\nvariables = \"first.*\"\nfrozen = true",
            "groups",
        ),
    ] {
        let mut model = strategy.scope(3, net).unwrap();
        let job = Job::from_toml(setting).unwrap();
        let refused = model.optimizer_of("*", &job).unwrap_err().to_string();
        assert!(refused.contains(named), "{refused}");
    }
}

#[test]
fn a_failed_call_may_not_be_passed_over() {
    let strategy = Strategy::mirrored("cpu,cpu").unwrap();
    let mut model = strategy.scope(3, net).unwrap();
    let all = model
        .optimizer("second.*", Optimizer::Sgd(Sgd::default()))
        .unwrap();
    let failed = model.run(|replica| {
        let ones = Tensor::ones((1, 8), candle_core::DType::F32, &Device::Cpu)?;
        let loss = replica.model().second.forward(&ones)?.sum_all()?;
        let _ = replica.minimize(all, &(loss * f64::NAN)?, 1);
        match replica.index() {
            0 => replica.sum(&[1.0]).map(drop),
            _ => Err(candle_core::Error::msg("another failure")),
        }
    });
    let error = failed.unwrap_err().to_string();
    assert!(error.contains("NaN or infinite"), "{error}");
    // All replicas know of it, so the model can be trained on.
    model.run(|_| Ok(())).unwrap();
}

#[tokio::test]
async fn loops_may_run_within_an_asynchronous_runtime() {
    for devices in ["cpu", "cpu,cpu"] {
        let strategy = Strategy::mirrored(devices).unwrap();
        let mut model = strategy.scope(3, net).unwrap();
        let sums = model.run(|replica| replica.sum(&[1.0])).unwrap();
        assert_eq!(sums[0], [strategy.replicas() as f64]);
    }
}

#[test]
fn mistakes_are_named() {
    let strategy = Strategy::one_device("cpu").unwrap();
    let mut model = strategy.scope(3, net).unwrap();
    let sgd = || Optimizer::Sgd(Sgd::default());
    model.optimizer("first.*", sgd()).unwrap();
    for (pattern, expected) in [
        ("first.weight", "has an optimizer already"),
        ("third.*", "first.bias"),
    ] {
        let error = model.optimizer(pattern, sgd()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for (devices, expected) in [("cpu,cpu", "2 are named"), ("gpu", "no device")] {
        let error = Strategy::one_device(devices).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
