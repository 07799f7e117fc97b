//! Corrections for stale gradients, which were computed with old weights, outside sync mode.
//!
//! While a gradient is computed, other updates change the weights. With `n` updates in flight, descent is stable about
//! as long as the product of the step size, the curvature and `n` stays below one. Four corrections help:
//! - The step of a block is limited, relative to the norm of its weights: in layered networks, the relative change of
//!   each layer bounds the change of its gradient (Bernstein et al., "On the Distance Between Two Neural Networks and
//!   the Stability of Learning", NeurIPS 2020). The step is not shortened below about its share of a synchronous step,
//!   which is the mean of `n` gradients.
//! - Evaluations and the exported model use a mean of the last weights. With a constant rate, the weights wander around
//!   a minimum, the more so the older the gradients are, and the mean is nearer to the minimum (Polyak and Juditsky,
//!   "Acceleration of Stochastic Approximation by Averaging", 1992).
//! - Workers compute with the weights to which the momentum leads in the meantime (DANA: Hakimi et al., "Taming
//!   Momentum in a Distributed Asynchronous Environment", 2019).
//! - The step of a row of a table depends on the row's own staleness (a factor of 1/(1 + staleness) for a whole model:
//!   Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016). A row that occurs in few
//!   batches has one gradient in flight at a time, and its steps are not shortened.

use shared_proto::blocks::VariableKind;
use shared_proto::job::{Correction, Job, Optimizer};
use shared_proto::table::RowOptimizer;

use crate::rule;

/// The corrections of a variable.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StaleSteps {
    /// The norm by which all updates in flight together may move a block's weights, relative to the norm of these
    /// weights.
    limit: f64,
    /// The exponent `e`. With `n` updates in flight, the factor of a block's step is at least `n^-e`. With a staleness
    /// of `n - 1`, the factor of a row's step is `n^-e`.
    exponent: f64,
    /// True if workers compute with look-ahead weights.
    look_ahead: bool,
    /// The number of the last updates over which weights are averaged; 0 if weights are not averaged.
    window: u64,
}

/// The most updates over which weights are averaged.
const LONGEST_WINDOW: f64 = 1000.0;

/// The largest share of a job's updates over which weights are averaged. In a short job, the weights still move fast.
const LARGEST_SHARE: f64 = 1.0 / 8.0;

/// The most times in a window that the weights are added to their average. To add them after each update would cost
/// memory traffic, and would hardly be better.
const POINTS: u64 = 16;

/// The exponent of [`StaleSteps`] for optimizers with steps that are proportional to the gradient. The mean of n gradients
/// moves the weights 1/n as far as their sum, so a step with n updates in flight is scaled by no less than 1/n.
pub(crate) const OF_A_MEAN: f64 = 1.0;

/// The exponent of steps that are divided by the root of a mean of squares. A single gradient is noisier than the mean
/// of n gradients.
pub(crate) const OF_MOMENTS: f64 = 0.75;

/// The exponent of steps that are divided by the root of a sum of squares, to which n gradients add n squares.
pub(crate) const OF_SUMS: f64 = 0.5;

/// The norm of a block's weights before an update, and the norm of its step before the step is shortened. Both may be
/// norms of the same part of the block, because only their ratio counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Norms {
    /// The norm of the weights.
    pub weights: f64,
    /// The norm of the step.
    pub step: f64,
}

/// The corrections of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StaleStep {
    /// The staleness of the gradient: the number of updates of the block since the gradient's weights were read.
    pub staleness: u64,
    /// The fraction of the step that is made.
    pub factor: f32,
    /// The factor that the step would have in sync mode, where a step is the mean of the gradients in flight.
    pub synchronous_factor: f64,
    /// The number of updates by which look-ahead weights are ahead; `None` if there are no look-ahead weights.
    pub ahead: Option<f64>,
    /// The share of the new weights in their average; `None` if this step does not change the average.
    pub average: Option<f32>,
}

/// A corrected step, as the server made it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CorrectedStep {
    /// The fraction of the step that was made; 1 if the step was not shortened.
    pub factor: f64,
    /// The factor that the step would have in sync mode.
    pub synchronous_factor: f64,
    /// The norm of the step before it was shortened, relative to the norm of the weights. Infinite if all weights were
    /// zero.
    pub relative_norm: f64,
}

impl StaleStep {
    /// Returns the step that was made with these corrections.
    pub fn made(self, norms: Norms) -> CorrectedStep {
        CorrectedStep {
            factor: self.factor.into(),
            synchronous_factor: self.synchronous_factor,
            relative_norm: norms.step / norms.weights,
        }
    }
}

