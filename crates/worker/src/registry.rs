//! The models that a job can name.

use std::collections::BTreeMap;

use candle_nn::VarBuilder;

use crate::model::{Model, ModelError, Setup};
use crate::models::{Cnn, Mlp, Softmax};

type Constructor = fn(&Setup, VarBuilder) -> candle_core::Result<Box<dyn Model>>;

fn construct<M: Model>(setup: &Setup, vars: VarBuilder) -> candle_core::Result<Box<dyn Model>> {
    Ok(Box::new(M::new(setup, vars)?))
}

/// The models that a job can name.
#[derive(Clone, Debug)]
pub struct Registry(BTreeMap<&'static str, Constructor>);

impl Registry {
    /// `softmax`, `mlp` and `cnn`.
    pub fn builtin() -> Self {
        Self(BTreeMap::new())
            .with::<Softmax>("softmax")
            .with::<Mlp>("mlp")
            .with::<Cnn>("cnn")
    }

    /// Adds a model, or replaces the one that had its name.
    #[must_use]
    pub fn with<M: Model>(mut self, name: &'static str) -> Self {
        self.0.insert(name, construct::<M>);
        self
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.0.keys().copied()
    }

    /// Builds the model of this name.
    ///
    /// # Errors
    /// [`ModelError::Unknown`] lists the known names; [`ModelError::Build`] says why the model
    /// could not be built.
    pub fn build(
        &self,
        name: &str,
        setup: &Setup,
        vars: VarBuilder,
    ) -> Result<Box<dyn Model>, ModelError> {
        let constructor = self.0.get(name).ok_or_else(|| ModelError::Unknown {
            name: name.to_owned(),
            known: self.names().collect::<Vec<_>>().join(", "),
        })?;
        constructor(setup, vars).map_err(|source| ModelError::Build {
            name: name.to_owned(),
            source,
        })
    }
}
