//! A schedule cut into pieces, so that a rank sends one, receives another and adds a third at the same time.

use std::ops::Range;

use crate::schedule::{Combine, Rank, Round};

/// The most elements that a piece can have. Smaller pieces overlap more, but each piece costs some microseconds.
pub(crate) const PIECE_ELEMENTS: usize = 64 << 10;

/// The most bytes that a piece can have.
pub(crate) const PIECE_BYTES: usize = PIECE_ELEMENTS * size_of::<f32>();

/// A piece to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outgoing {
    pub(crate) peer: Rank,
    pub(crate) range: Range<usize>,
    /// The number of incoming pieces that must be received first, because they change the elements of this piece.
    pub(crate) after: usize,
}

/// A piece to receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Incoming {
    pub(crate) peer: Rank,
    pub(crate) range: Range<usize>,
    pub(crate) combine: Combine,
    /// The number of outgoing pieces that must be sent first, because this piece changes their elements.
    pub(crate) after: usize,
}

/// The pieces of a schedule, in the order in which they are sent and received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pieces {
    pub(crate) outgoing: Vec<Outgoing>,
    pub(crate) incoming: Vec<Incoming>,
}

impl Pieces {
    /// Cuts the rounds into pieces of at most `most` elements.
    pub(crate) fn new(rounds: &[Round], most: usize) -> Self {
        let mut pieces = Self::default();
        for round in rounds {
            // A round's sends have what the rounds before have received.
            if let Some((peer, range)) = &round.send {
                for range in cut(range, most) {
                    let ranges = pieces.incoming.iter().map(|piece| &piece.range);
                    pieces.outgoing.push(Outgoing {
                        peer: *peer,
                        after: last_overlap(ranges, &range),
                        range,
                    });
                }
            }
            if let Some((peer, range, combine)) = &round.receive {
                for range in cut(range, most) {
                    let ranges = pieces.outgoing.iter().map(|piece| &piece.range);
                    pieces.incoming.push(Incoming {
                        peer: *peer,
                        combine: *combine,
                        after: last_overlap(ranges, &range),
                        range,
                    });
                }
            }
        }
        pieces
    }
}

/// Cuts a range into ranges of at most `most` elements. Sender and receiver get the same ranges.
fn cut(range: &Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    let starts = range.clone().step_by(most);
    starts.map(move |start| start..end.min(start + most))
}

/// Returns the number of ranges up to and including the last one that shares elements with `range`, or 0 if none does.
fn last_overlap<'a>(
    ranges: impl DoubleEndedIterator<Item = &'a Range<usize>> + ExactSizeIterator,
    range: &Range<usize>,
) -> usize {
    let overlaps = |other: &Range<usize>| other.start < range.end && range.start < other.end;
    let last = ranges.enumerate().rev().find(|(_, other)| overlaps(other));
    last.map_or(0, |(number, _)| number + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Algorithm, all_reduce};

    #[test]
    fn a_piece_of_a_ring_leaves_as_soon_as_it_is_there() {
        let rounds = all_reduce(Algorithm::Ring, 0, 3, 12);
        let pieces = Pieces::new(&rounds, 2);
        // Two pieces in each of four rounds, each after the piece of the round before that it continues.
        let after: Vec<usize> = pieces.outgoing.iter().map(|piece| piece.after).collect();
        assert_eq!(after, [0, 0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn what_is_exchanged_is_sent_before_it_changes() {
        let rounds = all_reduce(Algorithm::Doubling, 0, 4, 3);
        let pieces = Pieces::new(&rounds, 2);
        let sends: Vec<usize> = pieces.outgoing.iter().map(|piece| piece.after).collect();
        let receives: Vec<usize> = pieces.incoming.iter().map(|piece| piece.after).collect();
        assert_eq!(sends, [0, 0, 1, 2]);
        assert_eq!(receives, [1, 2, 3, 4]);
    }
}
