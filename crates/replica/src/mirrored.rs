//! The values of a model replica that keeps them itself, on its thread.

use std::ops::Range;
use std::sync::Arc;

use shared_proto::ids::Epoch;
use shared_proto::job::Job;
use shared_proto::payload::Elements;
use tokio::sync::oneshot;
use variables::{
    BucketedGradients, DeviceGradients, HeldSlots, LocalOptimizer, UpdateGroups, Variables,
    VariablesError,
};

use super::error::ReplicaError;
use super::mirror::{Held, MirrorState, SlotShare, StepsMade, ValuesId};

/// Where the answer to a command goes.
pub(super) type Reply<T> = oneshot::Sender<Result<T, ReplicaError>>;

type Act = dyn FnOnce(Result<Values, VariablesError>) + Send;

/// A command of strategies without servers: an act on the values.
pub(super) struct MirrorCommand(Box<Act>);

impl MirrorCommand {
    /// The command that does this, and answers.
    pub(super) fn new<T: Send + 'static>(
        act: impl FnOnce(&mut Values) -> Result<T, VariablesError> + Send + 'static,
        reply: Reply<T>,
    ) -> Self {
        Self(Box::new(|values| {
            let done = values.and_then(|mut values| act(&mut values));
            // A caller that is gone does not need the answer.
            drop(reply.send(done.map_err(ReplicaError::from)));
        }))
    }
}

/// The optimizer of a replica, and the steps that its values have.
#[derive(Default)]
pub(super) struct Mirrored {
    optimizer: Option<LocalOptimizer>,
    steps: Steps,
}

/// The steps that values have, and the slots that belong to them.
#[derive(Default)]
struct Steps {
    made: Option<StepsMade>,
    /// The ring that made the values, or that has begun with them.
    made_in: Epoch,
    /// The slots that it has, if the job shares them out.
    share: Option<SlotShare>,
    prepared: Option<Prepared>,
    /// The slots that it had before, until it makes a step with the present ones: other members may not have theirs yet.
    before: Option<Before>,
    /// True while the variables have averages in place of weights.
    swapped: bool,
    /// True if the variables no longer have their initial values.
    overwritten: bool,
}

/// A step that is prepared.
#[derive(Clone, Copy)]
struct Prepared {
    /// The values that it makes.
    values: ValuesId,
    /// True if it changes values.
    updates: bool,
}

/// Slots that a replica had before those that it has now.
struct Before {
    share: SlotShare,
    prepared: Option<Prepared>,
    slots: HeldSlots,
}

impl Mirrored {
    /// Executes a command on the variables of a job with so many training samples. Returns whether the variables no longer have their
    /// initial values.
    pub(super) fn serve(
        &mut self,
        MirrorCommand(act): MirrorCommand,
        job: &Job,
        variables: &Variables,
        samples: u64,
    ) -> bool {
        act(self.values(job, variables, samples));
        self.steps.overwritten
    }

    /// Returns the values of a job with so many training samples.
    pub(super) fn values<'a>(
        &'a mut self,
        job: &Job,
        variables: &'a Variables,
        samples: u64,
    ) -> Result<Values<'a>, VariablesError> {
        let optimizer = match &mut self.optimizer {
            Some(optimizer) => optimizer,
            none => none.insert(LocalOptimizer::new(job, variables, samples)?),
        };
        Ok(Values {
            optimizer,
            variables,
            steps: &mut self.steps,
        })
    }
}

/// The values of a replica, and all that belongs to them.
pub(super) struct Values<'a> {
    optimizer: &'a mut LocalOptimizer,
    variables: &'a Variables,
    steps: &'a mut Steps,
}

