//! Reduce-scatter and all-gather around a ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations", 2009). The vector has a segment for each rank. A segment travels around the ring, and each rank adds its
//! own elements; then the sums travel around once more.

use super::{Combine, Rank, Round, segment};

/// Returns the rounds of a rank, after which it has the sum of all ranks' elements in its own segment.
pub(super) fn reduce_scatter(rank: Rank, ranks: usize, elements: usize) -> Vec<Round> {
    // The sum of segment s begins at rank s + 1, so it ends at rank s.
    around(rank, ranks, elements, 1, Combine::Add)
}

/// Returns the rounds of a rank. The rank begins with its own segment, and ends with all segments.
pub(super) fn all_gather(rank: Rank, ranks: usize, elements: usize) -> Vec<Round> {
    around(rank, ranks, elements, 0, Combine::Replace)
}

/// Returns the rounds of a rank in which the vector of `root` travels around the ring.
pub(super) fn pass_around(rank: Rank, root: Rank, ranks: usize, elements: usize) -> Vec<Round> {
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    if elements == 0 {
        return Vec::new();
    }
    let receive = Round {
        receive: (rank != root).then_some((previous, 0..elements, Combine::Replace)),
        ..Round::default()
    };
    let send = Round {
        send: (next != root).then_some((next, 0..elements)),
        ..Round::default()
    };
    vec![receive, send]
}

/// Returns the rounds of a rank in which each segment travels around the ring. Segment `s` begins at rank `s + lead`.
fn around(rank: Rank, ranks: usize, elements: usize, lead: usize, combine: Combine) -> Vec<Round> {
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let of = |behind: usize| segment((rank + 2 * ranks - lead - behind) % ranks, ranks, elements);
    let round = |number: usize| {
        let (send, receive) = (of(number), of(number + 1));
        Round {
            send: (!send.is_empty()).then_some((next, send)),
            receive: (!receive.is_empty()).then_some((previous, receive, combine)),
        }
    };
    (0..ranks - 1).map(round).collect()
}
