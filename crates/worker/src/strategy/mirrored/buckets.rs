//! The gradients of a step in buckets. Each bucket is added up as soon as it is full, while the backward pass computes
//! the gradients of the next buckets (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
//!
//! All but the last bucket are added up before a member has its whole gradient. The member may find later that its
//! gradient is not finite and must not count, or that it has sent a part too early. Then it sets a flag at the end of
//! the last bucket. All members see the flag in the sum, and add up their whole gradients again.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use replica::{
    Computed, Description, Filled, Filling, InBuckets, Mirror, Positions, Replica, ReplicaError,
    Step, filling,
};
use shared_proto::blocks::VariableSpec;
use shared_proto::job::Job;
use shared_proto::planted;
use shared_proto::step::Gradients;
use variables::{BucketPlan, BucketedGradients};

use super::gradient::{self, counts, take_counts};
use super::ring::{Lost, Ring};
use super::{Mirrored, mirror};
use crate::strategy::StrategyError;

/// The smallest and the largest size of buckets by default, in elements: 512 KiB and 25 MiB.
const USUAL: RangeInclusive<usize> = 1 << 17..=25 << 18;

/// The number of buckets by default, within the sizes of [`USUAL`].
const USUAL_BUCKETS: usize = 8;

/// The number of steps after which the members stop asking the first rank for an order, and the number of repeated sums
/// after which they use a single bucket.
const TRIES: u64 = 8;

/// The number of elements of a MiB.
const OF_A_MEBIBYTE: f64 = 262_144.0;

/// The buckets of a job.
pub(super) struct Buckets {
    /// The largest number of elements of a bucket with several variables.
    most: usize,
    /// The plan with one bucket, for steps without an agreed plan.
    one: Arc<BucketPlan>,
}

impl Buckets {
    /// Returns the buckets of a job's gradients.
    pub(super) fn new(job: &Job, model: &Description) -> Self {
        let one = BucketPlan::one(&model.variables);
        let elements: usize = one.lengths().iter().sum();
        Self {
            most: match job.strategy.bucket_mebibytes {
                Some(mebibytes) => (mebibytes * OF_A_MEBIBYTE) as usize,
                None => (elements / USUAL_BUCKETS).clamp(*USUAL.start(), *USUAL.end()),
            },
            one: one.into(),
        }
    }
}

/// The buckets of a step after its passes.
pub(super) struct Summed {
    plan: Arc<BucketPlan>,
    /// All buckets, of which the last one is not added up yet.
    vectors: Vec<Vec<f32>>,
    /// True if this member asks all members to add up again.
    again: bool,
    /// The number of samples of all members, if numbers are rounded on the wire. Each bucket then has this member's
    /// part of the mean.
    samples: Option<f64>,
    /// The time that all-reduces took while the replica computed.
    hidden: Duration,
    /// The time in which the step waited for sums while nothing computed.
    waited: Duration,
}

impl Summed {
    /// Withdraws this member's gradient, because it must not count. If neither a bucket nor the number of samples was
    /// sent yet, the gradient becomes zeros. Otherwise all members are asked to add up again.
    pub(super) fn take_back(&mut self) {
        match (&mut self.vectors[..], self.samples) {
            ([one], None) => {
                one.fill(0.0);
                self.again = false;
            }
            _ => self.again = true,
        }
    }

    /// Returns the time in which the step has waited for sums while nothing computed.
    pub(super) fn waited(&self) -> Duration {
        self.waited
    }
}

impl Mirrored {
    /// Computes a step, and meanwhile adds up all its buckets but the last.
    pub(super) async fn compute_in_buckets(
        &mut self,
        positions: Positions,
        step: Step,
        replica: &dyn Replica,
    ) -> Result<(Computed, Summed), StrategyError> {
        let (buckets, memory) = (Arc::clone(&self.buckets), std::mem::take(&mut self.memory));
        let (mirror, variables) = (mirror(replica)?, &replica.description().variables);
        let compute = async |ring: &Ring| {
            let plan = ring.plan_buckets(&buckets, variables, mirror).await?;
            ring.compute_in_buckets(plan, memory, positions, step, mirror)
                .await
        };
        let (summed, computed) = self.in_ring(compute).await??;
        self.counters.hidden(summed.hidden);
        Ok((computed, summed))
    }

