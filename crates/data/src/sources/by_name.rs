//! The data sources that a job can name.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use shared_proto::job::{Data, LabelTransform};

use super::cifar::Cifar10;
use super::clicks::Clicks;
use super::criteo::Criteo;
use super::csv::Csv;
use super::digits::Digits;
use super::idx::Idx;
use super::images::Images;
use super::libsvm::LibSvm;
use super::npy::Npy;
use super::parquet::Parquet;
use super::random::Random;
use super::{pictures, weighted};
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::source::{DataSetup, Purpose, Source};

/// A function that opens data.
type Open = dyn Fn(&DataSetup) -> Result<Dataset, InputError> + Send + Sync;

/// The function of a data source, and whether the source can be streamed.
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

/// The data sources that a job can name.
#[derive(Clone, Debug)]
pub struct Sources(BTreeMap<Cow<'static, str>, Opener>);

impl Sources {
    /// Returns the built-in sources: `digits`, `mnist`, `fashion-mnist`, `cifar10`, `npy`, `image-folder`, `csv`,
    /// `parquet`, `libsvm`, `criteo`, `clicks` and `random`.
    pub fn builtin() -> Self {
        Self(BTreeMap::new())
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

    /// Returns the names of the sources, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(AsRef::as_ref)
    }

    /// Adds a data source. Replaces a source of the same name.
    #[must_use]
    pub fn data<S: Source>(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        let source = Opener {
            open: Arc::new(S::open),
            streams: S::STREAMS,
        };
        self.0.insert(name.into(), source);
        self
    }

    /// Adds a data source that is a function. Replaces a source of the same name. The source cannot be streamed.
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
        self.0.insert(name.into(), source);
        self
    }

    /// Opens the data that a job names. Unless the source documents otherwise, `seed` determines which samples are held
    /// out, and the values of generated samples.
    ///
    /// # Errors
    /// [`InputError::Unknown`] lists the known names; [`InputError::Invalid`] for a setting that does not fit the
    /// source; those of the source.
    pub fn open(&self, data: &Data, seed: u64, purpose: Purpose) -> Result<Dataset, InputError> {
        let source = self.0.get(data.kind.as_str());
        let source = source.ok_or_else(|| InputError::Unknown {
            name: data.kind.clone(),
            known: listed(self.0.keys()),
        })?;
        if data.stream && !source.streams {
            let streams = self.0.iter().filter(|(_, source)| source.streams);
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
            Some(pictures) => pictures::change(dataset, pictures)?,
            None => dataset,
        };
        match data.class_weight.is_empty() || matches!(purpose, Purpose::Prediction(_)) {
            true => Ok(dataset),
            false => weighted::weigh_classes(dataset, &data.class_weight),
        }
    }
}

/// Returns names, separated by commas.
fn listed<'a>(names: impl Iterator<Item = &'a Cow<'static, str>>) -> String {
    let names: Vec<&str> = names.map(AsRef::as_ref).collect();
    names.join(", ")
}
