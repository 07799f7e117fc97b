//! The gradients of a step: taken out of candle, measured and clipped. The changes of averaged variables travel with
//! them.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use candle_core::Var;
use candle_core::backprop::GradStore;
use model::tables;
use shared_proto::blocks::{VariableKind, VariableSpec};
use shared_proto::job::Clip;
use shared_proto::kernel::{Kernel, Simd, WithSimd};
use shared_proto::payload::{Elements, LeF32};
use shared_proto::step::{Gradients, WantedRows};

use super::error::VariablesError;
use super::initial::is_measured;
use super::memory::{Overwrite, elements};
use super::set::Variables;

/// The values, before a step, of the variables that a model changes while it computes.
#[derive(Debug)]
pub struct Measured(Vec<Option<Vec<f32>>>);

impl Variables {
    /// Returns the values of the variables that a model changes while it computes.
    ///
    /// # Errors
    /// candle's.
    pub fn measured(&self) -> Result<Measured, VariablesError> {
        let value = |(name, var): (&str, &Var)| match is_measured(name) {
            true => Ok(Some(elements(var)?)),
            false => Ok(None),
        };
        let named = self.0.iter().map(|(spec, var)| (spec.name.as_str(), var));
        named.map(value).collect::<Result<_, _>>().map(Measured)
    }

    /// Resets the variables that the model changes while it computes to `before`, their values before the step.
    ///
    /// # Errors
    /// candle's.
    pub fn restore(&self, before: Measured) -> Result<(), VariablesError> {
        let measured = self.0.iter().zip(before.0);
        let measured = measured.filter_map(|((_, var), before)| Some((var, before?)));
        for (var, before) in measured {
            restore(var, before)?;
        }
        Ok(())
    }

    /// Takes the gradients of each trained variable, and of the rows of each table, out of `store`. Rows that the loss does
    /// not depend on have a gradient of zeros.
    ///
    /// # Errors
    /// [`VariablesError::NoGradient`] names a variable that has none, or candle's.
    pub fn trained_gradients(
        &self,
        store: &GradStore,
        rows: &[Var],
    ) -> Result<Trained, VariablesError> {
        self.gradients_of(store, rows, |_| true)
    }

    /// Does the same as [`Self::trained_gradients`] for those variables for which `counts` returns true. The gradients
    /// of the others have no elements.
    ///
    /// # Errors
    /// As [`Self::trained_gradients`].
    pub fn gradients_of(
        &self,
        store: &GradStore,
        rows: &[Var],
        counts: impl Fn(&Var) -> bool,
    ) -> Result<Trained, VariablesError> {
        let gradient = |(spec, var): &(VariableSpec, Var)| {
            if !spec.kind.is_optimized() || !counts(var) {
                return Ok(Vec::new());
            }
            let gradient = store.get(var).ok_or_else(|| VariablesError::NoGradient {
                variable: spec.clone(),
            })?;
            Ok(elements(gradient)?)
        };
        let of_rows = |rows: &Var| match store.get(rows) {
            Some(gradient) => Ok(elements(gradient)?),
            None => Ok(vec![0.0; rows.elem_count()]),
        };
        let variables = self.0.iter().map(gradient);
        let rows = rows.iter().map(of_rows);
        variables.chain(rows).collect::<Result<_, _>>().map(Trained)
    }

    /// Returns the gradients of a step: the gradients of trained variables, limited by `clip`, and the changes of
    /// averaged variables, which are `before` minus the present values. Resets the variables that the model has changed
    /// to `before`, so that all variables are as they were pulled. `rows` has the rows of each table.
    ///
    /// # Errors
    /// candle's.
    pub fn finish_gradients(
        &self,
        trained: Trained,
        rows: &[Arc<WantedRows>],
        before: Measured,
        clip: Clip,
    ) -> Result<Gradients, VariablesError> {
        self.finish_clipped(trained.clipped(clip), rows, before)
    }

