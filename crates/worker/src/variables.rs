//! A model's variables, and the only place where bytes meet candle's memory.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{
    CpuStorage, DType, Device, Error, InplaceOp1, Layout, Shape, Storage, Tensor, Var, bail,
};
use candle_nn::init::{Init, NormalOrUniform};
use candle_nn::var_builder::{SimpleBackend, VarBuilder};
use ps_client::Gradients;
use rand::SeedableRng;
use rand::distr::{Distribution, Uniform};
use rand_chacha::ChaCha8Rng;
use rand_distr::Normal;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use sha2::{Digest, Sha256};
use shared_proto::blocks::VariableSpec;
use shared_proto::kernel::Kernel;
use shared_proto::payload::{self, Dtype, Elements};

use crate::model::{ModelError, plain};

/// SHA-256 of a file's content.
///
/// # Errors
/// [`VariablesError::File`] if it cannot be read.
pub(crate) fn digest_of(path: &Path) -> Result<Bytes, VariablesError> {
    let read = || {
        let mut hash = Sha256::new();
        let mut file = BufReader::with_capacity(1 << 20, File::open(path)?);
        loop {
            let part = file.fill_buf()?;
            if part.is_empty() {
                return Ok(Bytes::copy_from_slice(&hash.finalize()));
            }
            hash.update(part);
            let length = part.len();
            file.consume(length);
        }
    };
    read().map_err(|source| VariablesError::File {
        action: "read back",
        path: path.to_owned(),
        source,
    })
}

/// A model's variables, sorted by name: a variable's number is the same in every process.
#[derive(Debug)]
pub struct Variables(Vec<(VariableSpec, Var)>);

impl Variables {
    /// Builds a model on variables that are made as it asks for them. Each one's
    /// initial values are drawn by the seed and its name, whatever else there is: candle's own cannot
    /// be seeded on the CPU.
    ///
    /// # Errors
    /// The errors of `build`.
    pub fn build<M>(
        seed: u64,
        device: &Device,
        build: impl FnOnce(VarBuilder) -> Result<M, ModelError>,
    ) -> Result<(Self, M), ModelError> {
        let maker = Maker {
            seed,
            made: Arc::default(),
        };
        let backend = Box::new(maker.clone());
        let model = build(VarBuilder::from_backend(
            backend,
            DType::F32,
            device.clone(),
        ))?;
        let made = std::mem::take(&mut *maker.made());
        let spec = |(name, var): (String, Var)| {
            let shape = var.dims().to_vec();
            (VariableSpec { name, shape }, var)
        };
        Ok((Self(made.into_iter().map(spec).collect()), model))
    }

    /// Names and shapes.
    pub fn specs(&self) -> Vec<VariableSpec> {
        self.0.iter().map(|(spec, _)| spec.clone()).collect()
    }

    /// candle's variables, in the same order.
    pub fn vars(&self) -> Vec<Var> {
        self.0.iter().map(|(_, var)| var.clone()).collect()
    }

    /// All elements of a variable, in little-endian `f32`.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if there is no such variable, or candle's.
    pub fn values(&self, variable: usize) -> Result<Bytes, VariablesError> {
        let (_, var) = self.find(variable)?;
        Ok(payload::share(&elements(var)?.into()))
    }

    /// Checks that no element is NaN or infinite.
    ///
    /// # Errors
    /// [`VariablesError::NonFinite`] names the first variable that has such an element, or candle's.
    pub fn check_finite(&self) -> Result<(), VariablesError> {
        for (number, (spec, _)) in self.0.iter().enumerate() {
            if !payload::all_finite(payload::elements(&self.values(number)?)) {
                let variable = spec.clone();
                return Err(VariablesError::NonFinite { variable });
            }
        }
        Ok(())
    }

    /// Overwrites elements of a variable from `start` on, in its own memory.
    ///
    /// # Errors
    /// [`VariablesError::Range`] if the variable has no such elements, or candle's.
    pub fn write(
        &self,
        variable: usize,
        start: usize,
        values: &Elements,
    ) -> Result<(), VariablesError> {
        let (spec, var) = self.find(variable)?;
        let end = start.checked_add(values.len());
        if end.is_none_or(|end| end > spec.elements()) {
            return Err(VariablesError::Range(format!(
                "{} values from element {start} on do not fit into {spec}, which has {}",
                values.len(),
                spec.elements()
            )));
        }
        Ok(var.inplace_op1(&Overwrite { start, values })?)
    }

