//! A job in a single process, with candle's own optimizers and without a cluster. Distributed runs are compared
//! with it.

use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer as _, ParamsAdamW, SGD};
use nn::{autocast, backward};
use shared_proto::job::{Adam, Job, Optimizer, Schedule, run_dir};

use data::save_transforms;

use model::input::{Dataset, Fitted, InMemory, InputError, Order, Purpose, Samples, read};
use model::registry::Registry;
use model::tables::{LocalTables, RowSource, RowsOf, SavedTables};
use model::{Metrics, Objective, Pass};
use replica::{Built, Evaluating, Place, ReplicaError, build, precision};
use variables::Variables;

/// The result of a local run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The number of steps.
    pub steps: u64,
    /// The number of samples trained on.
    pub samples: u64,
    /// The time spent in training, without the evaluation.
    pub seconds: f64,
    /// The metrics of the final weights on the held-out samples.
    pub metrics: Metrics,
    /// The rows of tables.
    pub tables: SavedTables,
}

enum Rule {
    Sgd(SGD),
    Adam(AdamW),
}

/// Trains, evaluates, and writes the weights to `save_to`.
///
/// # Errors
/// The data's, the model's or candle's. Optimizers other than sgd, adam and adamw are refused, and so are settings of
/// the update that candle's optimizers do not have: `schedule`, `clip_norm`, `clip_value`, `ema_decay`, and groups that are not
/// frozen.
pub fn train(
    job: &Job,
    registry: &Registry,
    device: &Device,
    save_to: Option<&Path>,
) -> Result<Outcome, ReplicaError> {
    let mut data = registry.open(&job.data, job.seed, Purpose::Training)?;
    let objective = Objective::new(&job.objective, &data.signature)?;
    let built = build(
        job,
        registry,
        &Place::on(device),
        &data.signature,
        &objective,
    )?;
    let Built {
        variables,
        tables,
        model,
    } = &built;
    let mut local = LocalTables::new(tables.specs());
    let mut rule = rule(job, variables)?;

    let precision = precision(job);
    let (mut steps, mut samples) = (0, 0);
    let began = Instant::now();
    let count = data.training.count();
    'training: for epoch in 0..job.epochs {
        let order = Order::Shuffled {
            seed: job.seed,
            epoch,
        };
        for start in (0..count).step_by(job.samples_per_step() as usize) {
            if job.steps.is_some_and(|most| steps >= most) {
                break 'training;
            }
            let end = count.min(start + job.samples_per_step());
            let batch = read(&mut *data.training, order, start..end, &Device::Cpu)?;
            let mut batch = [batch];
            let wanted = tables.distinct(&mut batch)?;
            let rows = tables.rows(&wanted, &mut local.read(&wanted)?, device)?;
            tables.set(&rows);
            let batch = batch[0].to_device(device)?;
            let pass = Pass::training(&objective, job.seed, steps, 0);
            let gradients = autocast(precision, || {
                let outputs = model.forward(&batch, &pass)?;
                backward(&model.loss(&outputs, &batch, &pass)?)
            })?;
            match &mut rule {
                Rule::Sgd(sgd) => sgd.step(&gradients)?,
                Rule::Adam(adam) => adam.step(&gradients)?,
            }
            local.update(&wanted, &mut rows.gradients(&gradients)?, 1.0)?;
            steps += 1;
            samples += end - start;
        }
    }
    // A GPU may still be at work.
    device.synchronize()?;
    let seconds = began.elapsed().as_secs_f64();
    if let Some(path) = save_to {
        variables.save(path)?;
        save_transforms(data.transforms.as_ref(), path)?;
    }
    Ok(Outcome {
        steps,
        samples,
        seconds,
        metrics: autocast(precision, || {
            evaluate(
                &built,
                &mut local,
                &objective,
                &mut *data.evaluation,
                device,
            )
        })?,
        tables: local.into_saved()?,
    })
}

/// Returns the loss and the metrics of a model over all held-out samples.
fn evaluate(
    built: &Built,
    rows: &mut dyn RowSource,
    objective: &Objective,
    held_out: &mut dyn Samples,
    device: &Device,
) -> Result<Metrics, ReplicaError> {
    let (model, tables) = (&*built.model, &built.tables);
    let mut evaluating = Evaluating::begin(model, objective);
    while evaluating.next(held_out, tables, device)?.is_some() {
        if let Some((batch, wanted)) = evaluating.read.take() {
            tables.set(&tables.rows(&wanted, &mut rows.read(&wanted)?, device)?);
            let pass = Pass::evaluation(objective);
            let outputs = model.forward(&batch, &pass)?;
            evaluating.add(model, &outputs, &batch, &pass)?;
        }
    }
    Ok(evaluating.metrics())
}

