//! The index of a bucket's rows: from an id's hash to the place of its row.
//!
//! An entry holds 32 bits of the hash, the tag, beside the place. A search compares tags. Whether a row belongs to the
//! id, only the row itself shows. Entries are in groups of a cache line each, and most searches end in the first group
//! that they look at. The tag alone determines this group, so that the index can grow without reading the rows.

use std::hint::black_box;

use shared_proto::table::hash::hash;

use crate::chunks::Place;

/// The number of parts of the index, which grow one by one. A part is a small share of the bucket, so that no update
/// waits long for its growth.
const PARTS: usize = 64;

/// The number of entries in a group.
const WIDTH: usize = 8;

/// The number of keys that are looked up together: enough that the CPU waits for the memory of many entries at once,
/// and few enough that this memory is still in the first-level cache when the entries are compared.
pub(crate) const BLOCK: usize = 128;

/// The part of an id's hash that the index uses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Key {
    part: u32,
    /// At least 1: an entry with a tag of 0 is empty.
    tag: u32,
}

impl Key {
    /// Returns the key of an id in a table of `buckets` buckets: the place of the id's hash in its bucket's range of
    /// hashes. Ids in the order of their hashes have keys in ascending order, so a batch of them goes through the index
    /// from front to back.
    #[inline(always)]
    pub(crate) fn new(id: u64, buckets: u32) -> Self {
        // The bucket is the upper half of this product.
        let place = hash(id).wrapping_mul(u64::from(buckets));
        let part_bits = PARTS.ilog2();
        Self {
            part: (place >> (u64::BITS - part_bits)) as u32,
            tag: ((place >> (u32::BITS - part_bits)) as u32).max(1),
        }
    }
}

/// Finds places by keys.
#[derive(Debug)]
pub(crate) struct Index {
    parts: Vec<Part>,
    /// The number of groups of all parts.
    groups: usize,
}

#[derive(Clone, Debug, Default)]
struct Part {
    groups: Vec<Group>,
    /// The number of entries.
    len: usize,
}

/// Entries with a tag and a place each. An entry is in the first group, from its home on, that had room for it. The
/// search for room goes on from the last group to the first.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Group {
    tags: [u32; WIDTH],
    places: [Place; WIDTH],
}

impl Index {
    /// Returns an index without entries.
    pub(crate) fn new() -> Self {
        Self {
            parts: vec![Part::default(); PARTS],
            groups: 0,
        }
    }

    /// Writes a guess for each key to `places`: the place in an entry with the key's tag, or [`Place::NONE`] if there
    /// is no such entry. The row at the place may be another id's.
    #[inline(always)]
    pub(crate) fn guess(&self, keys: &[Key], places: &mut [Place]) {
        // First a read from each group, so that the CPU waits for all of them at once.
        let mut read = 0;
        for key in keys {
            read ^= self.home(*key).map_or(0, |group| group.tags[0]);
        }
        black_box(read);
        // If the first group is full, the entry may be in another one. These groups are read together too.
        let mut further = [0; BLOCK];
        let mut count = 0;
        for (number, (key, place)) in keys.iter().zip(places.iter_mut()).enumerate() {
            let home = self.home(*key);
            *place = home.map_or(Place::NONE, |group| group.guess(key.tag));
            if *place == Place::NONE && home.is_some_and(Group::is_full) {
                further[count] = number;
                count += 1;
            }
        }
        let further = &further[..count];
        for number in further {
            let key = keys[*number];
            let part = &self.parts[key.part as usize];
            read ^= part.groups[part.next(part.home(key.tag))].tags[0];
        }
        black_box(read);
        for number in further {
            places[*number] = self.find(keys[*number], |_| true).unwrap_or(Place::NONE);
        }
    }

    /// Returns the group where the search for a key begins; `None` if its part is empty.
    #[inline(always)]
    fn home(&self, key: Key) -> Option<&Group> {
        let part = &self.parts[key.part as usize];
        part.groups.get(part.home(key.tag))
    }

    /// Returns the place in the entry of the key that `is_row` accepts, if there is one.
    pub(crate) fn find(&self, key: Key, is_row: impl FnMut(Place) -> bool) -> Option<Place> {
        let part = &self.parts[key.part as usize];
        let (group, entry) = part.position(key.tag, is_row)?;
        Some(part.groups[group].places[entry])
    }

    /// Adds an entry.
    pub(crate) fn insert(&mut self, key: Key, place: Place) {
        let part = &mut self.parts[key.part as usize];
        if part.is_full() {
            let before = part.groups.len();
            part.grow();
            self.groups += part.groups.len() - before;
        }
        part.insert(key.tag, place);
    }

