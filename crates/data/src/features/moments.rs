//! Mean and standard deviation of numbers.

/// The number of partial results to which numbers are added in turn, so that the CPU works on several at once.
const LANES: usize = 4;

/// Mean and variance of numbers, updated number by number (Welford, "Note on a Method for Calculating Corrected Sums of
/// Squares and Products", 1962).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moments {
    count: u64,
    lanes: [Lane; LANES],
}

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    count: f64,
    mean: f64,
    /// The sum of the squared differences from the mean.
    squares: f64,
}

impl Moments {
    /// Adds a number.
    pub(crate) fn add(&mut self, number: f64) {
        let lane = &mut self.lanes[self.count as usize % LANES];
        self.count += 1;
        lane.count += 1.0;
        let before = number - lane.mean;
        lane.mean += before / lane.count;
        lane.squares += before * (number - lane.mean);
    }

    /// Returns the mean; 0 of no numbers.
    pub(crate) fn mean(&self) -> f64 {
        self.all().mean
    }

    /// Returns the mean and the standard deviation. The deviation is 1 if all numbers are equal, or if their squared
    /// differences underflow to 0.
    pub(crate) fn finish(self) -> (f64, f64) {
        let all = self.all();
        match (all.squares / all.count.max(1.0)).sqrt() {
            0.0 => (all.mean, 1.0),
            deviation => (all.mean, deviation),
        }
    }

    /// Combines the results of all lanes (Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance",
    /// 1983).
    fn all(&self) -> Lane {
        // From the first lane on: equal means stay what they are.
        let [first, others @ ..] = &self.lanes;
        let others = others.iter().filter(|lane| lane.count > 0.0);
        others.fold(*first, |all, lane| {
            let count = all.count + lane.count;
            let difference = lane.mean - all.mean;
            Lane {
                count,
                mean: all.mean + difference * lane.count / count,
                squares: all.squares
                    + lane.squares
                    + difference * difference * all.count * lane.count / count,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_deviation_are_those_of_two_passes() {
        for count in [1, 2, 3, 5, 1000] {
            let numbers: Vec<f64> = (0..count).map(|i| 1e9 + f64::from(i * i % 37)).collect();
            let mut moments = Moments::default();
            numbers.iter().for_each(|number| moments.add(*number));
            let mean = numbers.iter().sum::<f64>() / f64::from(count);
            let squares = numbers.iter().map(|number| (number - mean).powi(2));
            let deviation = (squares.sum::<f64>() / f64::from(count)).sqrt();
            let (found, spread) = moments.finish();
            assert!((found - mean).abs() < 1e-6, "{found} {mean}");
            let expected = if deviation == 0.0 { 1.0 } else { deviation };
            assert!((spread - expected).abs() < 1e-6, "{spread} {expected}");
        }
        // Equal numbers have no difference, whatever their size.
        let mut equal = Moments::default();
        (0..10).for_each(|_| equal.add(0.1));
        assert_eq!(equal.finish(), (0.1, 1.0));
    }
}
