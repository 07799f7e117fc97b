//! A backward pass in parts.

#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device::Cpu, Tensor, Var};
use flambeau_nn::{backward, backward_from, cross_entropy, linear, linear_relu};

#[test]
fn the_parts_of_a_backward_pass_give_the_gradients_of_the_whole() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let var = |shape: (usize, usize)| {
            let values = Tensor::randn(0f32, 1.0, shape, &Cpu).unwrap();
            Var::from_tensor(&values.to_dtype(dtype).unwrap()).unwrap()
        };
        let (first, second) = (var((3, 4)), var((2, 3)));
        let bias = |size: usize| Tensor::zeros(size, dtype, &Cpu).unwrap();
        let inputs = var((5, 4)).as_detached_tensor();
        let targets = Tensor::new(&[0u32, 1, 1, 0, 1], &Cpu).unwrap();

        let inner = linear_relu(&inputs, &first, &bias(3)).unwrap();
        let outputs = linear(&inner, &second, &bias(2)).unwrap();
        let whole = backward(&cross_entropy(&outputs, &targets).unwrap()).unwrap();

        let cut = Var::from_tensor(&inner.detach()).unwrap();
        let outputs = linear(&cut, &second, &bias(2)).unwrap();
        let above = backward(&cross_entropy(&outputs, &targets).unwrap()).unwrap();
        let gradient = above.get(&cut).unwrap();
        let below = backward_from(&inner, gradient).unwrap();
        for (found, of) in [(&above, &second), (&below, &first)] {
            let numbers = |tensor: &Tensor| {
                let tensor = tensor.to_dtype(DType::F64).unwrap();
                tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap()
            };
            let expected = numbers(whole.get(of).unwrap());
            assert!(expected.iter().any(|number| *number != 0.0));
            assert_eq!(numbers(found.get(of).unwrap()), expected, "{dtype:?}");
        }
    }
}

#[test]
fn a_gradient_of_another_shape_is_refused() {
    let outputs = Var::zeros((2, 3), DType::F32, &Cpu).unwrap();
    let gradient = Tensor::zeros((3, 2), DType::F32, &Cpu).unwrap();
    let error = backward_from(&outputs, &gradient).unwrap_err().to_string();
    assert!(
        error.contains("[3, 2] does not fit outputs of shape [2, 3]"),
        "{error}"
    );
}
