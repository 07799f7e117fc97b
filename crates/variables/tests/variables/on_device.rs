//! Updates by candle's operations make the values and slots that the optimizers make on the host.

use std::sync::Arc;

use candle_core::Tensor;
use candle_nn::VarBuilder;
use flambeau_variables::{DeviceGradients, LocalOptimizer, UpdateGroups, Variables};
use shared_proto::job::Job;

use crate::{a_and_b, build};

const OPTIMIZERS: [&str; 10] = [
    "name = \"sgd\"\nweight_decay = 0.1",
    "name = \"momentum\"\nweight_decay = 0.1",
    "name = \"momentum\"\nnesterov = true",
    "name = \"adagrad\"",
    "name = \"rmsprop\"",
    "name = \"rmsprop\"\nmomentum = 0.9\nweight_decay = 0.1",
    "name = \"adam\"\nweight_decay = 0.1",
    "name = \"adamw\"",
    "name = \"ftrl\"\nl1 = 0.01\nl2 = 0.1\nbeta = 0.5\nl2_shrinkage = 0.2",
    "name = \"ftrl\"\nlearning_rate_power = -0.3",
];

/// Three variables, an averaged one and a frozen one. The first and the last have the same rule.
fn make(vars: &VarBuilder) -> candle_core::Result<Vec<Tensor>> {
    let mut made = a_and_b(vars)?;
    made.push(vars.pp("last").get((2, 2), "weight")?);
    made.push(vars.pp("norm").get(4, "running_mean")?);
    made.push(vars.pp("frozen").get(5, "weight")?);
    Ok(made)
}

fn job(optimizer: &str) -> Job {
    let job = format!(
        "ema_decay = 0.5\n[optimizer]\n{optimizer}\n[schedule]\nwarmup_steps = 3\n[strategy]\nname = \"mirrored\"\n[[groups]]\nvariables = \"inner.*\"\nlearning_rate = 0.25\n[[groups]]\nvariables = \"frozen.*\"\nfrozen = true\n"
    );
    Job::from_toml(&job).unwrap()
}

fn built(job: &Job) -> (Variables, LocalOptimizer) {
    let groups = job.clone();
    let kind_of = move |name: &str| groups.kind_of(name);
    let device = candle_core::Device::Cpu;
    let built = Variables::build::<_, candle_core::Error>(5, kind_of, &device, |vars| make(&vars));
    let (variables, _) = built.unwrap();
    let optimizer = LocalOptimizer::new(job, &variables, 100).unwrap();
    (variables, optimizer)
}

/// The gradient of each variable in a step, by its number. Frozen ones have none.
fn gradients(variables: &Variables, step: usize) -> Vec<Vec<f32>> {
    let specs = variables.specs();
    let gradient = |spec: &shared_proto::blocks::VariableSpec| {
        let elements = if spec.kind.takes_updates() {
            spec.elements()
        } else {
            0
        };
        let number = |element: usize| ((element + 7 * step) as f32 * 1.7).sin();
        (0..elements).map(number).collect()
    };
    specs.iter().map(gradient).collect()
}

fn update_on_device(
    (variables, optimizer): &mut (Variables, LocalOptimizer),
    groups: &Arc<UpdateGroups>,
    step: usize,
) {
    let gradients = gradients(variables, step);
    let gradients = DeviceGradients::from_host(groups, variables, &gradients).unwrap();
    optimizer
        .update_on_device(variables, groups, gradients)
        .unwrap();
}

fn update_on_host((variables, optimizer): &mut (Variables, LocalOptimizer), step: usize) {
    let gradient = gradients(variables, step).concat();
    optimizer.update(variables, &mut gradient.into()).unwrap();
}

#[test]
fn updates_on_the_device_are_those_on_the_host() {
    for optimizer in OPTIMIZERS {
        let job = job(optimizer);
        for most in [1, 5, 1000] {
            check(&job, optimizer, most);
        }
    }
}

