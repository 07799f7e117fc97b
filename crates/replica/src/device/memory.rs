//! The memory that a process may take of each GPU.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use parking_lot::Mutex;

use super::DeviceError;

const MEBIBYTE: u64 = 1 << 20;
const GIBIBYTE: u64 = 1 << 30;

/// The suffix of a limit whose memory is all taken at once.
const RESERVED: &str = "/reserved";

/// The most memory of a GPU that the tensors of a process may take: `8GiB` or `512MiB`. With the suffix `/reserved`,
/// the process takes all of it at once, so that no other process can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The limit in bytes, at least 1.
    pub bytes: u64,
    /// True if all of the memory is taken at once, and not when it is needed.
    pub reserved: bool,
}

impl MemoryLimit {
    /// Returns the sum of two limits. It is reserved if either of them is.
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            reserved: self.reserved || other.reserved,
        }
    }
}

impl FromStr for MemoryLimit {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let (size, reserved) = match text.strip_suffix(RESERVED) {
            Some(size) => (size, true),
            None => (text, false),
        };
        let units = [("GiB", GIBIBYTE), ("MiB", MEBIBYTE)];
        let mut sizes = units.into_iter().filter_map(|(unit, bytes)| {
            let number: f64 = size.strip_suffix(unit)?.trim().parse().ok()?;
            Some((number * bytes as f64) as u64).filter(|_| number.is_finite())
        });
        let bytes = sizes.next().filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| DeviceError::Size(text.to_owned()))?;
        Ok(Self { bytes, reserved })
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reserved = if self.reserved { RESERVED } else { "" };
        let (size, unit) = match self.bytes % GIBIBYTE {
            0 => (self.bytes / GIBIBYTE, "GiB"),
            _ => (self.bytes.div_ceil(MEBIBYTE), "MiB"),
        };
        write!(f, "{size}{unit}{reserved}")
    }
}

/// The limits of this process, by the GPU's index. `None` stands for no limit.
static APPLIED: Mutex<BTreeMap<usize, Option<MemoryLimit>>> = Mutex::new(BTreeMap::new());

/// Limits the memory of a GPU that the tensors of this process take. The process keeps freed memory for its next
/// tensors. A process cannot change a limit later.
pub(super) fn apply(gpu: usize, limit: Option<MemoryLimit>) -> Result<(), DeviceError> {
    let mut applied = APPLIED.lock();
    match applied.get(&gpu) {
        Some(before) if *before == limit => return Ok(()),
        Some(before) => {
            let named = |limit: &Option<MemoryLimit>| match limit {
                Some(limit) => format!("with the limit {limit}"),
                None => "without a limit".to_owned(),
            };
            return Err(DeviceError::Limit {
                index: gpu,
                problem: format!(
                    "this process uses it {} already, and cannot use it {} now",
                    named(before),
                    named(&limit)
                ),
            });
        }
        None => {}
    }
    let refused = |error: gpu::Error| DeviceError::Limit {
        index: gpu,
        problem: error.to_string(),
    };
    match limit {
        Some(limit) => gpu::pool::limit(gpu, limit.bytes, limit.reserved).map_err(refused)?,
        None => {
            // Some GPUs have no pools; candle then allocates without them.
            if let Err(error) = gpu::pool::retain(gpu) {
                tracing::warn!(gpu, "free memory is not kept for the next tensors: {error}");
            }
        }
    }
    applied.insert(gpu, limit);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_and_written() {
        for (text, bytes, written) in [
            ("8GiB", 8 << 30, "8GiB"),
            ("1.5GiB", 3 << 29, "1536MiB"),
            ("512 MiB", 512 << 20, "512MiB"),
            ("2GiB/reserved", 2 << 30, "2GiB/reserved"),
        ] {
            let limit: MemoryLimit = text.parse().unwrap();
            assert_eq!(limit.bytes, bytes);
            assert_eq!(limit.to_string(), written);
            assert_eq!(written.parse::<MemoryLimit>().unwrap(), limit);
        }
        for wrong in [
            "",
            "8",
            "8GB",
            "0MiB",
            "-1GiB",
            "NaNGiB",
            "GiB",
            "1GiB/kept",
        ] {
            let error = wrong.parse::<MemoryLimit>().unwrap_err().to_string();
            assert!(
                error.contains("GiB") && error.contains("reserved"),
                "{error}"
            );
        }
    }
}