    /// Returns the mean gradient of all members, or `None` if no member has samples. `gradients` are this member's
    /// gradients, which count unless `samples` is 0.
    pub(super) async fn mean_gradient(
        &mut self,
        summed: Option<Summed>,
        mut gradients: Gradients,
        samples: u64,
        replica: &dyn Replica,
    ) -> Result<Option<BucketedGradients>, StrategyError> {
        let counts = self.counts(samples);
        if let Some(mut summed) = summed {
            let sum = async |ring: &Ring| ring.sum_last(&mut summed, samples).await;
            match self.in_ring(sum).await? {
                Sum::Mean => {
                    return Ok(Some(BucketedGradients::new(summed.plan, summed.vectors)));
                }
                Sum::Nothing => {
                    self.memory = summed.vectors;
                    return Ok(None);
                }
                Sum::Again => {
                    self.counters.added_up_again();
                    drop(summed);
                    gradients = whole(gradients, samples, mirror(replica)?).await?;
                }
            }
        }
        let mut vector = self.memory.pop().unwrap_or_default();
        let (counted, model) = (counts.counted, replica.description());
        let reduce = async |ring: &Ring| {
            gradient::fill(&mut vector, &gradients, counts, ring.factor(samples), model);
            ring.mean_gradient(&mut vector, counted).await
        };
        match self.in_ring(reduce).await? {
            gradient::Total::Mean => Ok(Some(vector.into())),
            gradient::Total::Nothing => {
                self.memory = vec![vector];
                Ok(None)
            }
        }
    }
}

/// Returns the gradients of this member's newest step. Fetches the gradients of variables from the replica if the step
/// has samples.
pub(super) async fn whole(
    gradients: Gradients,
    samples: u64,
    mirror: &dyn Mirror,
) -> Result<Gradients, ReplicaError> {
    Ok(match samples {
        0 => gradients,
        _ => Gradients {
            values: mirror.first().bucketed_gradients().await?,
            ..gradients
        },
    })
}

/// The outcome of adding up all members' buckets.
enum Sum {
    /// The buckets have the mean.
    Mean,
    /// No member has samples.
    Nothing,
    /// A member asks to add up again.
    Again,
}

impl Ring {
    /// Agrees with the other members on whether to add up gradients in buckets: they do if all members fill buckets.
    pub(super) async fn agree_on_buckets(&self, fills_buckets: bool) -> Result<(), Lost> {
        let without = f64::from(u8::from(!fills_buckets));
        let all = self.sum_short(vec![without]).await?;
        self.agreed.has_buckets.set(all == [0.0]);
        Ok(())
    }

    /// Returns whether the members add up gradients in buckets.
    pub(super) fn has_buckets(&self) -> bool {
        self.agreed.has_buckets.get()
    }

    async fn compute_in_buckets(
        &self,
        plan: Arc<BucketPlan>,
        memory: Vec<Vec<f32>>,
        positions: Positions,
        step: Step,
        mirror: &dyn Mirror,
    ) -> Result<Result<(Summed, Computed), StrategyError>, Lost> {
        let asked = Instant::now();
        let samples = match self.rounds() && !self.is_alone() {
            true => Some(self.all_samples(positions.samples()).await?),
            false => None,
        };
        let asked = asked.elapsed();
        let (filling, mut filled) = filling(&plan, memory, self.factor(positions.samples()));
        let compute = self.fill(filling, positions, step, mirror);
        let early = plan.lengths().len() - 1;
        let sum = self.sum_early(&mut filled, early, samples);
        let (summed, (computed, ended)) = tokio::join!(sum, compute);
        let InBuckets {
            mut computed,
            complete,
        } = match computed {
            Ok(computed) => computed,
            Err(error) => return Ok(Err(error.into())),
        };
        let (mut vectors, times) = summed?;
        vectors.extend(filled.next().await);
        if vectors.len() <= early {
            let problem = format!(
                "the replica has filled {} of {} buckets of a step; this is a fault of the program, please report it",
                vectors.len(),
                plan.lengths().len()
            );
            return Ok(Err(StrategyError::Failed(problem.into())));
        }
        let hidden = times.iter().map(|(from, to)| {
            let to = ended.min(*to);
            to.saturating_duration_since(*from)
        });
        computed.waited = asked + ended.elapsed();
        let summed = Summed {
            plan,
            vectors,
            again: !complete,
            samples,
            hidden: hidden.sum(),
            waited: computed.waited,
        };
        Ok(Ok((summed, computed)))
    }

