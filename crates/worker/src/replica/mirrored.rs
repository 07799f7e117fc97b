//! The values of a model replica that keeps them itself: commands to its thread, and what they do there.

use shared_proto::job::Job;
use shared_proto::payload::Elements;
use tokio::sync::oneshot;

use super::error::ReplicaError;
use super::mirror::{MirrorState, StepsMade};
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
}

impl MirrorCommand {
    /// Returns whether the variables no longer have their initial values afterwards.
    pub(super) fn overwrites(&self) -> bool {
        !matches!(
            self,
            Self::NoteMade(..) | Self::State(_) | Self::Values(_) | Self::Made(_)
        )
    }
}

/// The optimizer of a replica, and the steps that its values have.
#[derive(Default)]
pub(super) struct Mirrored {
    optimizer: Option<LocalOptimizer>,
    made: Option<StepsMade>,
    /// True while the variables have averages in place of weights.
    swapped: bool,
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
        let optimizer = match &mut self.optimizer {
            Some(optimizer) => Ok(optimizer),
            none => LocalOptimizer::new(job, variables, samples).map(|new| none.insert(new)),
        };
        // A caller that is gone does not need the answer.
        match command {
            MirrorCommand::Update(mut gradient, made, reply) => {
                let update = |optimizer: &mut LocalOptimizer| {
                    // Half an update is no step.
                    self.made = None;
                    optimizer.update(variables, &mut gradient)?;
                    self.made = Some(made);
                    Ok(gradient)
                };
                answer(reply, optimizer.and_then(update));
            }
            MirrorCommand::NoteMade(made, reply) => {
                self.made = Some(made);
                answer(reply, Ok(()));
            }
            MirrorCommand::State(reply) => {
                let state = |optimizer: &mut LocalOptimizer| {
                    Ok(MirrorState {
                        values: optimizer.state(variables)?,
                        updates: optimizer.updates(),
                    })
                };
                answer(reply, optimizer.and_then(state));
            }
            MirrorCommand::Values(reply) => answer(reply, variables.all_values()),
            MirrorCommand::SetState(state, made, reply) => {
                let set = |optimizer: &mut LocalOptimizer| {
                    self.made = None;
                    optimizer.set_state(variables, &state.values, state.updates)?;
                    self.made = Some(made);
                    Ok(())
                };
                answer(reply, optimizer.and_then(set));
            }
            MirrorCommand::Made(reply) => {
                // The membership may have ended after an evaluation of averages.
                let made = |optimizer: &mut LocalOptimizer| {
                    if std::mem::take(&mut self.swapped) {
                        optimizer.swap_averages(variables)?;
                    }
                    Ok(self.made)
                };
                answer(reply, optimizer.and_then(made));
            }
            MirrorCommand::SwapAverages(reply) => {
                let swap = |optimizer: &mut LocalOptimizer| {
                    optimizer.swap_averages(variables)?;
                    self.swapped = !self.swapped;
                    Ok(())
                };
                answer(reply, optimizer.and_then(swap));
            }
        }
    }
}

fn answer<T>(reply: Reply<T>, result: Result<T, VariablesError>) {
    drop(reply.send(result.map_err(ReplicaError::from)));
}
