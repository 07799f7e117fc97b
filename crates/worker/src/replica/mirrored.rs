//! The values of a model replica that keeps them itself: commands to its thread, and what they do there.

use std::ops::Range;

use shared_proto::ids::Epoch;
use shared_proto::job::Job;
use shared_proto::payload::Elements;
use tokio::sync::oneshot;

use super::error::ReplicaError;
use super::mirror::{Held, MirrorState, SlotShare, StepsMade, ValuesId};
use crate::variables::{LocalOptimizer, Variables, VariablesError};

/// Where the answer to a command goes.
pub(super) type Reply<T> = oneshot::Sender<Result<T, ReplicaError>>;

/// A command of strategies without servers.
pub(super) enum MirrorCommand {
    Update(Vec<f32>, StepsMade, Reply<Vec<f32>>),
    NoteMade(StepsMade, Reply<()>),
    State(Reply<MirrorState>),
    Values(Reply<Vec<Elements>>),
    SetState(MirrorState, StepsMade, Reply<()>),
    Made(Reply<Option<StepsMade>>),
    SwapAverages(Reply<()>),
    Parts(PartsCommand),
}

/// A command about an optimizer's state that is shared out.
pub(super) enum PartsCommand {
    Prepare(Option<Vec<f32>>, StepsMade, Reply<Vec<f32>>),
    Make(Vec<f32>, StepsMade, Reply<Vec<f32>>),
    Held(Reply<Held>),
    Slots(Range<usize>, ValuesId, Reply<Vec<f32>>),
    Hold(
        SlotShare,
        Vec<Range<usize>>,
        Option<Vec<Vec<f32>>>,
        Reply<()>,
    ),
    StateWith(Vec<f32>, Reply<MirrorState>),
    Forget(Reply<()>),
}

impl MirrorCommand {
    /// Returns whether the variables no longer have their initial values afterwards.
    pub(super) fn overwrites(&self) -> bool {
        !matches!(
            self,
            Self::NoteMade(..) | Self::State(_) | Self::Values(_) | Self::Made(_) | Self::Parts(_)
        ) || matches!(self, Self::Parts(PartsCommand::Make(..)))
    }
}

/// The optimizer of a replica, and the steps that its values have.
#[derive(Default)]
pub(super) struct Mirrored {
    optimizer: Option<LocalOptimizer>,
    made: Option<StepsMade>,
    /// The ring that made the values, or that has begun with them.
    made_in: Epoch,
    /// The slots that it has, if the job shares them out.
    share: Option<SlotShare>,
    prepared: Option<Prepared>,
    /// True while the variables have averages in place of weights.
    swapped: bool,
}

/// A step that is prepared.
struct Prepared {
    /// The values that it makes.
    values: ValuesId,
    /// True if it changes values.
    updates: bool,
}

