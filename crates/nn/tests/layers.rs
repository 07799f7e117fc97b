//! Activations, softmax, dropout, embeddings and attention.

#![allow(clippy::unwrap_used)]

mod gradients;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use flambeau_nn::{
    Attention, DropoutStream, Embedding, add_relu, backward, cross_entropy, dropout, gelu,
    mean_squared_error, relu, relu6, softmax,
};
use gradients::{Source, check, difference, values};

type Function = fn(&Tensor) -> Result<Tensor>;

#[test]
fn functions_of_each_element_agree_with_finite_differences() {
    let mut source = Source::new();
    let functions: [(&str, Function); 4] = [
        ("relu", relu),
        ("relu6", relu6),
        ("gelu", gelu),
        ("softmax", softmax),
    ];
    for shape in [&[1][..], &[5, 7], &[2, 3, 33]] {
        for (name, function) in functions {
            let x = (source.tensor(shape, DType::F64) * 8.0).unwrap();
            let x = Var::from_tensor(&x).unwrap();
            let part = source.tensor(shape, DType::F64);
            check(name, &[&x], || (function(&x)? * &part)?.sum_all());
        }
        let (a, b) = (source.var(shape, DType::F64), source.var(shape, DType::F64));
        let part = source.tensor(shape, DType::F64);
        check("add_relu", &[&a, &b], || {
            (add_relu(&a, &b)? * &part)?.sum_all()
        });
    }
}

#[test]
fn functions_of_f32_agree_with_f64() {
    let x: Vec<f32> = (-4000..4000).map(|i| i as f32 * 0.03).collect();
    let x = Var::new(x, &Device::Cpu).unwrap();
    let exact = Var::from_tensor(&x.to_dtype(DType::F64).unwrap()).unwrap();
    let gradient = |x: &Var, function: Function| {
        let y = function(x).unwrap();
        let loss = (&y * &y).unwrap().sum_all().unwrap();
        (y, backward(&loss).unwrap().get(x).unwrap().clone())
    };
    for function in [gelu, softmax] {
        let (ours, exact) = (gradient(&x, function), gradient(&exact, function));
        for (ours, exact) in [(ours.0, exact.0), (ours.1, exact.1)] {
            for (ours, exact) in values(&ours).iter().zip(values(&exact)) {
                assert!(
                    (ours - exact).abs() < 1e-6 * exact.abs().max(1.0),
                    "{ours} {exact}"
                );
            }
        }
    }
    // The exponential over its whole range, by ratios of a softmax of two.
    for i in 0..860 {
        let apart = i as f64 * -0.1;
        let pair = Tensor::new(&[0f32, apart as f32], &Device::Cpu).unwrap();
        let shares = values(&softmax(&pair).unwrap());
        let exact = f64::from(apart as f32).exp();
        assert!(
            (shares[1] / shares[0] / exact - 1.0).abs() < 1e-6,
            "{apart}"
        );
    }
}

#[test]
fn activations_keep_nan_and_have_pytorchs_gradients_at_limits() {
    let x = Var::new(&[0f32, 6.0, f32::NAN, -1.0, 7.0, 3.0], &Device::Cpu).unwrap();
    let y = relu6(&x).unwrap().to_vec1::<f32>().unwrap();
    assert!(y[2].is_nan());
    assert_eq!([y[0], y[1], y[3], y[4], y[5]], [0.0, 6.0, 0.0, 6.0, 3.0]);
    let gradients = backward(&relu6(&x).unwrap().sum_all().unwrap()).unwrap();
    let gradient = gradients.get(&x).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(
        [
            gradient[0],
            gradient[1],
            gradient[3],
            gradient[4],
            gradient[5]
        ],
        [0.0, 0.0, 0.0, 0.0, 1.0]
    );
    for function in [relu, gelu, softmax] {
        let y = function(&x).unwrap().to_vec1::<f32>().unwrap();
        assert!(y[2].is_nan());
    }
}

