//! Sums over the steps that servers correct because gradients are stale.

use crate::wire::CorrectedSteps;

impl CorrectedSteps {
    /// Adds a step. `factor` is the factor by which the step was shortened, `synchronous_factor` the one that sync mode
    /// would give it.
    pub fn add_step(&mut self, factor: f64, synchronous_factor: f64) {
        self.add(&Self {
            number: 1,
            factor_sum: factor,
            synchronous_ratio_sum: factor / synchronous_factor,
        });
    }

    /// Adds the steps of another server.
    pub fn add(&mut self, more: &Self) {
        self.number = self.number.saturating_add(more.number);
        self.factor_sum += more.factor_sum;
        self.synchronous_ratio_sum += more.synchronous_ratio_sum;
    }

    /// Returns the mean factor; `None` without steps.
    pub fn mean_factor(&self) -> Option<f64> {
        self.mean(self.factor_sum)
    }

    /// Returns the mean ratio of a step's length to its length in sync mode; `None` without steps.
    pub fn mean_synchronous_ratio(&self) -> Option<f64> {
        self.mean(self.synchronous_ratio_sum)
    }

    fn mean(&self, sum: f64) -> Option<f64> {
        (self.number > 0).then(|| sum / self.number as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_over_the_steps_of_all_servers() {
        let mut all = CorrectedSteps::default();
        assert_eq!(
            (all.mean_factor(), all.mean_synchronous_ratio()),
            (None, None)
        );
        all.add_step(1.0, 0.25);
        let mut more = CorrectedSteps::default();
        more.add_step(0.5, 0.25);
        more.add_step(0.25, 0.25);
        all.add(&more);
        assert_eq!(all.mean_factor(), Some(1.75 / 3.0));
        assert_eq!(all.mean_synchronous_ratio(), Some(7.0 / 3.0));
    }
}
