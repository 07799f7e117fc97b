//! The variables of a model, by number.

use bytes::Bytes;
use candle_core::{DType, Device, Var};
use candle_nn::var_builder::VarBuilder;
use shared_proto::blocks::{VariableKind, VariableSpec};
use shared_proto::payload::{self, Elements};

use super::error::VariablesError;
use super::initial::{Maker, is_measured};
use super::memory::{Overwrite, elements};

/// A model's variables, sorted by name: a variable's number is the same in every process.
#[derive(Debug)]
pub struct Variables(pub(crate) Vec<(VariableSpec, Var)>);

impl Variables {
    /// Returns an empty set of variables.
    pub fn none() -> Self {
        Self(Vec::new())
    }

    /// Builds a model, and creates each variable when the model asks for it. The seed and the variable's name
    /// alone decide its initial values: candle's generator cannot be seeded on the CPU. `kind_of` returns the kind of
    /// the variable of a name, as [`VariableKind::by_name`] does.
    ///
    /// # Errors
    /// The errors of `build`.
    pub fn build<M, E>(
        seed: u64,
        kind_of: impl Fn(&str) -> VariableKind + Send + Sync + 'static,
        device: &Device,
        build: impl FnOnce(VarBuilder) -> Result<M, E>,
    ) -> Result<(Self, M), E> {
        let maker = Maker::new(seed, kind_of);
        let backend = Box::new(maker.clone());
        let model = build(VarBuilder::from_backend(
            backend,
            DType::F32,
            device.clone(),
        ))?;
        let made = maker.take();
        let spec = |(name, var): (String, Var)| {
            let (shape, kind) = (var.dims().to_vec(), maker.kind_of(&name));
            (VariableSpec { name, shape, kind }, var)
        };
        Ok((Self(made.into_iter().map(spec).collect()), model))
    }

    /// Returns the variables for which `wanted` is true. They share their values with those of `self`.
    pub fn select(&self, wanted: impl Fn(&VariableSpec) -> bool) -> Self {
        let wanted = self.0.iter().filter(|(spec, _)| wanted(spec));
        Self(wanted.cloned().collect())
    }

    /// Returns the names, shapes and kinds of all variables.
    pub fn specs(&self) -> Vec<VariableSpec> {
        self.0.iter().map(|(spec, _)| spec.clone()).collect()
    }

    /// Returns all variables in order, each with a flag: true if the model itself changes the variable while it
    /// computes.
    pub fn each(&self) -> impl Iterator<Item = (&VariableSpec, &Var, bool)> {
        let each = self.0.iter();
        each.map(|(spec, var)| (spec, var, is_measured(&spec.name)))
    }

    /// Returns candle's `Var` of each trained variable, in the order of [`Self::specs`].
    pub fn trained(&self) -> Vec<Var> {
        let trained = |(spec, _): &&(VariableSpec, Var)| spec.kind.is_optimized();
        let trained = self.0.iter().filter(trained);
        trained.map(|(_, var)| var.clone()).collect()
    }

    /// Returns all elements of a variable, in little-endian `f32`.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if there is no such variable, or candle's.
    pub fn values(&self, variable: usize) -> Result<Bytes, VariablesError> {
        let (_, var) = self.find(variable)?;
        Ok(payload::share(&elements(var)?.into()))
    }

    /// Returns the elements of all variables, in the order of their numbers.
    ///
    /// # Errors
    /// candle's.
    pub fn all_values(&self) -> Result<Vec<Elements>, VariablesError> {
        let values = self.0.iter().map(|(_, var)| Ok(elements(var)?.into()));
        values.collect()
    }

    /// Returns the elements of all variables, concatenated in the order of the variables.
    ///
    /// # Errors
    /// candle's.
    pub fn joined(&self) -> Result<Vec<f32>, VariablesError> {
        let mut joined = Vec::new();
        for (_, var) in &self.0 {
            joined.extend(elements(var)?);
        }
        Ok(joined)
    }

    /// Overwrites all variables with concatenated elements, as [`Self::joined`] returns them.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if `joined` has too few elements, or candle's.
    pub fn overwrite(&self, joined: &[f32]) -> Result<(), VariablesError> {
        let mut rest = joined;
        for (number, (spec, _)) in self.0.iter().enumerate() {
            let missing = || VariablesError::Range(format!("there are no values for {spec}"));
            let (own, others) = rest.split_at_checked(spec.elements()).ok_or_else(missing)?;
            self.write(number, 0, &own.to_vec().into())?;
            rest = others;
        }
        Ok(())
    }

    /// Checks that no element is NaN or infinite.
    ///
    /// # Errors
    /// [`VariablesError::NonFinite`] names the first variable that has such an element, or candle's.
    pub fn check_finite(&self) -> Result<(), VariablesError> {
        for (number, (spec, _)) in self.0.iter().enumerate() {
            if !payload::all_finite(payload::elements(&self.values(number)?)) {
                let variable = spec.clone();
                return Err(VariablesError::NonFinite { variable });
            }
        }
        Ok(())
    }

    /// Overwrites elements of a variable from `start` on, in its own memory.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if the variable has no such elements, or candle's.
    pub fn write(
        &self,
        variable: usize,
        start: usize,
        values: &Elements,
    ) -> Result<(), VariablesError> {
        let (spec, var) = self.find(variable)?;
        let end = start.checked_add(values.len());
        if end.is_none_or(|end| end > spec.elements()) {
            return Err(VariablesError::Range(format!(
                "{} values from element {start} on do not fit into {spec}, which has {}",
                values.len(),
                spec.elements()
            )));
        }
        Ok(var.inplace_op1(&Overwrite { start, values })?)
    }

    fn find(&self, variable: usize) -> Result<&(VariableSpec, Var), VariablesError> {
        self.0.get(variable).ok_or_else(|| {
            VariablesError::Range(format!(
                "there is no variable number {variable}; the model has {}, from 0",
                self.0.len()
            ))
        })
    }
}
