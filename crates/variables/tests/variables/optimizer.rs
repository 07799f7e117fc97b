//! Updates by an optimizer with all of its state, and with a part of it.

use flambeau_variables::{LocalOptimizer, Variables};
use shared_proto::job::Job;

use crate::{a_and_b, build, numbers};

/// The elements of both variables.
const ALL: usize = 10;

/// The elements that a replica with a part of the state holds: some of each variable.
const PART: std::ops::Range<usize> = 4..8;

fn adam(copies: &str) -> Job {
    Job::from_toml(&format!(
        "ema_decay = 0.5\n[optimizer]\nname = \"adam\"\nlearning_rate = 0.1\n[strategy]\nname = \"multi-worker-mirrored\"\n{copies}"
    ))
    .unwrap()
}

/// Variables and an optimizer with all of its state, after an update.
fn whole() -> (Variables, LocalOptimizer) {
    let (variables, _) = build(5, a_and_b);
    let mut optimizer = LocalOptimizer::new(&adam(""), &variables, 100).unwrap();
    optimizer
        .update(&variables, &mut gradient(1.0).into())
        .unwrap();
    (variables, optimizer)
}

/// The same with a part of its state.
fn part() -> (Variables, LocalOptimizer) {
    let (expected, mut whole) = whole();
    let (variables, _) = build(5, a_and_b);
    let mut optimizer =
        LocalOptimizer::new(&adam("optimizer_copies = 1"), &variables, 100).unwrap();
    let state = whole.state(&expected).unwrap();
    assert!(optimizer.set_state(&variables, &state, 1).unwrap());
    let slots = whole.slots(&expected, None, &PART, false).unwrap();
    let held = optimizer.hold(&variables, &[PART], Some(&[slots]));
    held.unwrap();
    (variables, optimizer)
}

fn gradient(factor: f32) -> Vec<f32> {
    (0..ALL)
        .map(|element| factor * (element as f32 - 4.5))
        .collect()
}

/// Returns the values that an update by the second gradient makes, and the slots of the part after it.
fn expected() -> (Vec<f32>, Vec<f32>) {
    let (variables, mut optimizer) = whole();
    optimizer
        .update(&variables, &mut gradient(-2.0).into())
        .unwrap();
    let values = [numbers(&variables, 0), numbers(&variables, 1)].concat();
    (
        values,
        optimizer.slots(&variables, None, &PART, false).unwrap(),
    )
}

#[test]
fn a_prepared_update_is_the_update_of_a_replica_with_all_of_the_state() {
    let (values, slots) = expected();
    let (variables, mut optimizer) = part();
    let before = [numbers(&variables, 0), numbers(&variables, 1)].concat();
    let mut new = gradient(-2.0);
    optimizer.prepare(&variables, &mut new).unwrap();
    assert_eq!(new[PART], values[PART]);
    let unchanged = [numbers(&variables, 0), numbers(&variables, 1)].concat();
    assert_eq!(unchanged, before, "it is only prepared");
    optimizer.make_prepared(&variables, &values).unwrap();
    let made = [numbers(&variables, 0), numbers(&variables, 1)].concat();
    assert_eq!(made, values);
    assert_eq!(
        optimizer.slots(&variables, None, &PART, false).unwrap(),
        slots
    );
    assert_eq!(optimizer.updates(), 2);
}

#[test]
fn slots_of_a_prepared_update_can_be_had_after_values_and_shares_have_changed() {
    let (values, slots) = expected();
    for overwritten in [false, true] {
        let (variables, mut optimizer) = part();
        optimizer.prepare(&variables, &mut gradient(-2.0)).unwrap();
        let overwrite = |optimizer: &mut LocalOptimizer| {
            let mut state = optimizer.state(&variables).unwrap();
            state[..ALL].copy_from_slice(&values);
            optimizer.set_state(&variables, &state, 2).unwrap();
        };
        if overwritten {
            overwrite(&mut optimizer);
        }
        let before = optimizer.hold(&variables, &[0..2, 8..9], None).unwrap();
        overwrite(&mut optimizer);
        let found = optimizer
            .slots(&variables, Some(&before), &PART, true)
            .unwrap();
        assert_eq!(found, slots, "overwritten before: {overwritten}");
        assert_ne!(
            optimizer
                .slots(&variables, Some(&before), &PART, false)
                .unwrap(),
            slots
        );
    }
}

#[test]
fn an_update_that_is_not_prepared_changes_nothing() {
    let (variables, mut optimizer) = part();
    let slots = optimizer.slots(&variables, None, &PART, false).unwrap();
    let error = optimizer
        .make_prepared(&variables, &[0.0; ALL])
        .unwrap_err();
    assert_eq!(error.to_string(), "no update is prepared");
    assert!(optimizer.prepare(&variables, &mut [0.0; 3]).is_err());
    assert!(
        optimizer
            .update(&variables, &mut vec![0.0; ALL].into())
            .is_err(),
        "it has a part of the slots"
    );
    assert_eq!(
        optimizer.slots(&variables, None, &PART, false).unwrap(),
        slots
    );
    assert_eq!(optimizer.updates(), 1);
}
