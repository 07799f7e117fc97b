//! The gradients of a step on their way from the replica to the strategy. The replica fills buckets while it computes.
//! It sends a bucket as soon as this bucket and all before it are full.

use std::sync::Arc;

use tokio::sync::mpsc;

use variables::{BucketPlan, sum_of_squares_times};

/// Returns both ends of a step's buckets. Each gradient is multiplied by `factor`. The buckets reuse the vectors of
/// `memory`.
pub fn filling(
    plan: &Arc<BucketPlan>,
    mut memory: Vec<Vec<f32>>,
    factor: f32,
) -> (Filling, Filled) {
    let lengths = plan.lengths();
    memory.resize(lengths.len(), Vec::new());
    for (vector, length) in memory.iter_mut().zip(lengths) {
        let capacity = length + SPARE;
        if vector.capacity() < capacity || vector.capacity() > 2 * capacity {
            *vector = Vec::with_capacity(capacity);
        }
        vector.resize(*length, 0.0);
    }
    let (full, filled) = mpsc::channel(lengths.len());
    let mut filling = Filling {
        missing: plan.variables(),
        plan: Arc::clone(plan),
        vectors: memory,
        sent: 0,
        factor,
        full,
    };
    // A model that trains only tables has one empty bucket, which is full.
    filling.send_full();
    (filling, Filled(filled))
}

/// The spare capacity of each bucket, in elements. The strategy appends counts there.
const SPARE: usize = 8;

/// The replica's end of a step's buckets, which it fills with gradients.
#[derive(Debug)]
pub struct Filling {
    plan: Arc<BucketPlan>,
    /// The vector of each bucket; empty once it is sent.
    vectors: Vec<Vec<f32>>,
    /// The number of gradients that each bucket lacks.
    missing: Vec<usize>,
    /// The number of buckets that were sent.
    sent: usize,
    factor: f32,
    full: mpsc::Sender<Vec<f32>>,
}

/// The strategy's end of a step's buckets, which arrive in order. If it closes before the last bucket, the replica has
/// failed.
#[derive(Debug)]
pub struct Filled(mpsc::Receiver<Vec<f32>>);

impl Filling {
    /// Returns the plan of the buckets.
    pub fn plan(&self) -> &Arc<BucketPlan> {
        &self.plan
    }

    /// Takes the gradient of a variable, once for each variable that is not frozen. Returns the sum of the squares of
    /// its elements, without the factor.
    pub fn fill(&mut self, variable: usize, gradient: &[f32]) -> f64 {
        let (bucket, place) = self.plan.place(variable);
        if place.is_empty() {
            return 0.0;
        }
        let squares = sum_of_squares_times(gradient, self.factor, &mut self.vectors[bucket][place]);
        self.missing[bucket] -= 1;
        self.send_full();
        squares
    }

    /// Sends all buckets with zeros, for a step without samples.
    pub fn fill_with_zeros(mut self) {
        for vector in &mut self.vectors {
            vector.fill(0.0);
        }
        self.missing.fill(0);
        self.send_full();
    }

    fn send_full(&mut self) {
        while self.missing.get(self.sent) == Some(&0) {
            let vector = std::mem::take(&mut self.vectors[self.sent]);
            // If the receiver is gone, the step is abandoned.
            let _ = self.full.try_send(vector);
            self.sent += 1;
        }
    }
}

impl Filled {
    /// Waits for the next bucket. Returns `None` if no bucket follows.
    pub async fn next(&mut self) -> Option<Vec<f32>> {
        self.0.recv().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::blocks::{VariableKind, VariableSpec};

    fn plan() -> Arc<BucketPlan> {
        let spec = |name: &str, elements: usize| VariableSpec {
            name: name.to_owned(),
            shape: vec![elements],
            kind: VariableKind::Trained,
        };
        let variables = [spec("a", 2), spec("b", 1), spec("c", 3)];
        let plan = BucketPlan::in_order(&variables, &[2, 1, 0], 3);
        assert_eq!(plan.lengths(), [3, 3]);
        plan.into()
    }

    #[tokio::test]
    async fn buckets_leave_in_order_as_soon_as_they_are_full() {
        let (mut filling, mut filled) = filling(&plan(), vec![vec![7.0; 9]], 2.0);
        assert_eq!(filling.fill(0, &[1.0, 2.0]), 5.0);
        assert_eq!(filling.fill(1, &[3.0]), 9.0);
        assert!(filled.0.try_recv().is_err(), "the first one is not full");
        assert_eq!(filling.fill(2, &[4.0, 5.0, 6.0]), 77.0);
        assert_eq!(filled.next().await, Some(vec![8.0, 10.0, 12.0]));
        assert_eq!(filled.next().await, Some(vec![6.0, 2.0, 4.0]));
        drop(filling);
        assert_eq!(filled.next().await, None);
    }

    #[tokio::test]
    async fn a_step_without_samples_has_zeros() {
        let (filling, mut filled) = filling(&plan(), vec![vec![7.0; 3], vec![f32::NAN; 3]], 0.0);
        filling.fill_with_zeros();
        assert_eq!(filled.next().await, Some(vec![0.0; 3]));
        assert_eq!(filled.next().await, Some(vec![0.0; 3]));
        assert_eq!(filled.next().await, None);
    }

    #[tokio::test]
    async fn a_bucket_without_variables_is_full_at_once() {
        let plan = Arc::new(BucketPlan::one(&[]));
        let (filling, mut filled) = filling(&plan, vec![vec![7.0; 3]], 1.0);
        assert_eq!(filled.next().await, Some(Vec::new()));
        drop(filling);
        assert_eq!(filled.next().await, None);
    }

    #[tokio::test]
    async fn buckets_of_a_replica_that_fails_do_not_come() {
        let (mut filling, mut filled) = filling(&plan(), Vec::new(), 1.0);
        filling.fill(2, &[1.0; 3]);
        drop(filling);
        assert_eq!(filled.next().await, Some(vec![1.0; 3]));
        assert_eq!(filled.next().await, None);
    }
}
