//! A series of points with a maximum length. When it is full, neighbouring points are merged in pairs.

/// A point of a series.
pub(super) trait Point: Clone {
    /// Merges a later point into this one. `for_records` is the number of records that this point stands for so far.
    fn merge(&mut self, later: Self, for_records: u32);
}

/// Points in chronological order.
#[derive(Clone, Debug)]
pub(super) struct Series<T, const MOST: usize> {
    points: Vec<T>,
    /// The number of records that each point stands for. The last point may stand for fewer.
    each: u32,
    /// The number of records that the last point stands for.
    last: u32,
}

impl<T, const MOST: usize> Default for Series<T, MOST> {
    fn default() -> Self {
        Self {
            points: Vec::new(),
            each: 1,
            last: 0,
        }
    }
}

impl<T: Point, const MOST: usize> Series<T, MOST> {
    pub(super) fn points(&self) -> &[T] {
        &self.points
    }

    pub(super) fn add(&mut self, point: T) {
        if let Some(last) = self.points.last_mut().filter(|_| self.last < self.each) {
            last.merge(point, self.last);
            self.last += 1;
            return;
        }
        if self.points.len() >= MOST {
            self.halve();
        }
        self.points.push(point);
        self.last = 1;
    }

    /// Keeps only the points that `satisfies` accepts. The next record starts a new point.
    pub(super) fn retain(&mut self, satisfies: impl FnMut(&T) -> bool) {
        self.points.retain(satisfies);
        self.last = self.each;
    }

    fn halve(&mut self) {
        let pairs = self.points.chunks(2);
        let merged = pairs.filter_map(|pair| {
            let (first, rest) = pair.split_first()?;
            let mut first = first.clone();
            for later in rest {
                first.merge(later.clone(), 1);
            }
            Some(first)
        });
        self.points = merged.collect();
        self.each = self.each.saturating_mul(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Point for f64 {
        fn merge(&mut self, later: Self, for_records: u32) {
            let records = f64::from(for_records);
            *self = (*self * records + later) / (records + 1.0);
        }
    }

    #[test]
    fn each_point_is_the_mean_of_as_many_records() {
        let mut series = Series::<f64, 4>::default();
        for record in 0..16 {
            series.add(record.into());
        }
        assert_eq!(series.points(), [1.5, 5.5, 9.5, 13.5]);
        series.add(16.0);
        assert_eq!(series.points(), [3.5, 11.5, 16.0]);
        series.add(18.0);
        assert_eq!(series.points(), [3.5, 11.5, 17.0]);
        series.retain(|point| *point < 12.0);
        series.add(12.0);
        assert_eq!(series.points(), [3.5, 11.5, 12.0]);
    }

    #[test]
    fn a_series_stays_within_its_limit() {
        let mut series = Series::<f64, 6>::default();
        for record in 0..1000 {
            series.add(record.into());
            assert!(series.points().len() <= 6);
            assert!(series.points().is_sorted());
        }
    }
}
