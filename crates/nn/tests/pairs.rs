//! Sums of vectors and of their pairs, against candle's operations and finite differences.

#![allow(clippy::unwrap_used)]

mod gradients;

use candle_core::DType;
use flambeau_nn::{sum_of_pairs, sum_of_vectors};
use gradients::{Source, check, difference};

#[test]
fn sums_are_those_of_candle() {
    let mut source = Source::new();
    for shape in [[3, 4, 5], [1, 1, 1], [7, 26, 16], [2, 3, 33]] {
        for (dtype, most) in [(DType::F64, 1e-13), (DType::F32, 1e-5)] {
            let x = source.tensor(&shape, dtype);
            let sum = x.sum(1).unwrap();
            assert!(difference(&sum_of_vectors(&x).unwrap(), &sum) < most);
            let squares = x.sqr().unwrap().sum(1).unwrap();
            let pairs = (sum.sqr().unwrap() - squares).unwrap();
            let pairs = (pairs.sum_keepdim(1).unwrap() * 0.5).unwrap();
            assert!(difference(&sum_of_pairs(&x).unwrap(), &pairs) < most);
        }
    }
    // A transposed input is made contiguous.
    let x = source.tensor(&[4, 3, 5], DType::F64);
    let transposed = x.transpose(0, 1).unwrap();
    let expected = transposed.sum(1).unwrap();
    assert!(difference(&sum_of_vectors(&transposed).unwrap(), &expected) < 1e-13);
    assert!(sum_of_pairs(&expected).is_err());
}

#[test]
fn gradients_agree_with_finite_differences() {
    let mut source = Source::new();
    let x = source.var(&[3, 4, 5], DType::F64);
    let (of_sums, of_pairs) = (
        source.tensor(&[3, 5], DType::F64),
        source.tensor(&[3, 1], DType::F64),
    );
    check("sum", &[&x], || {
        (sum_of_vectors(&x)? * &of_sums)?.sqr()?.sum_all()
    });
    check("pairs", &[&x], || {
        (sum_of_pairs(&x)? * &of_pairs)?.sum_all()
    });
}
