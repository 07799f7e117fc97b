//! The error of a step for which a device has too little memory.

use std::collections::BTreeSet;

use candle_core::{Device, DeviceLocation, Error, Tensor};
use model::Batch;
use model::candle_error::plain;
use variables::Variables;

use crate::device;

/// Parts of the names of CUDA's and its libraries' errors for lack of memory.
const PARTS_OF_NAMES: [&str; 2] = ["OUT_OF_MEMORY", "ALLOC_FAILED"];

/// The number of tensors that the error names.
const LISTED: usize = 3;

/// The tensors of a step, to explain that a device has too little memory for it.
pub(super) struct OutOfMemory<'a> {
    pub(super) variables: &'a Variables,
    /// The samples; `None` in an update.
    pub(super) batch: Option<&'a Batch>,
    /// The loss, if the forward pass has computed it.
    pub(super) loss: Option<&'a Tensor>,
}

impl OutOfMemory<'_> {
    /// Adds the step, its samples and the largest tensors to an out-of-memory error, and returns any other error
    /// unchanged. `done` is the number of steps before this one.
    pub(super) fn explain(&self, error: Error, device: &Device, done: u64) -> Error {
        let text = plain(&error);
        if !PARTS_OF_NAMES.iter().any(|name| text.contains(name)) {
            return error;
        }
        let largest: Vec<String> = self.largest().into_iter().map(|(_, name)| name).collect();
        let (what, advice) = match self.batch {
            Some(batch) => (
                format!("{} samples", batch.samples()),
                "Lower batch_size, with `accumulate` if the step should stay as large, or use more devices",
            ),
            None => (
                "the update of the variables".to_owned(),
                "Use an optimizer with fewer slots, or more devices",
            ),
        };
        Error::msg(format!(
            "{} has too little memory for {what} in step {}{}. The largest tensors: {}. {advice} ({text})",
            device::name(device),
            done + 1,
            in_use(device),
            largest.join("; ")
        ))
    }

    /// Returns the bytes and the descriptions of the largest tensors, the largest one first.
    fn largest(&self) -> Vec<(usize, String)> {
        let variables = self.variables.each();
        let variables = variables.map(|(spec, var, _)| (var.as_tensor(), spec.to_string()));
        let described = |tensor: &Tensor, what: &str| {
            format!("{what} {:?} of {}", tensor.dims(), tensor.dtype().as_str())
        };
        let columns = self.batch.into_iter().flat_map(Batch::tensors);
        let columns = columns.map(|(name, tensor)| {
            let what = format!("input {name:?}, a tensor");
            (tensor, described(tensor, &what))
        });
        let mut all: Vec<_> = variables.chain(columns).collect();
        let nodes = self.loss.map(Tensor::sorted_nodes).unwrap_or_default();
        for node in nodes {
            all.push((
                node,
                described(node, "a result of the forward pass, a tensor"),
            ));
        }
        // Each memory once, and none that has fewer elements than its tensor.
        let mut seen = BTreeSet::new();
        all.retain(|(tensor, _)| {
            let (storage, layout) = tensor.storage_and_layout();
            let address = std::ptr::from_ref(&*storage).addr();
            !layout.stride().contains(&0) && seen.insert(address)
        });
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        let all = all.into_iter();
        let mut all: Vec<_> = all
            .map(|(tensor, name)| {
                let bytes = bytes(tensor);
                let mebibytes = bytes as f64 / f64::from(1 << 20);
                (bytes, format!("{name} ({mebibytes:.1} MiB)"))
            })
            .collect();
        all.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        all.truncate(LISTED);
        all
    }
}

/// Describes the largest amount of a GPU's memory that was in use; empty if that is unknown.
fn in_use(device: &Device) -> String {
    let DeviceLocation::Cuda { gpu_id } = device.location() else {
        return String::new();
    };
    match gpu::pool::usage(gpu_id) {
        Ok(usage) => {
            let mebibytes = usage.most_used >> 20;
            format!("; the most memory in use was {mebibytes} MiB")
        }
        Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;
    use candle_nn::Init;
    use shared_proto::blocks::VariableKind;

    #[test]
    fn missing_memory_is_explained_and_other_errors_stay() {
        let device = Device::Cpu;
        let kind_of = |name: &str| VariableKind::by_name(name);
        let built = Variables::build::<_, Error>(1, kind_of, &device, |vars| {
            vars.get_with_hints((300, 300), "large", Init::Const(1.0))
        });
        let (variables, large) = built.unwrap();
        let inputs = Tensor::zeros((7, 500), DType::F32, &device).unwrap();
        let batch = Batch::new(7).with_input("image", inputs);
        let result = (large.broadcast_as((4, 300, 300)).unwrap() * 2.0).unwrap();
        let loss = result.flatten_all().unwrap();
        let explain = |text: &str| {
            let tensors = OutOfMemory {
                variables: &variables,
                batch: Some(&batch),
                loss: Some(&loss),
            };
            plain(&tensors.explain(Error::msg(text.to_owned()), &device, 11))
        };
        let explained = explain("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")");
        for part in [
            "7 samples in step 12",
            "[360000] of f32 (1.4 MiB); ",
            "large",
            "0.3 MiB",
            "batch_size",
            "CUDA_ERROR_OUT_OF_MEMORY",
        ] {
            assert!(explained.contains(part), "{part}: {explained}");
        }
        assert_eq!(explain("another error"), "another error");
    }
}
