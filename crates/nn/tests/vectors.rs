//! Each layer and loss against PyTorch: results and gradients, made by `vectors/make_layer_vectors.py`.

#![allow(clippy::unwrap_used)]

mod gradients;

use std::collections::{BTreeSet, HashMap};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Conv2dConfig, VarBuilder};
use flambeau_nn::{
    Activation, Attention, BatchNorm, BatchNormConfig, Embedding, GroupNorm, LayerNorm, Pool2d,
    avg_pool2d, backward, binary_cross_entropy, conv2d, conv2d_relu, cross_entropy_smooth, gelu,
    global_avg_pool2d, max_pool2d, mean_absolute_error, mean_squared_error, relu6, softmax,
};
use gradients::difference;

/// The tensors of a case, those with gradients as variables.
struct Case {
    name: String,
    tensors: HashMap<String, Tensor>,
    vars: HashMap<String, Var>,
}

impl Case {
    fn all() -> Vec<Self> {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/vectors/layers.safetensors"
        );
        let all = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let names: BTreeSet<&str> = all
            .keys()
            .filter_map(|key| key.strip_suffix("/result"))
            .collect();
        let case = |name: &str| {
            let prefix = format!("{name}/");
            let own = all.iter().filter_map(|(key, tensor)| {
                Some((key.strip_prefix(&prefix)?.to_owned(), tensor.clone()))
            });
            let tensors: HashMap<String, Tensor> = own.collect();
            let names = tensors
                .keys()
                .filter_map(|key| key.strip_prefix("gradient/"));
            let var = |name: &str| (name.to_owned(), Var::from_tensor(&tensors[name]).unwrap());
            let vars = names.map(var).collect();
            Self {
                name: name.to_owned(),
                tensors,
                vars,
            }
        };
        names.into_iter().map(case).collect()
    }

    fn var(&self, name: &str) -> &Tensor {
        &self.vars[name]
    }

    fn ids(&self, name: &str) -> Tensor {
        self.tensors[name].to_dtype(DType::U32).unwrap()
    }

    /// Returns the variables of a layer, each under a name of the case.
    fn layer(&self, names: &[(&str, &str)]) -> VarBuilder<'static> {
        let tensor = |name: &str| match self.vars.get(name) {
            Some(var) => var.as_tensor().clone(),
            None => self.tensors[name].clone(),
        };
        let tensors = names
            .iter()
            .map(|(layer, case)| ((*layer).to_owned(), tensor(case)));
        VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu)
    }

    /// Computes the result with the layer of the case's name.
    fn compute(&self) -> Result<Tensor> {
        let parts: Vec<&str> = self.name.split('/').collect();
        let number = |at: usize| parts[at].parse::<usize>().unwrap();
        let affine = [("weight", "weight"), ("bias", "bias")];
        match parts[0] {
            "conv" => {
                let config = Conv2dConfig {
                    stride: number(2),
                    padding: number(3),
                    dilation: number(4),
                    groups: number(5),
                    ..Conv2dConfig::default()
                };
                let layer = if parts[1] == "relu" {
                    conv2d_relu
                } else {
                    conv2d
                };
                layer(
                    self.var("x"),
                    self.var("weight"),
                    Some(self.var("bias")),
                    &config,
                )
            }
            "pool" => {
                let windows = Pool2d {
                    kernel: number(2),
                    stride: number(3),
                    padding: number(4),
                };
                let pool = if parts[1] == "max" {
                    max_pool2d
                } else {
                    avg_pool2d
                };
                pool(self.var("x"), &windows)
            }
            "global-pool" => global_avg_pool2d(self.var("x")),
            "batch-norm" => self.batch_norm(parts[1], parts[2]),
            "layer-norm" => LayerNorm::new(37, 1e-5, self.layer(&affine))?.forward(self.var("x")),
            "group-norm" => GroupNorm::new(3, 6, 1e-5, self.layer(&affine))?.forward(self.var("x")),
            "gelu" => gelu(self.var("input")),
            "relu6" => relu6(self.var("input")),
            "softmax" => softmax(self.var("x")),
            "embedding" => {
                let layer = Embedding::new(5, 3, self.layer(&[("weight", "weight")]))?;
                layer.forward(&self.ids("ids"))
            }
            "attention" => {
                let names = [
                    ("projection.weight", "in_weight"),
                    ("projection.bias", "in_bias"),
                    ("output.weight", "out_weight"),
                    ("output.bias", "out_bias"),
                ];
                let hidden = |i: u32| {
                    if i % 5 > i / 5 {
                        f32::NEG_INFINITY
                    } else {
                        0.0
                    }
                };
                let mask: Vec<f32> = (0..25).map(hidden).collect();
                let mask = Tensor::from_vec(mask, (5, 5), &Device::Cpu)?;
                Attention::new(8, 2, self.layer(&names))?.forward(self.var("x"), Some(&mask))
            }
            "cross-entropy" => {
                let smoothing = parts[1].parse().unwrap();
                cross_entropy_smooth(self.var("logits"), &self.ids("targets"), smoothing)
            }
            "binary-cross-entropy" => binary_cross_entropy(self.var("x"), self.var("target")),
            "mean-squared-error" => mean_squared_error(self.var("x"), self.var("target")),
            "mean-absolute-error" => mean_absolute_error(self.var("x"), self.var("target")),
            other => panic!("no layer is called {other}"),
        }
    }

    fn batch_norm(&self, pass: &str, activation: &str) -> Result<Tensor> {
        let config = BatchNormConfig {
            activation: match activation {
                "relu" => Activation::Relu,
                "relu6" => Activation::Relu6,
                _ => Activation::Identity,
            },
            ..BatchNormConfig::default()
        };
        let names = ["weight", "bias", "running_mean", "running_var"].map(|name| (name, name));
        let layer = BatchNorm::new(3, config, self.layer(&names))?;
        if pass == "evaluate" {
            return layer.evaluate(self.var("x"));
        }
        let (result, running) = layer.train(self.var("x"))?;
        for (ours, theirs) in [(running.mean, "other/0"), (running.variance, "other/1")] {
            let error = difference(&ours, &self.tensors[theirs]);
            assert!(error < 1e-6, "{} {theirs}: {error:.1e}", self.name);
        }
        Ok(result)
    }
}

#[test]
fn layers_agree_with_pytorch() {
    let cases = Case::all();
    assert_eq!(cases.len(), 38);
    for case in cases {
        let result = case.compute().unwrap();
        let error = difference(&result, &case.tensors["result"]);
        assert!(error < 2e-6, "{}: {error:.1e}", case.name);
        let loss = (&result * &case.tensors["part"])
            .unwrap()
            .sum_all()
            .unwrap();
        let gradients = backward(&loss).unwrap();
        for (name, var) in &case.vars {
            let theirs = &case.tensors[&format!("gradient/{name}")];
            let error = difference(gradients.get(var).unwrap(), theirs);
            assert!(error < 5e-6, "{} {name}: {error:.1e}", case.name);
        }
    }
}
