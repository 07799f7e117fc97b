//! The slots that each member of a ring has, and those that move when the members change: plain data.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use collective::{Rank, kept_segments, segment};
use shared_proto::ids::{Clock, Epoch};
use shared_proto::planted;

use replica::{Held, SlotShare, ValuesId};

/// The cut of a model's elements into the segments of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// The number of elements of all variables that are not frozen.
    pub(super) elements: usize,
    /// The length of the vector in which gradients are added up, counts included. The segments are those of this
    /// vector.
    pub(super) vector: usize,
    /// The number of ranks that hold each segment.
    pub(super) copies: usize,
}

impl Cut {
    /// Returns the elements of a segment.
    fn segment(&self, number: usize, ranks: usize) -> Range<usize> {
        let segment = segment(number, ranks, self.vector);
        segment.start.min(self.elements)..segment.end.min(self.elements)
    }

    /// Returns the elements that a rank holds.
    pub(super) fn of_rank(&self, rank: Rank, ranks: usize) -> Vec<Range<usize>> {
        if self.copies >= ranks {
            return std::iter::once(0..self.elements).collect();
        }
        let segments = kept_segments(rank, ranks, self.copies);
        let ranges = segments.map(|number| self.segment(number, ranks));
        ranges.filter(|range| !range.is_empty()).collect()
    }
}

/// The way in which the members of a ring get their slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// No update has changed the slots: all are initial.
    Initial,
    /// The slots belong to these values, and move range by range.
    Moves(ValuesId, Vec<Move>),
}

/// The slots of a range of elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) elements: Range<usize>,
    /// The rank that sends the slots.
    pub(super) from: Rank,
    /// The ranks that have the slots, each with the share that has them.
    pub(super) holders: BTreeMap<Rank, Which>,
    /// True if a rank that wants some of the slots does not have them.
    pub(super) travels: bool,
}

/// One of the two shares that a member may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Present,
    /// The share before the present one, which is kept until a step is made.
    Before,
}

/// The most elements of a move, so that only few slots travel at a time.
const MOST_ELEMENTS: usize = 1 << 20;

/// Plans how the members of a ring get the slots that they want, from what each member holds. All members make the same
/// plan. The slots belong to the values of the rank `source`. `has_slots` returns whether elements have slots at all.
/// Returns `None` if no member has some of the slots.
pub(super) fn plan(
    held: &[Held],
    source: Rank,
    cut: Cut,
    wanted: impl Fn(Rank) -> Vec<Range<usize>>,
    has_slots: impl Fn(&Range<usize>) -> bool,
) -> Option<Plan> {
    let of = match held.get(source)? {
        Held { updates: 0, .. } => return Some(Plan::Initial),
        source => source.values?,
    };
    let shares = shares_of(held, of);
    let cuts: BTreeSet<usize> = shares.iter().map(|(_, _, share)| share.ranks).collect();
    let wanted: Vec<_> = (0..held.len()).map(wanted).collect();
    let of_segment = |number: usize, ranks: usize| -> Option<Vec<Move>> {
        let elements = cut.segment(number, ranks);
        if !has_slots(&elements) {
            return Some(Vec::new());
        }
        let keeps = |share: &SlotShare| {
            let mut kept = kept_segments(share.rank, ranks, cut.copies);
            share.ranks == ranks && kept.any(|kept| kept == number)
        };
        let mut holders = BTreeMap::new();
        for (rank, which, _) in shares.iter().filter(|(_, _, share)| keeps(share)) {
            holders.entry(*rank).or_insert(*which);
        }
        let from = *holders.first_key_value()?.0;
        let piece = |start: usize| {
            let elements = start..elements.end.min(start + MOST_ELEMENTS);
            let overlaps =
                |range: &Range<usize>| range.start < elements.end && elements.start < range.end;
            let lacks = |(rank, wanted): (Rank, &Vec<Range<usize>>)| {
                !holders.contains_key(&rank) && wanted.iter().any(overlaps)
            };
            Move {
                travels: wanted.iter().enumerate().any(lacks),
                from,
                holders: holders.clone(),
                elements,
            }
        };
        let pieces = elements.clone().step_by(MOST_ELEMENTS);
        Some(pieces.map(piece).collect())
    };
    let moves = |ranks: usize| -> Option<Vec<Move>> {
        let segments = (0..ranks).map(|number| of_segment(number, ranks));
        Some(segments.collect::<Option<Vec<_>>>()?.concat())
    };
    // Without slots, no member need have any.
    let cuts = cuts.into_iter().chain(std::iter::once(held.len()));
    let moves = cuts.into_iter().find_map(moves)?;
    Some(Plan::Moves(of, moves))
}