#[test]
fn a_masked_key_takes_no_part_in_softmax() {
    let x = Tensor::new(&[[0f32, f32::NEG_INFINITY, 0.0]], &Device::Cpu).unwrap();
    let y: Vec<Vec<f32>> = softmax(&x).unwrap().to_vec2().unwrap();
    assert_eq!(y, [[0.5, 0.0, 0.5]]);
}

#[test]
fn dropout_is_a_function_of_seed_step_and_rank() {
    let x = Var::ones((100, 100), DType::F32, &Device::Cpu).unwrap();
    let dropped = |seed, step, rank| {
        let mut stream = DropoutStream::new(seed, step, rank);
        let first = dropout(&x, 0.25, Some(&mut stream)).unwrap();
        let second = dropout(&x, 0.25, Some(&mut stream)).unwrap();
        assert_ne!(values(&first), values(&second));
        first
    };
    let y = dropped(1, 2, 3);
    assert_eq!(values(&y), values(&dropped(1, 2, 3)));
    for other in [(0, 2, 3), (1, 0, 3), (1, 2, 0), (3, 2, 1)] {
        assert_ne!(values(&y), values(&dropped(other.0, other.1, other.2)));
    }
    let kept = values(&y).iter().filter(|y| **y != 0.0).count();
    assert!((7300..7700).contains(&kept), "{kept}");
    assert!(
        values(&y)
            .iter()
            .all(|y| *y == 0.0 || (*y - 4.0 / 3.0).abs() < 1e-6)
    );
    // What is kept has the gradient.
    let gradients = backward(&y.sum_all().unwrap()).unwrap();
    assert_eq!(values(gradients.get(&x).unwrap()), values(&y));
    // NaN is dropped like other numbers, in all types.
    for dtype in [DType::F32, DType::BF16] {
        let x = Tensor::full(f32::NAN, (100, 100), &Device::Cpu).unwrap();
        let x = Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap();
        let mut stream = DropoutStream::new(1, 2, 3);
        let z = dropout(&x, 0.25, Some(&mut stream)).unwrap();
        let pairs = || values(&z).into_iter().zip(values(&y));
        assert!(pairs().all(|(z, y)| z.is_nan() == (y != 0.0)));
        let gradients = backward(&z.sum_all().unwrap()).unwrap();
        let of_x = values(gradients.get(&x).unwrap());
        let near = |(of_x, y): (&f64, &f64)| (of_x - y).abs() < 0.01;
        assert!(of_x.iter().zip(&values(&y)).all(near));
    }
    // Evaluation.
    let same = dropout(&x, 0.25, None).unwrap();
    assert_eq!(same.id(), x.as_tensor().id());
    assert!(dropout(&x, 1.0, None).is_err());
}

#[test]
fn embeddings_agree_with_finite_differences() {
    let mut source = Source::new();
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
    let layer = Embedding::new(5, 3, vars).unwrap();
    let weight = map.data().lock().unwrap()["weight"].clone();
    let ids = Tensor::new(&[[0u32, 4, 4], [1, 4, 0]], &Device::Cpu).unwrap();
    let part = source.tensor(&[2, 3, 3], DType::F64);
    check("embedding", &[&weight], || {
        (layer.forward(&ids)? * &part)?.sum_all()
    });
    let rows = layer.forward(&ids).unwrap();
    let row = rows.get(0).unwrap().get(1).unwrap();
    assert_eq!(values(&row), values(&weight.get(4).unwrap()));
    let ids = Tensor::new(&[5u32], &Device::Cpu).unwrap();
    let error = layer.forward(&ids).unwrap_err().to_string();
    assert!(error.contains("no row 5; there are 5"), "{error}");
}

