//! The search for a learning rate: a short training in one process, in which the rate rises from step to step until the loss diverges
//! (L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3).

use std::sync::Arc;

use candle_core::Device;
use shared_proto::ids::{Clock, Epoch, RunNumber};
use shared_proto::job::{BatchNorm, Job, Mode, Schedule, StrategyName};
use shared_proto::payload::Elements;
use shared_proto::step::{Gradients, Part, PartOf, Want, WantedRows};
use shared_proto::task::boxed;

use model::registry::Registry;
use model::tables::{LocalTables, RowSource};
use replica::{DeviceReplicas, Mirror, Positions, Replica, ReplicaError, Step, StepsMade};

/// The decay of the exponential moving average of the loss.
const SMOOTHING: f64 = 0.95;

/// The multiple of the lowest smoothed loss beyond which a training has diverged.
const DIVERGED: f64 = 4.0;

/// The least fall of the smoothed loss, per unit of the logarithm of the rate and as a part of the first loss, for
/// which a rate is suggested. A smaller fall is a rounding error.
const LEAST_FALL: f64 = 1e-6;

/// The slope at a point is taken over `1 / SIDE` of all points on each side, so that the noise of single steps does not
/// decide.
const SIDE: usize = 16;

/// The learning rates that a search tries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateRange {
    /// The rate of the first step.
    pub from: f32,
    /// The rate of the last step.
    pub to: f32,
    /// The number of rates, each of which is tried for one step.
    pub rates: u32,
}

/// A range of learning rates that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the range of learning rates has `{field}` {value}, which {expected}")]
pub struct RangeError {
    field: &'static str,
    value: String,
    expected: &'static str,
}

impl Default for RateRange {
    fn default() -> Self {
        Self {
            from: 1e-7,
            to: 10.0,
            rates: 100,
        }
    }
}

impl RateRange {
    /// Checks the range.
    ///
    /// # Errors
    /// If `from` is not positive, `to` is not greater than `from`, or there are fewer than 10 or more than 1,000,000
    /// rates.
    pub fn validate(&self) -> Result<(), RangeError> {
        let positive = self.from.is_finite() && self.from > 0.0;
        let checks = [
            (positive, "from", self.from.to_string(), "must be positive"),
            (
                self.to.is_finite() && self.to > self.from,
                "to",
                self.to.to_string(),
                "must be more than `from`",
            ),
            (
                (10..=1_000_000).contains(&self.rates),
                "rates",
                self.rates.to_string(),
                "must lie between 10 and 1000000",
            ),
        ];
        match checks.into_iter().find(|(ok, ..)| !ok) {
            Some((_, field, value, expected)) => Err(RangeError {
                field,
                value,
                expected,
            }),
            None => Ok(()),
        }
    }

    /// Returns the rate of a step, counted from 0.
    fn rate(&self, step: u32) -> f32 {
        let way = f64::from(step) / f64::from(self.rates - 1);
        let (from, to) = (f64::from(self.from), f64::from(self.to));
        (from * (to / from).powf(way)) as f32
    }
}

/// A step of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RatePoint {
    /// The learning rate of the step.
    pub rate: f32,
    /// The loss of the step's samples, before its update.
    pub loss: f64,
    /// The exponential moving average of the losses until this one.
    pub smoothed: f64,
}

/// The loss as a function of the learning rate.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct LearningRateCurve {
    /// The steps, in the order of their rates.
    pub points: Vec<RatePoint>,
    /// The rate at which the smoothed loss falls fastest, per unit of the logarithm of the rate; `None` if the loss
    /// never falls.
    pub suggestion: Option<f32>,
    /// True if the loss has diverged, so that higher rates were not tried.
    pub diverged: bool,
}

impl LearningRateCurve {
    /// Adds a step. Returns whether another one may follow.
    fn add(&mut self, rate: f32, loss: f64) -> bool {
        let steps = self.points.len() as i32 + 1;
        // The average of the first steps would be too low, since it begins with 0.
        let weight = |steps: i32| 1.0 - SMOOTHING.powi(steps);
        let before = self.points.last();
        let sum = before.map_or(0.0, |before| before.smoothed * weight(steps - 1));
        let smoothed = (SMOOTHING * sum + (1.0 - SMOOTHING) * loss) / weight(steps);
        let lowest = self.points.iter().map(|point| point.smoothed);
        let lowest = lowest.fold(smoothed, f64::min);
        self.diverged = !loss.is_finite() || smoothed > DIVERGED * lowest && lowest > 0.0;
        if loss.is_finite() {
            self.points.push(RatePoint {
                rate,
                loss,
                smoothed,
            });
        }
        !self.diverged
    }