/// Returns the shares of the members that belong to these values, or would if the prepared update were made.
fn shares_of(held: &[Held], of: ValuesId) -> Vec<(Rank, Which, SlotShare)> {
    let mut shares = Vec::new();
    for (rank, held) in held.iter().enumerate() {
        for (which, share, prepared) in [
            (Which::Present, held.share, held.prepared),
            (Which::Before, held.share_before, held.prepared_before),
        ] {
            let belongs =
                |share: &SlotShare| share.of == of || prepared == Some(of) || planted!(OldSlots);
            let share = share.filter(belongs);
            shares.extend(share.map(|share| (rank, which, share)));
        }
    }
    shares
}

/// The length of the vector of numbers that describes what a member holds.
pub(super) const NUMBERS: usize = 15;

/// Returns what a member holds, as numbers that are exact in a sum with zeros.
pub(super) fn to_numbers(held: &Held) -> [f64; NUMBERS] {
    let id = |id: Option<ValuesId>| match id {
        // Rings are numbered from 1.
        Some(id) => [id.ring.0 as f64, id.clock.0 as f64],
        None => [0.0; 2],
    };
    let share = |share: Option<SlotShare>, prepared: Option<ValuesId>| {
        let [of, prepared] = [share.map(|share| share.of), prepared].map(id);
        let (rank, ranks) = share.map_or((0, 0), |share| (share.rank, share.ranks));
        [
            of[0],
            of[1],
            rank as f64,
            ranks as f64,
            prepared[0],
            prepared[1],
        ]
    };
    let mut numbers = [0.0; NUMBERS];
    numbers[..2].copy_from_slice(&id(held.values));
    numbers[2] = held.updates as f64;
    numbers[3..9].copy_from_slice(&share(held.share, held.prepared));
    numbers[9..].copy_from_slice(&share(held.share_before, held.prepared_before));
    numbers
}

