//! Batch normalisation over the batches of several replicas, against one replica with all samples.

#![allow(clippy::unwrap_used)]

mod gradients;

use std::sync::{Arc, Condvar, Mutex};

use candle_core::{DType, Device, Result, Tensor, Var, bail};
use candle_nn::{VarBuilder, VarMap};
use flambeau_nn::{Activation, BatchNorm, BatchNormConfig, Replicas, backward, synchronised};
use gradients::{Source, difference, values};

/// A place where threads add up vectors.
#[derive(Default)]
struct Meeting {
    round: Mutex<Round>,
    complete: Condvar,
}

#[derive(Default)]
struct Round {
    number: usize,
    vectors: Vec<(usize, Vec<f64>)>,
    sum: Vec<f64>,
}

/// A replica at a meeting of so many.
struct Member {
    rank: usize,
    ranks: usize,
    meeting: Arc<Meeting>,
}

impl Replicas for Member {
    fn add_up(&self, values: &mut [f64]) -> Result<()> {
        let mut round = self.meeting.round.lock().unwrap();
        let number = round.number;
        round.vectors.push((self.rank, values.to_vec()));
        if round.vectors.len() == self.ranks {
            let mut vectors = std::mem::take(&mut round.vectors);
            vectors.sort_by_key(|(rank, _)| *rank);
            round.sum = vec![0.0; values.len()];
            for (_, vector) in vectors {
                assert_eq!(vector.len(), values.len());
                let pairs = round.sum.iter_mut().zip(vector);
                pairs.for_each(|(sum, value)| *sum += value);
            }
            round.number += 1;
            self.meeting.complete.notify_all();
        }
        while round.number == number {
            round = self.meeting.complete.wait(round).unwrap();
        }
        values.copy_from_slice(&round.sum);
        Ok(())
    }
}

/// The results of a replica.
#[derive(Clone, Debug)]
struct Passed {
    samples: usize,
    loss: f64,
    /// The gradients of the inputs, and of the weights and biases of both layers.
    gradients: Vec<Tensor>,
    /// The running statistics of both layers.
    running: Vec<Tensor>,
}

/// Makes the passes of a network with two normalisations over these samples.
fn pass(x: &Tensor, part: &Tensor) -> Result<Passed> {
    let (samples, channels) = (x.dim(0)?, x.dim(1)?);
    let map = VarMap::new();
    let layer = |name: &str, activation| {
        let config = BatchNormConfig {
            activation,
            ..BatchNormConfig::default()
        };
        let vars = VarBuilder::from_varmap(&map, x.dtype(), &Device::Cpu);
        BatchNorm::new(channels, config, vars.pp(name))
    };
    let first = layer("first", Activation::Relu)?;
    let second = layer("second", Activation::Identity)?;
    let vars = map.data().lock().unwrap().clone();
    let mut source = Source::new();
    for name in ["first.weight", "first.bias", "second.weight", "second.bias"] {
        vars[name].set(&source.tensor(&[channels], x.dtype()))?;
    }
    let x = Var::from_tensor(x)?;
    let hidden = first.forward(&x, true)?;
    let outputs = second.forward(&(&hidden + hidden.sqr()?)?, true)?;
    let loss = ((outputs * part)?.sum_all()? / samples as f64)?;
    let gradients = backward(&loss)?;
    let of = |name: &str| gradients.get(&vars[name]).unwrap().clone();
    let names = ["first.weight", "first.bias", "second.weight", "second.bias"];
    let layers = ["first", "second"];
    let running = layers.map(|layer| {
        let named = |name| vars[&format!("{layer}.{name}")].as_tensor().clone();
        [named("running_mean"), named("running_var")]
    });
    Ok(Passed {
        samples,
        loss: values(&loss)[0],
        gradients: [gradients.get(&x).unwrap().clone()]
            .into_iter()
            .chain(names.map(of))
            .collect(),
        running: running.into_iter().flatten().collect(),
    })
}

