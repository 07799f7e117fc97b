//! A replica that keeps its values, which show the steps and samples that they are made of. The history has them, so that it
//! can compare them with those of other replicas after each change. In jobs that share out the optimizer's state, the history has all
//! slots as they must be, and the replica those that it holds (`slots`).

mod slots;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use replica::{
    Computed, Description, DeviceGroup, DeviceSteps, Evaluation, EvaluationPart, Filling,
    FirstReplica, GroupError, InBuckets, Mirror, MirrorState, Others, Positions, Prepared, Replica,
    ReplicaError, SlotShare, Step, StepsMade, ValuesId,
};
use shared_proto::ids::Epoch;
use shared_proto::payload::Elements;
use shared_proto::step::{Gradients, Part, Want};
use tokio::time::{Instant, sleep, sleep_until};
use variables::BucketedGradients;

use super::gpus::{Gpus, Membership};
use super::history::History;
use super::values::{SAMPLES, Shape};
use super::{World, rows};

/// The replica of a worker.
pub(crate) struct Kept {
    pub(super) name: String,
    pub(super) history: History,
    pub(super) shape: Shape,
    /// The time that a gradient takes.
    pub(super) step: Duration,
    description: Description,
    /// True if the job shares out the optimizer's state.
    shares: bool,
    /// True if a step does not wait for the slowest worker. Then some passes take long.
    backups: bool,
    /// The GPUs of all workers, if they add up gradients.
    gpus: Option<Gpus>,
    seed: u64,
    pub(super) own: Mutex<Own>,
}

/// The part of a replica that the history does not have.
#[derive(Default)]
pub(super) struct Own {
    made_in: Epoch,
    share: Option<SlotShare>,
    /// The slot of each element; NaN where it is not held.
    slots: Vec<f32>,
    prepared: Option<PreparedStep>,
    /// The gradient of the newest step in buckets, by variable.
    bucketed: Vec<Vec<f32>>,
    /// The gradient of the newest step that was computed on the device, by variable.
    on_device: Option<Vec<Vec<f32>>>,
    /// The membership of the device in a group.
    membership: Option<Membership>,
    /// The slots before those, until a step is made.
    before: Option<(SlotShare, Option<PreparedStep>, Vec<f32>)>,
    /// The rows that were pulled last.
    rows: Vec<f32>,
    /// The end of the newest pass. A pass goes on after its future is dropped.
    busy_until: Option<Instant>,
    /// The place in a stage group.
    pub(super) place: Option<usize>,
}

struct PreparedStep {
    values: ValuesId,
    /// The mean gradient, of which the held elements count; none for a step without an update.
    gradient: Option<Vec<f32>>,
    slots: Vec<f32>,
}

impl Kept {
    /// The replica of a worker that starts, with initial values.
    pub(crate) fn new(name: &str, world: &World, step: Duration) -> Self {
        let history = &world.history;
        history.starts(name);
        let shape = history.shape();
        Self {
            name: name.to_owned(),
            history: history.clone(),
            shape,
            step,
            description: Description {
                variables: shape.variables(),
                tables: world.plan.servers.then(rows::spec).into_iter().collect(),
                training_samples: SAMPLES as u64,
                evaluation_samples: 1,
                data_digest: Default::default(),
            },
            shares: world.plan.copies.is_some(),
            backups: world.plan.backups,
            gpus: world.plan.gpus.then(|| world.gpus.clone()),
            seed: world.seed,
            own: Mutex::default(),
        }
    }

    /// Returns a number that depends on the world, on the replica's name and on this number.
    pub(super) fn chance(&self, number: u64) -> u64 {
        let mut hash = DefaultHasher::new();
        (self.seed, &self.name, number).hash(&mut hash);
        hash.finish()
    }

    /// Waits for the end of the newest pass, as all commands do: they are executed one after the other.
    async fn pass_is_over(&self) {
        let over = self.own.lock().unwrap().busy_until;
        if let Some(over) = over {
            sleep_until(over).await;
        }
    }

