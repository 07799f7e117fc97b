//! Each optimizer and schedule against fixed vectors made with PyTorch and TensorFlow
//! (`vectors/make_optimizer_vectors.py`).

#![allow(clippy::unwrap_used)]

use flambeau_optimizer::{LookAhead, Part, Update, VariableRule, rule};
use serde::Deserialize;
use shared_proto::blocks::VariableSpec;
use shared_proto::job::{Job, Optimizer, Schedule};
use shared_proto::kernel::Kernel;
use shared_proto::payload::LeF32;

#[derive(Deserialize)]
struct Vectors {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    optimizer: Optimizer,
    schedule: Option<Schedule>,
    ema_decay: Option<f32>,
    initial: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    weights: Vec<Vec<f32>>,
    /// The moving average of the weights after each step, of a case with `ema_decay`.
    averages: Option<Vec<Vec<f32>>>,
}

#[test]
fn every_optimizer_agrees_with_an_independent_implementation() {
    let vectors: Vectors = serde_json::from_str(include_str!("vectors/optimizers.json")).unwrap();
    let mut seen = Vec::new();
    for case in vectors.cases {
        assert!(case.gradients.len() >= 20, "{}", case.name);
        let worst = largest_error(&case);
        println!("{:<40} largest relative error {worst:.1e}", case.name);
        assert!(worst < 1e-5, "{}: {worst}", case.name);
        seen.push(case.optimizer.name());
    }
    for name in Optimizer::NAMES {
        assert!(seen.contains(&name), "no vectors for {name}");
    }
}

/// Returns the largest error over all steps and weights, relative to the weight, or to 0.1 if it is smaller (an
/// update of several tenths that ends near zero has the rounding of several tenths).
fn largest_error(case: &Case) -> f32 {
    let job = Job {
        optimizer: case.optimizer.clone(),
        schedule: case.schedule.clone().unwrap_or_default(),
        ema_decay: case.ema_decay,
        ..Job::default()
    };
    let rule = VariableRule::new(&job, &VariableSpec::default(), u64::MAX);
    let mut weights = case.initial.clone();
    let mut slots = rule.initial_slots(&weights);
    let place = rule.averages(weights.len());
    let mut worst = 0.0f32;
    for (step, gradient) in case.gradients.iter().enumerate() {
        let gradient: Vec<LeF32> = gradient.iter().copied().map(LeF32::from).collect();
        let part = Part {
            weights: &mut weights,
            gradient: &gradient,
            slots: rule.slots().split(&mut slots),
            ahead: None,
        };
        rule.apply(rule.update_after(step as u64, 1.0), part);
        let averages = place.clone().map(|place| &slots[place]);
        let expected_averages = case.averages.as_ref().map(|averages| &averages[step]);
        assert_eq!(averages.is_some(), expected_averages.is_some());
        let found = weights.iter().chain(averages.into_iter().flatten());
        let expected = case.weights[step].iter();
        let expected = expected.chain(expected_averages.into_iter().flatten());
        for (w, e) in found.zip(expected) {
            worst = worst.max((w - e).abs() / e.abs().max(0.1));
        }
    }
    worst
}

/// The results that a job promises bit for bit do not depend on the CPUs of its servers.
#[test]
fn all_kernels_give_the_same_bits() {
    let kernels = Kernel::all();
    let names: Vec<_> = kernels.iter().map(|kernel| kernel.name()).collect();
    println!("compared: {}", names.join(", "));
    let numbers = |seed: u32| {
        // xorshift, over many magnitudes, of a length that no register divides
        let mut state = seed;
        std::iter::repeat_with(move || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state as f32 / u32::MAX as f32 - 0.5) * 10f32.powi((state % 9) as i32 - 5)
        })
        .take(1003)
    };
    let mut optimizers: Vec<Optimizer> = Optimizer::NAMES
        .iter()
        .filter_map(|name| Optimizer::named(name))
        .collect();
    optimizers.extend(
        [
            "name = \"rmsprop\"\nmomentum = 0.9",
            "name = \"momentum\"\nnesterov = true",
            "name = \"ftrl\"\nlearning_rate_power = -0.3",
        ]
        .map(|branch| {
            Job::from_toml(&format!("[optimizer]\n{branch}"))
                .unwrap()
                .optimizer
        }),
    );
    for optimizer in optimizers {
        let rule = rule(&optimizer);
        let run = |kernel| {
            let mut weights: Vec<f32> = numbers(1).collect();
            let mut slots = vec![rule.slots().initial; rule.slots().count * weights.len()];
            let mut made = vec![0.0; weights.len()];
            for number in 1..=5 {
                let gradient: Vec<LeF32> = numbers(number as u32 + 1).map(LeF32::from).collect();
                let update = Update {
                    learning_rate: 0.01,
                    factor: if number % 2 == 0 { 0.3 } else { 1.0 },
                    number,
                    kernel,
                };
                let part = Part {
                    weights: &mut weights,
                    gradient: &gradient,
                    slots: rule.slots().split(&mut slots),
                    ahead: (number > 2).then(|| LookAhead {
                        made: &mut made,
                        steps: rule.steps_ahead(update, 2.5),
                    }),
                };
                rule.apply(update, part);
            }
            let all = weights.iter().chain(&slots).chain(&made);
            let bits = all.map(|w| w.to_bits());
            bits.collect::<Vec<_>>()
        };
        let expected = run(Kernel::baseline());
        for kernel in &kernels {
            let same = run(*kernel) == expected;
            assert!(
                same,
                "{optimizer:?}: {} differs from the baseline",
                kernel.name()
            );
        }
    }
}
