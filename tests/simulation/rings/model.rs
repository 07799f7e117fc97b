//! A replica that keeps its values, which show the steps and samples that they are made of. The history has them, so that it
//! can compare them with those of other replicas after each change.

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use shared_proto::payload::Elements;
use shared_proto::step::{Gradients, Want};
use worker::replica::{
    Computed, Description, Evaluation, EvaluationPart, Mirror, MirrorState, Others, Positions,
    Prepared, Replica, ReplicaError, Step, StepsMade,
};
use worker::variables::Part;

use super::history::History;
use super::values::{SAMPLES, Shape};

/// The replica of a worker.
pub(crate) struct Kept {
    name: String,
    history: History,
    shape: Shape,
    /// The time that a gradient takes.
    step: Duration,
    description: Description,
}

impl Kept {
    /// The replica of a worker that starts, with initial values.
    pub(crate) fn new(name: &str, history: &History, step: Duration) -> Self {
        history.starts(name);
        let shape = history.shape();
        Self {
            name: name.to_owned(),
            history: history.clone(),
            shape,
            step,
            description: Description {
                variables: shape.variables(),
                tables: Vec::new(),
                training_samples: SAMPLES as u64,
                evaluation_samples: 1,
                data_digest: Default::default(),
            },
        }
    }
}

#[async_trait(?Send)]
impl Replica for Kept {
    fn description(&self) -> &Description {
        &self.description
    }

    async fn prepare(&self, positions: Positions) -> Prepared {
        Prepared::new(positions, vec![Want::Dense])
    }

    async fn take_in(&self, _: Vec<Part>) {}

    async fn compute(&self, positions: Positions, step: Step) -> Result<Computed, ReplicaError> {
        tokio::time::sleep(self.step).await;
        self.history.computed(&self.name, step.clock.0, positions);
        let values = self.shape.gradient(step.clock.0, positions);
        Ok(Computed {
            loss: 0.0,
            gradients: Gradients {
                values: values.into_iter().map(Elements::from).collect(),
                rows: Vec::new(),
                norm: 1.0,
            },
        })
    }

    async fn evaluate(&self, _: EvaluationPart) -> Result<Evaluation, ReplicaError> {
        self.history.evaluated(&self.name);
        Ok(Evaluation::Done([("loss".to_owned(), 0.0)].into()))
    }

    async fn initial_values(&self) -> Result<Vec<Elements>, ReplicaError> {
        let zeros = |elements| Elements::from(vec![0.0; elements]);
        let variables = self.description.variables.iter();
        Ok(variables.map(|spec| zeros(spec.elements())).collect())
    }

    fn mirror(&self) -> Option<&dyn Mirror> {
        Some(self)
    }

    async fn save(&self, _: PathBuf) -> Result<(), ReplicaError> {
        Ok(())
    }
}

#[async_trait(?Send)]
impl Mirror for Kept {
    async fn update(&self, gradient: Vec<f32>, made: StepsMade) -> Result<Vec<f32>, ReplicaError> {
        self.history.updated(&self.name, gradient.clone(), made);
        Ok(gradient)
    }

    async fn note_made(&self, made: StepsMade) -> Result<(), ReplicaError> {
        self.history.noted(&self.name, made);
        Ok(())
    }

    /// Its passes have no sums with others.
    async fn compute_with(
        &self,
        _: Others,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError> {
        self.compute(positions, step).await
    }

    async fn state(&self) -> Result<MirrorState, ReplicaError> {
        Ok(self.history.state(&self.name))
    }

    async fn set_state(&self, state: MirrorState, made: StepsMade) -> Result<(), ReplicaError> {
        self.history.taken(&self.name, state, made);
        Ok(())
    }

    async fn made(&self) -> Result<Option<StepsMade>, ReplicaError> {
        Ok(self.history.made(&self.name))
    }

    async fn swap_averages(&self) -> Result<(), ReplicaError> {
        Ok(())
    }
}
