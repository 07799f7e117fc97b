//! The gradients of a step in a device's memory.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};
use shared_proto::blocks::{VariableKind, VariableSpec};
use shared_proto::job::Clip;
use shared_proto::payload::Elements;

use super::{ELEMENTS, Group, UpdateGroups};
use crate::error::VariablesError;
use crate::memory::elements;
use crate::set::Variables;

/// The number of elements that are added up together.
const PER_SUM: usize = 1024;

/// The values, before a step, of the variables that a model changes while it computes, in the device's memory.
#[derive(Debug)]
pub struct MeasuredOnDevice(Vec<Option<Tensor>>);

impl Variables {
    /// Returns copies of the variables that a model changes while it computes.
    ///
    /// # Errors
    /// candle's.
    pub fn measured_on_device(&self) -> Result<MeasuredOnDevice> {
        let copy = |(_, var, measured): (&VariableSpec, &Var, bool)| match measured {
            true => var.as_detached_tensor().copy().map(Some),
            false => Ok(None),
        };
        self.each()
            .map(copy)
            .collect::<Result<_>>()
            .map(MeasuredOnDevice)
    }

    /// Resets the variables that the model changes while it computes to `before`. Returns the changes of averaged
    /// variables by variable number: `before` minus the present values.
    ///
    /// # Errors
    /// candle's.
    pub fn restore_on_device(&self, before: &MeasuredOnDevice) -> Result<BTreeMap<usize, Tensor>> {
        let mut changes = BTreeMap::new();
        for (number, ((spec, var, _), before)) in self.each().zip(&before.0).enumerate() {
            if spec.kind == VariableKind::Averaged {
                let change = match before {
                    Some(before) => (before - var.as_detached_tensor())?,
                    None => var.zeros_like()?,
                };
                changes.insert(number, change);
            }
            if let Some(before) = before {
                var.set(before)?;
            }
        }
        Ok(changes)
    }
}

/// The gradients of a step in a device's memory, one vector for each update group. For averaged variables, the vectors
/// have their changes instead of gradients.
#[derive(Clone, Debug)]
pub struct DeviceGradients(pub(crate) Vec<Tensor>);

impl DeviceGradients {
    /// Takes the gradients of trained variables out of `store`. `changes` has the changes of averaged variables by
    /// number.
    ///
    /// # Errors
    /// [`VariablesError::NoGradient`] names a trained variable that has none, or candle's.
    pub fn of(
        groups: &UpdateGroups,
        variables: &Variables,
        store: &GradStore,
        changes: &BTreeMap<usize, Tensor>,
    ) -> std::result::Result<Self, VariablesError> {
        let each = groups.0.iter().flat_map(|group| &group.variables);
        for number in each {
            let (spec, var) = &variables.0[*number];
            if spec.kind.is_optimized() && store.get(var).is_none() {
                return Err(VariablesError::NoGradient {
                    variable: spec.clone(),
                });
            }
        }
        let gradient = |number: usize| {
            let (_, var) = &variables.0[number];
            let found = changes.get(&number).or_else(|| store.get(var));
            found.map_or_else(|| var.zeros_like(), |found| Ok(found.clone()))
        };
        let vectors = groups.0.iter().map(|group| group.join(gradient));
        Ok(Self(vectors.collect::<Result<_>>()?))
    }

    /// Copies gradients from the host: one vector for each variable, in order. The vector of a frozen variable may be
    /// empty.
    ///
    /// # Errors
    /// candle's.
    pub fn from_host(
        groups: &UpdateGroups,
        variables: &Variables,
        gradients: &[Vec<f32>],
    ) -> Result<Self> {
        let gradient = |number: usize| {
            let (_, var) = &variables.0[number];
            Tensor::from_slice(&gradients[number], gradients[number].len(), var.device())
        };
        let vectors = groups.0.iter().map(|group| group.join(gradient));
        vectors.collect::<Result<_>>().map(Self)
    }

    /// Returns zeros.
    ///
    /// # Errors
    /// candle's.
    pub fn zeros(groups: &UpdateGroups, variables: &Variables) -> Result<Self> {
        let zeros = |group: &Group| {
            let device = variables.0[group.variables[0]].1.device();
            Tensor::zeros(group.elements(), DType::F32, device)
        };
        groups.0.iter().map(zeros).collect::<Result<_>>().map(Self)
    }

