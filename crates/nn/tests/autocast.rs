//! Mixed precision.

#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::init::DEFAULT_KAIMING_NORMAL;
use candle_nn::{Conv2dConfig, VarBuilder, VarMap};
use flambeau_nn::{Attention, Conv2d, Linear, autocast, backward, matmul};

type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// Returns each layer that computes products, with inputs for it.
fn layers(map: &VarMap) -> Vec<(&'static str, Layer, Tensor)> {
    let vars = |name: &str| VarBuilder::from_varmap(map, DType::F32, &Device::Cpu).pp(name);
    let linear = Linear::new(24, 10, vars("linear")).unwrap();
    let config = Conv2dConfig {
        padding: 1,
        ..Conv2dConfig::default()
    };
    let conv = Conv2d::new(3, 5, 3, config, vars("conv")).unwrap();
    let config = Conv2dConfig {
        groups: 4,
        stride: 2,
        ..config
    };
    let grouped = Conv2d::new(4, 8, 3, config, vars("grouped")).unwrap();
    let attention = Attention::new(24, 3, vars("attention")).unwrap();
    let weight = vars("matmul").get_with_hints((24, 7), "weight", DEFAULT_KAIMING_NORMAL);
    let weight = weight.unwrap();
    let inputs = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap();
    vec![
        (
            "linear",
            Box::new(move |x| linear.forward_relu(x)),
            inputs(&[6, 24]),
        ),
        (
            "conv",
            Box::new(move |x| conv.forward(x)),
            inputs(&[2, 3, 8, 9]),
        ),
        (
            "grouped",
            Box::new(move |x| grouped.forward_relu(x)),
            inputs(&[2, 4, 8, 8]),
        ),
        (
            "attention",
            Box::new(move |x| attention.forward(x, None)),
            inputs(&[2, 5, 24]),
        ),
        (
            "matmul",
            Box::new(move |x| matmul(x, &weight)),
            inputs(&[6, 24]),
        ),
    ]
}

fn largest(tensor: &Tensor) -> f32 {
    let values = tensor.abs().unwrap().flatten_all().unwrap();
    values.max(0).unwrap().to_scalar().unwrap()
}

/// A number of bf16 has eight binary digits, so a product of rounded operands differs by some thousandths of its largest
/// element: more than by rounding in `f32`, less than by a fault.
const ROUNDING: std::ops::Range<f32> = 1e-5..5e-2;

#[test]
fn results_and_gradients_are_those_of_f32_but_for_rounding() {
    let map = VarMap::new();
    for (name, layer, inputs) in layers(&map) {
        let inputs = Var::from_tensor(&inputs).unwrap();
        let computed = || {
            let outputs = layer(&inputs).unwrap();
            let loss = outputs.sqr().and_then(|y| y.sum_all()).unwrap();
            (outputs, backward(&loss).unwrap())
        };
        let (exact, exact_gradients) = computed();
        let (rounded, gradients) = autocast(DType::BF16, computed);
        assert_eq!(rounded.dtype(), DType::F32, "{name}");
        let differs = largest(&(&rounded - &exact).unwrap()) / largest(&exact);
        assert!(ROUNDING.contains(&differs), "{name}: {differs}");

        let vars = map.data().lock().unwrap();
        let of_layer = vars.iter().filter(|(var, _)| var.starts_with(name));
        let of_layer = of_layer.map(|(_, var)| var).chain([&inputs]);
        let (mut differs, mut most) = (0f32, 0f32);
        for var in of_layer {
            let (exact, rounded) = (exact_gradients.get(var), gradients.get(var));
            let (exact, rounded) = (exact.unwrap(), rounded.unwrap());
            assert_eq!(rounded.dtype(), DType::F32, "{name}");
            differs = differs.max(largest(&(rounded - exact).unwrap()));
            most = most.max(largest(exact));
        }
        let differs = differs / most;
        assert!(ROUNDING.contains(&differs), "{name}: gradients, {differs}");
    }
}

/// A sum in bf16 does not grow beyond 256 times a term.
#[test]
fn the_gradient_of_a_bias_is_summed_in_f32() {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let linear = Linear::new(4, 3, vars.pp("linear")).unwrap();
    let conv = Conv2d::new(1, 3, 1, Conv2dConfig::default(), vars.pp("conv")).unwrap();
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    let outputs = autocast(DType::BF16, || {
        let rows = linear.forward(&ones(&[5000, 4])).unwrap();
        (rows, conv.forward(&ones(&[50, 1, 10, 10])).unwrap())
    });
    let loss = (outputs.0.sum_all().unwrap() + outputs.1.sum_all().unwrap()).unwrap();
    let gradients = backward(&loss).unwrap();
    for bias in ["linear.bias", "conv.bias"] {
        let bias = &map.data().lock().unwrap()[bias];
        let gradient = gradients.get(bias).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(gradient, [5000.0; 3]);
    }
}

#[test]
fn products_have_their_type_back_afterwards() {
    let map = VarMap::new();
    let (_, layer, inputs) = layers(&map).remove(0);
    let computed = || layer(&inputs).unwrap().to_vec2::<f32>().unwrap();
    let exact = computed();
    let rounded = autocast(DType::BF16, computed);
    assert_ne!(rounded, exact);
    assert_eq!(computed(), exact);
    let within = || (autocast(DType::F32, computed), computed());
    assert_eq!(autocast(DType::BF16, within), (exact.clone(), rounded));
    let panicked = std::panic::catch_unwind(|| autocast(DType::BF16, || panic!("within")));
    assert!(panicked.is_err());
    assert_eq!(computed(), exact);
}
