//! Sums within groups of ranks that are close to each other, such as the processes of a host, then between the groups: each
//! vector passes the slow way between two groups once instead of once for each rank.

use super::{Algorithm, Rank, Round, renamed, tree};

/// Ranks by the place that they share. A rank is in one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups(Vec<Vec<Rank>>);

impl Groups {
    /// Returns the groups of ranks that share a place. `places` has the place of each rank.
    pub fn by_place<P: PartialEq>(places: &[P]) -> Self {
        let mut groups: Vec<Vec<Rank>> = Vec::new();
        for (rank, place) in places.iter().enumerate() {
            let same = |group: &&mut Vec<Rank>| group.first().is_some_and(|r| places[*r] == *place);
            match groups.iter_mut().find(same) {
                Some(group) => group.push(rank),
                None => groups.push(vec![rank]),
            }
        }
        Self(groups)
    }

    /// Returns whether there are several groups, and one of them has several ranks.
    pub(crate) fn are_nested(&self) -> bool {
        self.0.len() > 1 && self.0.iter().any(|group| group.len() > 1)
    }
}

/// Returns the rounds of a rank: a sum within its group, an all-reduce between the groups' first ranks, and a copy within
/// the group.
pub(super) fn all_reduce(groups: &Groups, rank: Rank, elements: usize, bytes: usize) -> Vec<Round> {
    if elements == 0 {
        return Vec::new();
    }
    let algorithm = Algorithm::for_size(elements, bytes);
    let of_rank = |group: &&Vec<Rank>| group.contains(&rank);
    let Some(group) = groups.0.iter().find(of_rank) else {
        return Vec::new();
    };
    let place = group.iter().position(|other| *other == rank).unwrap_or(0);
    let within = |rounds| renamed(rounds, |place| group[place]);
    let mut rounds = within(tree::reduce(place, group.len(), elements));
    if place == 0 {
        let firsts: Vec<Rank> = groups.0.iter().map(|group| group[0]).collect();
        let place = firsts.iter().position(|first| *first == rank).unwrap_or(0);
        let between = super::all_reduce(algorithm, place, firsts.len(), elements);
        rounds.extend(renamed(between, |place| firsts[place]));
    }
    rounds.extend(within(tree::broadcast(place, group.len(), elements)));
    rounds
}
