//! Optimizers for the rows of tables. A step changes only its own rows. The table stores the state of a row beside the
//! row's values.
//!
//! Each row counts its updates, and Adam corrects the bias of the row's means with this count. A row that takes part in
//! every step changes as with the usual Adam. Other implementations correct the bias with the number of steps of the
//! whole training, so their first steps of a rare row are larger.

use shared_proto::job::{Adagrad, Adam, Ftrl, Sgd};
use shared_proto::kernel::{Kernel, Simd, WithSimd};
use shared_proto::payload::LeF32;
use shared_proto::table::RowOptimizer;

use crate::ftrl;

/// A row, and the gradient of its values.
#[derive(Debug)]
pub struct Row<'a> {
    /// The values.
    pub values: &'a mut [f32],
    /// The optimizer's state: [`state_len`] numbers.
    pub state: &'a mut [f32],
    /// The gradient, as long as the values.
    pub gradient: &'a [LeF32],
    /// The fraction of the step that is made.
    pub factor: f32,
}

/// The learning rate of an update, with the factor of its schedule, and the fraction of each row's step that is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowRates<'a> {
    /// The learning rate.
    pub rate: f32,
    /// The factor of each row; empty if all are 1.
    pub factors: &'a [f32],
}

impl From<f32> for RowRates<'_> {
    fn from(rate: f32) -> Self {
        Self { rate, factors: &[] }
    }
}

/// Rows that an update changes.
pub trait ChangedRows {
    /// Calls `change` with each row.
    fn each(&mut self, change: impl FnMut(Row));
}

/// Returns the length of the state of a row with `dimension` values.
pub fn state_len(optimizer: &RowOptimizer, dimension: usize) -> usize {
    match optimizer {
        RowOptimizer::Sgd(_) => 0,
        RowOptimizer::Adagrad(_) => dimension,
        RowOptimizer::RowAdagrad(_) => 1,
        RowOptimizer::Adam(_) => 1 + 2 * dimension,
        RowOptimizer::RowAdam(_) => 2 + dimension,
        RowOptimizer::Ftrl(_) => 2 * dimension,
    }
}

/// Sets the state of a new row.
pub fn initialize(optimizer: &RowOptimizer, state: &mut [f32]) {
    state.fill(match optimizer {
        RowOptimizer::Adagrad(settings) | RowOptimizer::RowAdagrad(settings) => {
            settings.initial_accumulator
        }
        _ => 0.0,
    });
}

/// Applies the gradients of rows. `rate` is the learning rate, with the factor of its schedule.
pub fn update(optimizer: &RowOptimizer, rate: f32, kernel: Kernel, rows: &mut impl ChangedRows) {
    match optimizer {
        RowOptimizer::Sgd(rule) => kernel.run(Work { rule, rate, rows }),
        RowOptimizer::Adagrad(rule) => kernel.run(Work { rule, rate, rows }),
        RowOptimizer::RowAdagrad(settings) => {
            let rule = &RowWise(settings);
            kernel.run(Work { rule, rate, rows });
        }
        RowOptimizer::Adam(rule) => kernel.run(Work { rule, rate, rows }),
        RowOptimizer::RowAdam(settings) => {
            let rule = &RowWise(settings);
            kernel.run(Work { rule, rate, rows });
        }
        RowOptimizer::Ftrl(rule) => kernel.run(Work { rule, rate, rows }),
    }
}

/// The update rule of a row. Implementations are `#[inline(always)]`, so that the compiler uses the instructions of the
/// kernel.
trait RowRule {
    /// Applies the fraction `row.factor` of the step at this learning rate.
    fn apply(&self, rate: f32, row: Row);
}

/// An update of many rows by one rule.
struct Work<'a, R, C> {
    rule: &'a R,
    rate: f32,
    rows: &'a mut C,
}

impl<R: RowRule, C: ChangedRows> WithSimd for Work<'_, R, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { rule, rate, rows } = self;
        rows.each(|row| rule.apply(rate, row));
    }
}

/// The row-wise form of an optimizer. It keeps one number for a whole row; the usual form keeps one for each value.
struct RowWise<'a, T>(&'a T);

impl RowRule for Sgd {
    #[inline(always)]
    fn apply(&self, rate: f32, row: Row) {
        let rate = row.factor * rate;
        for (w, g) in row.values.iter_mut().zip(row.gradient) {
            *w -= rate * (g.get() + self.weight_decay * *w);
        }
    }
}

impl RowRule for Adagrad {
    #[inline(always)]
    fn apply(&self, rate: f32, row: Row) {
        let rate = row.factor * rate;
        let pairs = row.values.iter_mut().zip(row.gradient);
        for ((w, g), sum) in pairs.zip(row.state) {
            let g = g.get() + self.weight_decay * *w;
            *sum += g * g;
            *w -= rate * g / (sum.sqrt() + self.epsilon);
        }
    }
}

