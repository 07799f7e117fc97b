//! Optimizers for the rows of tables, compared with the usual optimizers and with their formulas in `f64`.

#![allow(clippy::unwrap_used)]

use flambeau_optimizer::row::{self, ChangedRows, Row};
use flambeau_optimizer::{Part, Update, rule};
use shared_proto::job::{Adagrad, Adam, Ftrl, Optimizer, Sgd};
use shared_proto::kernel::Kernel;
use shared_proto::payload::LeF32;
use shared_proto::table::RowOptimizer;

const RATE: f32 = 0.05;

struct OneRow {
    values: Vec<f32>,
    state: Vec<f32>,
    gradient: Vec<LeF32>,
    factor: f32,
}

impl ChangedRows for OneRow {
    #[inline(always)]
    fn each(&mut self, mut change: impl FnMut(Row)) {
        change(Row {
            values: &mut self.values,
            state: &mut self.state,
            gradient: &self.gradient,
            factor: self.factor,
        });
    }
}

/// Returns the gradients of 20 steps. They differ in sign and size, and some are 0.
fn gradients(dimension: usize) -> Vec<Vec<f32>> {
    let of = |step: usize, i: usize| match (step * 7 + i * 3) % 11 {
        0 => 0.0,
        n => (n as f32 - 5.5) * 0.3 / (1.0 + step as f32).sqrt(),
    };
    (0..20)
        .map(|step| (0..dimension).map(|i| of(step, i)).collect())
        .collect()
}

fn initial(dimension: usize) -> Vec<f32> {
    (0..dimension).map(|i| 0.1 * i as f32 - 0.3).collect()
}

/// Returns the values after each step.
fn train(optimizer: &RowOptimizer, dimension: usize, kernel: Kernel) -> Vec<Vec<f32>> {
    let mut row = OneRow {
        values: initial(dimension),
        state: vec![f32::NAN; row::state_len(optimizer, dimension)],
        gradient: Vec::new(),
        factor: 1.0,
    };
    row::initialize(optimizer, &mut row.state);
    let step = |gradient: Vec<f32>| {
        row.gradient = gradient.into_iter().map(LeF32::from).collect();
        row::update(optimizer, RATE, kernel, &mut row);
        row.values.clone()
    };
    gradients(dimension).into_iter().map(step).collect()
}

fn train_dense(optimizer: &Optimizer, dimension: usize) -> Vec<Vec<f32>> {
    let rule = rule(optimizer);
    let mut weights = initial(dimension);
    let mut slots = vec![rule.slots().initial; rule.slots().count * dimension];
    let step = |(number, gradient): (u64, Vec<f32>)| {
        let gradient: Vec<LeF32> = gradient.into_iter().map(LeF32::from).collect();
        let update = Update {
            learning_rate: RATE,
            factor: 1.0,
            number,
            kernel: Kernel::baseline(),
        };
        let part = Part {
            weights: &mut weights,
            gradient: &gradient,
            slots: rule.slots().split(&mut slots),
            ahead: None,
        };
        rule.apply(update, part);
        weights.clone()
    };
    (1..).zip(gradients(dimension)).map(step).collect()
}

fn settings() -> (Sgd, Adagrad, Adam, Ftrl) {
    let sgd = Sgd {
        weight_decay: 0.01,
        ..Sgd::default()
    };
    let adagrad = Adagrad {
        initial_accumulator: 0.1,
        weight_decay: 0.02,
        ..Adagrad::default()
    };
    let adam = Adam {
        weight_decay: 0.03,
        ..Adam::default()
    };
    let ftrl = Ftrl {
        l1: 0.02,
        l2: 0.1,
        ..Ftrl::default()
    };
    (sgd, adagrad, adam, ftrl)
}

#[test]
fn a_row_in_every_step_changes_like_a_dense_variable() {
    let (sgd, adagrad, adam, ftrl) = settings();
    for (row, dense) in [
        (RowOptimizer::Sgd(sgd.clone()), Optimizer::Sgd(sgd)),
        (
            RowOptimizer::Adagrad(adagrad.clone()),
            Optimizer::Adagrad(adagrad),
        ),
        (RowOptimizer::Adam(adam.clone()), Optimizer::Adam(adam)),
        (RowOptimizer::Ftrl(ftrl.clone()), Optimizer::Ftrl(ftrl)),
    ] {
        for dimension in [1, 8, 19] {
            let (ours, expected) = (
                train(&row, dimension, Kernel::best()),
                train_dense(&dense, dimension),
            );
            assert_eq!(ours, expected, "{row:?} of {dimension}");
        }
    }
}

