//! Initial values from files of other models and programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use candle_core::pickle::PthTensors;
use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
use model::candle_error::plain;
use safetensors::SafeTensors;
use shared_proto::payload::Elements;

use super::error::VariablesError;
use super::set::Variables;

/// The keys under which training scripts keep the variables in a PyTorch file.
const STATE_KEYS: [&str; 2] = ["state_dict", "model"];

impl Variables {
    /// Sets variables from a safetensors file, or from a file that PyTorch has saved (`.pth`, `.pt`, `.bin`), with
    /// tensors of `F32`, `F64`, `F16` or `BF16`. Variables that are not in the file or not `wanted` keep their values.
    /// The prefix `strip` is removed from the names of tensors; without `strip`, the prefix of PyTorch's wrappers is
    /// removed if all tensors have it. A tensor belongs to the variable of the same name, or else to the variable whose
    /// name `name_of` returns. Logs the variables that are missing, and the tensors that belong to no variable.
    ///
    /// # Errors
    /// [`VariablesError::Unreadable`] if the file cannot be read, [`VariablesError::Mismatch`] if a tensor has another
    /// shape or type, or NaN or infinity, or if the file has none of the variables; nothing is set then.
    pub fn load_known(
        &self,
        path: &Path,
        wanted: impl Fn(&str) -> bool,
        name_of: impl Fn(&str) -> Option<String>,
        strip: Option<&str>,
    ) -> Result<(), VariablesError> {
        let unreadable = |reason: String| VariablesError::Unreadable {
            path: path.to_owned(),
            reason,
        };
        let mismatch = |differences: String| VariablesError::Mismatch {
            path: path.to_owned(),
            differences,
        };
        let content;
        let file = match is_of_pytorch(path) {
            true => File::pytorch(path),
            false => {
                content = fs::read(path).map_err(|error| unreadable(error.to_string()))?;
                let file = SafeTensors::deserialize(&content);
                file.map(File::Safetensors).map_err(|e| e.to_string())
            }
        };
        let file = file.map_err(unreadable)?;
        let names = file.names();
        let own = |prefix: &str| self.0.iter().any(|(spec, _)| spec.name.starts_with(prefix));
        let prefix = match strip {
            Some(prefix) => prefix.to_owned(),
            None => wrappers(&names, own),
        };
        let plain = |name: &String| name.strip_prefix(&prefix).unwrap_or(name).to_owned();
        let stripped: BTreeMap<String, &String> =
            names.iter().map(|name| (plain(name), name)).collect();
        let renamed = stripped
            .iter()
            .filter_map(|(plain, name)| Some((name_of(plain)?, *name)));
        let renamed: BTreeMap<String, &String> = renamed.collect();
        let (mut known, mut missing, mut excluded) = (Vec::new(), Vec::new(), Vec::new());
        let mut left_over: BTreeSet<&String> = names.iter().collect();
        for (variable, (spec, _)) in self.0.iter().enumerate() {
            let name = &spec.name;
            let foreign = stripped.get(name).or(renamed.get(name)).copied();
            let Some(foreign) = foreign else {
                missing.push(name);
                continue;
            };
            left_over.remove(foreign);
            if !wanted(name) {
                excluded.push(name);
                continue;
            }
            let tensor = file.tensor(foreign).map_err(unreadable)?;
            if tensor.dims() != spec.shape {
                return Err(mismatch(format!(
                    "{spec} is there as {foreign:?} with shape {:?}; name it in model.init_except to leave it out",
                    tensor.dims()
                )));
            }
            let values = elements(&tensor);
            let values = values.map_err(|problem| mismatch(format!("{foreign:?} {problem}")))?;
            known.push((variable, values));
        }
        if known.is_empty() {
            return Err(mismatch(format!(
                "it has none of the variables {missing:?}, but {left_over:?}; model.init_except leaves out {excluded:?}"
            )));
        }
        for (variable, values) in &known {
            self.write(*variable, 0, values)?;
        }
        tracing::info!(
            path = %path.display(),
            loaded = known.len(),
            prefix,
            ?missing,
            ?excluded,
            ?left_over,
            "initial values come from a file"
        );
        Ok(())
    }
}

/// The prefixes that PyTorch's wrappers give to the names of all variables: `DataParallel` and `DistributedDataParallel`, `torch.compile`, and
/// modules such as Lightning's that have the model as a part.
const WRAPPERS: [&str; 3] = ["module.", "_orig_mod.", "model."];

