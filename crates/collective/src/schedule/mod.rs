//! What each rank sends and receives in a collective operation, as plain data: no sockets, clocks or threads.
//!
//! - `ring`: reduce-scatter and all-gather around a ring, for large vectors
//! - `doubling`: recursive doubling, for small vectors
//! - `tree`: sums and copies along a binomial tree
//!
//! A rank's part is a list of [`Round`]s. In each round it sends a range of its vector to a peer, or receives one, or both.
//! The order in which numbers are added follows from the schedule alone, and each sum is either computed once and copied, or
//! computed from the same two numbers on both sides. So all ranks end with the same bits.

mod doubling;
mod ring;
mod tree;

use std::collections::BTreeSet;
use std::ops::Range;

/// The place of a process or device in a group, from 0.
pub type Rank = usize;

/// A part of a collective operation for one rank. The rank sends its elements as they are after the rounds before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Round {
    /// The peer that elements are sent to, and their range.
    pub(crate) send: Option<(Rank, Range<usize>)>,
    /// The peer that elements are received from, their range, and what is done with them.
    pub(crate) receive: Option<(Rank, Range<usize>, Combine)>,
}

/// What is done with received elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Combine {
    /// Each received element is added to the element at the same index.
    Add,
    /// Each received element replaces the element at the same index.
    Replace,
}

/// The algorithm of an all-reduce among `n` ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Each rank sends and receives `2 (n - 1) / n` of the vector, in `2 (n - 1)` rounds.
    Ring,
    /// Each rank sends and receives the whole vector in each of `log2 n` rounds.
    Doubling,
    /// The vectors are added up along a binomial tree to one rank, and the sum is copied back along the same tree.
    ReduceToOne,
}

/// The size in bytes up to which recursive doubling is faster than a ring (`flambeau bench allreduce` measures both).
pub const DOUBLING_BYTES: usize = 128 << 10;

impl Algorithm {
    /// Returns the faster algorithm for a vector of `elements` elements of `bytes` bytes each. Among `n` ranks,
    /// doubling sends the vector `log2 n` times; a ring sends it less than twice, but in more rounds. Between two ranks
    /// both send the same number of bytes.
    pub fn for_size(elements: usize, bytes: usize) -> Self {
        match elements.saturating_mul(bytes) <= DOUBLING_BYTES {
            true => Self::Doubling,
            false => Self::Ring,
        }
    }

    /// Returns the algorithm with this name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::Ring, Self::Doubling, Self::ReduceToOne];
        all.into_iter().find(|algorithm| algorithm.name() == name)
    }

    /// Returns the name on command lines and in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Doubling => "doubling",
            Self::ReduceToOne => "reduce-to-one",
        }
    }
}

/// Returns the rounds of a rank, after which each of `ranks` ranks has the sum of all ranks' vectors.
pub(crate) fn all_reduce(
    algorithm: Algorithm,
    rank: Rank,
    ranks: usize,
    elements: usize,
) -> Vec<Round> {
    if elements == 0 {
        return Vec::new();
    }
    match algorithm {
        Algorithm::Ring => {
            let mut rounds = ring::reduce_scatter(rank, ranks, elements);
            rounds.extend(ring::all_gather(rank, ranks, elements));
            rounds
        }
        Algorithm::Doubling => doubling::all_reduce(rank, ranks, elements),
        Algorithm::ReduceToOne => {
            let mut rounds = tree::reduce(rank, ranks, elements);
            rounds.extend(tree::broadcast(rank, ranks, elements));
            rounds
        }
    }
}

/// Returns the rounds of a rank, after which each of the ranks in `ranks` has the sum of their one-element vectors. A
/// rank outside `ranks` has no rounds.
pub(crate) fn sum_among(rank: Rank, ranks: Range<Rank>) -> Vec<Round> {
    let Some(place) = rank.checked_sub(ranks.start).filter(|_| rank < ranks.end) else {
        return Vec::new();
    };
    let rounds = doubling::all_reduce(place, ranks.len(), 1);
    renamed(rounds, |place| place + ranks.start)
}