    /// Takes each variable's gradient out of `store`, scaled so that their global norm is at most
    /// `clip_norm`.
    ///
    /// # Errors
    /// [`VariablesError::NoGradient`] names a variable that has none, or candle's.
    pub fn gradients(
        &self,
        store: &GradStore,
        clip_norm: Option<f32>,
    ) -> Result<Gradients, VariablesError> {
        let mut gradients = Vec::with_capacity(self.0.len());
        let mut squares = 0.0;
        for (spec, var) in &self.0 {
            let gradient = store.get(var).ok_or_else(|| VariablesError::NoGradient {
                variable: spec.clone(),
            })?;
            let values = elements(gradient)?;
            squares += sum_of_squares(&values);
            gradients.push(values);
        }
        let norm = squares.sqrt();
        if let Some(clip) = clip_norm.filter(|clip| norm > f64::from(*clip)) {
            let scale = (f64::from(clip) / norm) as f32;
            for value in gradients.iter_mut().flatten() {
                *value *= scale;
            }
        }
        let values = gradients
            .into_iter()
            .map(|g| payload::share(&g.into()))
            .collect();
        Ok(Gradients { values, norm })
    }

    /// Writes all variables to a safetensors file, under their own names. The file appears whole
    /// or not at all.
    ///
    /// # Errors
    /// [`VariablesError::File`] names the file, or candle's.
    pub fn save(&self, path: &Path) -> Result<(), VariablesError> {
        let values: Vec<Bytes> = (0..self.0.len())
            .map(|variable| self.values(variable))
            .collect::<Result<_, _>>()?;
        let write = || {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            let mut views = Vec::with_capacity(values.len());
            for ((spec, _), bytes) in self.0.iter().zip(&values) {
                let shape = spec.shape.clone();
                let view = TensorView::new(safetensors::Dtype::F32, shape, bytes);
                views.push((&spec.name, view.map_err(io::Error::other)?));
            }
            let mut partial = OsString::from(path);
            partial.push(".partial");
            // The file gets the usual permissions. safetensors would create one for the owner alone.
            let usual = File::create(&partial)?.metadata()?.permissions();
            safetensors::serialize_to_file(views, None, Path::new(&partial))
                .map_err(io::Error::other)?;
            std::fs::set_permissions(&partial, usual)?;
            File::open(&partial)?.sync_all()?;
            std::fs::rename(&partial, path)
        };
        write().map_err(|source| VariablesError::File {
            action: "written",
            path: path.to_owned(),
            source,
        })
    }

    /// Sets all variables from a safetensors file. Either all are set, or none.
    ///
    /// # Errors
    /// [`VariablesError::File`] if it cannot be read, [`VariablesError::Mismatch`] if it holds
    /// other variables than these, or candle's.
    pub fn load(&self, path: &Path) -> Result<(), VariablesError> {
        let unreadable = |source| VariablesError::File {
            action: "read",
            path: path.to_owned(),
            source,
        };
        let content = std::fs::read(path).map_err(unreadable)?;
        let file = SafeTensors::deserialize(&content)
            .map_err(|error| unreadable(io::Error::new(io::ErrorKind::InvalidData, error)))?;
        let differences = self.differences(&file);
        if !differences.is_empty() {
            return Err(VariablesError::Mismatch {
                path: path.to_owned(),
                differences: differences.join("; "),
            });
        }
        for (variable, (spec, _)) in self.0.iter().enumerate() {
            // The file has it. A missing variable is one of the differences.
            if let Ok(tensor) = file.tensor(&spec.name) {
                let values = Bytes::copy_from_slice(tensor.data());
                self.write(variable, 0, &Elements::of(values, Dtype::F32))?;
            }
        }
        Ok(())
    }

    fn differences(&self, file: &SafeTensors) -> Vec<String> {
        let mut differences = Vec::new();
        for (spec, _) in &self.0 {
            match file.tensor(&spec.name) {
                Err(_) => differences.push(format!("{spec} is missing")),
                Ok(found)
                    if found.shape() != spec.shape || found.dtype() != safetensors::Dtype::F32 =>
                {
                    differences.push(format!(
                        "{spec} of F32 is there with shape {:?} of {}",
                        found.shape(),
                        found.dtype()
                    ));
                }
                Ok(_) => {}
            }
        }
        let unknown = |name: &&str| !self.0.iter().any(|(spec, _)| spec.name == **name);
        let mut names = file.names();
        names.sort_unstable();
        for name in names.into_iter().filter(|name| unknown(name)) {
            differences.push(format!("{name:?} is none of the model's"));
        }
        differences
    }

