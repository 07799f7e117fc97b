//! Tests of the checker: it must find each fault that is planted in one of the roles.

use shared_proto::planted::{Fault, plant};

use crate::told;
use crate::world::World;

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
    (Fault::FastestMinClock, 1),
    (Fault::HalfStep, 2),
    (Fault::CommitsAgain, 20),
    (Fault::ForgottenContributor, 2),
    (Fault::EndlessLeases, 9),
    (Fault::LostData, 2),
    (Fault::SplitTwice, 10),
    (Fault::OldViews, 7),
    (Fault::OneGeneration, 2),
    (Fault::AnsweredBeforeKept, 11),
    (Fault::KeepsProgress, 2),
    (Fault::OlderCheckpoint, 1),
    (Fault::NeverReplaced, 12),
    (Fault::EarlyManifest, 14),
    (Fault::CheckpointLacksStep, 2),
    (Fault::StaleModel, 18),
    (Fault::SilentLosses, 3),
    (Fault::ForgottenLives, 4),
    (Fault::ReconcilesUnasked, 3),
    (Fault::OutcomeOverstated, 3),
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
    (Fault::SightsNotSaved, 0),
    (Fault::EvictsNewest, 0),
    (Fault::NeverTooOld, 3),
    (Fault::EvictedNotSaved, 0),
    (Fault::AgesNotRestored, 15),
];

/// Returns the checker's message about a run with a fault; none if it finds nothing.
fn found(fault: Fault, seed: u64) -> Option<String> {
    plant(Some(fault));
    let (_, wrong) = World::new(seed).run();
    plant(None);
    wrong.into_iter().next()
}

/// Returns the faults of a list that the checker does not find at these seeds. Prints those that it finds, with their
/// seeds.
fn not_found(faults: &[Fault], seeds: impl Iterator<Item = u64>) -> Vec<Fault> {
    let mut rest = faults.to_vec();
    for seed in seeds {
        rest.retain(|fault| {
            let wrong = found(*fault, seed);
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

#[test]
fn planted_faults_are_found() {
    let named = FOUND.iter().map(|(fault, _)| fault);
    assert!(named.eq(Fault::IN_SIMULATION), "each fault has its seed");
    let rest = match told("FLAMBEAU_SIM_SEEDS") {
        Some(seeds) => not_found(Fault::IN_SIMULATION, 0..seeds),
        None => {
            let at_its_seed = |(fault, seed): &(Fault, u64)| not_found(&[*fault], *seed..seed + 1);
            let moved: Vec<Fault> = FOUND.iter().flat_map(at_its_seed).collect();
            not_found(&moved, 0..UNTIL_FOUND)
        }
    };
    assert!(rest.is_empty(), "not found: {rest:?}");
}
