//! The devices of this machine that a worker can compute on.

use crate::threads;

/// The folder in which NVIDIA's driver on Linux has an entry for each GPU.
#[cfg(not(feature = "cuda"))]
const DRIVER: &str = "/proc/driver/nvidia/gpus";

/// The devices of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// The CPU.
    pub cpu: Cpu,
    /// The GPUs.
    pub gpus: Gpus,
}

/// The processors that this process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cpu {
    /// The number of logical cores that the system and the container allow.
    pub cores: usize,
    /// The number of threads with which a worker computes.
    pub threads: usize,
    /// The memory that this process may use.
    pub memory_bytes: u64,
}

/// The GPUs that this program can use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gpus {
    /// This program was not built for GPUs.
    NotBuilt {
        /// The number of GPUs for which NVIDIA's driver has an entry under `/proc`; 0 if that cannot be read.
        present: usize,
    },
    /// The driver does not answer.
    Unusable(String),
    /// The GPUs in the driver's order; empty if there are none.
    Listed(Vec<Gpu>),
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gpu {
    /// The name by which a worker is given this GPU, such as `cuda:0`.
    pub device: String,
    /// The driver's description, or the reason why the GPU cannot be opened.
    pub state: Result<GpuState, String>,
}

/// The driver's description of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuState {
    /// The product's name.
    pub name: String,
    /// The total memory of the GPU.
    pub memory_bytes: u64,
    /// The memory that no process uses.
    pub free_bytes: u64,
    /// The compute capability, such as `9.0`.
    pub compute_capability: String,
}

/// Finds the devices of this machine. Opens each GPU for a moment.
pub fn find() -> Found {
    Found {
        cpu: Cpu {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            threads: threads::number(),
            memory_bytes: daemon::memory_limit(),
        },
        gpus: gpus(),
    }
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> Gpus {
    let present = std::fs::read_dir(DRIVER).map_or(0, |entries| entries.flatten().count());
    Gpus::NotBuilt { present }
}

#[cfg(feature = "cuda")]
fn gpus() -> Gpus {
    use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError};

    let open = |index: usize| -> Result<GpuState, DriverError> {
        let gpu = CudaContext::new(index)?;
        let (major, minor) = gpu.compute_capability()?;
        let (free, all) = gpu.mem_get_info()?;
        Ok(GpuState {
            name: gpu.name()?,
            memory_bytes: all as u64,
            free_bytes: free as u64,
            compute_capability: format!("{major}.{minor}"),
        })
    };
    let number = match CudaContext::device_count() {
        Ok(number) => usize::try_from(number).unwrap_or(0),
        Err(error) => return Gpus::Unusable(error.to_string()),
    };
    let gpu = |index| Gpu {
        device: format!("cuda:{index}"),
        state: open(index).map_err(|error| error.to_string()),
    };
    Gpus::Listed((0..number).map(gpu).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_always_there() {
        let found = find();
        assert!(found.cpu.cores >= 1 && found.cpu.threads >= 1);
        assert!(found.cpu.memory_bytes > 1 << 20);
        let built = !matches!(found.gpus, Gpus::NotBuilt { .. });
        assert_eq!(built, cfg!(feature = "cuda"));
    }
}
