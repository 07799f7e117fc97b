//! The values of a model replica that keeps them itself. They live on the model's thread.

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

/// Takes the answer to a command.
pub(super) type Reply<T> = oneshot::Sender<Result<T, ReplicaError>>;

type Act = dyn FnOnce(Result<Values, VariablesError>) + Send;

/// A command of a strategy without servers: a function of the values.
pub(super) struct MirrorCommand(Box<Act>);

impl MirrorCommand {
    /// Returns a command that calls `act`, and sends the result to `reply`.
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
    /// The share of the slots that the replica holds, if the job shares them out or the state of another replica had
    /// all.
    share: Option<SlotShare>,
    prepared: Option<Prepared>,
    /// The previous slots, until the next step with the present ones: other members may not have received their shares
    /// yet.
    before: Option<Before>,
    /// True while the variables have averages in place of weights.
    swapped: bool,
    /// True if the variables no longer have their initial values.
    overwritten: bool,
}

/// A prepared step.
#[derive(Clone, Copy)]
struct Prepared {
    /// The values that the step makes.
    values: ValuesId,
    /// True if the step changes values.
    updates: bool,
}

/// The slots that a replica held before its present ones.
struct Before {
    share: SlotShare,
    prepared: Option<Prepared>,
    slots: HeldSlots,
}

impl Mirrored {
    /// Executes a command on the variables of a job with `samples` training samples. Returns true if the variables no
    /// longer have their initial values.
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

    /// Returns the values. Creates the optimizer of a job with `samples` training samples if there is none yet.
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

/// A replica's values, with the optimizer and the steps that they have.
pub(super) struct Values<'a> {
    optimizer: &'a mut LocalOptimizer,
    variables: &'a Variables,
    steps: &'a mut Steps,
}

impl Values<'_> {
    /// Updates the values. Returns the gradient's memory for reuse.
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

    /// Updates the values with gradients in the device's memory.
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

    /// Takes over the state of another replica, with all slots or with none.
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

    /// Returns the steps that the values have; `None` if they are initial values or were overwritten. If an evaluation
    /// was abandoned while averages stood in place of the weights, puts the weights back first.
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

    /// Prepares a step. Returns the new values of the held elements, or an empty vector if there is no gradient.
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

    /// Makes the prepared step. Returns the memory of `values` for reuse.
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

    /// Returns the slots of a range of elements that belong to the values `of`: the present values, or those of the
    /// prepared update. If `before`, returns the slots of the previous share.
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

    /// Holds these ranges of elements from now on. The previous slots are kept until the next step.
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

    /// Forgets the slots, the number of updates, and which steps the values have.
    pub(super) fn forget(&mut self) {
        let overwritten = self.steps.overwritten;
        *self.steps = Steps {
            overwritten,
            ..Steps::default()
        };
        self.optimizer.forget();
    }
}