    /// Does the same as [`Self::finish_gradients`] with gradients that are clipped already, and their norm before
    /// clipping.
    ///
    /// # Errors
    /// candle's.
    pub fn finish_clipped(
        &self,
        (trained, norm): (Trained, f64),
        rows: &[Arc<WantedRows>],
        before: Measured,
    ) -> Result<Gradients, VariablesError> {
        let mut gradients = trained.0;
        let of_rows = gradients.split_off(self.0.len());
        for (number, change) in self.changes(before)? {
            gradients[number] = change;
        }
        let values = gradients.into_iter().map(Elements::from).collect();
        let rows = tables::gradients(rows, of_rows);
        Ok(Gradients { values, rows, norm })
    }

    /// Returns the changes of averaged variables by variable number: `before` minus the present values. Resets the
    /// variables that the model has changed to `before`.
    ///
    /// # Errors
    /// candle's.
    pub fn changes(&self, before: Measured) -> Result<BTreeMap<usize, Vec<f32>>, VariablesError> {
        let mut changes = BTreeMap::new();
        for (number, ((spec, var), before)) in self.0.iter().zip(before.0).enumerate() {
            let change = before.map(|before| restore(var, before)).transpose()?;
            if spec.kind == VariableKind::Averaged {
                let unchanged = || vec![0.0; spec.elements()];
                changes.insert(number, change.unwrap_or_else(unchanged));
            }
        }
        Ok(changes)
    }

    /// Returns the gradients of a step with one batch: the gradients of trained variables, limited by `clip`, and the
    /// changes of averaged variables. Resets the variables that the model has changed to `before`.
    ///
    /// # Errors
    /// [`VariablesError::NoGradient`] names a trained variable without a gradient in `store`, or candle's.
    pub fn gradients(
        &self,
        store: &GradStore,
        before: Measured,
        clip: Clip,
    ) -> Result<Gradients, VariablesError> {
        self.finish_gradients(self.trained_gradients(store, &[])?, &[], before, clip)
    }
}

/// The gradients of trained variables and of table rows: one vector for each variable, in order, which is empty if the
/// variable is not trained; then one vector for each table, with the gradients of its rows.
#[derive(Clone, Debug)]
pub struct Trained(Vec<Vec<f32>>);

impl Trained {
    /// Returns gradients that are already joined into one vector.
    pub fn whole(gradient: Vec<f32>) -> Self {
        Self(vec![gradient])
    }

    /// Returns all gradients, concatenated in one vector.
    pub fn joined(mut self) -> Vec<f32> {
        match &mut self.0[..] {
            [one] => std::mem::take(one),
            all => all.concat(),
        }
    }

    /// Returns the global norm.
    pub fn norm(&self) -> f64 {
        self.squares().sqrt()
    }

    /// Returns the sum of the squares of all elements.
    fn squares(&self) -> f64 {
        self.0.iter().map(|values| sum_of_squares(values)).sum()
    }

    /// Returns the gradients, each times a factor.
    #[must_use]
    pub fn times(mut self, factor: f32) -> Self {
        for value in self.0.iter_mut().flatten() {
            *value *= factor;
        }
        self
    }

    /// Returns the gradients limited by `clip`, and their global norm before clipping.
    pub fn clipped(self, clip: Clip) -> (Self, f64) {
        let Ok(clipped) = self.clipped_among(clip, &mut Ok::<_, Infallible>);
        clipped
    }

    /// Does the same as [`Self::clipped`] for one part of the gradients. `whole` takes this part's sum of squares and
    /// returns the sum over all parts. It is called once, and a second time if `clip` limits elements.
    ///
    /// # Errors
    /// Those of `whole`.
    pub fn clipped_among<E>(
        self,
        clip: Clip,
        whole: &mut dyn FnMut(f64) -> Result<f64, E>,
    ) -> Result<(Self, f64), E> {
        let norm = whole(self.squares())?.sqrt();
        let limited = self.limited_to(clip.value);
        let limited_norm = match clip.value {
            Some(_) => whole(limited.squares())?.sqrt(),
            None => norm,
        };
        Ok((limited.shortened(clip.norm, limited_norm), norm))
    }