    /// Notes the steps that the values have.
    fn has_made(&self, before: Option<StepsMade>, made: StepsMade) {
        if before.is_none_or(|before| before.clock != made.clock) {
            self.own.lock().unwrap().made_in = made.ring;
        }
    }

    fn has_rows(&self) -> bool {
        !self.description.tables.is_empty()
    }

    /// Returns the result of a step with these gradients of variables, and those of rows if there are any. The rows that were pulled for it are
    /// checked.
    fn result(&self, values: Vec<Vec<f32>>, clock: u64, positions: Positions) -> Computed {
        let mut computed = of_values(values);
        if self.has_rows() {
            let pulled = std::mem::take(&mut self.own.lock().unwrap().rows);
            let checked = rows::check_pulled(clock, &rows::wanted(positions), &pulled);
            self.judge("computes with", checked);
            computed.gradients.rows = vec![rows::gradients(clock, positions)];
        }
        computed
    }

    /// Checks that all rows belong to the dense values.
    fn check_evaluated_rows(&self) {
        let pulled = std::mem::take(&mut self.own.lock().unwrap().rows);
        let (all, values) = (rows::all(), self.history.values(&self.name));
        let checked = rows::all_of(&all, &pulled).and_then(|pulled| {
            let rows = all.ids.iter().copied().zip(pulled.iter().copied());
            rows::check(&rows.collect(), &values)
        });
        self.judge("evaluates", checked);
    }

    fn judge(&self, what: &str, checked: Result<(), String>) {
        if let Err(wrong) = checked {
            let name = &self.name;
            self.history
                .violation(format!("{name} {what} wrong rows: {wrong}"));
        }
    }

    /// Returns the slots as they must be at the present values.
    fn right_slots(&self) -> Vec<f32> {
        let mut state = self.history.state(&self.name).values;
        state.split_off(state.len() / 2)
    }

    /// Checks the slots that this replica holds.
    fn check_slots(&self, when: &str) {
        let own = self.own.lock().unwrap();
        let pairs = own.slots.iter().zip(self.right_slots()).enumerate();
        let mut held = pairs.filter(|(_, (slot, _))| !slot.is_nan());
        if let Some((element, (slot, right))) = held.find(|(_, (slot, right))| **slot != *right) {
            let name = &self.name;
            self.history.violation(format!(
                "{name} {when}: the slot of element {element} is {slot}, and must be {right}"
            ));
        }
    }
}

#[async_trait(?Send)]
impl Replica for Kept {
    fn description(&self) -> &Description {
        &self.description
    }

    async fn prepare(&self, positions: Positions) -> Prepared {
        let rows = self.has_rows().then(|| Want::Rows(rows::wanted(positions)));
        let wants = [Want::Dense].into_iter().chain(rows);
        Prepared::new(positions, wants.collect())
    }

    async fn load(&self, parts: Vec<Part>) {
        let mut own = self.own.lock().unwrap();
        for part in parts {
            let values = part.values.to_vec();
            let end = part.start + values.len();
            if own.rows.len() < end {
                own.rows.resize(end, f32::NAN);
            }
            own.rows[part.start..end].copy_from_slice(&values);
        }
    }

    async fn compute(&self, positions: Positions, step: Step) -> Result<Computed, ReplicaError> {
        self.pass_is_over().await;
        let takes_long = self.backups && self.chance(step.clock.0).is_multiple_of(8);
        let times = if takes_long { 12 } else { 1 };
        let over = Instant::now() + self.step * times;
        self.own.lock().unwrap().busy_until = Some(over);
        sleep_until(over).await;
        self.history.computed(&self.name, step.clock.0, positions);
        let values = self.shape.gradient(step.clock.0, positions);
        Ok(self.result(values, step.clock.0, positions))
    }

