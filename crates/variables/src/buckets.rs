//! The gradients of a step in buckets: vectors that can be sent one after the other, while the backward pass computes
//! the next ones.

use std::ops::Range;
use std::sync::Arc;

use shared_proto::blocks::VariableSpec;

/// The place of each variable's gradient in the buckets. Frozen variables have no elements there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    /// The bucket of each variable, and the range of its elements in the bucket.
    places: Vec<(usize, Range<usize>)>,
    /// True for each variable with a gradient that is known before the backward pass ends.
    early: Vec<bool>,
    /// The number of elements of each bucket.
    lengths: Vec<usize>,
}

impl BucketPlan {
    /// Returns a plan with one bucket, which has all variables in order. No gradient is known early.
    pub fn one(variables: &[VariableSpec]) -> Self {
        Self::in_order(variables, &[], usize::MAX)
    }

    /// Returns a plan with buckets of at most `most` elements; a larger variable has a bucket of its own. The variables
    /// in `order` come first, then the others in order. The gradients of trained variables in `order` are known early.
    /// Unknown and repeated numbers in `order` are ignored.
    pub fn in_order(variables: &[VariableSpec], order: &[usize], most: usize) -> Self {
        let mut plan = Self {
            places: vec![(0, 0..0); variables.len()],
            early: vec![false; variables.len()],
            lengths: vec![0],
        };
        let mut placed = vec![false; variables.len()];
        let named = order.iter().map(|variable| (*variable, true));
        let others = (0..variables.len()).map(|variable| (variable, false));
        for (variable, early) in named.chain(others) {
            let Some(spec) = variables.get(variable) else {
                continue;
            };
            if std::mem::replace(&mut placed[variable], true) || !spec.kind.takes_updates() {
                continue;
            }
            plan.add(variable, spec.elements(), most);
            // Averages are known once the passes have ended.
            plan.early[variable] = early && spec.kind.is_optimized();
        }
        plan
    }

    fn add(&mut self, variable: usize, elements: usize, most: usize) {
        let last = self.lengths.last().copied().unwrap_or_default();
        if last > 0 && last.saturating_add(elements) > most {
            self.lengths.push(0);
        }
        let bucket = self.lengths.len() - 1;
        let length = &mut self.lengths[bucket];
        self.places[variable] = (bucket, *length..*length + elements);
        *length += elements;
    }

    /// Returns the bucket of a variable, and the range of its elements in the bucket.
    pub fn place(&self, variable: usize) -> (usize, Range<usize>) {
        self.places[variable].clone()
    }

    /// Returns whether the gradient of a variable is known before the backward pass ends.
    pub fn is_early(&self, variable: usize) -> bool {
        self.early[variable]
    }

    /// Returns the number of elements of each bucket. There is at least one bucket.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Returns the number of variables with elements in each bucket.
    pub fn variables(&self) -> Vec<usize> {
        let mut counts = vec![0; self.lengths.len()];
        let filled = self.places.iter().filter(|(_, place)| !place.is_empty());
        filled.for_each(|(bucket, _)| counts[*bucket] += 1);
        counts
    }
}

/// The gradients of all variables that are not frozen, with a vector for each bucket.
#[derive(Clone, Debug)]
pub struct BucketedGradients {
    /// `None` if there is a single vector with all variables in order.
    plan: Option<Arc<BucketPlan>>,
    vectors: Vec<Vec<f32>>,
}

impl BucketedGradients {
    /// The gradients in the buckets of a plan.
    pub fn new(plan: Arc<BucketPlan>, vectors: Vec<Vec<f32>>) -> Self {
        Self {
            plan: Some(plan),
            vectors,
        }
    }

    /// Returns the gradients in one vector, in the order of the variables' numbers.
    pub fn in_order(&self, variables: &[VariableSpec]) -> Vec<f32> {
        let mut joined = Vec::with_capacity(self.elements());
        let changing = variables.iter().enumerate();
        for (variable, spec) in changing.filter(|(_, spec)| spec.kind.takes_updates()) {
            let among_all = joined.len()..joined.len() + spec.elements();
            let (bucket, place) = self.place(variable, &among_all);
            joined.extend_from_slice(&self.vectors[bucket][place]);
        }
        joined
    }

    /// Returns the vectors, so that their memory can be used again.
    pub fn into_vectors(self) -> Vec<Vec<f32>> {
        self.vectors
    }

    /// Returns the vectors.
    pub(super) fn vectors_mut(&mut self) -> &mut [Vec<f32>] {
        &mut self.vectors
    }

    /// Returns the index of the vector that has a variable's gradient, and the gradient's range in it. `among_all` is
    /// the range of the variable's elements among those of all variables.
    pub(super) fn place(&self, variable: usize, among_all: &Range<usize>) -> (usize, Range<usize>) {
        match &self.plan {
            Some(plan) => plan.place(variable),
            None => (0, among_all.clone()),
        }
    }

    /// Returns the number of elements.
    pub(super) fn elements(&self) -> usize {
        self.vectors.iter().map(Vec::len).sum()
    }
}

impl From<Vec<f32>> for BucketedGradients {
    /// The gradients in one vector, in the order of the variables' numbers.
    fn from(vector: Vec<f32>) -> Self {
        Self {
            plan: None,
            vectors: vec![vector],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shared_proto::blocks::VariableKind;

    fn variables(elements: &[usize]) -> Vec<VariableSpec> {
        let spec = |(number, elements): (usize, &usize)| VariableSpec {
            name: format!("v{number:02}"),
            shape: vec![*elements],
            kind: match number % 5 {
                3 => VariableKind::Frozen,
                4 => VariableKind::Averaged,
                _ => VariableKind::Trained,
            },
        };
        elements.iter().enumerate().map(spec).collect()
    }

    #[test]
    fn buckets_have_the_named_order_and_then_the_others() {
        let plan = BucketPlan::in_order(&variables(&[3, 4, 5, 6, 7]), &[2, 9, 0, 2], 8);
        assert_eq!(plan.lengths(), [8, 4, 7]);
        assert_eq!(plan.place(2), (0, 0..5));
        assert_eq!(plan.place(0), (0, 5..8));
        assert_eq!(plan.place(1), (1, 0..4));
        assert_eq!(plan.place(4), (2, 0..7));
        let early: Vec<bool> = (0..5).map(|variable| plan.is_early(variable)).collect();
        assert_eq!(early, [true, false, true, false, false]);
        assert_eq!(plan.variables(), [2, 1, 1]);
    }

    proptest! {
        #[test]
        fn each_element_has_a_place_of_its_own(
            elements in proptest::collection::vec(1usize..40, 1..12),
            order in proptest::collection::vec(0usize..14, 0..20), most in 1usize..100,
        ) {
            let variables = variables(&elements);
            let plan = BucketPlan::in_order(&variables, &order, most);
            let mut taken: Vec<Vec<bool>> = plan.lengths().iter().map(|length| vec![false; *length]).collect();
            for (number, spec) in variables.iter().enumerate() {
                let (bucket, place) = plan.place(number);
                let expected = if spec.kind.takes_updates() { spec.elements() } else { 0 };
                prop_assert_eq!(place.len(), expected);
                for element in place {
                    prop_assert!(!std::mem::replace(&mut taken[bucket][element], true));
                }
            }
            prop_assert!(taken.iter().flatten().all(|taken| *taken));
            for (length, count) in plan.lengths().iter().zip(plan.variables()) {
                prop_assert!(*length <= most || count == 1);
            }
        }
    }
}