    fn limited_to(self, most: Option<f32>) -> Self {
        match most {
            Some(most) => self.limited(most),
            None => self,
        }
    }

    /// Returns the gradients, whose norm is `norm`. Scales them down to the norm `most` if theirs is larger.
    fn shortened(self, most: Option<f32>, norm: f64) -> Self {
        match most.map(f64::from).filter(|most| norm > *most) {
            Some(most) => self.times((most / norm) as f32),
            None => self,
        }
    }

    /// Returns the gradients with all finite elements clamped to the range from `-most` to `most`. NaN and infinity
    /// stay, so that a later check finds them.
    fn limited(mut self, most: f32) -> Self {
        let finite = |value: &&mut f32| value.is_finite();
        for value in self.0.iter_mut().flatten().filter(finite) {
            *value = value.max(-most).min(most);
        }
        self
    }

    /// Adds other gradients, each times a factor.
    pub fn add(&mut self, others: Self, factor: f32) {
        for (sum, others) in self.0.iter_mut().zip(others.0) {
            for (sum, other) in sum.iter_mut().zip(others) {
                *sum += factor * other;
            }
        }
    }
}

/// Returns the mean of the gradients of several devices, weighted by each device's share of the samples and limited by
/// `clip`. Changes of averaged variables are not limited. The result has no table rows.
pub fn mean_gradients(
    parts: &[(f32, Gradients)],
    variables: &[VariableSpec],
    clip: Clip,
) -> Gradients {
    let of_variable = |number: usize| {
        let of = |(share, gradients): &(f32, Gradients)| {
            let values = gradients.values.get(number)?;
            Some((*share, values.clone()))
        };
        let parts: Vec<(f32, Elements)> = parts.iter().filter_map(of).collect();
        weighted_sum(&parts)
    };
    let mut sums = Trained((0..variables.len()).map(of_variable).collect());
    let averaged = |spec: &VariableSpec| spec.kind == VariableKind::Averaged;
    let changes = sums.0.iter_mut().zip(variables);
    let changes = changes.map(|(sum, spec)| averaged(spec).then(|| std::mem::take(sum)));
    let changes: Vec<Option<Vec<f32>>> = changes.collect();
    let (trained, norm) = sums.clipped(clip);
    let values = trained.0.into_iter().zip(changes);
    let values = values.map(|(trained, change)| Elements::from(change.unwrap_or(trained)));
    Gradients {
        values: values.collect(),
        rows: Vec::new(),
        norm,
    }
}

/// The number of elements that are added up at a time: few enough to stay in the processor's cache.
const AT_ONCE: usize = 1 << 13;

/// Returns the sum of vectors, each times its factor.
fn weighted_sum(parts: &[(f32, Elements)]) -> Vec<f32> {
    let length = parts.first().map_or(0, |(_, values)| values.len());
    let mut all = Vec::with_capacity(length);
    for start in (0..length).step_by(AT_ONCE) {
        let range = start..length.min(start + AT_ONCE);
        all.resize(range.end, 0.0);
        for (number, (factor, values)) in parts.iter().enumerate() {
            let sum = &mut all[range.clone()];
            values.slice(range.clone()).for_parts(|within, part| {
                let sum = &mut sum[within];
                match number {
                    0 => set_times(sum, part, *factor),
                    _ => add_times(sum, part, *factor),
                }
            });
        }
    }
    all
}

/// Sets numbers to elements, each times a factor.
fn set_times(sum: &mut [f32], elements: &[LeF32], factor: f32) {
    Kernel::best().run(|| {
        for (sum, element) in sum.iter_mut().zip(elements) {
            *sum = element.get() * factor;
        }
    });
}

