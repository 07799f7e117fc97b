//! Initial values, drawn by a generator that can be seeded.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Error, Shape, Tensor, Var, bail};
use candle_nn::init::{Init, NormalOrUniform};
use candle_nn::var_builder::SimpleBackend;
use nn::FROZEN_STATISTICS;
use rand::SeedableRng;
use rand::distr::{Distribution, Uniform};
use rand_chacha::ChaCha8Rng;
use rand_distr::Normal;
use shared_proto::blocks::VariableKind;
use shared_proto::hash::{FNV_START, fnv1a};

/// Creates a variable when a model asks for it.
#[derive(Clone)]
pub(super) struct Maker {
    seed: u64,
    kind_of: Arc<dyn Fn(&str) -> VariableKind + Send + Sync>,
    made: Arc<Mutex<BTreeMap<String, Var>>>,
}

impl Maker {
    /// `kind_of` returns the kind of the variable of a name.
    pub(super) fn new(
        seed: u64,
        kind_of: impl Fn(&str) -> VariableKind + Send + Sync + 'static,
    ) -> Self {
        Self {
            seed,
            kind_of: Arc::new(kind_of),
            made: Arc::default(),
        }
    }

    /// Returns the kind of the variable of a name.
    pub(super) fn kind_of(&self, name: &str) -> VariableKind {
        (self.kind_of)(name)
    }

    /// Returns a variable as the model gets it. candle computes no gradients for a frozen one.
    fn handed_out(&self, name: &str, var: &Var) -> Tensor {
        match self.kind_of(name) == VariableKind::Frozen && !is_measured(name) {
            true => var.as_detached_tensor(),
            false => var.as_tensor().clone(),
        }
    }

    /// Takes the created variables, sorted by name.
    pub(super) fn take(&self) -> BTreeMap<String, Var> {
        std::mem::take(&mut *self.made())
    }

    fn made(&self) -> MutexGuard<'_, BTreeMap<String, Var>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimpleBackend for Maker {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        if dtype != DType::F32 {
            bail!("variable {name:?} is asked for as {dtype:?}; variables are F32");
        }
        let mut made = self.made();
        if let Some(var) = made.get(name) {
            if var.shape() != &shape {
                bail!(
                    "variable {name:?} is asked for twice, with shapes {:?} and {:?}; give one of them another name",
                    var.dims(),
                    shape.dims()
                );
            }
            return Ok(self.handed_out(name, var));
        }
        let values = initial_values(self.seed, name, &shape, init)?;
        let var = Var::from_vec(values, shape, device)?;
        let tensor = self.handed_out(name, &var);
        made.insert(name.to_owned(), var);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        match self.made().get(name) {
            Some(var) => Ok(self.handed_out(name, var)),
            None => bail!("variable {name:?} is asked for without a shape; ask with `get`"),
        }
    }

    /// Also returns true for [`FROZEN_STATISTICS`] of a layer whose running statistics are frozen. The layer gets these
    /// statistics as variables nevertheless: candle's own layer makes a copy of any other tensor, and would not see
    /// later values.
    fn contains_tensor(&self, name: &str) -> bool {
        if let Some(layer) = name.strip_suffix(FROZEN_STATISTICS) {
            return ["running_mean", "running_var"].iter().all(|statistic| {
                self.kind_of(&format!("{layer}{statistic}")) == VariableKind::Frozen
            });
        }
        self.made().contains_key(name)
    }
}

/// Returns whether the model itself changes the variable of a name while it computes.
pub(super) fn is_measured(name: &str) -> bool {
    VariableKind::by_name(name) == VariableKind::Averaged
}

/// Returns values as candle's `Init::var` does, from a generator that can be seeded.
fn initial_values(
    seed: u64,
    name: &str,
    shape: &Shape,
    init: Init,
) -> candle_core::Result<Vec<f32>> {
    let count = shape.elem_count();
    if count == 0 {
        bail!(
            "variable {name:?} of shape {:?} is empty; give each dimension a size of at least 1",
            shape.dims()
        );
    }
    let impossible = |error: &dyn std::fmt::Display| {
        Error::msg(format!("variable {name:?} cannot have {init:?}: {error}"))
    };
    let uniform = |low: f64, high: f64| {
        let values = Uniform::new(low as f32, high as f32).map_err(|e| impossible(&e))?;
        Ok(sample(seed, name, values, count))
    };
    let normal = |mean: f64, deviation: f64| {
        let values = Normal::new(mean as f32, deviation as f32).map_err(|e| impossible(&e))?;
        Ok(sample(seed, name, values, count))
    };
    match init {
        Init::Const(value) => Ok(vec![value as f32; count]),
        Init::Uniform { lo, up } => uniform(lo, up),
        Init::Randn { mean, stdev } => normal(mean, stdev),
        Init::Kaiming {
            dist,
            fan,
            non_linearity,
        } => {
            let deviation = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => normal(0.0, deviation),
                NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * deviation;
                    uniform(-bound, bound)
                }
            }
        }
    }
}

fn sample(seed: u64, name: &str, values: impl Distribution<f32>, count: usize) -> Vec<f32> {
    let hash = fnv1a(FNV_START, name.as_bytes());
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&hash.to_le_bytes());
    let random = ChaCha8Rng::from_seed(key);
    values.sample_iter(random).take(count).collect()
}
