//! An optimizer's state that is shared out among the members of a ring (Rajbhandari et al., "ZeRO", SC 2020, section
//! 5.1), in several copies: each member has the slots of its own segment of the elements, and of the segments of some
//! members before it.
//!
//! A step is made in three parts. First, the gradients are added up, so that each member has the sums for its elements.
//! Second, each member prepares the update of its elements, and sends their new values to all others. Third, a member
//! that has all new values makes the update. So if any member has made a step, all members that hold slots have
//! prepared it, and can send the slots that belong to the new values.
//!
//! - `plan`: the slots of each member, and those that move when the members change

mod plan;

use std::ops::Range;

use collective::Rank;
use replica::{Description, Mirror, MirrorState, SlotShare, StepsMade, ValuesId};
use shared_proto::job::Job;
use shared_proto::planted;
use variables::Places;

use self::plan::{Cut, Move, NUMBERS, Plan, Which, of_numbers, plan, to_numbers};
use super::gradient::{self, COUNTS};
use super::ring::{Lost, Ring};

/// The shares of a model's optimizer state.
pub(super) struct Shares {
    places: Places,
    cut: Cut,
}

/// The slots that a member will hold.
pub(super) struct Taken {
    of: ValuesId,
    ranges: Vec<Range<usize>>,
    /// The slots of each range; `None` if they are initial.
    slots: Option<Vec<Vec<f32>>>,
}

/// The work that a member is about to do with the others. Members add up the numbers that describe it, and so notice if
/// they are about to do different work.
enum Work {
    /// A step, with this member's number of samples.
    Step(u64),
    /// The copy of slots for the checkpoint `number`. `writes` is true if this member writes the checkpoint.
    Copy { number: u64, writes: bool },
}

impl Shares {
    /// The shares of a job's optimizer state; `None` if each member has all of it.
    pub(super) fn new(job: &Job, model: &Description) -> Option<Self> {
        let copies = job.strategy.optimizer_copies? as usize;
        let places = Places::of(job, model.variables.iter());
        let elements = places.all();
        Some(Self {
            places,
            cut: Cut {
                elements,
                vector: elements + COUNTS,
                copies,
            },
        })
    }
}

impl Ring {
    /// Gets the slots that this member will hold in this ring from the members that have them. The slots belong to the
    /// values of the rank `source`. Returns `None` if no member has some of the slots.
    pub(super) async fn take_slots(
        &self,
        shares: &Shares,
        source: Rank,
        begins: ValuesId,
        mirror: &dyn Mirror,
    ) -> Result<Option<Taken>, Lost> {
        let (rank, ranks) = (self.rank(), self.ranks());
        let wanted = |rank| shares.cut.of_rank(rank, ranks);
        let Some(plan) = self.plan(shares, source, &wanted, mirror).await? else {
            return Ok(None);
        };
        let ranges = wanted(rank);
        Ok(Some(match plan {
            Plan::Initial => Taken {
                of: begins,
                ranges,
                slots: None,
            },
            Plan::Moves(of, moves) => {
                let slots = self.move_slots(shares, of, &moves, &ranges, mirror).await?;
                Taken {
                    of,
                    ranges,
                    slots: Some(slots),
                }
            }
        }))
    }

    /// Holds the slots that were taken. Other members may still want slots of the last ring, so the replica keeps those
    /// until a step is made.
    pub(super) async fn hold(&self, taken: Taken, mirror: &dyn Mirror) -> Result<(), Lost> {
        let share = SlotShare {
            of: taken.of,
            rank: self.rank(),
            ranks: self.ranks(),
        };
        mirror
            .first()
            .hold(share, taken.ranges, taken.slots)
            .await?;
        Ok(())
    }

    async fn plan(
        &self,
        shares: &Shares,
        source: Rank,
        wanted: &dyn Fn(Rank) -> Vec<Range<usize>>,
        mirror: &dyn Mirror,
    ) -> Result<Option<Plan>, Lost> {
        let held = mirror.first().held().await?;
        let mut numbers = vec![0.0; NUMBERS * self.ranks()];
        let own = NUMBERS * self.rank();
        numbers[own..own + NUMBERS].copy_from_slice(&to_numbers(&held));
        let all = self.sum_short(numbers).await?;
        let held: Vec<_> = all.chunks(NUMBERS).map(of_numbers).collect();
        let has_slots = |range: &Range<usize>| shares.places.slots_in(range) > 0;
        Ok(plan(&held, source, shares.cut, wanted, has_slots))
    }