/// Adds elements, each times a factor.
fn add_times(sum: &mut [f32], elements: &[LeF32], factor: f32) {
    Kernel::best().run(|| {
        for (sum, element) in sum.iter_mut().zip(elements) {
            *sum += factor * element.get();
        }
    });
}

/// Restores a variable's values from before the step. Returns the restored values minus the overwritten ones.
fn restore(var: &Var, before: Vec<f32>) -> Result<Vec<f32>, VariablesError> {
    let after = elements(var)?;
    let changes = before
        .iter()
        .zip(after)
        .map(|(before, after)| before - after);
    let changes = changes.collect();
    let values = Elements::from(before);
    let start = 0;
    var.inplace_op1(&Overwrite {
        start,
        values: &values,
    })?;
    Ok(changes)
}

/// Returns the sum of the squares of numbers.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    // Eight sums side by side: a single one would wait for each addition before the next.
    let (chunks, rest) = values.as_chunks::<8>();
    Kernel::best().run(|| {
        let mut sums = [0f64; 8];
        for chunk in chunks {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum += square(value);
            }
        }
        sums.into_iter().chain(rest.iter().map(square)).sum()
    })
}

/// Returns the same as [`sum_of_squares`], and writes each number times `factor` to `to`, which must have the same
/// length.
pub fn sum_of_squares_times(values: &[f32], factor: f32, to: &mut [f32]) -> f64 {
    debug_assert_eq!(values.len(), to.len());
    Kernel::best().run(SquaresTimes { values, factor, to })
}

/// Copies numbers, each times a factor, and returns the sum of their squares.
struct SquaresTimes<'a> {
    values: &'a [f32],
    factor: f32,
    to: &'a mut [f32],
}

impl WithSimd for SquaresTimes<'_> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> f64 {
        let (chunks, rest) = self.values.as_chunks::<8>();
        let (to_chunks, to_rest) = self.to.as_chunks_mut::<8>();
        let mut sums = [0f64; 8];
        for (chunk, to) in chunks.iter().zip(to_chunks) {
            for ((sum, value), to) in sums.iter_mut().zip(chunk).zip(to) {
                *sum += square(value);
                *to = value * self.factor;
            }
        }
        for (value, to) in rest.iter().zip(to_rest) {
            *to = value * self.factor;
        }
        sums.into_iter().chain(rest.iter().map(square)).sum()
    }
}

#[inline(always)]
fn square(value: &f32) -> f64 {
    f64::from(*value) * f64::from(*value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_copied_with_a_factor_and_have_the_same_sum_of_squares() {
        for count in [0, 1, 7, 8, 9, 31, 1000] {
            let values: Vec<f32> = (0..count).map(|n| (n as f32 * 0.37).sin()).collect();
            let mut copied = vec![f32::NAN; count];
            let squares = sum_of_squares_times(&values, 3.0, &mut copied);
            assert_eq!(squares, sum_of_squares(&values));
            let expected: Vec<f32> = values.iter().map(|value| value * 3.0).collect();
            assert_eq!(copied, expected);
        }
    }

    #[test]
    fn vectors_are_added_up_in_their_order() {
        for count in [0, 1, AT_ONCE - 1, AT_ONCE, 2 * AT_ONCE + 7] {
            let of = |seed: usize| -> Vec<f32> {
                let numbers = 0..count;
                numbers.map(|n| ((n + seed) as f32 * 0.37).sin()).collect()
            };
            let vectors = [(0.25, of(1)), (0.5, of(5)), (0.25, of(9))];
            let parts = vectors.clone().map(|(factor, v)| (factor, v.into()));
            let expected: Vec<f32> = (0..count)
                .map(|n| {
                    let [(a, x), (b, y), (c, z)] = &vectors;
                    (x[n] * a + b * y[n]) + c * z[n]
                })
                .collect();
            assert_eq!(weighted_sum(&parts), expected);
        }
        assert!(weighted_sum(&[]).is_empty());
    }
}
