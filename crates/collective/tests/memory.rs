//! Groups within a process.

use flambeau_collective::{
    Algorithm, CollectiveError, Group, MemoryLinks, Traffic, kept_segments, segment,
};
use futures_util::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shared_proto::payload::Dtype;

/// Enough for several pieces in each segment.
const LARGE: usize = 700_001;

fn vectors(ranks: usize, elements: usize) -> Vec<Vec<f32>> {
    let mut random = StdRng::seed_from_u64(7);
    let mut vector = || {
        (0..elements)
            .map(|_| random.random_range(-1.0..1.0))
            .collect()
    };
    (0..ranks).map(|_| vector()).collect()
}

fn sums(vectors: &[Vec<f32>]) -> Vec<f64> {
    let sum = |i: usize| vectors.iter().map(|v| f64::from(v[i])).sum();
    (0..vectors[0].len()).map(sum).collect()
}

fn bits(vector: &[f32]) -> Vec<u32> {
    vector.iter().map(|value| value.to_bits()).collect()
}

/// Lets all ranks do the same, side by side.
async fn together(
    vectors: &mut [Vec<f32>],
    wire: Dtype,
    set: impl Fn(Group<MemoryLinks>) -> Group<MemoryLinks>,
    act: impl AsyncFn(&Group<MemoryLinks>, &mut [f32]) -> Result<(), CollectiveError>,
) -> Vec<Result<(), CollectiveError>> {
    let ranks = vectors.len();
    let links = MemoryLinks::among(ranks);
    let groups = links.into_iter().enumerate();
    let groups: Vec<_> = groups
        .map(|(rank, links)| set(Group::new(rank, ranks, links, wire)))
        .collect();
    let acts = groups
        .iter()
        .zip(vectors)
        .map(|(group, vector)| act(group, vector));
    join_all(acts).await
}

#[tokio::test]
async fn sums_are_right_and_the_same_everywhere() {
    for (ranks, elements) in [(1, 5), (2, 1), (2, LARGE), (3, LARGE), (5, 100), (8, 4_000)] {
        let expected = sums(&vectors(ranks, elements));
        for (algorithm, wire, error) in [
            (None, Dtype::F32, 1e-5),
            (Some(Algorithm::Ring), Dtype::F32, 1e-5),
            (Some(Algorithm::Doubling), Dtype::F32, 1e-5),
            (Some(Algorithm::ReduceToOne), Dtype::F32, 1e-5),
            (Some(Algorithm::Ring), Dtype::Bf16, 0.1),
            (Some(Algorithm::Doubling), Dtype::Bf16, 0.1),
            (Some(Algorithm::Ring), Dtype::F16, 0.02),
        ] {
            let set = |group: Group<_>| match algorithm {
                Some(algorithm) => group.by(algorithm),
                None => group,
            };
            let mut reduced = vectors(ranks, elements);
            let act = async |group: &Group<_>, values: &mut [f32]| group.all_reduce(values).await;
            let ended = together(&mut reduced, wire, set, act).await;
            assert!(ended.iter().all(Result::is_ok));
            for vector in &reduced {
                assert!(bits(vector) == bits(&reduced[0]), "{algorithm:?} {wire:?}");
                let far = |(sum, expected): (&f32, &f64)| (f64::from(*sum) - expected).abs();
                let far = vector.iter().zip(&expected).map(far).fold(0.0, f64::max);
                assert!(far <= error * ranks as f64, "{algorithm:?} {wire:?}: {far}");
            }
            let mut again = vectors(ranks, elements);
            together(&mut again, wire, set, act).await;
            assert!(
                bits(&again[0]) == bits(&reduced[0]),
                "another run has other bits"
            );
        }
    }
}