impl Mirrored {
    /// Executes a command on the variables of a job with so many training samples.
    pub(super) fn serve(
        &mut self,
        command: MirrorCommand,
        job: &Job,
        variables: &Variables,
        samples: u64,
    ) {
        // A caller that is gone does not need the answer.
        match command {
            MirrorCommand::Update(mut gradient, made, reply) => {
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        // Half an update is no step.
                        own.made = None;
                        optimizer.update(variables, &mut gradient)?;
                        own.has_made(made);
                        Ok(gradient)
                    }),
                );
            }
            MirrorCommand::NoteMade(made, reply) => {
                self.has_made(made);
                answer(reply, Ok(()));
            }
            MirrorCommand::State(reply) => {
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        Ok(MirrorState {
                            values: optimizer.state(variables)?,
                            updates: optimizer.updates(),
                            made_in: own.made_in,
                        })
                    }),
                );
            }
            MirrorCommand::Values(reply) => answer(reply, variables.all_values()),
            MirrorCommand::SetState(state, made, reply) => {
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        own.made = None;
                        let values = &state.values;
                        let has_slots = optimizer.set_state(variables, values, state.updates)?;
                        (own.made, own.made_in) = (Some(made), state.made_in);
                        if has_slots {
                            own.prepared = None;
                            own.share = own.values().map(|of| SlotShare {
                                of,
                                rank: 0,
                                ranks: 1,
                            });
                        }
                        Ok(())
                    }),
                );
            }
            MirrorCommand::Made(reply) => {
                // The membership may have ended after an evaluation of averages.
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        if std::mem::take(&mut own.swapped) {
                            optimizer.swap_averages(variables)?;
                        }
                        Ok(own.made)
                    }),
                );
            }
            MirrorCommand::SwapAverages(reply) => {
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        optimizer.swap_averages(variables)?;
                        own.swapped = !own.swapped;
                        Ok(())
                    }),
                );
            }
            MirrorCommand::Parts(command) => self.serve_parts(command, job, variables, samples),
        }
    }

    fn serve_parts(
        &mut self,
        command: PartsCommand,
        job: &Job,
        variables: &Variables,
        samples: u64,
    ) {
        match command {
            PartsCommand::Prepare(gradient, made, reply) => {
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        own.prepared = None;
                        let updates = gradient.is_some();
                        let mut values = gradient.unwrap_or_default();
                        if updates {
                            optimizer.prepare(variables, &mut values)?;
                        }
                        let id = ValuesId {
                            ring: made.ring,
                            clock: made.clock,
                        };
                        own.prepared = Some(Prepared {
                            values: id,
                            updates,
                        });
                        Ok(values)
                    }),
                );
            }
            PartsCommand::Make(values, made, reply) => {
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        own.made = None;
                        if own.prepared.take().is_some_and(|prepared| prepared.updates) {
                            optimizer.make_prepared(variables, &values)?;
                        }
                        own.has_made(made);
                        let made = own.values();
                        if let (Some(share), Some(of)) = (&mut own.share, made) {
                            share.of = of;
                        }
                        Ok(values)
                    }),
                );
            }
            PartsCommand::Held(reply) => {
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        Ok(Held {
                            values: own.values(),
                            updates: optimizer.updates(),
                            share: own.share,
                            prepared: own.prepared.as_ref().map(|prepared| prepared.values),
                            slot_bytes: optimizer.slot_bytes(),
                        })
                    }),
                );
            }
            PartsCommand::Slots(range, of, reply) => {
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        let prepared = own.prepared.as_ref();
                        let prepared = prepared
                            .is_some_and(|prepared| prepared.values == of && prepared.updates);
                        optimizer.slots(variables, &range, prepared)
                    }),
                );
            }
            PartsCommand::Hold(share, ranges, slots, reply) => {
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        (own.share, own.prepared) = (None, None);
                        optimizer.hold(&ranges, slots.as_deref())?;
                        own.share = Some(share);
                        Ok(())
                    }),
                );
            }
            PartsCommand::StateWith(slots, reply) => {
                answer(
                    reply,
                    self.with(job, variables, samples, |own, optimizer| {
                        Ok(MirrorState {
                            values: optimizer.state_with(variables, &slots)?,
                            updates: optimizer.updates(),
                            made_in: own.made_in,
                        })
                    }),
                );
            }
            PartsCommand::Forget(reply) => {
                *self = Self::default();
                answer(reply, Ok(()));
            }
        }
    }

    /// Does something with the optimizer, which is made at its first use.
    fn with<T>(
        &mut self,
        job: &Job,
        variables: &Variables,
        samples: u64,
        act: impl FnOnce(&mut Self, &mut LocalOptimizer) -> Result<T, VariablesError>,
    ) -> Result<T, VariablesError> {
        let mut optimizer = match self.optimizer.take() {
            Some(optimizer) => optimizer,
            None => LocalOptimizer::new(job, variables, samples)?,
        };
        let done = act(self, &mut optimizer);
        self.optimizer = Some(optimizer);
        done
    }

    /// Notes the steps that the values have.
    fn has_made(&mut self, made: StepsMade) {
        if self.made.is_none_or(|before| before.clock != made.clock) {
            self.made_in = made.ring;
        }
        self.made = Some(made);
    }

    fn values(&self) -> Option<ValuesId> {
        self.made.map(|made| ValuesId {
            ring: self.made_in,
            clock: made.clock,
        })
    }
}

fn answer<T>(reply: Reply<T>, result: Result<T, VariablesError>) {
    drop(reply.send(result.map_err(ReplicaError::from)));
}
