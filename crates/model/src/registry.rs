//! The models and data sources that a job can name.

use std::borrow::Cow;
use std::collections::BTreeMap;

use candle_nn::VarBuilder;
use data::{DataSetup, Dataset, InputError, Purpose, Source, Sources};
use shared_proto::job::Data;

use crate::models::{
    Cnn, DeepFm, Dlrm, FactorizationMachine, Logistic, Mlp, MobileNetV2, ResNet, Softmax,
    Transformer, TwoTower, WideDeep,
};
use crate::{Model, ModelError, Setup};

type Constructor = fn(&Setup, VarBuilder) -> candle_core::Result<Box<dyn Model>>;

fn construct<M: Model>(setup: &Setup, vars: VarBuilder) -> candle_core::Result<Box<dyn Model>> {
    Ok(Box::new(M::new(setup, vars)?))
}

/// The models and data sources that a job can name.
#[derive(Clone, Debug)]
pub struct Registry {
    models: BTreeMap<Cow<'static, str>, Constructor>,
    sources: Sources,
}

impl Registry {
    /// Returns a registry of the models `logistic`, `softmax`, `mlp`, `factorization-machine`, `cnn`, `resnet18`,
    /// `resnet20`, `resnet34`, `resnet50`, `resnet56`, `mobilenetv2`, `transformer`, `deepfm`, `wide-deep`, `dlrm` and
    /// `two-tower`, and of the built-in data sources.
    pub fn builtin() -> Self {
        let empty = Self {
            models: BTreeMap::new(),
            sources: Sources::builtin(),
        };
        empty
            .model::<Logistic>("logistic")
            .model::<Softmax>("softmax")
            .model::<Mlp>("mlp")
            .model::<Cnn>("cnn")
            .model::<FactorizationMachine>("factorization-machine")
            .model::<ResNet<20>>("resnet20")
            .model::<ResNet<56>>("resnet56")
            .model::<ResNet<18>>("resnet18")
            .model::<ResNet<34>>("resnet34")
            .model::<ResNet<50>>("resnet50")
            .model::<MobileNetV2>("mobilenetv2")
            .model::<Transformer>("transformer")
            .model::<DeepFm>("deepfm")
            .model::<WideDeep>("wide-deep")
            .model::<Dlrm>("dlrm")
            .model::<TwoTower>("two-tower")
    }

    /// Returns the names of the models, in alphabetical order.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.models.keys().map(AsRef::as_ref)
    }

    /// Returns the names of the data sources, in alphabetical order.
    pub fn sources(&self) -> impl Iterator<Item = &str> {
        self.sources.names()
    }

    /// Adds a model. Replaces a model of the same name.
    #[must_use]
    pub fn model<M: Model>(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        self.models.insert(name.into(), construct::<M>);
        self
    }

    /// Adds a data source. Replaces a source of the same name.
    #[must_use]
    pub fn data<S: Source>(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        self.sources = self.sources.data::<S>(name);
        self
    }

    /// Adds a data source that is a function. Replaces a source of the same name. The source cannot be streamed.
    #[must_use]
    pub fn open_by(
        mut self,
        name: impl Into<Cow<'static, str>>,
        open: impl Fn(&DataSetup) -> Result<Dataset, InputError> + Send + Sync + 'static,
    ) -> Self {
        self.sources = self.sources.open_by(name, open);
        self
    }

    /// Opens the data that a job names. Unless the source documents otherwise, `seed` determines which samples are held
    /// out, and the values of generated samples.
    ///
    /// # Errors
    /// [`InputError::Unknown`] lists the known names; [`InputError::Invalid`] for a setting that does not fit the
    /// source; those of the source.
    pub fn open(&self, data: &Data, seed: u64, purpose: Purpose) -> Result<Dataset, InputError> {
        self.sources.open(data, seed, purpose)
    }

    /// Builds the model of this name.
    ///
    /// # Errors
    /// [`ModelError::Unknown`] lists the known names; [`ModelError::Build`] has the reason why the model
    /// could not be built.
    pub fn build(
        &self,
        name: &str,
        setup: &Setup,
        vars: VarBuilder,
    ) -> Result<Box<dyn Model>, ModelError> {
        let constructor = self.models.get(name).ok_or_else(|| ModelError::Unknown {
            name: name.to_owned(),
            known: listed(self.models.keys()),
        })?;
        constructor(setup, vars).map_err(|source| ModelError::Build {
            name: name.to_owned(),
            source,
        })
    }
}

/// Returns the names, separated by commas.
fn listed<'a>(names: impl Iterator<Item = &'a Cow<'static, str>>) -> String {
    names.map(AsRef::as_ref).collect::<Vec<&str>>().join(", ")
}
