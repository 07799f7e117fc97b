//! Initial values from files of other models and programs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Device, Tensor, pickle, safetensors};
use shared_proto::payload::Elements;

use super::error::VariablesError;
use super::set::Variables;
use crate::candle_error::plain;

impl Variables {
    /// Sets the variables that a file has: a safetensors file, or one that PyTorch has saved (`.pth`, `.pt`, `.bin`), of
    /// `F32`, `F64`, `F16` or `BF16`. The others keep their values, and so do those that are not `wanted`. A tensor
    /// belongs to the variable of its name, else to the one that `name_of` gives. Variables that are missing, and tensors
    /// that no variable takes, are logged.
    ///
    /// # Errors
    /// [`VariablesError::Unreadable`] if the file cannot be read, [`VariablesError::Mismatch`] if a tensor has another
    /// shape or type, or NaN or infinity, or if the file has none of the variables; nothing is set then.
    pub fn load_known(
        &self,
        path: &Path,
        wanted: impl Fn(&str) -> bool,
        name_of: impl Fn(&str) -> Option<String>,
    ) -> Result<(), VariablesError> {
        let tensors = read(path).map_err(|error| VariablesError::Unreadable {
            path: path.to_owned(),
            reason: plain(&error),
        })?;
        let mismatch = |differences: String| VariablesError::Mismatch {
            path: path.to_owned(),
            differences,
        };
        let mut renamed: BTreeMap<String, &str> = BTreeMap::new();
        for foreign in tensors.keys() {
            if let Some(name) = name_of(foreign) {
                renamed.insert(name, foreign);
            }
        }
        let (mut known, mut missing) = (Vec::new(), Vec::new());
        let mut left_over: BTreeSet<&str> = tensors.keys().map(String::as_str).collect();
        for (variable, (spec, _)) in self.0.iter().enumerate() {
            let name = spec.name.as_str();
            let found = tensors.get_key_value(name);
            let found = found.or_else(|| tensors.get_key_value(*renamed.get(name)?));
            let found = found.filter(|_| wanted(name));
            let Some((named, tensor)) = found else {
                missing.push(name);
                continue;
            };
            left_over.remove(named.as_str());
            let there = match named == name {
                true => format!("{spec} is there"),
                false => format!("{spec} is there as {named:?}"),
            };
            if tensor.dims() != spec.shape {
                return Err(mismatch(format!(
                    "{there} with shape {:?}; name it in model.init_except to leave it out",
                    tensor.dims()
                )));
            }
            known.push((variable, elements(tensor, &there).map_err(mismatch)?));
        }
        if known.is_empty() {
            return Err(mismatch(format!(
                "it has none of the variables, {missing:?}, but {left_over:?}"
            )));
        }
        for (variable, values) in &known {
            self.write(*variable, 0, values)?;
        }
        tracing::info!(
            path = %path.display(),
            loaded = known.len(),
            ?missing,
            ?left_over,
            "initial values come from a file"
        );
        Ok(())
    }
}

/// Returns the tensors in a file, by their names.
fn read(path: &Path) -> candle_core::Result<BTreeMap<String, Tensor>> {
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    match extension.as_ref() {
        "pth" | "pt" | "bin" => Ok(pickle::read_all(path)?.into_iter().collect()),
        _ => Ok(safetensors::load(path, &Device::Cpu)?.into_iter().collect()),
    }
}

/// Returns the numbers of a tensor, or what is wrong with them.
fn elements(tensor: &Tensor, there: &str) -> Result<Elements, String> {
    let dtype = tensor.dtype();
    if !matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
        return Err(format!("{there} as {}", dtype.as_str()));
    }
    let values = tensor
        .to_dtype(DType::F32)
        .and_then(|tensor| tensor.flatten_all()?.to_vec1::<f32>())
        .map_err(|error| format!("{there}: {}", plain(&error)))?;
    let values = Elements::from(values);
    match values.all_finite() {
        true => Ok(values),
        false => Err(format!("{there} with NaN or infinity")),
    }
}