    /// Returns the vectors, one for each group. All replicas have vectors of the same lengths in the same order.
    pub fn vectors(&self) -> &[Tensor] {
        &self.0
    }

    /// Returns the gradients, each times a factor.
    ///
    /// # Errors
    /// candle's.
    pub fn times(self, factor: f64) -> Result<Self> {
        let vectors = self.0.into_iter();
        let vectors = vectors.map(|vector| vector.affine(factor, 0.0));
        vectors.collect::<Result<_>>().map(Self)
    }

    /// Returns the global norm of the gradients of trained variables and of table rows. `squares_of_rows` is the sum of
    /// the squares of the rows' gradients.
    pub fn norm(&self, groups: &UpdateGroups, squares_of_rows: f64) -> Result<f64> {
        let mut sum: Option<Tensor> = None;
        for (group, vector) in groups.0.iter().zip(&self.0) {
            if group.kind.is_optimized() {
                let squares = sum_of_squares(vector)?;
                sum = Some(match sum {
                    Some(sum) => (sum + squares)?,
                    None => squares,
                });
            }
        }
        // A single number is read, because each read waits for the GPU.
        let squares = sum.map_or(Ok(0.0), |sum| sum.to_scalar::<f64>())?;
        Ok((squares + squares_of_rows).sqrt())
    }

    /// Clips the gradients of trained variables. `norm` is the global norm of these gradients and those of table rows.
    /// If it is not finite, the gradients stay as they are, so that a later check finds them.
    pub fn clipped(self, groups: &UpdateGroups, clip: Clip, norm: f64) -> Result<Self> {
        if !norm.is_finite() {
            return Ok(self);
        }
        let (mut limited, mut norm) = (self, norm);
        if let Some(most) = clip.value.map(f64::from) {
            limited = limited.of_trained(groups, |vector| vector.clamp(-most, most))?;
            norm = limited.norm(groups, 0.0)?;
        }
        match clip.norm.map(f64::from).filter(|most| norm > *most) {
            Some(most) => limited.of_trained(groups, |vector| vector.affine(most / norm, 0.0)),
            None => Ok(limited),
        }
    }

    fn of_trained(
        self,
        groups: &UpdateGroups,
        act: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let pairs = groups.0.iter().zip(self.0);
        let acted = pairs.map(|(group, vector)| match group.kind.is_optimized() {
            true => act(&vector),
            false => Ok(vector),
        });
        acted.collect::<Result<_>>().map(Self)
    }

    /// Returns the gradients of all variables on the host, empty for frozen ones.
    pub fn on_host(&self, groups: &UpdateGroups, variables: usize) -> Result<Vec<Elements>> {
        let mut values = vec![Vec::new(); variables];
        for (group, vector) in groups.0.iter().zip(&self.0) {
            for (number, part) in group.split(vector) {
                values[number] = elements(&part?)?;
            }
        }
        Ok(values.into_iter().map(Elements::from).collect())
    }
}

/// Returns the sum of the squares of a vector, of type `f64`: squares may not fit into `f32`.
fn sum_of_squares(vector: &Tensor) -> Result<Tensor> {
    let mut sum = Tensor::zeros((), DType::F64, vector.device())?;
    let length = vector.elem_count();
    for start in (0..length).step_by(ELEMENTS) {
        let part = vector.narrow(0, start, ELEMENTS.min(length - start))?;
        let squares = part.to_dtype(DType::F64)?.sqr()?;
        // A GPU computes many sums of few elements faster than one of many.
        let of_rows = part.elem_count() - part.elem_count() % PER_SUM;
        if of_rows > 0 {
            let rows = squares.narrow(0, 0, of_rows)?;
            let sums = rows.reshape((of_rows / PER_SUM, PER_SUM))?.sum(1)?;
            sum = (sum + sums.sum_all()?)?;
        }
        if of_rows < part.elem_count() {
            let rest = squares.narrow(0, of_rows, part.elem_count() - of_rows)?;
            sum = (sum + rest.sum_all()?)?;
        }
    }
    Ok(sum)
}