/// Returns what the member with these numbers holds.
pub(super) fn of_numbers(numbers: &[f64]) -> Held {
    let number = |place: usize| numbers.get(place).map_or(0, |number| *number as u64);
    let id = |place: usize| {
        let ring = number(place);
        (ring > 0).then(|| ValuesId {
            ring: Epoch(ring),
            clock: Clock(number(place + 1)),
        })
    };
    let share = |place: usize| {
        id(place).map(|of| SlotShare {
            of,
            rank: number(place + 2) as usize,
            ranks: number(place + 3) as usize,
        })
    };
    Held {
        values: id(0),
        updates: number(2),
        share: share(3),
        prepared: id(7),
        share_before: share(9),
        prepared_before: id(13),
        slot_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CUT: Cut = Cut {
        elements: 100,
        vector: 102,
        copies: 2,
    };

    fn id(ring: u64, clock: u64) -> ValuesId {
        ValuesId {
            ring: Epoch(ring),
            clock: Clock(clock),
        }
    }

    /// A member that has made the last of these values in a ring of so many ranks.
    fn member(of: ValuesId, rank: Rank, ranks: usize) -> Held {
        Held {
            values: Some(of),
            updates: of.clock.0,
            share: Some(SlotShare { of, rank, ranks }),
            ..Held::default()
        }
    }

    /// Each element has slots.
    fn all(_: &Range<usize>) -> bool {
        true
    }

    fn newcomer() -> Held {
        Held::default()
    }

    fn wanted(ranks: usize, copies: usize) -> impl Fn(Rank) -> Vec<Range<usize>> {
        let cut = Cut { copies, ..CUT };
        move |rank| cut.of_rank(rank, ranks)
    }

    #[test]
    fn nothing_travels_among_members_that_stay() {
        let held: Vec<Held> = (0..3).map(|rank| member(id(4, 9), rank, 3)).collect();
        let Some(Plan::Moves(of, moves)) = plan(&held, 0, CUT, wanted(3, 2), all) else {
            panic!();
        };
        assert_eq!(of, id(4, 9));
        assert!(moves.iter().all(|slots| !slots.travels));
    }

    #[test]
    fn a_dead_members_slots_come_from_its_neighbour() {
        // Rank 1 of 3 is dead; another worker has come.
        let held = [member(id(4, 9), 0, 3), member(id(4, 9), 2, 3), newcomer()];
        let Some(Plan::Moves(_, moves)) = plan(&held, 0, CUT, wanted(3, 2), all) else {
            panic!();
        };
        let from: Vec<Rank> = moves.iter().map(|slots| slots.from).collect();
        // Segment 0 is held by ranks 0 and 1, segment 1 by 1 and 2, segment 2 by 2 and 0.
        assert_eq!(from, [0, 1, 0]);
        assert_eq!(moves[1].elements, 34..68);
        assert!(moves.iter().all(|slots| slots.travels));
    }

    #[test]
    fn slots_that_nobody_holds_are_missed() {
        let held = [member(id(4, 9), 0, 4), member(id(4, 9), 3, 4)];
        assert_eq!(plan(&held, 0, CUT, wanted(2, 2), all), None);
        let initial = [newcomer(), newcomer()];
        assert_eq!(
            plan(&initial, 0, CUT, wanted(2, 2), all),
            Some(Plan::Initial)
        );
        let one = Cut { copies: 1, ..CUT };
        let held = [member(id(4, 9), 0, 2), newcomer()];
        assert_eq!(plan(&held, 0, one, wanted(2, 1), all), None);
    }

    #[test]
    fn a_member_that_has_prepared_the_step_has_its_slots() {
        let lacks = Held {
            prepared: Some(id(5, 9)),
            ..member(id(5, 8), 1, 2)
        };
        let one = Cut { copies: 1, ..CUT };
        let held = [member(id(5, 9), 0, 2), lacks];
        assert!(plan(&held, 0, one, wanted(2, 1), all).is_some());
        // A step of an earlier ring with the same clock is another one.
        let other = Held {
            prepared: Some(id(4, 9)),
            ..lacks
        };
        assert_eq!(plan(&[held[0], other], 0, one, wanted(2, 1), all), None);
        assert!(plan(&[held[0], other], 1, one, wanted(2, 1), all).is_none());
    }

    #[test]
    fn a_share_before_counts_until_all_have_the_next() {
        // Of four, rank 3 is dead. Rank 0 has its slots of the ring of three, the others have not.
        let of = id(4, 9);
        let moved = Held {
            share_before: Some(SlotShare {
                of,
                rank: 0,
                ranks: 4,
            }),
            ..member(of, 0, 3)
        };
        let held = [moved, member(of, 1, 4), member(of, 2, 4)];
        let Some(Plan::Moves(_, moves)) = plan(&held, 0, CUT, wanted(3, 2), all) else {
            panic!();
        };
        let last = &moves[3];
        assert_eq!((last.from, last.holders[&0]), (0, Which::Before));
        let lost = Held {
            share_before: None,
            ..moved
        };
        assert_eq!(
            plan(&[lost, held[1], held[2]], 0, CUT, wanted(3, 2), all),
            None
        );
    }

    #[test]
    fn elements_without_slots_need_no_holder() {
        let held = [member(id(4, 9), 0, 2), newcomer()];
        let one = Cut { copies: 1, ..CUT };
        let without = plan(&held, 0, one, wanted(2, 1), |_| false);
        assert_eq!(without, Some(Plan::Moves(id(4, 9), Vec::new())));
    }

    #[test]
    fn a_checkpoint_that_one_has_loaded_is_enough() {
        let loaded = member(id(7, 20), 0, 1);
        let held = [newcomer(), loaded, newcomer()];
        let Some(Plan::Moves(_, moves)) = plan(&held, 1, CUT, wanted(3, 2), all) else {
            panic!();
        };
        assert_eq!((moves.len(), moves[0].from, moves[0].travels), (1, 1, true));
        assert_eq!(moves[0].elements, 0..100);
    }

    proptest! {
        #[test]
        fn what_is_held_travels_as_numbers(
            ids in prop::array::uniform5((1u64..1 << 50, 0u64..1 << 50)),
            rank in 0usize..1000,
            has in prop::array::uniform5(any::<bool>()),
        ) {
            let [values, of, prepared, before, prepared_before] = ids.map(|(ring, clock)| id(ring, clock));
            let share = |of| SlotShare { of, rank, ranks: rank + 1 };
            let held = Held {
                values: has[0].then_some(values),
                updates: values.clock.0,
                share: has[1].then_some(share(of)),
                prepared: has[2].then_some(prepared),
                share_before: has[3].then_some(share(before)),
                prepared_before: has[4].then_some(prepared_before),
                slot_bytes: 0,
            };
            prop_assert_eq!(of_numbers(&to_numbers(&held)), held);
        }

        /// As long as no two neighbours of a ring die at once, two copies are enough.
        #[test]
        fn each_element_is_held_after_a_death(ranks in 2usize..9, dead in 0usize..9, joins in 0usize..3) {
            let survivors = (0..ranks).filter(|rank| *rank != dead % ranks);
            let mut held: Vec<Held> = survivors.map(|rank| member(id(3, 5), rank, ranks)).collect();
            held.extend((0..joins).map(|_| newcomer()));
            let next = held.len();
            let Some(Plan::Moves(_, moves)) = plan(&held, 0, CUT, wanted(next, 2), all) else {
                return Err(TestCaseError::fail("slots are missed"));
            };
            let mut covered = vec![0; CUT.elements];
            for slots in &moves {
                prop_assert!(slots.holders.contains_key(&slots.from));
                covered[slots.elements.clone()].iter_mut().for_each(|count| *count += 1);
            }
            prop_assert!(covered.iter().all(|count| *count == 1));
            // Each element is held `copies` times in the next ring.
            let mut copies = vec![0; CUT.elements];
            for rank in 0..next {
                for range in CUT.of_rank(rank, next) {
                    copies[range].iter_mut().for_each(|count| *count += 1);
                }
            }
            prop_assert!(copies.iter().all(|count| *count == next.min(2)));
        }
    }
}
