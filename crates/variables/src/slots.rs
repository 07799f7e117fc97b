//! The optimizer's slots of some of the elements of a model.
//!
//! Elements are numbered across all variables that are not frozen, in the order of the variables. In a vector of slots,
//! the slots of an element follow each other, so a range of elements has a range of slots.

use std::ops::Range;

use optimizer::{Slots, VariableRule};
use shared_proto::blocks::VariableSpec;
use shared_proto::job::Job;

/// The slots of a range of a variable's elements.
#[derive(Clone, Debug)]
pub(crate) struct SlotPart {
    /// The variable's number.
    pub(super) variable: usize,
    /// The elements within the variable.
    pub(super) within: Range<usize>,
    /// The elements among those of all variables.
    pub(super) place: Range<usize>,
    /// An array for each slot, back to back.
    pub(super) slots: Vec<f32>,
}

impl SlotPart {
    /// Copies the slots of the elements that are both in this part and in `range` to `to`, the vector of the range's
    /// slots. `at` returns the index in `to` of an element's first slot.
    fn copy_to(&self, range: &Range<usize>, to: &mut [f32], at: impl Fn(usize) -> usize) {
        let (elements, count) = (self.place.len(), self.count());
        for element in overlap(&self.place, range) {
            let own = element - self.place.start;
            for slot in 0..count {
                to[at(element) + slot] = self.slots[slot * elements + own];
            }
        }
    }

    /// Copies the slots of the elements that are both in this part and in `range` from `from`, the vector of the
    /// range's slots. `at` returns the index in `from` of an element's first slot.
    fn copy_from(&mut self, range: &Range<usize>, from: &[f32], at: impl Fn(usize) -> usize) {
        let (elements, count) = (self.place.len(), self.count());
        for element in overlap(&self.place, range) {
            let own = element - self.place.start;
            for slot in 0..count {
                self.slots[slot * elements + own] = from[at(element) + slot];
            }
        }
    }

    /// Returns whether the part has elements of a range.
    pub(super) fn has_some_of(&self, range: &Range<usize>) -> bool {
        !overlap(&self.place, range).is_empty()
    }

    fn count(&self) -> usize {
        self.slots.len() / self.place.len().max(1)
    }
}

/// Returns the elements that two ranges have in common.
fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// The range of each variable's elements among those of all variables, and the slots of these elements.
#[derive(Clone, Debug)]
pub struct Places {
    /// The range of each variable's elements among those of all variables. It is empty for a frozen variable.
    elements: Vec<Range<usize>>,
    slots: Vec<Slots>,
}