/// Returns the rounds of a rank, after which each rank has the [`segment`]s of all ranks.
pub(crate) fn all_gather(rank: Rank, ranks: usize, elements: usize) -> Vec<Round> {
    ring::all_gather(rank, ranks, elements)
}

/// Returns the rounds of a rank, after which it has the sums of all ranks' elements in the segments that it [keeps](kept_segments).
pub(crate) fn reduce_to_keepers(
    rank: Rank,
    ranks: usize,
    copies: usize,
    elements: usize,
) -> Vec<Round> {
    let mut rounds = ring::reduce_scatter(rank, ranks, elements);
    let gathered = ring::all_gather(rank, ranks, elements);
    rounds.extend(gathered.into_iter().take(copies.saturating_sub(1)));
    rounds
}

/// Returns the rounds of a rank, after which each rank has the vector of `root`. Each rank passes the vector on to the
/// next.
pub(crate) fn pass_around(rank: Rank, root: Rank, ranks: usize, elements: usize) -> Vec<Round> {
    ring::pass_around(rank, root, ranks, elements)
}

/// Returns the rounds of a rank, after which each rank has the vector of `root`. The vector travels along a binomial
/// tree.
pub(crate) fn broadcast(rank: Rank, root: Rank, ranks: usize, elements: usize) -> Vec<Round> {
    if elements == 0 {
        return Vec::new();
    }
    // The tree's root is place 0.
    let place = (rank + ranks - root) % ranks;
    let rounds = tree::broadcast(place, ranks, elements);
    renamed(rounds, |place| (place + root) % ranks)
}

/// Returns a rank's segment: the range of elements of which the rank has the sum after a reduce-scatter. The segments
/// follow each other in rank order, and their sizes differ by at most one element.
pub fn segment(rank: Rank, ranks: usize, elements: usize) -> Range<usize> {
    elements * rank / ranks..elements * (rank + 1) / ranks
}

/// Returns the segments that a rank keeps, if `copies` ranks keep each one: its own, and those of the ranks before it.
pub fn kept_segments(rank: Rank, ranks: usize, copies: usize) -> impl Iterator<Item = Rank> {
    (0..copies.min(ranks)).map(move |behind| (rank + ranks - behind) % ranks)
}

/// Returns the peers of a rank in all-reduces of any size, and in broadcasts of `root`.
pub(crate) fn peers(rank: Rank, root: Rank, ranks: usize) -> BTreeSet<Rank> {
    // Long enough for each rank to have a segment.
    let elements = ranks;
    let algorithms = [Algorithm::Ring, Algorithm::Doubling];
    let rounds = algorithms.map(|algorithm| all_reduce(algorithm, rank, ranks, elements));
    let rounds = rounds.into_iter().flatten();
    let rounds = rounds.chain(broadcast(rank, root, ranks, elements));
    peers_in(rounds)
}

/// Returns the peers with which a rank exchanges data in [`sum_among`], for the same ranks.
pub(crate) fn peers_among(rank: Rank, ranks: Range<Rank>) -> BTreeSet<Rank> {
    peers_in(sum_among(rank, ranks))
}

fn peers_in(rounds: impl IntoIterator<Item = Round>) -> BTreeSet<Rank> {
    let peers = |round: Round| {
        let to = round.send.map(|(peer, _)| peer);
        to.into_iter().chain(round.receive.map(|(peer, ..)| peer))
    };
    rounds.into_iter().flat_map(peers).collect()
}

/// Returns the rounds with each peer replaced by `name(peer)`.
fn renamed(rounds: Vec<Round>, name: impl Fn(Rank) -> Rank) -> Vec<Round> {
    let mut rounds = rounds;
    for round in &mut rounds {
        if let Some((peer, _)) = &mut round.send {
            *peer = name(*peer);
        }
        if let Some((peer, ..)) = &mut round.receive {
            *peer = name(*peer);
        }
    }
    rounds
}

#[cfg(test)]
mod tests;
