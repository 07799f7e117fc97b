//! The slots of a replica, in jobs that share out the optimizer's state.

use std::ops::Range;

use async_trait::async_trait;
use replica::{
    FirstReplica, Held, MirrorState, ReplicaError, SlotShare, StageSteps, StepsMade, ValuesId,
};
use shared_proto::payload::Elements;

use super::{Kept, Own, PreparedStep};
use crate::rings::values::CLOSE;

impl Kept {
    /// Makes the prepared update, and checks its values.
    pub(super) fn make_prepared(&self, values: &[f32], made: StepsMade) {
        let prepared = self.own.lock().unwrap().prepared.take();
        let before = self.history.made(&self.name);
        match prepared.and_then(|prepared| Some((prepared.gradient?, prepared.slots))) {
            Some((gradient, slots)) => {
                let state = self.history.state(&self.name);
                let held = self.own.lock().unwrap().slots.clone();
                let whole = self.shape.gradient_of(&state.values, values);
                let pairs = gradient.iter().zip(&whole).zip(&held);
                let wrong = pairs.enumerate().find(|(_, ((part, right), slot))| {
                    !slot.is_nan() && (**part - **right).abs() > CLOSE
                });
                if let Some((element, ((part, right), _))) = wrong {
                    let name = &self.name;
                    self.history.violation(format!(
                        "{name} has added up {part} for element {element}, and the step has {right}"
                    ));
                }
                self.history.updated(&self.name, whole, made);
                self.own.lock().unwrap().slots = slots;
            }
            None => self.history.noted(&self.name, made),
        }
        self.has_made(before, made);
        {
            let mut own = self.own.lock().unwrap();
            let of = ValuesId {
                ring: own.made_in,
                clock: made.clock,
            };
            own.share.iter_mut().for_each(|share| share.of = of);
            own.before = None;
        }
        self.check_slots("has made a step");
    }
}

#[async_trait(?Send)]
impl FirstReplica for Kept {
    async fn swap_averages(&self) -> Result<(), ReplicaError> {
        Ok(())
    }

    async fn bucketed_gradients(&self) -> Result<Vec<Elements>, ReplicaError> {
        let gradient = self.own.lock().unwrap().bucketed.clone();
        Ok(gradient.into_iter().map(Elements::from).collect())
    }

    /// Returns an order that differs between replicas.
    async fn gradient_order(&self) -> Result<Vec<usize>, ReplicaError> {
        let mut order: Vec<usize> = (0..self.description.variables.len()).collect();
        let middle = self.chance(0) as usize % order.len();
        order.rotate_left(middle);
        Ok(order)
    }

    async fn prepare_update(
        &self,
        gradient: Option<Vec<f32>>,
        made: StepsMade,
    ) -> Result<Vec<f32>, ReplicaError> {
        let state = self.history.state(&self.name);
        let mut own = self.own.lock().unwrap();
        let mut slots = own.slots.clone();
        let elements = gradient.as_ref().map_or(0, Vec::len);
        // What a replica does not hold, it must not be asked for.
        let mut values = vec![f32::NAN; elements];
        for (element, part) in gradient.iter().flatten().enumerate() {
            if !slots[element].is_nan() {
                values[element] = state.values[element] + f32::from(*part != 0.0);
                if *part != 0.0 {
                    slots[element] = (state.updates + 1) as f32;
                }
            }
        }
        own.prepared = Some(PreparedStep {
            values: ValuesId {
                ring: made.ring,
                clock: made.clock,
            },
            gradient,
            slots,
        });
        Ok(values)
    }

    async fn held(&self) -> Result<Held, ReplicaError> {
        let own = self.own.lock().unwrap();
        let made = self.history.made(&self.name);
        Ok(Held {
            values: made.map(|made| ValuesId {
                ring: own.made_in,
                clock: made.clock,
            }),
            updates: self.history.state(&self.name).updates,
            share: own.share,
            prepared: own.prepared.as_ref().map(|prepared| prepared.values),
            share_before: own.before.as_ref().map(|before| before.0),
            prepared_before: own
                .before
                .as_ref()
                .and_then(|before| Some(before.1.as_ref()?.values)),
            slot_bytes: 0,
        })
    }

    async fn slots(
        &self,
        range: Range<usize>,
        of: ValuesId,
        before: bool,
    ) -> Result<Vec<f32>, ReplicaError> {
        let own = self.own.lock().unwrap();
        let (prepared, slots) = match &own.before {
            Some((_, prepared, slots)) if before => (prepared, slots),
            _ => (&own.prepared, &own.slots),
        };
        let prepared = prepared.as_ref().filter(|prepared| prepared.values == of);
        let slots = prepared.map_or(slots, |prepared| &prepared.slots);
        Ok(slots[range].to_vec())
    }

    async fn hold(
        &self,
        share: SlotShare,
        ranges: Vec<Range<usize>>,
        slots: Option<Vec<Vec<f32>>>,
    ) -> Result<(), ReplicaError> {
        {
            let mut own = self.own.lock().unwrap();
            let none = vec![f32::NAN; self.shape.elements()];
            let (prepared, before) = (own.prepared.take(), std::mem::replace(&mut own.slots, none));
            if let Some(share) = own.share.filter(|_| own.before.is_none()) {
                own.before = Some((share, prepared, before));
            }
            let slots = slots.map(Vec::into_iter);
            let mut slots = slots.into_iter().flatten();
            for range in ranges {
                let initial = || vec![0.0; range.len()];
                let taken = slots.next().unwrap_or_else(initial);
                own.slots[range].copy_from_slice(&taken);
            }
            own.share = Some(share);
        }
        self.check_slots("has taken slots");
        Ok(())
    }

    async fn state_with(&self, slots: Vec<f32>) -> Result<MirrorState, ReplicaError> {
        let mut state = self.history.state(&self.name);
        let counters = state.values.len() / 2;
        if slots != state.values[counters..] {
            let name = &self.name;
            let what = format!("{name} has other slots for a checkpoint than belong to its values");
            self.history.violation(what);
        }
        state.values.truncate(counters);
        state.values.extend(slots);
        Ok(state)
    }

    async fn forget(&self) -> Result<(), ReplicaError> {
        self.history.starts(&self.name);
        *self.own.lock().unwrap() = Own::default();
        Ok(())
    }

    fn stages(&self) -> Option<&dyn StageSteps> {
        Some(self)
    }
}