impl Places {
    /// Returns the places of a model's variables in a job.
    pub fn of<'a>(job: &Job, variables: impl Iterator<Item = &'a VariableSpec>) -> Self {
        Self::new(variables.map(|spec| {
            let changes = spec.kind.takes_updates();
            let slots = VariableRule::new(job, spec, 0).rule_slots();
            (if changes { spec.elements() } else { 0 }, slots)
        }))
    }

    /// Lays variables out one after the other. Each item is a variable's number of elements (0 for a frozen variable) and its
    /// slots.
    fn new(variables: impl Iterator<Item = (usize, Slots)>) -> Self {
        let mut end = 0;
        let (elements, slots) = variables
            .map(|(elements, slots)| {
                let start = end;
                end += elements;
                (start..end, slots)
            })
            .unzip();
        Self { elements, slots }
    }

    /// Returns the number of elements.
    pub fn all(&self) -> usize {
        self.elements.last().map_or(0, |last| last.end)
    }

    /// Returns the elements of a variable.
    pub(super) fn of_variable(&self, variable: usize) -> Range<usize> {
        self.elements[variable].clone()
    }

    /// Returns the number of slots of a range of elements.
    pub fn slots_in(&self, range: &Range<usize>) -> usize {
        self.slots_before(range.end) - self.slots_before(range.start)
    }

    /// Returns the number of slots of the elements before this one.
    fn slots_before(&self, element: usize) -> usize {
        let variables = self.elements.iter().zip(&self.slots);
        let before =
            variables.map(|(place, slots)| overlap(place, &(0..element)).len() * slots.count);
        before.sum()
    }

    /// Returns the parts of variables in these ranges, with initial slots.
    pub(crate) fn parts(&self, ranges: &[Range<usize>]) -> Vec<SlotPart> {
        let mut parts = Vec::new();
        for range in ranges {
            for (variable, (all, slots)) in self.elements.iter().zip(&self.slots).enumerate() {
                let place = overlap(all, range);
                if !place.is_empty() {
                    parts.push(SlotPart {
                        variable,
                        within: place.start - all.start..place.end - all.start,
                        slots: vec![slots.initial; slots.count * place.len()],
                        place,
                    });
                }
            }
        }
        parts
    }

    /// Returns all variables as parts, with initial slots.
    pub(super) fn whole(&self) -> Vec<SlotPart> {
        self.parts(std::slice::from_ref(&(0..self.all())))
    }

    /// Returns the slots of a range of elements, as far as they are held. The others are 0.
    pub(crate) fn slots(&self, held: &[SlotPart], range: &Range<usize>) -> Vec<f32> {
        let start = self.slots_before(range.start);
        let mut slots = vec![0.0; self.slots_in(range)];
        for part in held {
            part.copy_to(range, &mut slots, self.place_of_slots(part, start));
        }
        slots
    }

    /// Returns the initial slots of a range of elements, as far as they are in `held`. The others are 0.
    pub fn initial_slots(&self, held: &[Range<usize>], range: &Range<usize>) -> Vec<f32> {
        self.slots(&self.parts(held), range)
    }

    /// Sets the slots of the elements in a range, as far as these elements are held.
    pub(crate) fn take(&self, held: &mut [SlotPart], range: &Range<usize>, slots: &[f32]) {
        let start = self.slots_before(range.start);
        for part in held {
            let place = self.place_of_slots(part, start);
            part.copy_from(range, slots, place);
        }
    }

    /// Returns a function from an element of a part to the index of its first slot in a vector that begins after
    /// `start` slots.
    fn place_of_slots(&self, part: &SlotPart, start: usize) -> impl Fn(usize) -> usize + use<> {
        let (first, count) = (part.place.start, part.count());
        let before = self.slots_before(first);
        // Elements of the part that the vector lacks are before it.
        move |element| (before + (element - first) * count).saturating_sub(start)
    }

    /// Returns whether all elements are held.
    pub(crate) fn is_whole(&self, held: &[SlotPart]) -> bool {
        held.iter().map(|part| part.place.len()).sum::<usize>() == self.all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn places(variables: &[(usize, usize)]) -> Places {
        let slots = |count| Slots {
            count,
            initial: 0.5,
        };
        Places::new(
            variables
                .iter()
                .map(|(elements, count)| (*elements, slots(*count))),
        )
    }

    proptest! {
        #[test]
        fn slots_keep_their_elements_however_they_are_cut(
            variables in prop::collection::vec((0usize..9, 0usize..3), 1..5),
            cuts in prop::collection::vec(0usize..40, 3),
        ) {
            let places = places(&variables);
            let all = places.all();
            let mut whole = places.whole();
            prop_assert!(places.is_whole(&whole));
            let numbers = places.slots(&whole, &(0..all)).len();
            let counts = variables.iter().map(|(elements, count)| elements * count);
            prop_assert_eq!(numbers, counts.sum::<usize>());
            let slots: Vec<f32> = (0..numbers).map(|number| number as f32).collect();
            places.take(&mut whole, &(0..all), &slots);
            prop_assert_eq!(&places.slots(&whole, &(0..all)), &slots);
            // Moved in two pieces to a replica that holds another range.
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(all)).collect();
            cuts.sort_unstable();
            let mut held = places.parts(std::slice::from_ref(&(cuts[0]..cuts[2])));
            for piece in [0..cuts[1], cuts[1]..all] {
                let moved = places.slots(&whole, &piece);
                places.take(&mut held, &piece, &moved);
            }
            let of = cuts[0]..cuts[2];
            prop_assert_eq!(places.slots(&held, &of), places.slots(&whole, &of));
        }
    }

    #[test]
    fn slots_that_nobody_has_moved_are_initial() {
        let places = places(&[(2, 1), (3, 0), (2, 2)]);
        assert_eq!(
            places.slots(&places.parts(std::slice::from_ref(&(1..6))), &(0..7)),
            [0.0, 0.5, 0.5, 0.5, 0.0, 0.0]
        );
    }
}
