//! The distribution of the values of a variable, in the buckets that TensorFlow uses. On both sides of 0, the limits of
//! the buckets grow by a tenth from one to the next.

use std::sync::LazyLock;

use super::format::HistogramProto;

/// The smallest limit above 0.
const SMALLEST: f64 = 1e-12;
/// The limits grow up to this value. The last one is `f64::MAX`.
const LARGEST: f64 = 1e20;
/// The ratio of neighbouring limits.
const GROWTH: f64 = 1.1;

/// The upper ends of all buckets, ascending.
static LIMITS: LazyLock<Vec<f64>> = LazyLock::new(|| {
    let mut positive = Vec::new();
    let mut limit = SMALLEST;
    while limit < LARGEST {
        positive.push(limit);
        limit *= GROWTH;
    }
    positive.push(f64::MAX);
    let negative = positive.iter().rev().map(|limit| -limit);
    negative
        .chain([0.0])
        .chain(positive.iter().copied())
        .collect()
});

/// The distribution of the values that were added so far.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    min: f64,
    max: f64,
    number: u64,
    sum: f64,
    sum_squares: f64,
    counts: Vec<u64>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            number: 0,
            sum: 0.0,
            sum_squares: 0.0,
            counts: vec![0; LIMITS.len()],
        }
    }
}

impl Histogram {
    /// Adds values. Those that are NaN or infinite have no bucket, and are left out.
    pub(super) fn add(&mut self, values: impl Iterator<Item = f32>) {
        for value in values.filter(|value| value.is_finite()) {
            let value = f64::from(value);
            self.min = self.min.min(value);
            self.max = self.max.max(value);
            self.number += 1;
            self.sum += value;
            self.sum_squares += value * value;
            // A bucket has its lower end, but not its upper one.
            let bucket = LIMITS.partition_point(|limit| *limit <= value);
            if let Some(count) = self.counts.get_mut(bucket) {
                *count += 1;
            }
        }
    }

    /// Returns the histogram from the bucket before the first one with a value to the last one with a value. `None` if
    /// there are no values.
    pub(super) fn to_proto(&self) -> Option<HistogramProto> {
        let first = self.counts.iter().position(|count| *count > 0)?;
        let last = self.counts.iter().rposition(|count| *count > 0)?;
        // Readers take the limit before a bucket as its lower end, so an empty bucket comes first.
        let first = first.saturating_sub(1);
        let counts = self.counts.get(first..=last)?;
        Some(HistogramProto {
            min: self.min,
            max: self.max,
            num: self.number as f64,
            sum: self.sum,
            sum_squares: self.sum_squares,
            bucket_limit: LIMITS.get(first..=last)?.to_vec(),
            bucket: counts.iter().map(|count| *count as f64).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_is_between_the_limits_of_its_bucket() {
        let values = [-3e30f32, -2.5, -1e-20, 0.0, 1e-13, 0.04, 0.5, 7.0, f32::MAX];
        for value in values {
            let mut histogram = Histogram::default();
            histogram.add([value].into_iter());
            let proto = histogram.to_proto().unwrap();
            let [.., count] = proto.bucket[..] else {
                panic!("no bucket")
            };
            assert_eq!(count, 1.0, "{value}");
            let [lower @ .., upper] = &proto.bucket_limit[..] else {
                panic!("no limit")
            };
            assert!(f64::from(value) < *upper, "{value} {upper}");
            let lower = lower.last().copied().unwrap_or(f64::NEG_INFINITY);
            assert!(lower <= f64::from(value), "{value} {lower}");
        }
    }

    #[test]
    fn sums_are_of_all_finite_values() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.to_proto(), None);
        histogram.add([1.0, f32::NAN, -3.0, f32::INFINITY].into_iter());
        histogram.add([0.5; 2].into_iter());
        let proto = histogram.to_proto().unwrap();
        assert_eq!((proto.min, proto.max, proto.num), (-3.0, 1.0, 4.0));
        assert_eq!((proto.sum, proto.sum_squares), (-1.0, 10.5));
        assert_eq!(proto.bucket.iter().sum::<f64>(), 4.0);
        assert_eq!(proto.bucket.len(), proto.bucket_limit.len());
    }
}