#[tokio::test]
async fn kept_segments_are_gathered() {
    let (ranks, elements) = (3, LARGE);
    let mut values = vectors(ranks, elements);
    let mut reduced = values.clone();
    let ring = |group: Group<MemoryLinks>| group.by(Algorithm::Ring);
    let act = async |group: &Group<_>, values: &mut [f32]| {
        group.reduce_to_keepers(values, 1).await?;
        let own = segment(group.rank(), group.ranks(), values.len());
        values[..own.start].fill(f32::NAN);
        values[own.end..].fill(f32::NAN);
        group.all_gather(values).await
    };
    together(&mut values, Dtype::F32, ring, act).await;
    let act = async |group: &Group<_>, values: &mut [f32]| group.all_reduce(values).await;
    together(&mut reduced, Dtype::F32, ring, act).await;
    assert!(values.iter().all(|v| bits(v) == bits(&reduced[0])));
}

#[tokio::test]
async fn keepers_have_the_bits_of_an_all_reduce() {
    for (ranks, elements) in [(1, 5), (2, LARGE), (3, 7), (4, LARGE), (5, LARGE)] {
        for wire in [Dtype::F32, Dtype::Bf16] {
            let mut reduced = vectors(ranks, elements);
            let act = async |group: &Group<_>, values: &mut [f32]| group.all_reduce(values).await;
            together(&mut reduced, wire, |group| group, act).await;
            for copies in 1..=ranks {
                let mut kept = vectors(ranks, elements);
                let act = async |group: &Group<_>, values: &mut [f32]| {
                    group.reduce_to_keepers(values, copies).await
                };
                together(&mut kept, wire, |group| group, act).await;
                for (rank, vector) in kept.iter().enumerate() {
                    let segments = kept_segments(rank, ranks, copies);
                    assert_eq!(segments.count(), copies);
                    for segment in kept_segments(rank, ranks, copies) {
                        let own = flambeau_collective::segment(segment, ranks, elements);
                        let expected = bits(&reduced[0][own.clone()]);
                        assert!(
                            bits(&vector[own]) == expected,
                            "{rank} of {ranks}, {wire:?}"
                        );
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn a_broadcast_keeps_each_bit_and_a_barrier_waits_for_all() {
    let mut values = vectors(4, LARGE);
    values[2][5] = f32::from_bits(0x7fc0_1234);
    let expected = bits(&values[2]);
    let act = async |group: &Group<_>, values: &mut [f32]| {
        group.barrier().await?;
        group.broadcast(2, values).await
    };
    // A broadcast carries weights, which are not rounded.
    together(&mut values, Dtype::Bf16, |group| group, act).await;
    assert!(values.iter().all(|v| bits(v) == expected));
}

#[tokio::test]
async fn bytes_of_any_length_are_gathered() {
    for lengths in [
        vec![3],
        vec![0, 0],
        vec![0, 5, 3_000_000],
        vec![700_000, 1, 524_288, 524_289],
    ] {
        let ranks = lengths.len();
        let own = |rank: usize| vec![rank as u8 + 1; lengths[rank]];
        let groups = MemoryLinks::among(ranks).into_iter().enumerate();
        let groups: Vec<_> = groups
            .map(|(rank, links)| Group::new(rank, ranks, links, Dtype::Bf16))
            .collect();
        let gathering = groups
            .iter()
            .map(|group| group.gather_bytes(own(group.rank()).into()));
        let gathered = join_all(gathering).await;
        let expected: Vec<Vec<u8>> = (0..ranks).map(own).collect();
        for all in gathered {
            assert!(all.unwrap() == expected, "{lengths:?}");
        }
    }
}

#[tokio::test]
async fn all_notice_that_a_rank_is_gone() {
    let mut values = vectors(4, LARGE);
    let act = async |group: &Group<_>, values: &mut [f32]| match group.rank() {
        2 => Err(CollectiveError::Differs {
            rank: 2,
            found: 0,
            expected: 0,
        }),
        _ => group.all_reduce(values).await,
    };
    let links = MemoryLinks::among(4);
    let mut acts = Vec::new();
    for ((rank, links), values) in links.into_iter().enumerate().zip(&mut values) {
        // Each drops its links with its group when it fails.
        acts.push(async move {
            let group = Group::new(rank, 4, links, Dtype::F32);
            act(&group, values).await
        });
    }
    for ended in join_all(acts).await {
        assert!(ended.is_err());
    }
}

#[tokio::test]
async fn vectors_of_different_lengths_are_found() {
    let mut values = vec![vec![0.0; 10], vec![0.0; 12]];
    let act = async |group: &Group<_>, values: &mut [f32]| group.all_reduce(values).await;
    let ended = together(&mut values, Dtype::F32, |group| group, act).await;
    let error = ended[0].clone().unwrap_err().to_string();
    assert_eq!(
        error,
        "rank 1 sends 48 bytes where 40 are due; do all ranks have the same job?"
    );
}

#[tokio::test]
async fn the_traffic_is_that_of_the_schedule() {
    let ranks = 4;
    let elements = 4 * 300_000;
    let act = async |group: &Group<_>, values: &mut [f32]| {
        group.all_reduce(values).await?;
        let traffic = group.take_traffic();
        // Each rank sends and receives `2 (n - 1) / n` of the vector, of which an element has two bytes.
        let expected = (elements * 2 * 2 * (ranks - 1) / ranks) as u64;
        assert_eq!((traffic.sent, traffic.received), (expected, expected));
        assert_eq!(group.take_traffic(), Traffic::default());
        Ok(())
    };
    let by = |group: Group<_>| group.by(Algorithm::Ring);
    let ended = together(&mut vectors(ranks, elements), Dtype::Bf16, by, act).await;
    assert!(ended.iter().all(Result::is_ok));
}

/// Returns the sums of short vectors that each rank gets.
async fn short_sums(vectors: Vec<Vec<f64>>) -> Vec<Result<Vec<f64>, CollectiveError>> {
    let ranks = vectors.len();
    let links = MemoryLinks::among(ranks).into_iter().enumerate();
    let sums = links.zip(vectors).map(async |((rank, links), vector)| {
        // A 16-bit wire is for gradients.
        let group = Group::new(rank, ranks, links, Dtype::Bf16);
        group.sum_short(vector).await
    });
    join_all(sums).await
}

#[tokio::test]
async fn short_vectors_add_up_also_with_ranks_that_have_none() {
    for ranks in 1..=9 {
        let vector = |rank: usize, i: usize| 1.0 / (1.0 + (rank * 7 + i) as f64);
        // Each set of ranks with numbers; also none.
        for with in 0..1 << ranks {
            let has = |rank: &usize| with & 1 << rank != 0;
            let vectors = (0..ranks).map(|rank| match has(&rank) {
                true => (0..5).map(|i| vector(rank, i)).collect(),
                false => Vec::new(),
            });
            let sums = short_sums(vectors.collect()).await;
            let first = sums[0].clone().unwrap();
            assert!(sums.iter().all(|sum| sum.as_ref() == Ok(&first)));
            assert_eq!(first.len(), if with == 0 { 0 } else { 5 });
            for (i, sum) in first.iter().enumerate() {
                let having = (0..ranks).filter(has);
                let expected: f64 = having.map(|rank| vector(rank, i)).sum();
                assert!((sum - expected).abs() < 1e-14, "{sum} is not {expected}");
            }
        }
    }
}

#[tokio::test]
async fn short_vectors_of_different_lengths_are_found() {
    for vectors in [
        vec![vec![1.0; 3], vec![1.0; 4]],
        vec![vec![1.0; 3], vec![], vec![1.0; 4]],
    ] {
        let sums = short_sums(vectors).await;
        let error = sums.into_iter().find_map(Result::err).unwrap();
        assert!(matches!(error, CollectiveError::Differs { .. }), "{error}");
    }
}
