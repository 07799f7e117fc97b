//! Sums over steps that are limited because their gradients are of old weights.

use crate::wire::LimitedSteps;

impl LimitedSteps {
    /// Adds a step: the part of it that was made, the norm of that part, and the norm of the part that it would have in a synchronous one.
    pub fn add_step(&mut self, factor: f64, norm: f64, synchronous_norm: f64) {
        self.add(&Self {
            number: 1,
            factor_sum: factor,
            norm_sum: norm,
            synchronous_norm_sum: synchronous_norm,
        });
    }

    /// Adds the steps of another server.
    pub fn add(&mut self, more: &Self) {
        self.number = self.number.saturating_add(more.number);
        self.factor_sum += more.factor_sum;
        self.norm_sum += more.norm_sum;
        self.synchronous_norm_sum += more.synchronous_norm_sum;
    }

    /// Returns the mean part of a step that was made; none without steps.
    pub fn mean_factor(&self) -> Option<f64> {
        self.mean(self.factor_sum)
    }

    /// Returns the mean norm of the parts that were made, relative to the norm of the weights; none without steps.
    pub fn mean_norm(&self) -> Option<f64> {
        self.mean(self.norm_sum)
    }

    /// Returns the mean norm of the parts that the steps would have in synchronous ones; none without steps.
    pub fn mean_synchronous_norm(&self) -> Option<f64> {
        self.mean(self.synchronous_norm_sum)
    }

    fn mean(&self, sum: f64) -> Option<f64> {
        (self.number > 0).then(|| sum / self.number as f64)
    }
}