/// The results of a training.
pub struct Trained<'a> {
    /// The job as it ran.
    pub job: &'a Job,
    /// The safetensors file of the weights.
    pub weights: &'a Path,
    /// Returns the source of the rows of tables. It is not called for a model without tables.
    pub rows: RowsOf<'a>,
    /// The transforms that were fitted to the columns of the data; `None` for data without columns.
    pub fitted: Option<&'a Fitted>,
}

/// The samples on which a trained model is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evaluated {
    /// The samples that the job holds out.
    HeldOut,
    /// All samples in `data.dir`, which has other data than the training had. If the training has left no fitted
    /// transforms, the held-out samples of that data.
    All,
}

/// Evaluates a trained model. Also returns the number of samples.
///
/// # Errors
/// The data's or the model's, or if the file holds other variables than the model has.
pub fn evaluate_trained(
    trained: &Trained,
    registry: &Registry,
    device: &Device,
    samples: Evaluated,
) -> Result<(Metrics, u64), ReplicaError> {
    let purpose = match (trained.fitted, samples) {
        (None, _) => Purpose::Training,
        (Some(fitted), Evaluated::HeldOut) => Purpose::Evaluation(fitted),
        (Some(fitted), Evaluated::All) => Purpose::EvaluationOfAll(fitted),
    };
    let mut loaded = Loaded::open(trained, registry, device, purpose)?;
    let count = loaded.data.evaluation.count();
    Ok((evaluate_loaded(&mut loaded, trained.job, device)?, count))
}

/// Evaluates a job's model on its held-out samples.
pub(crate) fn evaluate_loaded(
    loaded: &mut Loaded,
    job: &Job,
    device: &Device,
) -> Result<Metrics, ReplicaError> {
    let Loaded {
        data,
        objective,
        built,
        rows,
    } = loaded;
    let samples = &mut *data.evaluation;
    autocast(precision(job), || {
        evaluate(built, &mut **rows, objective, samples, device)
    })
}

/// A trained model with data for it.
pub(crate) struct Loaded {
    pub(crate) data: Dataset,
    pub(crate) objective: Objective,
    pub(crate) built: Built,
    pub(crate) rows: Box<dyn RowSource>,
}

impl Loaded {
    /// Builds the model with its weights and rows, and opens its data.
    pub(crate) fn open(
        trained: &Trained,
        registry: &Registry,
        device: &Device,
        purpose: Purpose,
    ) -> Result<Self, ReplicaError> {
        let job = trained.job;
        let data = registry.open(&job.data, job.seed, purpose)?;
        if data.transforms.is_some() && matches!(purpose, Purpose::Training) {
            return Err(InputError::Invalid(format!(
                "there is no {} beside {}; copy it from the run directory of the training",
                run_dir::TRANSFORMS,
                trained.weights.display()
            ))
            .into());
        }
        Self::with_weights(trained, registry, device, data)
    }

    /// Builds the model with its weights and rows, to compute with samples that have been read.
    pub(crate) fn for_samples(
        trained: &Trained,
        registry: &Registry,
        device: &Device,
        samples: InMemory,
    ) -> Result<Self, ReplicaError> {
        let data = Dataset::in_memory(samples.select(&[0])?, samples)?;
        Self::with_weights(trained, registry, device, data)
    }

    fn with_weights(
        trained: &Trained,
        registry: &Registry,
        device: &Device,
        data: Dataset,
    ) -> Result<Self, ReplicaError> {
        let mut loaded = Self::with(trained.job, registry, device, data)?;
        loaded.built.variables.load(trained.weights)?;
        let specs = loaded.built.tables.specs();
        if !specs.is_empty() {
            loaded.rows = (trained.rows)(specs)?;
        }
        Ok(loaded)
    }

    /// Builds the model without its weights and rows, and opens the data as a worker does.
    pub(crate) fn as_in_training(
        job: &Job,
        registry: &Registry,
        device: &Device,
    ) -> Result<Self, ReplicaError> {
        let data = registry.open(&job.data, job.seed, Purpose::Training)?;
        Self::with(job, registry, device, data)
    }

    fn with(
        job: &Job,
        registry: &Registry,
        device: &Device,
        data: Dataset,
    ) -> Result<Self, ReplicaError> {
        let mut job = job.clone();
        // All values come from a file of weights.
        job.model.init_from = None;
        let objective = Objective::new(&job.objective, &data.signature)?;
        let place = Place::on(device);
        let built = build(&job, registry, &place, &data.signature, &objective)?;
        Ok(Self {
            data,
            objective,
            built,
            rows: Box::new(LocalTables::default()),
        })
    }

    /// Replaces the held-out samples, and returns the former ones.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if `samples` has other inputs than the model was trained with.
    pub(crate) fn replace_held_out(
        &mut self,
        samples: InMemory,
    ) -> Result<Box<dyn Samples>, InputError> {
        let (given, expected) = (samples.signature().inputs, &self.data.signature.inputs);
        if given != *expected {
            return Err(InputError::Invalid(format!(
                "the samples have the inputs {given:?}, but the model was trained with {expected:?}; give the same columns"
            )));
        }
        Ok(std::mem::replace(
            &mut self.data.evaluation,
            Box::new(samples),
        ))
    }