/// Compares updates of vectors that take no more variables once they have `most` elements.
fn check(job: &Job, optimizer: &str, most: usize) {
    let (mut host, mut device) = (built(job), built(job));
    let groups = Arc::new(UpdateGroups::of_size(job, &device.0, most));
    for step in 0..8 {
        update_on_host(&mut host, step);
        // The slots move to the host in between, and back.
        match step {
            5 => update_on_host(&mut device, step),
            _ => update_on_device(&mut device, &groups, step),
        }
        if step % 3 == 0 {
            let [expected, found] = [&mut host, &mut device]
                .map(|(variables, optimizer)| optimizer.state(variables).unwrap());
            assert_eq!(expected.len(), found.len());
            for (element, (expected, found)) in expected.iter().zip(&found).enumerate() {
                let apart = (expected - found).abs() / expected.abs().max(0.1);
                assert!(
                    apart < 1e-5,
                    "{optimizer}, step {step}, element {element}: {found} in place of {expected}"
                );
            }
        }
    }
    assert_eq!(host.1.updates(), device.1.updates());
}

#[test]
fn a_state_that_is_taken_replaces_the_slots_on_the_device() {
    let job = job(OPTIMIZERS[6]);
    let (mut whole, mut taking) = (built(&job), built(&job));
    let groups = Arc::new(UpdateGroups::new(&job, &whole.0));
    for step in 0..3 {
        update_on_device(&mut whole, &groups, step);
        update_on_device(&mut taking, &groups, step + 10);
    }
    let state = whole.1.state(&whole.0).unwrap();
    assert!(taking.1.set_state(&taking.0, &state, 3).unwrap());
    update_on_device(&mut whole, &groups, 3);
    update_on_device(&mut taking, &groups, 3);
    let expected = whole.1.state(&whole.0).unwrap();
    assert_eq!(expected, taking.1.state(&taking.0).unwrap());
    whole.1.swap_averages(&whole.0).unwrap();
    assert_ne!(expected, whole.1.state(&whole.0).unwrap());
    whole.1.swap_averages(&whole.0).unwrap();
    assert_eq!(expected, whole.1.state(&whole.0).unwrap());
}

#[test]
fn slots_that_are_shared_out_stay_on_the_host() {
    let job = "[strategy]\nname = \"multi-worker-mirrored\"\noptimizer_copies = 1";
    let job = Job::from_toml(job).unwrap();
    let (variables, _) = build(5, a_and_b);
    let mut optimizer = LocalOptimizer::new(&job, &variables, 100).unwrap();
    let groups = Arc::new(UpdateGroups::new(&job, &variables));
    let gradients = gradients(&variables, 0);
    let gradients = DeviceGradients::from_host(&groups, &variables, &gradients).unwrap();
    let refused = optimizer.update_on_device(&variables, &groups, gradients);
    assert!(refused.unwrap_err().to_string().contains("shared out"));
}

#[test]
fn a_rate_of_zero_changes_nothing() {
    let job = "[optimizer]\nname = \"ftrl\"\n[schedule]\nkind = \"cosine\"\ntotal_steps = 2\n";
    let job = Job::from_toml(job).unwrap();
    // A single variable is a vector of its own.
    let (variables, _) = build(5, |vars| Ok(vec![vars.get(4, "a")?]));
    let mut optimizer = LocalOptimizer::new(&job, &variables, 100).unwrap();
    let groups = Arc::new(UpdateGroups::new(&job, &variables));
    let mut states = Vec::new();
    for step in 0..4 {
        let gradients = gradients(&variables, step);
        let gradients = DeviceGradients::from_host(&groups, &variables, &gradients).unwrap();
        let updated = optimizer.update_on_device(&variables, &groups, gradients);
        updated.unwrap();
        states.push(optimizer.state(&variables).unwrap());
    }
    assert_ne!(states[0], states[1]);
    assert_eq!(states[2], states[3]);
}