    async fn evaluate(&self, part: EvaluationPart) -> Result<Evaluation, ReplicaError> {
        self.pass_is_over().await;
        if self.has_rows() && part == EvaluationPart::First {
            self.own.lock().unwrap().rows.clear();
            return Ok(Evaluation::Wants(vec![Want::Rows(rows::all())]));
        }
        if self.has_rows() {
            self.check_evaluated_rows();
        }
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

/// Returns the result of a step with these gradients of variables.
pub(super) fn of_values(values: Vec<Vec<f32>>) -> Computed {
    let gradients = Gradients {
        values: values.into_iter().map(Elements::from).collect(),
        rows: Vec::new(),
        norm: 1.0,
    };
    Computed::new(0.0, gradients)
}

#[async_trait(?Send)]
impl Mirror for Kept {
    fn first(&self) -> &dyn FirstReplica {
        self
    }

    async fn make_update(
        &self,
        values: Vec<f32>,
        made: StepsMade,
    ) -> Result<Vec<f32>, ReplicaError> {
        self.make_prepared(&values, made);
        Ok(values)
    }

    async fn update(
        &self,
        gradient: BucketedGradients,
        made: StepsMade,
    ) -> Result<BucketedGradients, ReplicaError> {
        self.pass_is_over().await;
        self.has_made(self.history.made(&self.name), made);
        let whole = gradient.in_order(&self.description.variables);
        self.history.updated(&self.name, whole, made);
        Ok(gradient)
    }

    async fn scale_learning_rate(&self, _: f64) -> Result<(), ReplicaError> {
        Ok(())
    }

    async fn note_made(&self, made: StepsMade) -> Result<(), ReplicaError> {
        self.pass_is_over().await;
        self.has_made(self.history.made(&self.name), made);
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

    /// Returns false for an eighth of the replicas, as a worker with several devices does.
    fn fills_buckets(&self) -> bool {
        !self.chance(1).is_multiple_of(8)
    }

    /// Fills buckets; in some steps the early gradients are wrong.
    async fn compute_in_buckets(
        &self,
        mut filling: Filling,
        positions: Positions,
        step: Step,
    ) -> Result<InBuckets, ReplicaError> {
        let clock = step.clock.0;
        self.history.computed(&self.name, clock, positions);
        let gradient = self.shape.gradient(clock, positions);
        let plan = filling.plan().clone();
        let order = FirstReplica::gradient_order(self).await?;
        let (early, late): (Vec<_>, Vec<_>) = order
            .into_iter()
            .partition(|variable| plan.is_early(*variable));
        let complete = early.is_empty() || !self.chance(clock).is_multiple_of(4);
        let pause = self.step / (early.len() as u32 + 1);
        for variable in early {
            sleep(pause).await;
            match complete {
                true => filling.fill(variable, &gradient[variable]),
                false => filling.fill(variable, &vec![0.5; gradient[variable].len()]),
            };
        }
        sleep(pause).await;
        for variable in late {
            filling.fill(variable, &gradient[variable]);
        }
        self.own.lock().unwrap().bucketed = gradient;
        Ok(InBuckets {
            computed: self.result(Vec::new(), clock, positions),
            complete,
        })
    }

    /// If the job shares out the optimizer's state, each replica has a number more, so that it differs from a whole state.
    async fn state(&self) -> Result<MirrorState, ReplicaError> {
        self.pass_is_over().await;
        let mut state = self.history.state(&self.name);
        state.made_in = self.own.lock().unwrap().made_in;
        state.values.extend(self.shares.then_some(0.0));
        Ok(state)
    }

    async fn set_state(&self, mut state: MirrorState, made: StepsMade) -> Result<(), ReplicaError> {
        self.pass_is_over().await;
        let mut own = self.own.lock().unwrap();
        own.made_in = state.made_in;
        if state.values.len() % 2 == 1 {
            state.values.pop();
        } else if self.shares {
            let of = ValuesId {
                ring: state.made_in,
                clock: made.clock,
            };
            let whole = SlotShare {
                of,
                rank: 0,
                ranks: 1,
            };
            own.slots = state.values[state.values.len() / 2..].to_vec();
            (own.share, own.prepared, own.before) = (Some(whole), None, None);
        }
        self.history.taken(&self.name, state, made);
        Ok(())
    }

    async fn made(&self) -> Result<Option<StepsMade>, ReplicaError> {
        self.pass_is_over().await;
        // A pull that was given up may have left some.
        self.own.lock().unwrap().rows.clear();
        Ok(self.history.made(&self.name))
    }

    /// Half of the replicas are on a GPU, and all if GPUs add up gradients.
    fn device_steps(&self) -> Option<&dyn DeviceSteps> {
        let on_gpu = self.gpus.is_some() || self.chance(2).is_multiple_of(2);
        on_gpu.then_some(self)
    }
}

#[async_trait(?Send)]
impl DeviceSteps for Kept {
    fn saves_copies(&self) -> bool {
        true
    }

    async fn compute_on_device(
        &self,
        positions: Positions,
        step: Step,
    ) -> Result<Computed, ReplicaError> {
        sleep(self.step).await;
        self.history.computed(&self.name, step.clock.0, positions);
        let gradient = self.shape.gradient(step.clock.0, positions);
        self.own.lock().unwrap().on_device = Some(gradient);
        Ok(self.result(Vec::new(), step.clock.0, positions))
    }

    async fn update_on_device(&self, made: StepsMade) -> Result<(), ReplicaError> {
        let gradient = self.own.lock().unwrap().on_device.take();
        let gradient = gradient.expect("a step was computed on the device");
        self.has_made(self.history.made(&self.name), made);
        self.history.updated(&self.name, gradient.concat(), made);
        Ok(())
    }

    async fn gradients_on_device(&self) -> Result<Vec<Elements>, ReplicaError> {
        let gradient = self.own.lock().unwrap().on_device.clone();
        let gradient = gradient.unwrap_or_default().into_iter();
        Ok(gradient.map(Elements::from).collect())
    }

    fn device_group(&self) -> Option<&dyn DeviceGroup> {
        self.gpus.is_some().then_some(self)
    }
}

impl Kept {
    fn gpus(&self) -> &Gpus {
        self.gpus.as_ref().expect("a world with GPUs")
    }
}

#[async_trait(?Send)]
impl DeviceGroup for Kept {
    fn device(&self) -> String {
        self.name.clone()
    }

    async fn new_group(&self) -> Result<Bytes, GroupError> {
        Ok(self.gpus().new_group())
    }

    async fn join_group(&self, id: Bytes, rank: usize, ranks: usize) -> Result<(), GroupError> {
        self.own.lock().unwrap().membership = None;
        let joined = self.gpus().join(&id, rank, ranks).await?;
        self.own.lock().unwrap().membership = Some(joined);
        Ok(())
    }

    async fn leave_group(&self) -> Result<(), ReplicaError> {
        self.own.lock().unwrap().membership = None;
        Ok(())
    }

    /// After a failure the gradient is this replica's part of the sum.
    async fn add_up(&self, part: f64) -> Result<(), GroupError> {
        let (membership, mut gradient) = {
            let mut own = self.own.lock().unwrap();
            (own.membership.take(), own.on_device.take())
        };
        let Some(mut membership) = membership else {
            let problem = "the GPU is in no group".to_owned();
            return Err(GroupError::Own(ReplicaError::Devices(problem)));
        };
        let variables = self.description.variables.iter();
        let zeros = || variables.map(|spec| vec![0.0; spec.elements()]).collect();
        let mut gradient = match part {
            0.0 => zeros(),
            _ => gradient.take().expect("a step was computed on the device"),
        };
        for element in gradient.iter_mut().flatten() {
            *element *= part as f32;
        }
        self.own.lock().unwrap().on_device = Some(gradient.clone());
        let sum = membership.add_up(gradient).await?;
        let mut own = self.own.lock().unwrap();
        (own.on_device, own.membership) = (Some(sum), Some(membership));
        Ok(())
    }
}