impl Values<'_> {
    /// Updates the values. Returns the memory of the gradient.
    pub(super) fn update(
        &mut self,
        mut gradient: BucketedGradients,
        made: StepsMade,
    ) -> Result<BucketedGradients, VariablesError> {
        // Half an update is no step.
        (self.steps.made, self.steps.overwritten) = (None, true);
        self.optimizer.update(self.variables, &mut gradient)?;
        self.note_made(made);
        Ok(gradient)
    }

    /// Updates the values by gradients in the device's memory.
    pub(super) fn update_on_device(
        &mut self,
        groups: &Arc<UpdateGroups>,
        gradients: DeviceGradients,
        made: StepsMade,
    ) -> Result<(), VariablesError> {
        (self.steps.made, self.steps.overwritten) = (None, true);
        let optimizer = &mut self.optimizer;
        optimizer.update_on_device(self.variables, groups, gradients)?;
        self.note_made(made);
        Ok(())
    }

    pub(super) fn scale_learning_rate(&mut self, factor: f64) {
        self.optimizer.scale_learning_rate(factor);
    }

    /// Notes the steps that the values have.
    pub(super) fn note_made(&mut self, made: StepsMade) {
        let before = self.steps.made;
        if before.is_none_or(|before| before.clock != made.clock) {
            self.steps.made_in = made.ring;
        }
        self.steps.made = Some(made);
    }

    pub(super) fn all(&self) -> Result<Vec<Elements>, VariablesError> {
        self.variables.all_values()
    }

    pub(super) fn state(&mut self) -> Result<MirrorState, VariablesError> {
        let values = self.optimizer.state(self.variables)?;
        Ok(self.with_progress(values))
    }

    /// Returns the state with these slots of all elements.
    pub(super) fn state_with(&self, slots: Vec<f32>) -> Result<MirrorState, VariablesError> {
        Ok(self.with_progress(self.optimizer.state_with(self.variables, slots)?))
    }

    fn with_progress(&self, values: Vec<f32>) -> MirrorState {
        MirrorState {
            values,
            updates: self.optimizer.updates(),
            made_in: self.steps.made_in,
        }
    }

    /// Takes the values of another replica, with all slots or without.
    pub(super) fn set_state(
        &mut self,
        state: &MirrorState,
        made: StepsMade,
    ) -> Result<(), VariablesError> {
        (self.steps.made, self.steps.overwritten) = (None, true);
        let (values, updates) = (&state.values, state.updates);
        let has_slots = self.optimizer.set_state(self.variables, values, updates)?;
        (self.steps.made, self.steps.made_in) = (Some(made), state.made_in);
        if has_slots {
            let of = ValuesId {
                ring: state.made_in,
                clock: made.clock,
            };
            self.steps.share = Some(SlotShare {
                of,
                rank: 0,
                ranks: 1,
            });
            (self.steps.prepared, self.steps.before) = (None, None);
        }
        Ok(())
    }

    /// Returns the steps that the values contain; none if they are initial values or were overwritten. If an evaluation
    /// has exchanged the weights for their averages and the membership ended before they were exchanged back, puts the
    /// weights back first.
    pub(super) fn made(&mut self) -> Result<Option<StepsMade>, VariablesError> {
        if std::mem::take(&mut self.steps.swapped) {
            self.optimizer.swap_averages(self.variables)?;
        }
        Ok(self.steps.made)
    }

    pub(super) fn swap_averages(&mut self) -> Result<(), VariablesError> {
        self.optimizer.swap_averages(self.variables)?;
        self.steps.swapped = !self.steps.swapped;
        self.steps.overwritten = true;
        Ok(())
    }

    /// Prepares a step. Returns the new values of the held elements.
    pub(super) fn prepare(
        &mut self,
        gradient: Option<Vec<f32>>,
        made: StepsMade,
    ) -> Result<Vec<f32>, VariablesError> {
        self.steps.prepared = None;
        let updates = gradient.is_some();
        let mut values = gradient.unwrap_or_default();
        if updates {
            self.optimizer.prepare(self.variables, &mut values)?;
        }
        self.steps.prepared = Some(Prepared {
            values: made.values(),
            updates,
        });
        Ok(values)
    }

    /// Makes the prepared step. Returns the memory of the values.
    pub(super) fn make(
        &mut self,
        values: Vec<f32>,
        made: StepsMade,
    ) -> Result<Vec<f32>, VariablesError> {
        (self.steps.made, self.steps.overwritten) = (None, true);
        let prepared = self.steps.prepared.take();
        if prepared.is_some_and(|prepared| prepared.updates) {
            self.optimizer.make_prepared(self.variables, &values)?;
        }
        self.note_made(made);
        let of = self.id();
        if let (Some(share), Some(of)) = (&mut self.steps.share, of) {
            share.of = of;
        }
        // All members have prepared the step, so all have the slots of their present shares.
        self.steps.before = None;
        Ok(values)
    }

    fn id(&self) -> Option<ValuesId> {
        self.steps.made.map(|made| ValuesId {
            ring: self.steps.made_in,
            clock: made.clock,
        })
    }

    pub(super) fn held(&self) -> Held {
        let prepared = |prepared: Option<Prepared>| prepared.map(|prepared| prepared.values);
        let before = self.steps.before.as_ref();
        Held {
            values: self.id(),
            updates: self.optimizer.updates(),
            share: self.steps.share,
            prepared: prepared(self.steps.prepared),
            share_before: before.map(|before| before.share),
            prepared_before: before.and_then(|before| prepared(before.prepared)),
            slot_bytes: self.optimizer.slot_bytes(),
        }
    }

    /// Returns the slots of a range at these values, of the present share or of the one before.
    pub(super) fn slots(
        &self,
        range: &Range<usize>,
        of: ValuesId,
        before: bool,
    ) -> Result<Vec<f32>, VariablesError> {
        let is_prepared = |prepared: Option<Prepared>| {
            prepared.is_some_and(|prepared| prepared.values == of && prepared.updates)
        };
        let before = self.steps.before.as_ref().filter(|_| before);
        let prepared = before.map_or(self.steps.prepared, |before| before.prepared);
        let slots = before.map(|before| &before.slots);
        self.optimizer
            .slots(self.variables, slots, range, is_prepared(prepared))
    }

    /// Holds these ranges from now on. The slots before are kept until a step is made.
    pub(super) fn hold(
        &mut self,
        share: SlotShare,
        ranges: &[Range<usize>],
        slots: Option<&[Vec<f32>]>,
    ) -> Result<(), VariablesError> {
        let slots = self.optimizer.hold(self.variables, ranges, slots)?;
        let prepared = self.steps.prepared.take();
        if let Some(share) = self.steps.share.replace(share)
            && self.steps.before.is_none()
        {
            self.steps.before = Some(Before {
                share,
                prepared,
                slots,
            });
        }
        Ok(())
    }

    /// Forgets the values, and what belongs to them.
    pub(super) fn forget(&mut self) {
        let overwritten = self.steps.overwritten;
        *self.steps = Steps {
            overwritten,
            ..Steps::default()
        };
        self.optimizer.forget();
    }
}
