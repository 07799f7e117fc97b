//! Schedules, played by ranks that exchange vectors in memory.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

type Queues = BTreeMap<(Rank, Rank), VecDeque<Vec<f32>>>;

/// Plays the schedules of all ranks, each as far as it can go in turn, and returns their vectors.
fn play(mut vectors: Vec<Vec<f32>>, schedules: &[Vec<Round>]) -> Vec<Vec<f32>> {
    let mut queues = Queues::new();
    // Each rank's round, and whether it has sent in it.
    let mut places = vec![(0, false); vectors.len()];
    loop {
        let mut moved = false;
        for (rank, place) in places.iter_mut().enumerate() {
            while let Some(round) = schedules[rank].get(place.0) {
                if !std::mem::replace(&mut place.1, true)
                    && let Some((peer, range)) = &round.send
                {
                    let sent = vectors[rank][range.clone()].to_vec();
                    queues.entry((rank, *peer)).or_default().push_back(sent);
                }
                if let Some((peer, range, combine)) = &round.receive {
                    let queue = queues.entry((*peer, rank)).or_default();
                    let Some(received) = queue.pop_front() else {
                        break;
                    };
                    assert_eq!(received.len(), range.len());
                    for (own, other) in vectors[rank][range.clone()].iter_mut().zip(received) {
                        *own = match combine {
                            Combine::Add => *own + other,
                            Combine::Replace => other,
                        };
                    }
                }
                (*place, moved) = ((place.0 + 1, false), true);
            }
        }
        if !moved {
            break;
        }
    }
    let ended = |rank: Rank| places[rank].0 == schedules[rank].len();
    assert!((0..vectors.len()).all(ended), "a rank waits for ever");
    assert!(queues.values().all(VecDeque::is_empty));
    vectors
}

fn sums(vectors: &[Vec<f32>]) -> Vec<f64> {
    let elements = vectors[0].len();
    let sum = |i: usize| vectors.iter().map(|v| f64::from(v[i])).sum();
    (0..elements).map(sum).collect()
}

fn vectors() -> impl Strategy<Value = Vec<Vec<f32>>> {
    (1usize..10, 0usize..40).prop_flat_map(|(ranks, elements)| {
        let vector = prop::collection::vec(-100f32..100.0, elements);
        prop::collection::vec(vector, ranks)
    })
}

fn bits(vector: &[f32]) -> Vec<u32> {
    vector.iter().map(|value| value.to_bits()).collect()
}

fn check(vectors: Vec<Vec<f32>>, schedules: &[Vec<Round>]) {
    let expected = sums(&vectors);
    let reduced = play(vectors, schedules);
    for vector in &reduced {
        assert_eq!(bits(vector), bits(&reduced[0]), "ranks have other bits");
        for (sum, expected) in vector.iter().zip(&expected) {
            assert!((f64::from(*sum) - expected).abs() < 1e-3);
        }
    }
}

proptest! {
    #[test]
    fn all_ranks_have_the_same_sums(vectors in vectors()) {
        let (ranks, elements) = (vectors.len(), vectors[0].len());
        for algorithm in [Algorithm::Ring, Algorithm::Doubling, Algorithm::ReduceToOne] {
            let schedule = |rank| all_reduce(algorithm, rank, ranks, elements);
            check(vectors.clone(), &(0..ranks).map(schedule).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_rank_has_its_segment_after_a_reduce_scatter(vectors in vectors()) {
        let (ranks, elements) = (vectors.len(), vectors[0].len());
        let expected = sums(&vectors);
        let schedules: Vec<_> = (0..ranks).map(|r| ring::reduce_scatter(r, ranks, elements)).collect();
        let mut scattered = play(vectors, &schedules);
        for (rank, vector) in scattered.iter_mut().enumerate() {
            for (i, value) in vector.iter_mut().enumerate() {
                match segment(rank, ranks, elements).contains(&i) {
                    true => prop_assert!((f64::from(*value) - expected[i]).abs() < 1e-3),
                    // The gathering must not depend on it.
                    false => *value = f32::NAN,
                }
            }
        }
        let schedules: Vec<_> = (0..ranks).map(|r| all_gather(r, ranks, elements)).collect();
        for vector in play(scattered, &schedules) {
            let close = |(value, sum): (&f32, &f64)| (f64::from(*value) - sum).abs() < 1e-3;
            prop_assert!(vector.iter().zip(&expected).all(close));
        }
    }

    #[test]
    fn a_broadcast_copies_the_root(vectors in vectors(), root in 0usize..10) {
        let (ranks, elements) = (vectors.len(), vectors[0].len());
        let root = root % ranks;
        let expected = bits(&vectors[root]);
        for copy in [broadcast, pass_around] {
            let schedules: Vec<_> = (0..ranks).map(|r| copy(r, root, ranks, elements)).collect();
            for vector in play(vectors.clone(), &schedules) {
                prop_assert_eq!(bits(&vector), expected.clone());
            }
        }
    }
}

#[test]
fn a_ring_sends_no_more_than_it_must() {
    for ranks in 2..9 {
        for rank in 0..ranks {
            let rounds = all_reduce(Algorithm::Ring, rank, ranks, 840);
            let sent = rounds.iter().filter_map(|round| round.send.as_ref());
            let sent: usize = sent.map(|(_, range)| range.len()).sum();
            assert_eq!(sent, 2 * (ranks - 1) * 840 / ranks);
            assert_eq!(rounds.len(), 2 * (ranks - 1));
        }
    }
}
