//! Tests of the checker: it must find each fault that is planted in one of the roles.

use shared_proto::planted::{Fault, plant};
use tests::{runs_slow_tests, say};

use crate::world::World;
use crate::{rings, told};

/// The number of seeds among which a fault must be found.
const UNTIL_FOUND: u64 = 500;

/// The first seed that finds each fault. It is tried first; if it no longer finds the fault, all seeds are tried.
const FOUND: &[(Fault, u64)] = &[
    (Fault::SameVersion, 0),
    (Fault::NoDedup, 42),
    (Fault::MarksNotSaved, 0),
    (Fault::AcknowledgesUnapplied, 0),
    (Fault::NoGate, 1),
    (Fault::LooseBound, 1),
    (Fault::AsksByEarlierClock, 16),
    (Fault::FastestMinClock, 4),
    (Fault::HalfStep, 2),
    (Fault::CommitsAgain, 20),
    (Fault::ForgottenContributor, 2),
    (Fault::EndlessLeases, 9),
    (Fault::LostData, 2),
    (Fault::SplitTwice, 20),
    (Fault::OldViews, 16),
    (Fault::OneGeneration, 2),
    (Fault::AnsweredBeforeKept, 16),
    (Fault::LogNotSynced, 6),
    (Fault::DamageTakenForTheEnd, 119),
    (Fault::PartForgotten, 380),
    (Fault::KeepsProgress, 2),
    (Fault::OlderCheckpoint, 1),
    (Fault::NeverReplaced, 12),
    (Fault::EarlyManifest, 10),
    (Fault::CheckpointLacksStep, 2),
    (Fault::StaleModel, 18),
    (Fault::SilentLosses, 6),
    (Fault::ForgottenLives, 4),
    (Fault::ReconcilesUnasked, 6),
    (Fault::OutcomeOverstated, 6),
    (Fault::SentOnce, 0),
    (Fault::ReadsCreate, 0),
    (Fault::LastContributorsRow, 2),
    (Fault::RowsMisplaced, 0),
    (Fault::RowNotSaved, 0),
    (Fault::RowsNotRestored, 1),
    (Fault::ForgottenChanges, 3),
    (Fault::SpilledAsUnchanged, 0),
    (Fault::NewestRowsAlone, 1),
    (Fault::AdmitsAtOnce, 0),
    (Fault::SightsNotSaved, 15),
    (Fault::EvictsNewest, 0),
    (Fault::NeverTooOld, 3),
    (Fault::EvictedNotSaved, 1),
    (Fault::AgesNotRestored, 15),
];

/// The first seed of a world of rings that finds each of their faults.
const FOUND_IN_RINGS: &[(Fault, u64)] = &[
    (Fault::CountsEarly, 0),
    (Fault::AbandonedValues, 34),
    (Fault::NoBroadcast, 38),
    (Fault::SpanLost, 0),
    (Fault::CopyNotAwaited, 4),
    (Fault::UpdatesNotShared, 0),
    (Fault::HalfAStep, 6),
    (Fault::SumOfSome, 15),
    (Fault::MissingPieces, 5),
    (Fault::OwnOrder, 24),
    (Fault::LeftTooEarly, 24),
    (Fault::GroupCountsTwice, 2),
    (Fault::SpareHasSamples, 2),
    (Fault::ClosesEmpty, 5),
    (Fault::MissedNotMade, 5),
    (Fault::RowsForgotten, 1),
    (Fault::DenseFirst, 135),
    (Fault::SlotsNotTaken, 2),
    (Fault::OldSlots, 59),
];

/// Runs the world of a seed. Returns the broken promises.
type Run = fn(u64) -> Vec<String>;

/// Returns the checker's message about a run with a fault; none if it finds nothing.
fn found(run: Run, fault: Fault, seed: u64) -> Option<String> {
    plant(Some(fault));
    let wrong = run(seed);
    plant(None);
    wrong.into_iter().next()
}

/// Returns the faults of a list that the checker does not find at these seeds. Prints those that it finds, with their
/// seeds.
fn not_found(run: Run, faults: &[Fault], seeds: impl Iterator<Item = u64>) -> Vec<Fault> {
    let mut rest = faults.to_vec();
    for seed in seeds {
        rest.retain(|fault| {
            let wrong = found(run, *fault, seed);
            if let Some(wrong) = &wrong {
                println!("{fault:?}: seed {seed}: {wrong}");
            }
            wrong.is_none()
        });
        if rest.is_empty() {
            break;
        }
    }
    rest
}

/// Checks that a kind of worlds finds each of its faults.
fn find_all(run: Run, faults: &[Fault], seeds: &[(Fault, u64)]) {
    let named = seeds.iter().map(|(fault, _)| fault);
    assert!(named.eq(faults), "each fault has its seed");
    if !runs_slow_tests("faults that are planted in the simulation") {
        return;
    }
    let rest = match told("FLAMBEAU_SIM_SEEDS") {
        Some(seeds) => not_found(run, faults, 0..seeds),
        None => {
            let at_its_seed =
                |(fault, seed): &(Fault, u64)| not_found(run, &[*fault], *seed..seed + 1);
            let moved: Vec<Fault> = seeds.iter().flat_map(at_its_seed).collect();
            if !moved.is_empty() {
                say(&format!(
                    "{moved:?}: not found at their seeds. All seeds are tried, which takes minutes; correct the lists of {}.",
                    file!()
                ));
            }
            not_found(run, &moved, 0..UNTIL_FOUND)
        }
    };
    assert!(rest.is_empty(), "not found: {rest:?}");
}

pub(crate) fn planted_faults_are_found() {
    find_all(|seed| World::new(seed).run().1, Fault::IN_SIMULATION, FOUND);
}

pub(crate) fn planted_faults_are_found_in_rings() {
    let run = |seed| rings::World::new(seed).run().1;
    find_all(run, Fault::IN_RINGS, FOUND_IN_RINGS);
}
