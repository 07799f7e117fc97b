//! The device on which candle computes.
//!
//! - `found`: the devices of this machine
//! - `memory`: the memory that a process may take of each GPU

mod found;
mod memory;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use candle_core::{Device, DeviceLocation};

use model::candle_error::plain;

pub use found::{Cpu, Found, Gpu, GpuState, Gpus, find};
pub use memory::MemoryLimit;

/// The requested device: `auto`, `cpu` or `cuda:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The first GPU if there is one and this program was built for it, otherwise the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU with this index.
    Cuda(usize),
}

/// The error of a device that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The text names no device.
    #[error(
        "{0:?} is no device; expected auto, cpu or cuda:N. Commands that train also take a limit of the GPU's memory, as in cuda:0@8GiB, and several devices, as in cuda:0,cuda:1"
    )]
    Unknown(String),
    /// The GPU does not answer, or this program was not built for it.
    #[error(
        "cuda:{index} cannot be used: {}; docs/cuda.md tells how to build for GPUs",
        plain(source)
    )]
    Cuda {
        /// The GPU's index.
        index: usize,
        /// candle's error.
        source: candle_core::Error,
    },
    /// The text is no limit of memory.
    #[error(
        "{0:?} is no limit of memory; expected a size such as 8GiB or 512MiB, or 8GiB/reserved to take it at once"
    )]
    Size(String),
    /// The text gives the CPU a limit of memory.
    #[error(
        "{0:?} limits the memory of the CPU, which is not possible here; leave the limit out, or limit the process"
    )]
    LimitOfCpu(String),
    /// The memory of a GPU cannot be limited like this.
    #[error("the memory of cuda:{index} cannot be limited: {problem}")]
    Limit {
        /// The GPU's index.
        index: usize,
        /// The problem.
        problem: String,
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

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// The requested devices of a worker, at least one. A GPU may have a limit of its memory, as in `cuda:0@8GiB`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choices(Vec<Requested>);

/// A requested device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Requested {
    choice: Choice,
    limit: Option<MemoryLimit>,
}

impl Choices {
    /// Opens the devices.
    ///
    /// # Errors
    /// Those of [`open`], or [`DeviceError::Limit`] if one GPU is named both with a limit and without one.
    pub fn open(&self) -> Result<Vec<Device>, DeviceError> {
        let devices = self.0.iter().map(|one| open(one.choice));
        let devices: Vec<Device> = devices.collect::<Result<_, _>>()?;
        self.limits(&devices)?;
        Ok(devices)
    }

    /// Opens the devices for training: this process obeys the limits of memory, and keeps freed GPU memory for its next
    /// tensors. If a GPU is named several times, its limit is the sum of the limits.
    ///
    /// # Errors
    /// Those of [`Self::open`], or [`DeviceError::Limit`] if this process already uses a GPU with another limit, or if
    /// the driver refuses the limit.
    pub fn open_to_train(&self) -> Result<Vec<Device>, DeviceError> {
        let devices = self.open()?;
        let limits = self.limits(&devices)?;
        if limits.is_empty() {
            if self.0.iter().any(|one| one.limit.is_some()) {
                tracing::warn!("no device is a GPU, so the limit of its memory has no effect");
            }
            return Ok(devices);
        }
        for (index, limit) in limits {
            memory::apply(index, limit)?;
        }
        // The first ones have allocated without limits.
        let limited = self.open()?;
        drop(devices);
        Ok(limited)
    }

    /// Returns the limit of each GPU among the opened devices.
    fn limits(
        &self,
        devices: &[Device],
    ) -> Result<BTreeMap<usize, Option<MemoryLimit>>, DeviceError> {
        let mut limits: BTreeMap<usize, Option<MemoryLimit>> = BTreeMap::new();
        for (one, device) in self.0.iter().zip(devices) {
            let DeviceLocation::Cuda { gpu_id: index } = device.location() else {
                continue;
            };
            let limit = match (limits.get(&index), one.limit) {
                (None, limit) => limit,
                (Some(Some(before)), Some(limit)) => Some(before.plus(limit)),
                (Some(None), None) => None,
                (Some(_), _) => {
                    let problem =
                        "it is named both with a limit and without one; give each entry a limit";
                    return Err(DeviceError::Limit {
                        index,
                        problem: problem.to_owned(),
                    });
                }
            };
            limits.insert(index, limit);
        }
        Ok(limits)
    }

