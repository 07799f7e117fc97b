//! A job's model, with its variables and tables.

use candle_core::{DType, Device};
use model::input::Signature;
use model::registry::Registry;
use model::tables::{ModelTables, Tables};
use model::{Model, Objective, Setup, Stages};
use shared_proto::job::{Job, Precision, TableSettings, matches_pattern};
use variables::Variables;

use super::error::ReplicaError;

/// Returns the data type in which a job computes matrix products and convolutions.
pub fn precision(job: &Job) -> DType {
    match job.model.precision {
        Precision::F32 => DType::F32,
        Precision::Bf16 => DType::BF16,
    }
}

/// A model with its variables and tables.
pub struct Built {
    /// The variables, with their initial values.
    pub variables: Variables,
    /// The tables that the model has asked for.
    pub tables: ModelTables,
    /// The model, which uses these variables and tables.
    pub model: Box<dyn Model>,
}

/// The devices on which a model is built.
#[derive(Clone, Debug)]
pub struct Place {
    /// The device of variables that belong to no stage.
    device: Device,
    stages: Stages,
}

impl Place {
    /// Returns the place of a model on one device.
    pub fn on(device: &Device) -> Self {
        Self {
            device: device.clone(),
            stages: Stages::default(),
        }
    }

    /// Returns the place of a model in stages.
    pub(super) fn in_stages(device: &Device, stages: Stages) -> Self {
        Self {
            device: device.clone(),
            stages,
        }
    }
}

/// Builds a job's model for its data. Variables have the values in the file `model.init_from`, if the job names one and
/// the file has them, and otherwise the initial values that the model asks for.
///
/// # Errors
/// Those of the model and of the file with initial values, [`ReplicaError::Pattern`] or [`ReplicaError::TablePattern`].
pub fn build(
    job: &Job,
    registry: &Registry,
    place: &Place,
    data: &Signature,
    objective: &Objective,
) -> Result<Built, ReplicaError> {
    let tables = Tables::new(job);
    let setup = Setup {
        settings: &job.model,
        data,
        objective,
        tables: &tables,
        stages: &place.stages,
    };
    let groups = job.clone();
    let kind_of = move |name: &str| groups.kind_of(name);
    let (variables, model) = Variables::build(job.seed, kind_of, &place.device, |vars| {
        registry.build(&job.model.name, &setup, vars)
    })?;
    let tables = tables.into_model();
    check_patterns(job, &variables, &tables)?;
    if let Some(path) = &job.model.init_from {
        let wanted = |name: &str| job.model.is_initial_from_file(name);
        let strip = job.model.init_strip.as_deref();
        variables.load_known(path, wanted, |foreign| model.name_of(foreign), strip)?;
    }
    Ok(Built {
        variables,
        tables,
        model,
    })
}

/// Refuses patterns without effect: a pattern of a group or of `model.init_except` that matches no variable, or a
/// pattern of `tables` that matches no table.
fn check_patterns(
    job: &Job,
    variables: &Variables,
    tables: &ModelTables,
) -> Result<(), ReplicaError> {
    let specs = tables.specs();
    let unused = |own: &&TableSettings| !specs.iter().any(|spec| own.matches(&spec.name));
    if let Some(own) = job.tables.iter().find(unused) {
        return Err(ReplicaError::TablePattern {
            pattern: own.tables.clone(),
            tables: specs.into_iter().map(|spec| spec.name).collect(),
        });
    }
    let names: Vec<String> = variables.specs().into_iter().map(|s| s.name).collect();
    let groups = job.groups.iter().map(|group| &group.variables);
    let mut patterns = groups.chain(&job.model.init_except);
    let without = |pattern: &&String| !names.iter().any(|name| matches_pattern(pattern, name));
    match patterns.find(without) {
        None => Ok(()),
        Some(pattern) => Err(ReplicaError::Pattern {
            pattern: pattern.clone(),
            variables: names,
        }),
    }
}
