//! The models and data sources that a job can name.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use candle_nn::VarBuilder;
use shared_proto::job::{Data, LabelTransform};

use crate::input::{
    Cifar10, Clicks, Criteo, Csv, DataSetup, Dataset, Digits, Idx, Images, InputError, LibSvm, Npy,
    Parquet, Purpose, Random, Source,
};
use crate::models::{
    Cnn, DeepFm, Dlrm, FactorizationMachine, Logistic, Mlp, MobileNetV2, ResNet, Softmax,
    Transformer, TwoTower, WideDeep,
};
use crate::{Model, ModelError, Setup};

type Constructor = fn(&Setup, VarBuilder) -> candle_core::Result<Box<dyn Model>>;

fn construct<M: Model>(setup: &Setup, vars: VarBuilder) -> candle_core::Result<Box<dyn Model>> {
    Ok(Box::new(M::new(setup, vars)?))
}

/// A function that opens data.
type Open = dyn Fn(&DataSetup) -> Result<Dataset, InputError> + Send + Sync;

/// A data source.
#[derive(Clone)]
struct Opener {
    open: Arc<Open>,
    streams: bool,
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Opener");
        shown
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}

/// The models and data sources that a job can name.
#[derive(Clone, Debug)]
pub struct Registry {
    models: BTreeMap<Cow<'static, str>, Constructor>,
    sources: BTreeMap<Cow<'static, str>, Opener>,
}

impl Registry {
    /// Returns a registry of the models `logistic`, `softmax`, `mlp`, `factorization-machine`, `cnn`, `resnet18`,
    /// `resnet20`, `resnet34`, `resnet50`, `resnet56`, `mobilenetv2`, `transformer`, `deepfm`, `wide-deep`, `dlrm` and `two-tower`, and of
    /// the data sources `digits`,
    /// `mnist`, `fashion-mnist`, `cifar10`, `npy`, `image-folder`, `csv`, `parquet`, `libsvm`, `criteo`, `clicks` and `random`.
    pub fn builtin() -> Self {
        let empty = Self {
            models: BTreeMap::new(),
            sources: BTreeMap::new(),
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
            .data::<Digits>("digits")
            .data::<Idx>("mnist")
            .data::<Idx>("fashion-mnist")
            .data::<Csv>("csv")
            .data::<Parquet>("parquet")
            .data::<Cifar10>("cifar10")
            .data::<Npy>("npy")
            .data::<Images>("image-folder")
            .data::<LibSvm>("libsvm")
            .data::<Criteo>("criteo")
            .data::<Clicks>("clicks")
            .data::<Random>("random")
    }

    /// Adds a model, or replaces the one that had its name.
    #[must_use]
    pub fn model<M: Model>(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        self.models.insert(name.into(), construct::<M>);
        self
    }

    /// Adds a data source, or replaces the one that had its name.
    #[must_use]
    pub fn data<S: Source>(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        let source = Opener {
            open: Arc::new(S::open),
            streams: S::STREAMS,
        };
        self.sources.insert(name.into(), source);
        self
    }

    /// Adds data that a function opens, or replaces the source that had its name.
    #[must_use]
    pub fn open_by(
        mut self,
        name: impl Into<Cow<'static, str>>,
        open: impl Fn(&DataSetup) -> Result<Dataset, InputError> + Send + Sync + 'static,
    ) -> Self {
        let source = Opener {
            open: Arc::new(open),
            streams: false,
        };
        self.sources.insert(name.into(), source);
        self
    }

    /// Opens the data that a job names. Unless the source says otherwise, `seed` decides which samples are
    /// held out, and the values of random samples.
    ///
    /// # Errors
    /// [`InputError::Unknown`] lists the known names; the others are the source's.
    pub fn open(&self, data: &Data, seed: u64, purpose: Purpose) -> Result<Dataset, InputError> {
        let source = self.sources.get(data.kind.as_str());
        let source = source.ok_or_else(|| InputError::Unknown {
            name: data.kind.clone(),
            known: listed(self.sources.keys()),
        })?;
        if data.stream && !source.streams {
            let streams = self.sources.iter().filter(|(_, source)| source.streams);
            return Err(InputError::Invalid(format!(
                "data.kind = {:?} cannot be streamed, because it holds all samples in memory; set data.stream to false, or data.kind to one of {}",
                data.kind,
                listed(streams.map(|(name, _)| name))
            )));
        }
        let dataset = (source.open)(&DataSetup {
            settings: data,
            seed,
            purpose,
        })?;
        let is_scaled = |dataset: &Dataset| {
            dataset
                .signature
                .targets
                .iter()
                .any(|target| target.scale.is_some())
        };
        if data.label_transform != LabelTransform::None && !is_scaled(&dataset) {
            return Err(InputError::Invalid(format!(
                "data.label_transform has no effect on data.kind = {:?}; leave it out, or use a source of tables with a number as label",
                data.kind
            )));
        }
        let dataset = match &data.pictures {
            Some(pictures) => data::change_pictures(dataset, pictures)?,
            None => dataset,
        };
        match data.class_weight.is_empty() || matches!(purpose, Purpose::Prediction(_)) {
            true => Ok(dataset),
            false => data::weigh_classes(dataset, &data.class_weight),
        }
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

/// Returns the names in a sentence.
fn listed<'a>(names: impl Iterator<Item = &'a Cow<'static, str>>) -> String {
    names.map(AsRef::as_ref).collect::<Vec<&str>>().join(", ")
}