    /// Computes a step, and fills its buckets. Also returns the time at which the replica was done.
    async fn fill(
        &self,
        filling: Filling,
        positions: Positions,
        step: Step,
        mirror: &dyn Mirror,
    ) -> (Result<InBuckets, ReplicaError>, Instant) {
        self.agreed.computing.set(true);
        let computed = match positions.is_empty() {
            true => {
                filling.fill_with_zeros();
                Ok(InBuckets::nothing())
            }
            false => mirror.compute_in_buckets(filling, positions, step).await,
        };
        self.agreed.computing.set(false);
        (computed, Instant::now())
    }

    /// Returns the plan of a step. The first step of a ring has one bucket. Later all members use the order in which the gradients of the
    /// first rank became complete.
    async fn plan_buckets(
        &self,
        buckets: &Buckets,
        variables: &[VariableSpec],
        mirror: &dyn Mirror,
    ) -> Result<Arc<BucketPlan>, Lost> {
        let agreed = &self.agreed;
        let steps = agreed.steps.replace(agreed.steps.get() + 1);
        let elements: usize = buckets.one.lengths().iter().sum();
        if steps == 0 || elements <= buckets.most || agreed.repeated.get() > TRIES {
            return Ok(Arc::clone(&buckets.one));
        }
        if let Some(plan) = agreed.plan.borrow().as_ref() {
            return Ok(Arc::clone(plan));
        }
        let own = match self.rank() {
            0 => mirror.first().gradient_order().await?,
            _ => Vec::new(),
        };
        let order = own.iter().map(|variable| *variable as f64).collect();
        let order = self.sum_short(order).await?;
        let mut order: Vec<usize> = order.iter().map(|variable| *variable as usize).collect();
        if planted!(OwnOrder) {
            order = mirror.first().gradient_order().await?;
        }
        let plan = match order.is_empty() {
            true => Arc::clone(&buckets.one),
            false => Arc::new(BucketPlan::in_order(variables, &order, buckets.most)),
        };
        // The first rank has no order on a GPU, or if it has had no samples yet.
        if !order.is_empty() || steps >= TRIES {
            tracing::debug!(buckets = plan.lengths().len(), "a plan of buckets");
            *agreed.plan.borrow_mut() = Some(Arc::clone(&plan));
        }
        Ok(plan)
    }

    /// Adds up `count` buckets, each as soon as it is full. Returns the sums, and the start and end times of each
    /// all-reduce. There are fewer than `count` if the replica fails.
    async fn sum_early(
        &self,
        filled: &mut Filled,
        count: usize,
        all_samples: Option<f64>,
    ) -> Result<(Vec<Vec<f32>>, Vec<(Instant, Instant)>), Lost> {
        let (mut vectors, mut times) = (Vec::new(), Vec::new());
        while vectors.len() < count
            && let Some(mut vector) = filled.next().await
        {
            let begun = Instant::now();
            take_part(&mut vector, all_samples);
            self.all_reduce(&mut vector).await?;
            vectors.push(vector);
            times.push((begun, Instant::now()));
        }
        Ok((vectors, times))
    }

    /// Adds up the last bucket of a step, and makes the mean of all buckets. `samples` is the number of this member's samples that count.
    async fn sum_last(&self, summed: &mut Summed, samples: u64) -> Result<Sum, Lost> {
        let Some(last) = summed.vectors.last_mut() else {
            return Ok(Sum::Nothing);
        };
        take_part(last, summed.samples);
        // Rounded counts would not be exact.
        let own = if summed.samples.is_some() { 0 } else { samples };
        last.extend(counts(own, summed.again));
        self.all_reduce(last).await?;
        let (counted, again) = take_counts(last);
        if again && !planted!(LeftTooEarly) {
            // The order may have changed.
            let agreed = &self.agreed;
            agreed.repeated.set(agreed.repeated.get() + 1);
            *agreed.plan.borrow_mut() = None;
            return Ok(Sum::Again);
        }
        let Some(all) = Some(summed.samples.unwrap_or(counted)).filter(|all| *all > 0.0) else {
            return Ok(Sum::Nothing);
        };
        if summed.samples.is_none() && !self.is_alone() {
            for vector in &mut summed.vectors {
                take_part(vector, Some(all));
            }
        }
        Ok(Sum::Mean)
    }
}

/// Divides gradients by the number of all samples, if that is known and not 0.
fn take_part(vector: &mut [f32], all_samples: Option<f64>) {
    if let Some(all) = all_samples.filter(|all| *all > 0.0) {
        gradient::scale(vector, (1.0 / all) as f32);
    }
}