    /// Removes the entry of the key that `is_row` accepts, and returns its place.
    pub(crate) fn remove(&mut self, key: Key, is_row: impl Fn(Place) -> bool) -> Option<Place> {
        let part = &mut self.parts[key.part as usize];
        let (group, entry) = part.position(key.tag, is_row)?;
        let place = part.groups[group].places[entry];
        part.remove(group, entry);
        Some(place)
    }

    /// Replaces the place `from` in the key's entry with the place `to`.
    pub(crate) fn replace(&mut self, key: Key, from: Place, to: Place) {
        let part = &mut self.parts[key.part as usize];
        if let Some((group, entry)) = part.position(key.tag, |place| place == from) {
            part.groups[group].places[entry] = to;
        }
    }

    /// Iterates over all places, in no order, to change them.
    pub(crate) fn places_mut(&mut self) -> impl Iterator<Item = &mut Place> {
        let groups = self.parts.iter_mut().flat_map(|part| &mut part.groups);
        groups.flat_map(|group| {
            let entries = group.tags.iter().zip(&mut group.places);
            entries
                .filter(|(tag, _)| **tag != 0)
                .map(|(_, place)| place)
        })
    }

    /// Iterates over all places, in no order.
    pub(crate) fn places(&self) -> impl Iterator<Item = Place> {
        let groups = self.parts.iter().flat_map(|part| &part.groups);
        groups.flat_map(Group::entries).map(|(_, place)| place)
    }

    /// Returns the number of bytes that the entries occupy.
    pub(crate) fn bytes(&self) -> usize {
        self.groups * size_of::<Group>()
    }
}

impl Part {
    /// Returns the index of the group where the search for a tag begins, in proportion to the tag. Tags in ascending
    /// order have homes in ascending order, so that a part that grows is read and written from front to back.
    #[inline(always)]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.groups.len() as u64) >> 32) as usize
    }

    fn next(&self, group: usize) -> usize {
        match group + 1 {
            next if next < self.groups.len() => next,
            _ => 0,
        }
    }

    /// Returns the index of the group, and of the entry in it, that has the tag and a place that `is_row` accepts.
    fn position(&self, tag: u32, mut is_row: impl FnMut(Place) -> bool) -> Option<(usize, usize)> {
        if self.groups.is_empty() {
            return None;
        }
        let mut number = self.home(tag);
        loop {
            let group = &self.groups[number];
            let mut found = group.with(tag);
            if let Some(entry) = found.find(|entry| is_row(group.places[*entry])) {
                return Some((number, entry));
            }
            if !group.is_full() {
                return None;
            }
            number = self.next(number);
        }
    }

    fn insert(&mut self, tag: u32, place: Place) {
        let mut number = self.home(tag);
        loop {
            let group = &mut self.groups[number];
            if let Some(entry) = group.with(0).next() {
                group.set(entry, tag, place);
                self.len += 1;
                return;
            }
            number = self.next(number);
        }
    }

    /// Removes an entry. A search ends at a group that is not full. A gap in a full group is therefore filled by an
    /// entry that had no room in this group or in one before it. This entry leaves a gap in turn.
    fn remove(&mut self, group: usize, entry: usize) {
        self.len -= 1;
        let (mut gap, mut entry) = (group, entry);
        let mut was_full = self.groups[gap].is_full();
        self.groups[gap].set(entry, 0, Place::NONE);
        let mut number = gap;
        while was_full {
            number = self.next(number);
            was_full = self.groups[number].is_full();
            let far = self.distance(gap, number);
            let Group { tags, places } = self.groups[number];
            let passed = |tag: u32| tag != 0 && self.distance(self.home(tag), number) >= far;
            if let Some(found) = tags.iter().position(|tag| passed(*tag)) {
                self.groups[gap].set(entry, tags[found], places[found]);
                self.groups[number].set(found, 0, Place::NONE);
                (gap, entry) = (number, found);
            }
        }
    }

    /// Returns the number of groups from one to another, going forward.
    fn distance(&self, from: usize, to: usize) -> usize {
        match to.checked_sub(from) {
            Some(distance) => distance,
            None => to + self.groups.len() - from,
        }
    }

    /// Returns whether the next entry needs more groups. At least a third of the entries stays empty, so that few
    /// searches go beyond the first group.
    fn is_full(&self) -> bool {
        self.len * 3 >= self.groups.len() * WIDTH * 2
    }

    /// Makes a quarter more groups. Doubling would leave more memory unused.
    fn grow(&mut self) {
        let count = self.groups.len() + (self.groups.len() / 4).max(1);
        let empty = Group {
            tags: [0; WIDTH],
            places: [Place::NONE; WIDTH],
        };
        let groups = std::mem::replace(&mut self.groups, vec![empty; count]);
        self.len = 0;
        for (tag, place) in groups.iter().flat_map(Group::entries) {
            self.insert(tag, place);
        }
    }
}