/// Makes the passes of replicas that have so many samples each, and that compute in these types.
fn passes(x: &Tensor, part: &Tensor, shares: &[(usize, DType)]) -> Vec<Passed> {
    let meeting = Arc::new(Meeting::default());
    std::thread::scope(|scope| {
        let mut start = 0;
        let mut threads = Vec::new();
        for (rank, &(samples, dtype)) in shares.iter().enumerate() {
            let of = |tensor: &Tensor| {
                let own = tensor.narrow(0, start, samples).unwrap();
                own.to_dtype(dtype).unwrap()
            };
            let (x, part) = (of(x), of(part));
            start += samples;
            let member: Arc<dyn Replicas> = Arc::new(Member {
                rank,
                ranks: shares.len(),
                meeting: Arc::clone(&meeting),
            });
            threads.push(
                scope.spawn(move || synchronised(member, samples, || pass(&x, &part)).unwrap()),
            );
        }
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Returns the loss and the gradients of all replicas together: the inputs of all, and the mean of the others by samples.
fn together(passed: &[Passed]) -> (f64, Vec<Tensor>) {
    let all: usize = passed.iter().map(|passed| passed.samples).sum();
    let share = |passed: &Passed| passed.samples as f64 / all as f64;
    let loss = passed.iter().map(|passed| share(passed) * passed.loss);
    let weighted = |passed: &Passed, i: usize| {
        let gradient = passed.gradients[i].to_dtype(DType::F64).unwrap();
        (gradient * share(passed)).unwrap()
    };
    let inputs: Vec<Tensor> = passed.iter().map(|passed| weighted(passed, 0)).collect();
    let mut gradients = vec![Tensor::cat(&inputs, 0).unwrap()];
    for i in 1..passed[0].gradients.len() {
        let parts = passed.iter().map(|passed| weighted(passed, i));
        gradients.push(parts.reduce(|sum, part| (sum + part).unwrap()).unwrap());
    }
    (loss.sum(), gradients)
}

#[test]
fn replicas_equal_one_with_all_samples() {
    let mut source = Source::new();
    for (samples, shape, dtype, most) in [
        (&[4, 4][..], &[3, 5][..], DType::F64, 1e-12),
        (&[5, 2, 1], &[3, 4, 3], DType::F64, 1e-12),
        // One element of each channel here, which has no variance of its own.
        (&[1, 6], &[4], DType::F64, 1e-12),
        (&[3, 5], &[2, 9], DType::F32, 1e-5),
        (&[8], &[2, 9], DType::F64, 1e-12),
        // These are computed by candle's operations, as on a GPU.
        (&[3, 5, 8], &[2, 9], DType::F16, 0.03),
    ] {
        let all = [&[samples.iter().sum::<usize>()], shape].concat();
        // The samples of the replicas have different means.
        let drift = Tensor::arange(0f64, all[0] as f64, &Device::Cpu).unwrap();
        let drift = drift.reshape([&all[..1], &vec![1; shape.len()]].concat());
        let x = source.tensor(&all, DType::F64);
        let x = (x.broadcast_add(&(drift.unwrap() * 0.3).unwrap())).unwrap();
        let part = source.tensor(&all, DType::F64);
        let shares: Vec<_> = samples.iter().map(|samples| (*samples, dtype)).collect();
        let passed = passes(&x, &part, &shares);

        let alone = pass(&x, &part).unwrap();
        let (loss, gradients) = together(&passed);
        let what = format!("{samples:?} {shape:?} {dtype:?}");
        assert!((loss - alone.loss).abs() < most * 10.0, "{what}: {loss}");
        for (i, (found, expected)) in gradients.iter().zip(&alone.gradients).enumerate() {
            let error = difference(found, expected);
            assert!(error < most, "{what}, gradient {i}: {error:.1e}");
        }
        for replica in &passed {
            let statistics = replica.running.iter().zip(&alone.running);
            for (i, (found, expected)) in statistics.enumerate() {
                let error = difference(found, expected);
                assert!(error < most, "{what}, running {i}: {error:.1e}");
                assert_eq!(values(found), values(&passed[0].running[i]), "{what}");
            }
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences_of_the_mean_of_all_losses() {
    const STEP: f64 = 1e-5;
    let mut source = Source::new();
    let x = source.tensor(&[6, 2, 3], DType::F64);
    let part = source.tensor(&[6, 2, 3], DType::F64);
    let shares = [(1, DType::F64), (3, DType::F64), (2, DType::F64)];
    let (_, gradients) = together(&passes(&x, &part, &shares));
    let at = values(&x);
    let slopes = (0..at.len()).map(|i| {
        let moved = |by: f64| {
            let mut values = at.clone();
            values[i] += by;
            let x = Tensor::from_vec(values, x.shape(), &Device::Cpu).unwrap();
            together(&passes(&x, &part, &shares)).0
        };
        (moved(STEP) - moved(-STEP)) / (2.0 * STEP)
    });
    let slopes = Tensor::from_vec(slopes.collect(), x.shape(), &Device::Cpu).unwrap();
    let error = difference(&gradients[0], &slopes);
    assert!(error < 1e-6, "{error:.1e}");
}

#[test]
fn replicas_that_compute_by_other_operations_fit_together() {
    let mut source = Source::new();
    let x = source.tensor(&[8, 2, 9], DType::F64);
    let part = source.tensor(&[8, 2, 9], DType::F64);
    let (_, expected) = together(&[pass(&x, &part).unwrap()]);
    let (_, found) = together(&passes(&x, &part, &[(3, DType::F32), (5, DType::F16)]));
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let error = difference(found, expected);
        assert!(error < 0.03, "gradient {i}: {error:.1e}");
    }
}

#[test]
fn a_large_mean_leaves_the_variance_of_all_right() {
    let mut source = Source::new();
    let x = ((source.tensor(&[64, 1, 33], DType::F32) * 0.01).unwrap() + 1000.0).unwrap();
    let part = source.tensor(&[64, 1, 33], DType::F32);
    let passed = passes(&x, &part, &[(31, DType::F32), (33, DType::F32)]);
    let alone = pass(&x, &part).unwrap();
    for replica in &passed {
        let (found, expected) = (&replica.running[1], &alone.running[1]);
        // A tenth of the variance is the batch's: 3e-6 of 0.9.
        let of_batch = |running: &Tensor| values(running)[0] - f64::from(0.9f32);
        let ratio = of_batch(found) / of_batch(expected);
        assert!((ratio - 1.0).abs() < 0.05, "{ratio}");
    }
    let (_, gradients) = together(&passed);
    let error = difference(&gradients[1], &alone.gradients[1]);
    assert!(error < 1e-3, "{error:.1e}");
}

/// Replicas of which another one is gone.
struct Gone;

impl Replicas for Gone {
    fn add_up(&self, _: &mut [f64]) -> Result<()> {
        bail!("another replica is gone")
    }
}

/// Replicas of which another one is gone after the forward pass.
struct GoneAfter(Mutex<usize>);

impl Replicas for GoneAfter {
    fn add_up(&self, _: &mut [f64]) -> Result<()> {
        let mut left = self.0.lock().unwrap();
        *left = match left.checked_sub(1) {
            Some(left) => left,
            None => bail!("another replica is gone"),
        };
        Ok(())
    }
}

#[test]
fn a_replica_that_is_gone_ends_the_pass() {
    let mut source = Source::new();
    let x = source.tensor(&[4, 2, 3], DType::F64);
    for dtype in [DType::F64, DType::F16] {
        let x = x.to_dtype(dtype).unwrap();
        for calls in 0..4 {
            let gone = Arc::new(GoneAfter(Mutex::new(calls)));
            let error = synchronised(gone, 4, || pass(&x, &x)).unwrap_err();
            assert!(error.to_string().contains("is gone"), "{calls}: {error}");
        }
        let enough = Arc::new(GoneAfter(Mutex::new(4)));
        synchronised(enough, 4, || pass(&x, &x)).unwrap();
        // It ends with the scope.
        let error = synchronised(Arc::new(Gone), 4, || pass(&x, &x)).unwrap_err();
        assert!(error.to_string().contains("is gone"), "{error}");
        pass(&x, &x).unwrap();
    }
}

#[test]
fn a_single_element_of_all_replicas_has_no_variance() {
    let alone = Arc::new(GoneAfter(Mutex::new(1)));
    let x = Tensor::ones((1, 3), DType::F64, &Device::Cpu).unwrap();
    let error = synchronised(alone, 1, || pass(&x, &x)).unwrap_err();
    assert!(error.to_string().contains("no variance"), "{error}");
}