    /// Suggests the rate at which the smoothed loss falls fastest before its minimum. Leaves out the first tenth of the
    /// points, where the average covers too few steps.
    fn suggest(&mut self) {
        let points = self.points.iter().enumerate();
        let lowest = points.min_by(|one, other| one.1.smoothed.total_cmp(&other.1.smoothed));
        let lowest = lowest.map_or(0, |(at, _)| at);
        let candidates = (self.points.len() / 10)..lowest;
        let slopes = candidates.map(|at| (at, self.slope(at)));
        let steepest = slopes.min_by(|one, other| one.1.total_cmp(&other.1));
        let least = LEAST_FALL * self.points.first().map_or(0.0, |first| first.loss.abs());
        let steepest = steepest.filter(|(_, slope)| *slope < -least);
        self.suggestion = steepest.map(|(at, _)| self.points[at].rate);
    }

    /// Returns the slope, around a point, of the smoothed loss as a function of the logarithm of the rate, by least
    /// squares.
    fn slope(&self, at: usize) -> f64 {
        let side = (self.points.len() / SIDE).max(1);
        let end = self.points.len().min(at + side + 1);
        let around = &self.points[at.saturating_sub(side)..end];
        let count = around.len() as f64;
        let place = |point: &RatePoint| f64::from(point.rate).ln();
        let middle = around.iter().map(place).sum::<f64>() / count;
        let mean = around.iter().map(|point| point.smoothed).sum::<f64>() / count;
        let (mut with, mut of) = (0.0, 0.0);
        for point in around {
            let away = place(point) - middle;
            with += away * (point.smoothed - mean);
            of += away * away;
        }
        with / of
    }
}

/// Trains a job for some steps from its initial values, with a higher learning rate in each step. A step has as many
/// samples as an update of the job: those of all workers if they make a step together. The rates of groups and tables
/// rise in proportion. Schedules have no effect. The caller has validated `range`.
///
/// # Errors
/// The data's or the model's.
#[boxed(?Send)]
pub async fn find_learning_rate(
    job: &Job,
    registry: &Registry,
    devices: &[Device],
    range: RateRange,
) -> Result<LearningRateCurve, ReplicaError> {
    let job = Arc::new(prepared(job));
    let replica = DeviceReplicas::start(&job, registry, devices).await?;
    let mut search = Search {
        tables: LocalTables::new(replica.description().tables.clone()),
        usual_rate: job.optimizer.learning_rate(),
        replica,
    };
    let samples = search.replica.description().training_samples;
    let mut curve = LearningRateCurve::default();
    let (mut data_epoch, mut start) = (0, 0);
    for step in 0..range.rates {
        let end = samples.min(start + job.samples_per_step());
        let positions = Positions {
            data_epoch,
            start,
            end,
        };
        let rate = range.rate(step);
        let loss = search.step(positions, u64::from(step), rate).await?;
        if !curve.add(rate, loss) {
            break;
        }
        (data_epoch, start) = match end < samples {
            true => (data_epoch, end),
            false => (data_epoch + 1, 0),
        };
    }
    curve.suggest();
    Ok(curve)
}

/// Returns the job of a search: one process with the batches of all workers, and one learning rate in each step.
fn prepared(job: &Job) -> Job {
    let mut job = job.clone();
    let together = job.strategy.mode == Mode::Sync || job.strategy.name.has_ring();
    let groups = job.strategy.stage_groups();
    let workers = match together {
        true => job.cluster.workers.unwrap_or(job.strategy.usual_workers()),
        false => 1,
    };
    // One process computes the batches of each stage group as one, and those of all groups in turn.
    let of_a_group = groups.workers;
    job.batch_size = job.batch_size.saturating_mul(of_a_group);
    let groups = (groups.computing(workers.into()) / u64::from(of_a_group)) as u32;
    job.accumulate = job.accumulate.saturating_mul(groups);
    job.schedule = Schedule::default();
    (job.plateau, job.ema_decay) = (None, None);
    (job.strategy.batch_norm, job.strategy.optimizer_copies) = (BatchNorm::PerReplica, None);
    job.strategy.stage_workers = None;
    if job.strategy.name.has_servers() {
        job.strategy.name = StrategyName::Mirrored;
    }
    job
}

/// A search that is under way.
struct Search {
    replica: DeviceReplicas,
    tables: LocalTables,
    /// The job's own rate.
    usual_rate: f32,
}

