//! Recursive doubling (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005):
//! in each round a rank exchanges its whole vector with a peer twice as far away as in the round before. Both add the same
//! two numbers, so both have the same bits.

use super::{Combine, Rank, Round};

/// Returns the rounds of a rank, after which it has the sum of all ranks' vectors. If the number of ranks is not a
/// power of two, the surplus ranks first send their vectors to other ranks, and receive the sum at the end.
pub(super) fn all_reduce(rank: Rank, ranks: usize, elements: usize) -> Vec<Round> {
    let all = 0..elements;
    let core = match ranks.is_power_of_two() {
        true => ranks,
        false => ranks.next_power_of_two() / 2,
    };
    if rank >= core {
        let helper = rank - core;
        let give = Round {
            send: Some((helper, all.clone())),
            receive: None,
        };
        let get = Round {
            send: None,
            receive: Some((helper, all, Combine::Replace)),
        };
        return vec![give, get];
    }
    let surplus = Some(rank + core).filter(|surplus| *surplus < ranks);
    let mut rounds = Vec::new();
    rounds.extend(surplus.map(|surplus| Round {
        send: None,
        receive: Some((surplus, all.clone(), Combine::Add)),
    }));
    let mut distance = 1;
    while distance < core {
        let peer = rank ^ distance;
        rounds.push(Round {
            send: Some((peer, all.clone())),
            receive: Some((peer, all.clone(), Combine::Add)),
        });
        distance *= 2;
    }
    rounds.extend(surplus.map(|surplus| Round {
        send: Some((surplus, all)),
        receive: None,
    }));
    rounds
}