#[test]
fn attention_agrees_with_finite_differences() {
    let mut source = Source::new();
    let map = VarMap::new();
    let vars = || VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
    let layer = Attention::new(6, 2, vars()).unwrap();
    let all = map.data().lock().unwrap().clone();
    let x = source.var(&[2, 4, 6], DType::F64);
    let part = source.tensor(&[2, 4, 6], DType::F64);
    // Each position sees itself and those before it.
    let mask: Vec<f64> = (0..16)
        .map(|i| {
            if i % 4 > i / 4 {
                f64::NEG_INFINITY
            } else {
                0.0
            }
        })
        .collect();
    let mask = Tensor::from_vec(mask, (4, 4), &Device::Cpu).unwrap();
    let mut all: Vec<&Var> = all.values().collect();
    all.push(&x);
    for mask in [None, Some(&mask)] {
        check("attention", &all, || {
            (layer.forward(&x, mask)? * &part)?.sum_all()
        });
    }
    let before = layer.forward(&x, Some(&mask)).unwrap();
    let changed = x.slice_assign(&[0..2, 3..4, 0..6], &source.tensor(&[2, 1, 6], DType::F64));
    let after = layer.forward(&changed.unwrap(), Some(&mask)).unwrap();
    let first = |tensor: &Tensor| tensor.narrow(D::Minus2, 0, 3).unwrap();
    assert!(difference(&first(&before), &first(&after)) < 1e-12);
    assert!(Attention::new(6, 4, vars()).is_err());
}

#[test]
fn a_mask_that_is_larger_than_the_scores_is_an_error() {
    let vars = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let layer = Attention::new(4, 2, vars).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    // Of one position there is one score; these masks would make three results of it.
    let x = zeros(&[2, 1, 4]);
    assert!(layer.forward(&x, Some(&zeros(&[3, 1]))).is_err());
    let y = layer.forward(&x, Some(&zeros(&[1, 1]))).unwrap();
    assert_eq!(y.dims(), [2, 1, 4]);
    // No samples are no error.
    let none = layer.forward(&zeros(&[0, 3, 4]), Some(&zeros(&[3, 3])));
    assert_eq!(none.unwrap().dims(), [0, 3, 4]);
}

#[test]
fn functions_of_no_elements_are_no_error() {
    let functions: [Function; 4] = [relu, relu6, gelu, softmax];
    for dtype in [DType::F32, DType::BF16] {
        for shape in [[0, 3], [2, 0]] {
            let x = Tensor::zeros(&shape, dtype, &Device::Cpu).unwrap();
            for function in functions {
                assert_eq!(function(&x).unwrap().dims(), shape);
            }
            assert_eq!(add_relu(&x, &x).unwrap().dims(), shape);
            let mut stream = DropoutStream::new(1, 2, 3);
            let y = dropout(&x, 0.5, Some(&mut stream)).unwrap();
            assert_eq!(y.dims(), shape);
        }
    }
}

#[test]
fn functions_of_integers_are_an_error() {
    let x = Tensor::zeros((2, 3), DType::U8, &Device::Cpu).unwrap();
    let dropped: Function = |x| dropout(x, 0.5, Some(&mut DropoutStream::new(1, 2, 3)));
    let error: Function = |x| mean_squared_error(x, x);
    let entropy: Function = |x| cross_entropy(x, &Tensor::zeros(2, DType::U32, &Device::Cpu)?);
    for function in [gelu, softmax, dropped, error, entropy] {
        let error = function(&x).unwrap_err().to_string();
        assert!(error.contains("no floating-point numbers"), "{error}");
    }
}

#[test]
fn functions_of_other_types_agree_with_f32() {
    let mut source = Source::new();
    let functions: [Function; 5] = [relu, relu6, gelu, softmax, |x| add_relu(x, x)];
    let x = (source.tensor(&[4, 9], DType::F32) * 8.0).unwrap();
    let other = x.to_dtype(DType::BF16).unwrap();
    let (x, other) = (
        Var::from_tensor(&other.to_dtype(DType::F32).unwrap()).unwrap(),
        Var::from_tensor(&other).unwrap(),
    );
    for function in functions {
        let gradient = |x: &Var| {
            let y = function(x).unwrap();
            let gradients = backward(&y.sqr().unwrap().sum_all().unwrap()).unwrap();
            (y, gradients.get(x).unwrap().clone())
        };
        let ((y, of_x), (others, of_other)) = (gradient(&x), gradient(&other));
        assert!(difference(&others, &y) < 0.02);
        assert!(difference(&of_other, &of_x) < 0.03);
    }
}