impl Search {
    /// Makes a step with a learning rate, and returns its loss. If the gradient is NaN or infinite, the weights stay as they are.
    async fn step(
        &mut self,
        positions: Positions,
        number: u64,
        rate: f32,
    ) -> Result<f64, ReplicaError> {
        let replica = &self.replica;
        let mut batch = replica.prepare(positions).await;
        let wants = batch.wants().await.to_vec();
        self.read_rows(&wants).await?;
        let clock = Clock(number);
        let replica = &self.replica;
        let computed = replica.compute(positions, Step { clock, rank: 0 }).await?;
        if !computed.loss.is_finite() || !computed.gradients.norm.is_finite() {
            return Ok(f64::INFINITY);
        }
        let scale = f64::from(rate) / f64::from(self.usual_rate);
        replica.scale_learning_rate(scale).await?;
        let made = StepsMade {
            run: RunNumber(1),
            ring: Epoch(1),
            clock: clock.next(),
        };
        let gradient = joined(&computed.gradients);
        replica.update(gradient.into(), made).await?;
        self.update_rows(&computed.gradients, scale)?;
        Ok(computed.loss)
    }

    /// Reads the rows that a batch wants, and loads them into the replica.
    async fn read_rows(&mut self, wants: &[Want]) -> Result<(), ReplicaError> {
        let tables = self.replica.description().tables.len();
        let none = |table| {
            Arc::new(WantedRows {
                table,
                ids: Vec::new(),
            })
        };
        let mut rows: Vec<_> = (0..tables).map(none).collect();
        for want in wants {
            if let Want::Rows(wanted) = want {
                rows[wanted.table] = Arc::clone(wanted);
            }
        }
        let read = self.tables.read(&rows)?;
        let parts = read
            .into_iter()
            .enumerate()
            .map(|(table, values)| Part::whole(PartOf::Table(table), Elements::from(values)));
        let parts: Vec<Part> = parts.collect();
        if !parts.is_empty() {
            self.replica.load(parts).await;
        }
        Ok(())
    }

    fn update_rows(&mut self, gradients: &Gradients, scale: f64) -> Result<(), ReplicaError> {
        let rows: Vec<_> = gradients.rows.iter().map(|g| Arc::clone(&g.rows)).collect();
        let values = gradients.rows.iter().map(|g| {
            let mut values = vec![0.0; g.values.len()];
            g.values.copy_to(&mut values);
            values
        });
        let mut values: Vec<_> = values.collect();
        Ok(self.tables.update(&rows, &mut values, scale)?)
    }
}

/// Returns the gradients of all variables, concatenated.
fn joined(gradients: &Gradients) -> Vec<f32> {
    let elements: usize = gradients.values.iter().map(Elements::len).sum();
    let mut joined = vec![0.0; elements];
    let mut rest = &mut joined[..];
    for gradient in &gradients.values {
        let (own, others) = rest.split_at_mut(gradient.len());
        gradient.copy_to(own);
        rest = others;
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(losses: impl IntoIterator<Item = f64>) -> LearningRateCurve {
        let (mut curve, range) = (LearningRateCurve::default(), RateRange::default());
        for (step, loss) in (0..).zip(losses) {
            if !curve.add(range.rate(step), loss) {
                break;
            }
        }
        curve.suggest();
        curve
    }

    #[test]
    fn rates_rise_by_the_same_factor() {
        let range = RateRange {
            from: 0.001,
            to: 1.0,
            rates: 10,
        };
        range.validate().unwrap();
        let rates: Vec<f32> = (0..10).map(|step| range.rate(step)).collect();
        assert!((rates[0] - 0.001).abs() < 1e-9 && (rates[9] - 1.0).abs() < 1e-6);
        for pair in rates.windows(2) {
            assert!((pair[1] / pair[0] - 10f32.powf(1.0 / 3.0)).abs() < 1e-4);
        }
        for wrong in [
            RateRange { from: 0.0, ..range },
            RateRange { to: 0.001, ..range },
            RateRange { rates: 9, ..range },
        ] {
            assert!(wrong.validate().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_curve_ends_where_it_diverges_and_suggests_where_it_falls_fastest() {
        // The smoothed loss is a mean of all losses at first, so equal losses have that mean.
        let flat = curve(std::iter::repeat_n(2.0, 50));
        assert!(
            flat.points
                .iter()
                .all(|point| (point.smoothed - 2.0).abs() < 1e-9)
        );
        assert_eq!((flat.suggestion, flat.diverged), (None, false));

        let falls = |step: u32| match step {
            0..60 => 1.0,
            60..70 => 1.0 - 0.09 * f64::from(step - 59),
            70..80 => 0.1,
            _ => f64::from(step - 79).powi(4),
        };
        let found = curve((0..100).map(falls));
        assert!(found.diverged && found.points.len() < 100);
        let range = RateRange::default();
        let suggestion = found.suggestion.unwrap();
        assert!(
            (range.rate(60)..range.rate(82)).contains(&suggestion),
            "{suggestion}"
        );

        let broken = curve([1.0, 0.9, f64::NAN]);
        assert_eq!((broken.points.len(), broken.diverged), (2, true));
    }
}
