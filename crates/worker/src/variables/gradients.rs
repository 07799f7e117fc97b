//! The gradients of a step: taken out of candle, measured and clipped.

use bytes::Bytes;
use candle_core::backprop::GradStore;
use shared_proto::kernel::Kernel;
use shared_proto::payload;

use super::error::VariablesError;
use super::memory::elements;
use super::set::Variables;

/// The gradients of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// One entry for each variable, in the order of [`Variables::specs`]: all its elements in little-endian `f32`.
    pub values: Vec<Bytes>,
    /// Their global norm before it was clipped. It is finite only if each element is.
    pub norm: f64,
}

impl Variables {
    /// Takes each variable's gradient out of `store`, scaled so that their global norm is at most
    /// `clip_norm`.
    ///
    /// # Errors
    /// [`VariablesError::NoGradient`] names a variable that has none, or candle's.
    pub fn gradients(
        &self,
        store: &GradStore,
        clip_norm: Option<f32>,
    ) -> Result<Gradients, VariablesError> {
        let mut gradients = Vec::with_capacity(self.0.len());
        let mut squares = 0.0;
        for (spec, var) in &self.0 {
            let gradient = store.get(var).ok_or_else(|| VariablesError::NoGradient {
                variable: spec.clone(),
            })?;
            let values = elements(gradient)?;
            squares += sum_of_squares(&values);
            gradients.push(values);
        }
        let norm = squares.sqrt();
        if let Some(clip) = clip_norm.filter(|clip| norm > f64::from(*clip)) {
            let scale = (f64::from(clip) / norm) as f32;
            for value in gradients.iter_mut().flatten() {
                *value *= scale;
            }
        }
        let values = gradients
            .into_iter()
            .map(|g| payload::share(&g.into()))
            .collect();
        Ok(Gradients { values, norm })
    }
}

fn sum_of_squares(values: &[f32]) -> f64 {
    // Eight sums side by side: a single one would wait for each addition before the next.
    let (chunks, rest) = values.as_chunks::<8>();
    let square = |value: &f32| f64::from(*value) * f64::from(*value);
    Kernel::best().run(|| {
        let mut sums = [0f64; 8];
        for chunk in chunks {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum += square(value);
            }
        }
        sums.iter()
            .chain(&rest.iter().map(square).collect::<Vec<_>>())
            .sum()
    })
}
