//! Sums and copies along a binomial tree with its root at rank 0.

use super::{Combine, Rank, Round};

/// Returns the rounds of a rank, after which rank 0 has the sum of all ranks' vectors.
pub(super) fn reduce(rank: Rank, ranks: usize, elements: usize) -> Vec<Round> {
    let mut rounds = Vec::new();
    let mut distance = 1;
    while distance < ranks {
        if rank & distance != 0 {
            rounds.push(Round {
                send: Some((rank - distance, 0..elements)),
                receive: None,
            });
            break;
        }
        if rank + distance < ranks {
            rounds.push(Round {
                send: None,
                receive: Some((rank + distance, 0..elements, Combine::Add)),
            });
        }
        distance *= 2;
    }
    rounds
}

/// Returns the rounds of a rank, after which it has the vector of rank 0. They are the rounds of [`reduce`] in reverse.
pub(super) fn broadcast(rank: Rank, ranks: usize, elements: usize) -> Vec<Round> {
    let reversed = reduce(rank, ranks, elements).into_iter().rev();
    let copy = |round: Round| Round {
        send: round.receive.map(|(peer, range, _)| (peer, range)),
        receive: round
            .send
            .map(|(peer, range)| (peer, range, Combine::Replace)),
    };
    reversed.map(copy).collect()
}