impl StaleSteps {
    /// Returns the corrections of a variable of this kind, in a job that expects `total_updates` updates of each block;
    /// `None` if the variable's steps are not corrected.
    pub(crate) fn new(
        job: &Job,
        optimizer: &Optimizer,
        kind: VariableKind,
        total_updates: u64,
    ) -> Option<Self> {
        if !job.strategy.corrects() {
            return None;
        }
        let Correction {
            step_limit,
            look_ahead,
            average,
            ..
        } = job.strategy.correction;
        // A job that ends after some steps does not tell how long a pass is.
        let of_pass = match job.steps {
            None => average * (total_updates / u64::from(job.epochs.max(1))) as f64,
            Some(_) => average * LONGEST_WINDOW,
        };
        let of_job = LARGEST_SHARE * total_updates as f64;
        let window = match job.averages_last_weights() {
            true => of_pass.min(of_job).min(LONGEST_WINDOW) as u64,
            false => 0,
        };
        match kind {
            VariableKind::Frozen => return None,
            // It is averaged as the weights are with which it was measured.
            VariableKind::Averaged => {
                let only_averaged = Self {
                    limit: f64::INFINITY,
                    exponent: 0.0,
                    look_ahead: false,
                    window,
                };
                return (window > 1).then_some(only_averaged);
            }
            VariableKind::Trained => {}
        }
        // A velocity takes steps on past the point where gradients turn, the more so the longer it lasts.
        let rest = 1.0 - f64::from(optimizer.momentum());
        Some(Self {
            limit: step_limit * rest.sqrt(),
            exponent: rule(optimizer).stale_exponent(),
            look_ahead: look_ahead && optimizer.has_momentum(),
            window,
        })
    }

    /// Returns the corrections of the rows of a table; `None` if their steps are not corrected.
    pub(crate) fn of_rows(job: &Job, optimizer: &RowOptimizer) -> Option<Self> {
        let exponent = match optimizer {
            RowOptimizer::Sgd(_) => OF_A_MEAN,
            // Also where sums of squares divide: those of most rows are of few gradients, and are no larger than such a mean.
            _ => OF_MOMENTS,
        };
        job.strategy.corrects().then_some(Self {
            limit: f64::INFINITY,
            exponent,
            look_ahead: false,
            window: 0,
        })
    }

    /// Returns the factor of a row's step. `staleness` is the number of updates of the row between the pull of its
    /// values and the push of its gradient.
    pub fn row_factor(self, staleness: f64) -> f32 {
        (1.0 + staleness).powf(-self.exponent) as f32
    }

    /// Returns the corrections of the next step of a block. `number` is the number of this step among the corrected
    /// steps, from 1. `last` has the norms of the last step, because the norms of the next step are known only once it
    /// is made. Without `last`, the step has the factor of sync mode. `in_flight` is the number of updates in flight.
    /// `staleness` is that of this step's gradient, and `mean_staleness` the mean over recent gradients.
    pub fn next(
        self,
        number: u64,
        last: Option<Norms>,
        in_flight: f64,
        staleness: u64,
        mean_staleness: f64,
    ) -> StaleStep {
        let synchronous_factor = in_flight.max(1.0).powf(-self.exponent);
        StaleStep {
            staleness,
            factor: self.factor(last.unwrap_or_default(), in_flight, synchronous_factor),
            synchronous_factor,
            ahead: self.look_ahead.then_some(mean_staleness),
            average: self.average(number),
        }
    }

    /// Returns the share of the weights after a step in their average; `None` if the step does not change the average.
    /// Until the window is full, the average is the mean of all added weights; after that, it is exponential.
    fn average(self, number: u64) -> Option<f32> {
        let every = self.window.div_ceil(POINTS).max(1);
        let points = number / every;
        let takes_part = self.window > 1 && number.is_multiple_of(every);
        takes_part.then(|| 1.0 / points.min(self.window / every) as f32)
    }

    /// Returns whether the steps of a whole block may be shortened. This is not so for averaged variables and for the
    /// buckets of tables.
    pub fn may_shorten(self) -> bool {
        self.limit.is_finite()
    }

    /// Returns the factor of a step: at most 1, and at least `synchronous_factor`.
    fn factor(
        self,
        Norms { weights, step }: Norms,
        in_flight: f64,
        synchronous_factor: f64,
    ) -> f32 {
        if !self.may_shorten() {
            return 1.0;
        }
        let allowed = self.limit * weights / (in_flight * step);
        // Norms that are no finite numbers leave the smallest factor.
        match allowed >= 1.0 {
            true => 1.0,
            false => allowed.max(synchronous_factor) as f32,
        }
    }
}

/// The most terms of a sum of powers. Later terms hardly count.
const MOST_UPDATES: f64 = 1000.0;

/// Returns how far a velocity of 1 carries the weights in the next `updates` updates without gradients. This is the sum
/// of the powers of the momentum `mu`, from the first power on, each multiplied by `scale` of its exponent. A fraction
/// of an update counts as this fraction of its step.
pub(crate) fn carry(mu: f32, updates: f64, scale: impl Fn(u64) -> f64) -> f32 {
    let (mut sum, mut power, mut number) = (0.0, 1.0, 0);
    let mut rest = updates.clamp(0.0, MOST_UPDATES);
    while rest > 0.0 {
        power *= f64::from(mu);
        number += 1;
        sum += rest.min(1.0) * power * scale(number);
        rest -= 1.0;
    }
    sum as f32
}

