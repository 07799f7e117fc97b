//! The device on which candle computes.
//!
//! - `found`: the devices of this machine

mod found;

use std::str::FromStr;

use candle_core::{Device, DeviceLocation};

use crate::candle_error::plain;

pub use found::{Cpu, Found, Gpu, GpuState, Gpus, find};

/// The requested device: `auto`, `cpu` or `cuda:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The first GPU if there is one and this program was built for it, otherwise the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of that number.
    Cuda(usize),
}

/// The error of a device that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The text names no device.
    #[error("{0:?} is no device; expected auto, cpu or cuda:N")]
    Unknown(String),
    /// The GPU does not answer, or this program was not built for it.
    #[error(
        "cuda:{index} cannot be used: {}; docs/cuda.md tells how to build for GPUs",
        plain(source)
    )]
    Cuda {
        /// The GPU's number.
        index: usize,
        /// candle's error.
        source: candle_core::Error,
    },
}

impl FromStr for Choice {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let number = |n: &str| n.parse().ok().map(Self::Cuda);
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            _ => text
                .strip_prefix("cuda:")
                .and_then(number)
                .ok_or_else(|| DeviceError::Unknown(text.to_owned())),
        }
    }
}

/// The requested devices of a worker, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choices(Vec<Choice>);

impl Choices {
    /// Opens the devices.
    ///
    /// # Errors
    /// As [`open`].
    pub fn open(&self) -> Result<Vec<Device>, DeviceError> {
        self.0.iter().map(|choice| open(*choice)).collect()
    }
}

impl FromStr for Choices {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let choices = text.split(',').map(|choice| choice.trim().parse());
        choices.collect::<Result<_, _>>().map(Self)
    }
}

/// Opens a device.
///
/// # Errors
/// [`DeviceError::Cuda`] if a GPU was asked for that cannot be used.
pub fn open(choice: Choice) -> Result<Device, DeviceError> {
    match choice {
        Choice::Cpu => Ok(Device::Cpu),
        Choice::Auto => Ok(Device::new_cuda(0).unwrap_or(Device::Cpu)),
        Choice::Cuda(index) => {
            Device::new_cuda(index).map_err(|source| DeviceError::Cuda { index, source })
        }
    }
}

/// Returns a device with one queue for the work of all threads. Otherwise candle gives each thread a queue of its own on a GPU, and a thread
/// could read numbers before another one has computed them.
///
/// # Errors
/// [`DeviceError::Cuda`] if the GPU does not answer.
pub(crate) fn with_one_queue(device: &Device) -> Result<Device, DeviceError> {
    match device.location() {
        DeviceLocation::Cuda { gpu_id: index } => Device::new_cuda_with_stream(index)
            .map_err(|source| DeviceError::Cuda { index, source }),
        DeviceLocation::Cpu | DeviceLocation::Metal { .. } => Ok(device.clone()),
    }
}

/// Returns a device's name in the form in which it is requested.
pub fn name(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cpu => "cpu".to_owned(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_and_others_refused() {
        let several: Choices = "cuda:0, cuda:1,cpu".parse().unwrap();
        let expected = vec![Choice::Cuda(0), Choice::Cuda(1), Choice::Cpu];
        assert_eq!(several, Choices(expected));
        assert!("cpu,".parse::<Choices>().is_err());
        assert_eq!("auto".parse::<Choice>().unwrap(), Choice::Auto);
        assert_eq!("cuda:3".parse::<Choice>().unwrap(), Choice::Cuda(3));
        let wrong = "gpu".parse::<Choice>().unwrap_err().to_string();
        assert!(wrong.contains("\"gpu\"") && wrong.contains("cuda:N"));
    }
}