impl Group {
    /// Returns the place in the first entry with this tag, or [`Place::NONE`] if there is none.
    #[inline(always)]
    fn guess(&self, tag: u32) -> Place {
        let found = self.with(tag);
        let place = self.places[found.first() % WIDTH];
        // All bits of the place, or all ones.
        Place(place.0 | u32::from(found.0 != 0).wrapping_sub(1))
    }

    /// Returns the entries with a tag.
    #[inline(always)]
    fn with(&self, tag: u32) -> Entries {
        let found = self.tags.map(|other| u8::from(other == tag));
        Entries(u64::from_le_bytes(found))
    }

    #[inline(always)]
    fn is_full(&self) -> bool {
        self.with(0).0 == 0
    }

    fn set(&mut self, entry: usize, tag: u32, place: Place) {
        self.tags[entry] = tag;
        self.places[entry] = place;
    }

    fn entries(&self) -> impl Iterator<Item = (u32, Place)> {
        let entries = self.tags.into_iter().zip(self.places);
        entries.filter(|(tag, _)| *tag != 0)
    }
}

/// A set of entries of a group. It has a byte for each entry: 1 if the entry is in the set, otherwise 0.
#[derive(Clone, Copy, Debug)]
struct Entries(u64);

impl Entries {
    /// Returns the first entry, or [`WIDTH`].
    #[inline(always)]
    fn first(self) -> usize {
        self.0.trailing_zeros() as usize / 8
    }
}

impl Iterator for Entries {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let entry = self.first();
        // Without the lowest bit.
        self.0 &= self.0.wrapping_sub(1);
        (entry < WIDTH).then_some(entry)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Returns a key of a part. There are few tags, so that entries of equal tags meet, and groups overflow.
    fn key(tag: u32) -> Key {
        let tags = [1, 2, 1 << 31, u32::MAX - 1, u32::MAX];
        let tag = tags.get(tag as usize).copied();
        Key {
            part: 5,
            tag: tag.unwrap_or(tags[2] + 1),
        }
    }

    proptest! {
        #[test]
        fn entries_are_found_until_they_are_removed(
            changes in prop::collection::vec((any::<bool>(), 0..6u32, 0..40u32), 1..600),
        ) {
            let (mut index, mut present) = (Index::new(), BTreeSet::new());
            for (add, tag, number) in changes {
                let place = Place(tag * 100 + number);
                let is_row = |other| other == place;
                if !add {
                    let removed = index.remove(key(tag), is_row);
                    prop_assert_eq!(removed.is_some(), present.remove(&(tag, place)));
                } else if present.insert((tag, place)) {
                    index.insert(key(tag), place);
                }
                for (tag, place) in &present {
                    prop_assert_eq!(index.find(key(*tag), |other| other == *place), Some(*place));
                    let mut guess = [Place::NONE];
                    index.guess(&[key(*tag)], &mut guess);
                    prop_assert!(present.contains(&(*tag, guess[0])));
                }
                let places: BTreeSet<Place> = index.places().collect();
                prop_assert!(places.iter().eq(present.iter().map(|(_, place)| place)));
                prop_assert_eq!(index.places().count(), present.len());
            }
        }
    }

    #[test]
    fn no_entry_is_found_for_a_key_without_one() {
        let mut index = Index::new();
        let ids: Vec<u64> = (0..10_000).collect();
        for id in &ids {
            index.insert(Key::new(*id, 1), Place(*id as u32));
        }
        let others: Vec<Key> = (10_000..10_000 + BLOCK as u64)
            .map(|id| Key::new(id, 1))
            .collect();
        let mut places = [Place(0); BLOCK];
        index.guess(&others, &mut places);
        // No tag of these is that of another.
        assert_eq!(places, [Place::NONE; BLOCK]);
        let keys: Vec<Key> = ids[..BLOCK]
            .iter()
            .copied()
            .map(|id| Key::new(id, 1))
            .collect();
        index.guess(&keys, &mut places);
        assert!(
            places
                .iter()
                .map(|place| u64::from(place.0))
                .eq(0..BLOCK as u64)
        );
    }
}