    /// Returns the model's outputs for samples that are held out. Numbers are in the unit of the labels.
    pub(crate) fn outputs(
        &mut self,
        samples: Range<u64>,
        device: &Device,
    ) -> Result<Tensor, ReplicaError> {
        let held_out = &mut *self.data.evaluation;
        let tables = &self.built.tables;
        let mut batch = [read(held_out, Order::Stored, samples, &Device::Cpu)?];
        let wanted = tables.distinct(&mut batch)?;
        tables.set(&tables.rows(&wanted, &mut self.rows.read(&wanted)?, device)?);
        let batch = batch[0].to_device(device)?;
        let pass = Pass::evaluation(&self.objective);
        let outputs = self.built.model.forward(&batch, &pass)?;
        Ok(match self.objective.scale {
            // In single precision, a mean far from 0 would cost digits of the deviation.
            Some(scale) => outputs
                .to_dtype(DType::F64)?
                .affine(scale.deviation, scale.mean)?,
            None => outputs,
        })
    }
}

/// Returns candle's optimizer for the job's settings, or an error that names a setting that it cannot follow.
fn rule(job: &Job, variables: &Variables) -> Result<Rule, ReplicaError> {
    let updates = job.groups.iter().find(|group| !group.frozen);
    let unused = match updates {
        Some(group) => Some(format!("the group {:?}", group.variables)),
        None if job.schedule != Schedule::default() => Some("`schedule`".to_owned()),
        None => {
            let set = |name, value: Option<f32>| value.map(|value| format!("`{name}` ({value})"));
            set("clip_norm", job.clip_norm)
                .or_else(|| set("clip_value", job.clip_value))
                .or_else(|| set("ema_decay", job.ema_decay))
        }
    };
    if let Some(setting) = unused {
        return Err(candle_core::Error::msg(format!(
            "{setting} has no effect in a single process without servers; leave it out"
        ))
        .into());
    }
    let vars = variables.trained();
    match &job.optimizer {
        Optimizer::Sgd(s) if s.weight_decay == 0.0 => {
            Ok(Rule::Sgd(SGD::new(vars, s.learning_rate.into())?))
        }
        Optimizer::Adam(Adam {
            learning_rate,
            beta1,
            beta2,
            epsilon,
            weight_decay,
        }) if *weight_decay == 0.0 => adam(vars, [learning_rate, beta1, beta2, epsilon, &0.0]),
        Optimizer::AdamW(s) => adam(
            vars,
            [
                &s.learning_rate,
                &s.beta1,
                &s.beta2,
                &s.epsilon,
                &s.weight_decay,
            ],
        ),
        other => Err(candle_core::Error::msg(format!(
            "candle has no {} with these settings; compare with sgd, adam or adamw",
            other.name()
        ))
        .into()),
    }
}

fn adam(vars: Vec<Var>, settings: [&f32; 5]) -> Result<Rule, ReplicaError> {
    let [lr, beta1, beta2, eps, weight_decay] = settings.map(|s| f64::from(*s));
    let settings = ParamsAdamW {
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
    };
    Ok(Rule::Adam(AdamW::new(vars, settings)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_would_have_no_effect_are_refused() {
        for (setting, named) in [
            ("clip_norm = 1.5", "`clip_norm` (1.5)"),
            ("clip_value = 0.5", "`clip_value` (0.5)"),
            ("ema_decay = 0.5", "`ema_decay` (0.5)"),
            ("[schedule]\nkind = \"cosine\"", "`schedule`"),
            ("[schedule]\nwarmup_steps = 3", "`schedule`"),
            (
                "[[groups]]\nvariables = \"*.bias\"\nlearning_rate = 0.1",
                "the group \"*.bias\"",
            ),
            ("[optimizer]\nname = \"ftrl\"", "candle has no ftrl"),
        ] {
            let job = Job::from_toml(setting).unwrap();
            let outcome = train(&job, &Registry::builtin(), &Device::Cpu, None);
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn frozen_variables_keep_their_values() {
        let job =
            "steps = 3\n[model]\nname = \"softmax\"\n[[groups]]\nvariables = \"*\"\nfrozen = true";
        let job = Job::from_toml(job).unwrap();
        let (registry, device) = (Registry::builtin(), Device::Cpu);
        let trained = train(&job, &registry, &device, None).unwrap();
        let untrained = train(
            &Job {
                steps: Some(0),
                ..job
            },
            &registry,
            &device,
            None,
        )
        .unwrap();
        assert_eq!(trained.metrics, untrained.metrics);
        assert_eq!((trained.steps, untrained.steps), (3, 0));
    }
}