    fn find(&self, variable: usize) -> Result<&(VariableSpec, Var), VariablesError> {
        self.0.get(variable).ok_or_else(|| {
            VariablesError::Range(format!(
                "there is no variable number {variable}; the model has {}, from 0",
                self.0.len()
            ))
        })
    }
}

/// Why an operation on variables failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VariablesError {
    /// A variable has no gradient.
    #[error(
        "{variable} has no gradient: either the loss does not use it, or it goes through an operation for which candle computes none (LayerNorm::forward with a bias, RmsNorm::forward, softmax_last_dim: use layer_norm_slow, RmsNorm::forward_diff, softmax), or through `detach`"
    )]
    NoGradient {
        /// The variable.
        variable: VariableSpec,
    },
    /// A variable has elements that are NaN or infinite.
    #[error(
        "{variable} has values that are NaN or infinite; lower the learning rate, or set clip_norm"
    )]
    NonFinite {
        /// The variable.
        variable: VariableSpec,
    },
    /// There is no such variable, or no such elements of it.
    #[error("{0}")]
    Range(String),
    /// A file cannot be read or written.
    #[error("{} cannot be {action}: {source}", path.display())]
    File {
        /// The attempted operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file holds other variables than the model has.
    #[error(
        "{} holds the variables of another model, nothing was loaded: {differences}", path.display()
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The differences.
        differences: String,
    },
    /// candle failed.
    #[error("candle: {}", plain(.0))]
    Candle(#[from] Error),
}

/// Makes variables when a model asks for them.
#[derive(Clone)]
struct Maker {
    seed: u64,
    made: Arc<Mutex<BTreeMap<String, Var>>>,
}

impl Maker {
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
            return Ok(var.as_tensor().clone());
        }
        let values = initial_values(self.seed, name, &shape, init)?;
        let var = Var::from_vec(values, shape, device)?;
        let tensor = var.as_tensor().clone();
        made.insert(name.to_owned(), var);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        match self.made().get(name) {
            Some(var) => Ok(var.as_tensor().clone()),
            None => bail!("variable {name:?} is asked for without a shape; ask with `get`"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.made().contains_key(name)
    }
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
    // FNV-1a: any hash does that is the same everywhere and always.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&hash.to_le_bytes());
    let random = ChaCha8Rng::from_seed(key);
    values.sample_iter(random).take(count).collect()
}

/// All elements of a tensor in order, in one copy; in two where they are not contiguous.
fn elements(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let start = layout.start_offset();
    let range = start..start + layout.shape().elem_count();
    let copied = match &*storage {
        Storage::Cpu(memory) => return Ok(memory.as_slice::<f32>()?[range].to_vec()),
        Storage::Cuda(memory) => memory.to_cpu_storage()?,
        Storage::Metal(memory) => memory.to_cpu_storage()?,
    };
    match copied {
        CpuStorage::F32(mut values) => {
            values.truncate(range.end);
            values.drain(..range.start);
            Ok(values)
        }
        other => bail!("a tensor has dtype {:?}; F32 was expected", other.dtype()),
    }
}

fn sum_of_squares(values: &[f32]) -> f64 {
    // Eight sums side by side: a single one would wait for each addition before the next.
    let (chunks, rest) = values.as_chunks::<8>();
    let square = |value: &f32| f64::from(*value) * f64::from(*value);
    Kernel::best().run(|| {
        let mut sums = [0f64; 8];
        for chunk in chunks {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum += square(value);
            }
        }
        sums.iter()
            .chain(&rest.iter().map(square).collect::<Vec<_>>())
            .sum()
    })
}

/// Overwrites elements of a variable in place. The caller has checked that they are there.
struct Overwrite<'a> {
    start: usize,
    values: &'a Elements,
}

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let CpuStorage::F32(memory) = storage else {
            bail!(
                "a variable has dtype {:?}; F32 was expected",
                storage.dtype()
            );
        };
        let start = layout.start_offset() + self.start;
        self.values.copy_to(&mut memory[start..]);
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &mut candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<()> {
        // Values arrive at any address and in several types: they are put right in a copy first.
        let mut values = vec![0f32; self.values.len()];
        self.values.copy_to(&mut values);
        let start = layout.start_offset() + self.start;
        let device = storage.device().clone();
        let memory = storage.as_cuda_slice_mut::<f32>()?;
        let mut part = memory.slice_mut(start..start + values.len());
        device.memcpy_htod(&values, &mut part)
    }
}