/// Returns the values after each step, by the formulas of the row-wise optimizers in `f64`.
fn row_wise(optimizer: &RowOptimizer, dimension: usize) -> Vec<Vec<f32>> {
    let mut values: Vec<f64> = initial(dimension).into_iter().map(f64::from).collect();
    let (mut square, mut means) = (0.0, vec![0.0; dimension]);
    if let RowOptimizer::RowAdagrad(settings) = optimizer {
        square = f64::from(settings.initial_accumulator);
    }
    let mut after = Vec::new();
    for (step, gradient) in (1..).zip(gradients(dimension)) {
        let decay = f64::from(match optimizer {
            RowOptimizer::RowAdagrad(settings) => settings.weight_decay,
            RowOptimizer::RowAdam(settings) => settings.weight_decay,
            other => panic!("{other:?} is not row-wise"),
        });
        let g: Vec<f64> = (gradient.iter().zip(&values))
            .map(|(g, w)| f64::from(*g) + decay * w)
            .collect();
        let mean_square = g.iter().map(|g| g * g).sum::<f64>() / dimension as f64;
        let rate = f64::from(RATE);
        match optimizer {
            RowOptimizer::RowAdagrad(settings) => {
                square += mean_square;
                for (w, g) in values.iter_mut().zip(&g) {
                    *w -= rate * g / (square.sqrt() + f64::from(settings.epsilon));
                }
            }
            RowOptimizer::RowAdam(settings) => {
                let (beta1, beta2) = (f64::from(settings.beta1), f64::from(settings.beta2));
                square = beta2 * square + (1.0 - beta2) * mean_square;
                let divisor =
                    (square / (1.0 - beta2.powi(step))).sqrt() + f64::from(settings.epsilon);
                for ((w, g), mean) in values.iter_mut().zip(&g).zip(&mut means) {
                    *mean = beta1 * *mean + (1.0 - beta1) * g;
                    *w -= rate * *mean / (1.0 - beta1.powi(step)) / divisor;
                }
            }
            other => panic!("{other:?} is not row-wise"),
        }
        after.push(values.iter().map(|w| *w as f32).collect());
    }
    after
}

#[test]
fn row_wise_optimizers_follow_their_formulas() {
    let (_, adagrad, adam, _) = settings();
    for optimizer in [
        RowOptimizer::RowAdagrad(adagrad),
        RowOptimizer::RowAdam(adam),
    ] {
        for dimension in [1, 8, 19] {
            let ours = train(&optimizer, dimension, Kernel::best()).concat();
            let expected = row_wise(&optimizer, dimension).concat();
            for (a, b) in ours.iter().zip(&expected) {
                assert!(
                    (a - b).abs() < 1e-5 * b.abs().max(0.1),
                    "{optimizer:?}: {a}, not {b}"
                );
            }
        }
    }
}

#[test]
fn row_wise_and_usual_optimizers_agree_on_a_row_of_one_value() {
    let (_, adagrad, adam, _) = settings();
    let last = |optimizer| train(&optimizer, 1, Kernel::best()).pop().unwrap()[0];
    let pairs = [
        (
            RowOptimizer::RowAdagrad(adagrad.clone()),
            RowOptimizer::Adagrad(adagrad),
        ),
        (
            RowOptimizer::RowAdam(adam.clone()),
            RowOptimizer::Adam(adam),
        ),
    ];
    for (row_wise, usual) in pairs {
        let (ours, expected) = (last(row_wise), last(usual));
        assert!((ours - expected).abs() < 1e-6, "{ours}, not {expected}");
    }
}

#[test]
fn ftrl_changes_nothing_at_a_rate_of_zero() {
    let settings = Ftrl {
        beta: 1.0,
        ..Ftrl::default()
    };
    let mut row = OneRow {
        values: initial(3),
        state: vec![0.5; 6],
        gradient: [1.0, -1.0, 2.0].map(LeF32::from).to_vec(),
        factor: 1.0,
    };
    let optimizer = RowOptimizer::Ftrl(settings.clone());
    row::update(&optimizer, 0.0, Kernel::best(), &mut row);
    assert_eq!((row.values, row.state), (initial(3), vec![0.5; 6]));

    let (mut weights, mut slots) = (initial(3), vec![0.5; 6]);
    let rule = rule(&Optimizer::Ftrl(settings));
    let update = Update {
        learning_rate: 0.0,
        factor: 1.0,
        number: 9,
        kernel: Kernel::best(),
    };
    let part = Part {
        weights: &mut weights,
        gradient: &row.gradient,
        slots: rule.slots().split(&mut slots),
        ahead: None,
    };
    rule.apply(update, part);
    assert_eq!((weights, slots), (initial(3), vec![0.5; 6]));
}