/// The sum of squares grows by the mean of the squared gradients of the row's values (Gupta et al., "Training
/// Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism", KDD 2021, section 3.1; as in
/// FBGEMM).
impl RowRule for RowWise<'_, Adagrad> {
    #[inline(always)]
    fn apply(&self, rate: f32, row: Row) {
        let rate = row.factor * rate;
        let Adagrad {
            epsilon,
            weight_decay,
            ..
        } = *self.0;
        let [sum] = row.state else { return };
        let pairs = row.values.iter().zip(row.gradient);
        *sum += mean_square(pairs.map(|(w, g)| g.get() + weight_decay * *w));
        let factor = rate / (sum.sqrt() + epsilon);
        for (w, g) in row.values.iter_mut().zip(row.gradient) {
            *w -= factor * (g.get() + weight_decay * *w);
        }
    }
}

/// Returns the mean of the squares, or 0 if there are no values.
#[inline(always)]
fn mean_square(values: impl ExactSizeIterator<Item = f32>) -> f32 {
    let count = values.len().max(1);
    values.fold(0.0, |sum, x| sum + x * x) / count as f32
}

/// Returns the step size of a row's update, and the square root of the bias correction of the mean square. `number` is
/// the number of the update, from 1.
#[inline(always)]
fn corrected(settings: &Adam, rate: f32, number: f32) -> (f32, f32) {
    let bias_correction = |beta: f32| 1.0 - f64::from(beta).powi(number as i32);
    let step = (f64::from(rate) / bias_correction(settings.beta1)) as f32;
    (step, bias_correction(settings.beta2).sqrt() as f32)
}

impl RowRule for Adam {
    #[inline(always)]
    fn apply(&self, rate: f32, row: Row) {
        let rate = row.factor * rate;
        let [number, means @ ..] = row.state else {
            return;
        };
        // An `f32` counts no further than 2^24. The corrections are 1 long before.
        *number += 1.0;
        let (step, root) = corrected(self, rate, *number);
        let (means, squares) = means.split_at_mut(row.values.len());
        let pairs = row.values.iter_mut().zip(row.gradient);
        for ((w, g), (mean, square)) in pairs.zip(means.iter_mut().zip(squares)) {
            let g = g.get() + self.weight_decay * *w;
            *mean += (1.0 - self.beta1) * (g - *mean);
            *square = self.beta2 * *square + (1.0 - self.beta2) * g * g;
            *w -= step * *mean / (square.sqrt() / root + self.epsilon);
        }
    }
}

/// A row has one mean square, over the gradients of all its values, as in FBGEMM's partial row-wise Adam.
impl RowRule for RowWise<'_, Adam> {
    #[inline(always)]
    fn apply(&self, rate: f32, row: Row) {
        let rate = row.factor * rate;
        let settings = self.0;
        let [number, square, means @ ..] = row.state else {
            return;
        };
        *number += 1.0;
        let (step, root) = corrected(settings, rate, *number);
        let pairs = row.values.iter().zip(row.gradient);
        let new = mean_square(pairs.map(|(w, g)| g.get() + settings.weight_decay * *w));
        *square = settings.beta2 * *square + (1.0 - settings.beta2) * new;
        let factor = step / (square.sqrt() / root + settings.epsilon);
        let pairs = row.values.iter_mut().zip(row.gradient);
        for ((w, g), mean) in pairs.zip(means) {
            let g = g.get() + settings.weight_decay * *w;
            *mean += (1.0 - settings.beta1) * (g - *mean);
            *w -= factor * *mean;
        }
    }
}

impl RowRule for Ftrl {
    #[inline(always)]
    fn apply(&self, rate: f32, row: Row) {
        // As in the dense form: such an update changes nothing, and the formula would divide by 0.
        if rate == 0.0 {
            return;
        }
        let factor = row.factor;
        // The usual power is the square root, which is a single instruction.
        if self.learning_rate_power == -0.5 {
            apply_ftrl(row, ftrl::step(self, rate, factor, f32::sqrt));
        } else {
            let power = -self.learning_rate_power;
            apply_ftrl(row, ftrl::step(self, rate, factor, move |n| n.powf(power)));
        }
    }
}

/// Applies `step`, the result of [`ftrl::step`], to each value of a row.
#[inline(always)]
fn apply_ftrl(row: Row, step: impl Fn(f32, f32, [f32; 2]) -> (f32, [f32; 2])) {
    let (sums, linears) = row.state.split_at_mut(row.values.len());
    let pairs = row.values.iter_mut().zip(row.gradient);
    for ((w, g), (sum, linear)) in pairs.zip(sums.iter_mut().zip(linears)) {
        (*w, [*sum, *linear]) = step(*w, g.get(), [*sum, *linear]);
    }
}