/// Returns the wrapper prefixes, joined, that all names have. A prefix with which the model's own names begin is not
/// one of them.
fn wrappers(names: &BTreeSet<String>, own: impl Fn(&str) -> bool) -> String {
    let mut prefix = String::new();
    loop {
        let of_all = |wrapper: &&&str| {
            let longer = format!("{prefix}{wrapper}");
            !own(wrapper) && names.iter().all(|name| name.starts_with(&longer))
        };
        match WRAPPERS.iter().find(of_all) {
            Some(wrapper) if !names.is_empty() => prefix.push_str(wrapper),
            _ => return prefix,
        }
    }
}

/// A file of tensors. Its methods return errors as texts.
enum File<'a> {
    Safetensors(SafeTensors<'a>),
    /// The tensors, and the length of the file in bytes.
    PyTorch(PthTensors, u64),
}

/// Returns whether a file's extension is one of PyTorch's.
fn is_of_pytorch(path: &Path) -> bool {
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    ["pth", "pt", "bin"].contains(&extension.as_ref())
}

impl File<'_> {
    /// Reads the names and the shapes of the tensors in a file of PyTorch.
    fn pytorch(path: &Path) -> Result<Self, String> {
        let length = fs::metadata(path).map_err(|error| error.to_string())?.len();
        let keys = [None].into_iter().chain(STATE_KEYS.map(Some));
        let mut file = None;
        for key in keys {
            let read = guarded(|| PthTensors::new(path, key));
            match read {
                Ok(tensors) if !tensors.tensor_infos().is_empty() => {
                    return Ok(Self::PyTorch(tensors, length));
                }
                // A file without the key.
                read => file = file.or(Some(read)),
            }
        }
        let reason = match file {
            Some(Err(reason)) => reason,
            _ => "it has no tensors".to_owned(),
        };
        Err(format!(
            "{reason}; save a state_dict with torch.save of PyTorch 1.6 or later, or a safetensors file"
        ))
    }

    fn names(&self) -> BTreeSet<String> {
        match self {
            Self::Safetensors(file) => file.names().into_iter().map(str::to_owned).collect(),
            Self::PyTorch(file, _) => file.tensor_infos().keys().cloned().collect(),
        }
    }

    fn tensor(&self, name: &str) -> Result<Tensor, String> {
        match self {
            Self::Safetensors(file) => {
                let view = file.tensor(name).map_err(|error| error.to_string())?;
                let tensor = view.load(&Device::Cpu);
                tensor.map_err(|error| format!("{name:?}: {}", plain(&error)))
            }
            Self::PyTorch(file, length) => {
                // What the file says of a tensor is checked before memory is taken for it.
                let fits = file.tensor_infos().get(name).is_some_and(|info| {
                    let mut dims = info.layout.dims().iter();
                    let size = info.dtype.size_in_bytes();
                    let bytes = dims.try_fold(size, |bytes, dim| bytes.checked_mul(*dim));
                    // candle would take the offset, a number of elements, for one of bytes.
                    bytes.is_some_and(|bytes| bytes as u64 <= *length)
                        && info.layout.start_offset() == 0
                });
                if !fits {
                    return Err(format!(
                        "{name:?} is damaged, or a part of another tensor; save a clone of it"
                    ));
                }
                match guarded(|| file.get(name)) {
                    Ok(Some(tensor)) => Ok(tensor),
                    Ok(None) => Err(format!("{name:?} is missing")),
                    Err(reason) => Err(format!("{name:?}: {reason}")),
                }
            }
        }
    }
}

/// Reads a part of a PyTorch file. candle's reader may panic if the file is damaged.
fn guarded<T>(read: impl FnOnce() -> candle_core::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(read) => read.map_err(|error| plain(&error)),
        Err(_) => Err("it is damaged".to_owned()),
    }
}

/// Returns the numbers of a tensor, or the problem with them.
fn elements(tensor: &Tensor) -> Result<Elements, String> {
    let dtype = tensor.dtype();
    if !matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
        return Err(format!(
            "is of {}; F32, F64, F16 or BF16 was expected",
            dtype.as_str()
        ));
    }
    let values = tensor
        .to_dtype(DType::F32)
        .and_then(|tensor| tensor.flatten_all()?.to_vec1::<f32>())
        .map_err(|error| format!("cannot be read: {}", plain(&error)))?;
    let values = Elements::from(values);
    match values.all_finite() {
        true => Ok(values),
        false => Err("has NaN or infinity".to_owned()),
    }
}