    /// Returns the slots of these ranges. All members take part.
    async fn move_slots(
        &self,
        shares: &Shares,
        of: ValuesId,
        moves: &[Move],
        ranges: &[Range<usize>],
        mirror: &dyn Mirror,
    ) -> Result<Vec<Vec<f32>>, Lost> {
        let places = &shares.places;
        let zeros = |range: &Range<usize>| vec![0.0; places.slots_in(range)];
        let mut taken: Vec<Vec<f32>> = ranges.iter().map(zeros).collect();
        for slots in moves {
            let own = slots.holders.get(&self.rank());
            if own.is_none() && !slots.travels {
                continue;
            }
            let mut numbers = match own {
                Some(which) => {
                    let (elements, before) = (slots.elements.clone(), *which == Which::Before);
                    mirror.first().slots(elements, of, before).await?
                }
                None => zeros(&slots.elements),
            };
            if slots.travels {
                self.pass_around(slots.from, &mut numbers).await?;
            }
            for (range, taken) in ranges.iter().zip(&mut taken) {
                let start = range.start.max(slots.elements.start);
                let end = range.end.min(slots.elements.end);
                if start < end && !planted!(SlotsNotTaken) {
                    let count = places.slots_in(&(start..end));
                    let to = places.slots_in(&(range.start..start));
                    let from = places.slots_in(&(slots.elements.start..start));
                    taken[to..to + count].copy_from_slice(&numbers[from..from + count]);
                }
            }
        }
        Ok(taken)
    }

    /// Makes a step. `memory` has this member's gradient times its number of samples, or the gradient itself if it is
    /// the only member. Returns a vector whose memory can be used again.
    pub(super) async fn make_step(
        &self,
        shares: &Shares,
        mut memory: Vec<f32>,
        samples: u64,
        made: StepsMade,
        mirror: &dyn Mirror,
    ) -> Result<Vec<f32>, Lost> {
        let (samples, _) = self.agree(Work::Step(samples)).await?;
        if samples == 0.0 {
            mirror.first().prepare_update(None, made).await?;
            self.barrier().await?;
            mirror.make_update(Vec::new(), made).await?;
            return Ok(memory);
        }
        let factor = match self.is_alone() {
            true => 1.0,
            false => (1.0 / samples) as f32,
        };
        if self.rounds() {
            gradient::scale(&mut memory, factor);
        }
        self.reduce_to_keepers(&mut memory, shares.cut.copies)
            .await?;
        memory.truncate(shares.cut.elements);
        if !self.rounds() {
            gradient::scale(&mut memory, factor);
        }
        let mut values = mirror.first().prepare_update(Some(memory), made).await?;
        if shares.cut.copies < self.ranks() {
            // As long as the vector of gradients, so that it has the same segments.
            values.resize(shares.cut.vector, 0.0);
            self.all_gather(&mut values).await?;
            values.truncate(shares.cut.elements);
        }
        Ok(mirror.make_update(values, made).await?)
    }

    /// Copies the values and the slots of all members for a checkpoint. Returns them to the member that writes it.
    pub(super) async fn copy_state(
        &self,
        shares: &Shares,
        number: u64,
        writes: bool,
        mirror: &dyn Mirror,
    ) -> Result<Option<MirrorState>, Lost> {
        let (_, writer) = self.agree(Work::Copy { number, writes }).await?;
        let all = 0..shares.cut.elements;
        let wanted = |rank| match rank == writer {
            true => vec![all.clone()],
            false => Vec::new(),
        };
        // All members have the same values.
        let plan = self.plan(shares, writer, &wanted, mirror).await?;
        let Some(plan) = plan else {
            return Err(Lost::Over);
        };
        let ranges = wanted(self.rank());
        let mut slots = match plan {
            Plan::Initial if writes => {
                vec![shares.places.initial_slots(&ranges, &all)]
            }
            Plan::Initial => Vec::new(),
            Plan::Moves(of, moves) => self.move_slots(shares, of, &moves, &ranges, mirror).await?,
        };
        match slots.pop() {
            Some(slots) if writes => Ok(Some(mirror.first().state_with(slots).await?)),
            _ => Ok(None),
        }
    }

    /// Agrees with the other members on the work. Returns the number of all members' samples, and the rank that writes
    /// the checkpoint. Fails if members are about to do different work: a coordinator that has started again may have
    /// given some of them another order.
    async fn agree(&self, work: Work) -> Result<(f64, Rank), Lost> {
        let (samples, copying, number, writes) = match work {
            Work::Step(samples) => (samples, 0.0, 0, false),
            Work::Copy { number, writes } => (0, 1.0, number, writes),
        };
        let (writer, writers) = match writes {
            true => (self.rank() as f64, 1.0),
            false => (0.0, 0.0),
        };
        let numbers = vec![samples as f64, copying, number as f64, writers, writer];
        let sums = self.sum_short(numbers).await?;
        let [samples, copies, numbers, writers, writer] = sums[..] else {
            return Err(Lost::Over);
        };
        let ranks = self.ranks() as f64;
        let all_agree = copies == copying * ranks && numbers == number as f64 * ranks;
        match all_agree && writers == copying {
            true => Ok((samples, writer as Rank)),
            false => Err(Lost::Over),
        }
    }
}