#[cfg(test)]
mod tests {
    use shared_proto::job::Sgd;

    use super::*;

    fn of(text: &str) -> Option<StaleSteps> {
        let job = Job::from_toml(text).unwrap();
        StaleSteps::new(&job, &job.optimizer, VariableKind::Trained, 0)
    }

    #[test]
    fn a_step_is_limited_by_what_is_in_flight_and_keeps_its_share_of_a_synchronous_one() {
        let sgd = of("[optimizer]\nname = \"sgd\"").unwrap();
        for (weights, step, in_flight, factor) in [
            (10.0, 0.1, 4.0, 1.0),
            (10.0, 0.2, 4.0, 0.625),
            (10.0, 1.0, 4.0, 0.25),
            (0.0, 1.0, 8.0, 0.125),
            (0.0, 0.0, 8.0, 0.125),
            (10.0, 0.0, 8.0, 1.0),
            (0.0, 1.0, 1.0, 1.0),
        ] {
            let found = sgd.next(1, Some(Norms { weights, step }), in_flight, 0, 0.0);
            assert_eq!(found.factor, factor as f32, "{weights} {step} {in_flight}");
            assert_eq!(found.synchronous_factor, 1.0 / in_flight);
        }
        let momentum = of("[optimizer]\nname = \"momentum\"\nmomentum = 0.75").unwrap();
        let norms = Norms {
            weights: 10.0,
            step: 0.1,
        };
        assert_eq!(momentum.next(1, Some(norms), 4.0, 0, 0.0).factor, 0.625);
        let adam = of("[optimizer]\nname = \"adam\"").unwrap();
        assert_eq!(adam.next(1, None, 16.0, 0, 0.0).factor, 0.125);
        for (weights, step) in [
            (f64::NAN, 1.0),
            (1.0, f64::NAN),
            (f64::INFINITY, f64::INFINITY),
        ] {
            let norms = Norms { weights, step };
            assert_eq!(sgd.next(1, Some(norms), 4.0, 0, 0.0).factor, 0.25);
        }
    }

    #[test]
    fn steps_stay_as_they_are_where_the_job_says_so_and_where_no_weights_are_old() {
        for text in [
            "[strategy]\nmode = \"sync\"",
            "[strategy]\nname = \"multi-worker-mirrored\"",
            "[strategy]\ncorrection = { enabled = false }",
        ] {
            assert_eq!(of(text), None, "{text}");
            let job = Job::from_toml(text).unwrap();
            let rows = RowOptimizer::Sgd(Sgd::default());
            assert_eq!(StaleSteps::of_rows(&job, &rows), None, "{text}");
        }
    }

    #[test]
    fn an_average_is_the_mean_of_all_weights_until_its_window_is_full() {
        let of = |text: &str, total| {
            let job = Job::from_toml(text).unwrap();
            StaleSteps::new(&job, &job.optimizer, VariableKind::Trained, total).unwrap()
        };
        let shares = |stale: StaleSteps| -> Vec<Option<f32>> {
            (1..=9).map(|number| stale.average(number)).collect()
        };
        let few = of("epochs = 8", 24);
        assert_eq!(few.window, 3);
        let share = [1.0, 1.0 / 2.0, 1.0 / 3.0].map(Some);
        assert_eq!(shares(few)[..4], [share[0], share[1], share[2], share[2]]);
        // Of 100 updates, every seventh takes part.
        let many = of("epochs = 2", 800);
        assert_eq!(many.window, 100);
        assert_eq!(shares(many)[5..8], [None, Some(1.0), None]);
        assert_eq!(
            (many.average(14), many.average(700)),
            (Some(0.5), Some(1.0 / 14.0))
        );
        assert_eq!(of("epochs = 1", u64::MAX).window, 1000);
        for text in [
            "ema_decay = 0.9",
            "[strategy]\ncorrection = { average = 0.0 }",
        ] {
            assert_eq!(of(text, 1000).window, 0, "{text}");
        }
    }

    #[test]
    fn a_velocity_carries_as_far_as_its_powers_add_up_to() {
        let sum = |mu: f32, updates: i32| (1..=updates).map(|n| mu.powi(n)).sum::<f32>();
        for updates in [0, 1, 3, 30] {
            let found = carry(0.9, updates.into(), |_| 1.0);
            assert!((found - sum(0.9, updates)).abs() < 1e-5, "{updates}");
        }
        assert_eq!(carry(0.5, 1.5, |_| 1.0), 0.625);
        assert_eq!(carry(0.5, 2.0, |number| number as f64), 1.0);
        assert_eq!(carry(1.0, f64::MAX, |_| 1.0), 1000.0);
    }
}