    /// Sets this limit for each device that may be a GPU and has no limit.
    #[must_use]
    pub fn limited(mut self, limit: Option<MemoryLimit>) -> Self {
        let may_be_gpus = self.0.iter_mut().filter(|one| one.choice != Choice::Cpu);
        for one in may_be_gpus {
            one.limit = one.limit.or(limit);
        }
        self
    }

    /// Returns the first device.
    pub fn first(&self) -> Choice {
        self.0.first().map_or(Choice::Auto, |one| one.choice)
    }
}

impl FromStr for Choices {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let one = |text: &str| {
            let (choice, limit) = match text.split_once('@') {
                Some((choice, limit)) => (choice.trim().parse()?, Some(limit.trim().parse()?)),
                None => (text.trim().parse()?, None),
            };
            match (choice, limit) {
                (Choice::Cpu, Some(_)) => Err(DeviceError::LimitOfCpu(text.to_owned())),
                _ => Ok(Requested { choice, limit }),
            }
        };
        text.split(',').map(one).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Choices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, one) in self.0.iter().enumerate() {
            let separator = if number > 0 { "," } else { "" };
            write!(f, "{separator}{}", one.choice)?;
            if let Some(limit) = one.limit {
                write!(f, "@{limit}")?;
            }
        }
        Ok(())
    }
}

/// Opens a device.
///
/// # Errors
/// [`DeviceError::Cuda`] if the requested GPU cannot be used.
pub fn open(choice: Choice) -> Result<Device, DeviceError> {
    match choice {
        Choice::Cpu => Ok(Device::Cpu),
        Choice::Auto => Ok(Device::new_cuda(0).unwrap_or(Device::Cpu)),
        Choice::Cuda(index) => {
            Device::new_cuda(index).map_err(|source| DeviceError::Cuda { index, source })
        }
    }
}

/// Returns a device with one CUDA stream for all threads. By default, candle gives each thread its own stream, so a
/// thread could read the memory of a GPU before another thread's operation has written it. A device that is no GPU is
/// returned as it is.
///
/// # Errors
/// [`DeviceError::Cuda`] if the GPU does not answer.
pub fn with_one_queue(device: &Device) -> Result<Device, DeviceError> {
    match device.location() {
        DeviceLocation::Cuda { gpu_id: index } => Device::new_cuda_with_stream(index)
            .map_err(|source| DeviceError::Cuda { index, source }),
        DeviceLocation::Cpu | DeviceLocation::Metal { .. } => Ok(device.clone()),
    }
}

/// Returns a device's name, in the form in which a CPU or a CUDA device is requested.
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
        let several: Choices = "cuda:0, cuda:1@8GiB,cpu".parse().unwrap();
        assert_eq!(several.to_string(), "cuda:0,cuda:1@8GiB,cpu");
        let limit = "512MiB/reserved".parse().ok();
        let limited = several.limited(limit).to_string();
        assert_eq!(limited, "cuda:0@512MiB/reserved,cuda:1@8GiB,cpu");
        for wrong in ["cpu,", "cpu@8GiB", "cuda:0@8", "cuda@8GiB"] {
            assert!(wrong.parse::<Choices>().is_err(), "{wrong}");
        }
        assert_eq!("auto".parse::<Choice>().unwrap(), Choice::Auto);
        assert_eq!("cuda:3".parse::<Choice>().unwrap(), Choice::Cuda(3));
        let wrong = "gpu".parse::<Choice>().unwrap_err().to_string();
        assert!(wrong.contains("\"gpu\"") && wrong.contains("cuda:N"));
    }
}
