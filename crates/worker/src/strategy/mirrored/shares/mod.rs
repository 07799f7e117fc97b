//! An optimizer's state that is shared out among the members of a ring (Rajbhandari et al., "ZeRO", SC 2020, section 5.1), in several
//! copies: each member has the slots of its own segment of the elements, and of those of the members before it.
//!
//! A step is made in three parts. The gradients are added up, so that each member has the sums of its elements; it prepares the
//! update of these, and hands their new values to all others; a member that has the values of all makes the update. So if any
//! member has made a step, all have prepared it, and the slots of its values can be had from each.
//!
//! - `plan`: who has which slots, and which of them move when the members change

mod plan;

use std::ops::Range;

use collective::Rank;
use optimizer::VariableRule;
use shared_proto::job::Job;
use shared_proto::planted;

use self::plan::{Cut, NUMBERS, Plan, of_numbers, plan, to_numbers};
use super::gradient::{self, COUNTS};
use super::ring::{Lost, Ring};
use crate::replica::{Description, Mirror, MirrorState, SlotShare, StepsMade, ValuesId};
use crate::variables::Places;

/// The shares of a model's optimizer state.
pub(super) struct Shares {
    places: Places,
    cut: Cut,
}

/// The slots that a member is to hold.
pub(super) struct Taken {
    of: ValuesId,
    ranges: Vec<Range<usize>>,
    /// None: they are initial.
    slots: Option<Vec<Vec<f32>>>,
}

/// What the members of a ring are about to do together. Their numbers are added up, so that a member that is about something else
/// is noticed.
struct Header {
    samples: u64,
    /// True for the copies of slots for a checkpoint.
    copies: bool,
    /// True for the member that writes it.
    writes: bool,
}

impl Shares {
    /// The shares of a job's optimizer state; none if each member has all of it.
    pub(super) fn of(job: &Job, model: &Description) -> Option<Self> {
        let copies = job.strategy.optimizer_copies? as usize;
        let places = Places::new(model.variables.iter().map(|spec| {
            let changes = spec.kind.takes_updates();
            let slots = VariableRule::of(job, spec, 0).rule_slots();
            (if changes { spec.elements() } else { 0 }, slots)
        }));
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
    /// Returns the slots that this member is to hold in this ring, from those who have them. The values are those of the rank
    /// `source`. Returns none if nobody has some of them.
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
            Plan::Moves(of, _) => {
                let slots = self.move_slots(shares, &plan, &ranges, mirror).await?;
                Taken {
                    of,
                    ranges,
                    slots: Some(slots),
                }
            }
        }))
    }

    /// Holds the slots that were taken, once all members have theirs: until then those of the ring before may be wanted again.
    pub(super) async fn hold(&self, taken: Taken, mirror: &dyn Mirror) -> Result<(), Lost> {
        self.barrier().await?;
        let share = SlotShare {
            of: taken.of,
            rank: self.rank(),
            ranks: self.ranks(),
        };
        mirror.hold(share, taken.ranges, taken.slots).await?;
        Ok(())
    }

    async fn plan(
        &self,
        shares: &Shares,
        source: Rank,
        wanted: &dyn Fn(Rank) -> Vec<Range<usize>>,
        mirror: &dyn Mirror,
    ) -> Result<Option<Plan>, Lost> {
        let held = mirror.held().await?;
        let mut numbers = vec![0.0; NUMBERS * self.ranks()];
        let own = NUMBERS * self.rank();
        numbers[own..own + NUMBERS].copy_from_slice(&to_numbers(&held));
        let all = self.sum_short(numbers).await?;
        let held: Vec<_> = all.chunks(NUMBERS).map(of_numbers).collect();
        Ok(plan(&held, source, shares.cut, wanted))
    }

    /// Returns the slots of these ranges. All members take part.
    async fn move_slots(
        &self,
        shares: &Shares,
        plan: &Plan,
        ranges: &[Range<usize>],
        mirror: &dyn Mirror,
    ) -> Result<Vec<Vec<f32>>, Lost> {
        let places = &shares.places;
        let zeros = |range: &Range<usize>| vec![0.0; places.slots_in(range)];
        let mut taken: Vec<Vec<f32>> = ranges.iter().map(zeros).collect();
        let Plan::Moves(of, moves) = plan else {
            return Ok(taken);
        };
        for slots in moves {
            let holds = slots.holders.contains(&self.rank());
            if !holds && !slots.travels {
                continue;
            }
            let mut numbers = match holds {
                true => mirror.slots(slots.elements.clone(), *of).await?,
                false => zeros(&slots.elements),
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

    /// Makes a step: `memory` has this member's gradient times its samples. Returns the memory.
    pub(super) async fn make_step(
        &self,
        shares: &Shares,
        mut memory: Vec<f32>,
        samples: u64,
        made: StepsMade,
        mirror: &dyn Mirror,
    ) -> Result<Vec<f32>, Lost> {
        let header = Header {
            samples,
            copies: false,
            writes: false,
        };
        let (samples, _) = self.agree(header).await?;
        if samples == 0.0 {
            mirror.prepare_update(None, made).await?;
            self.barrier().await?;
            mirror.make_update(Vec::new(), made).await?;
            return Ok(memory);
        }
        self.reduce_to_keepers(&mut memory, shares.cut.copies)
            .await?;
        memory.truncate(shares.cut.elements);
        gradient::scale(&mut memory, (1.0 / samples) as f32);
        let mut values = mirror.prepare_update(Some(memory), made).await?;
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
        writes: bool,
        mirror: &dyn Mirror,
    ) -> Result<Option<MirrorState>, Lost> {
        let header = Header {
            samples: 0,
            copies: true,
            writes,
        };
        let (_, writer) = self.agree(header).await?;
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
                let held = shares.places.parts(&ranges);
                vec![shares.places.slots(&held, &all)]
            }
            Plan::Initial => Vec::new(),
            plan => self.move_slots(shares, &plan, &ranges, mirror).await?,
        };
        match slots.pop() {
            Some(slots) if writes => Ok(Some(mirror.state_with(slots).await?)),
            _ => Ok(None),
        }
    }

    /// Returns the samples of all members, and the rank that writes a checkpoint. Fails if the members are about different things: a
    /// coordinator that has started again may have given some of them another task.
    async fn agree(&self, header: Header) -> Result<(f64, Rank), Lost> {
        let Header {
            samples,
            copies,
            writes,
        } = header;
        let writer = if writes { self.rank() + 1 } else { 0 };
        let copying = u64::from(copies) as f64;
        let sums = self
            .sum_short(vec![samples as f64, copying, writer as f64])
            .await?;
        let [samples, copies, writer] = sums[..] else {
            return Err(Lost::Over);
        };
        let writer = writer as usize;
        let all_agree = copies == copying * self.ranks() as f64;
        let has_writer = copying == 0.0 || (1..=self.ranks()).contains(&writer);
        match all_agree && has_writer {
            true => Ok((samples, writer.saturating_sub(1))),
            false => Err(Lost::Over),
        }
    }
}
