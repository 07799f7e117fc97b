//! The system's figures of a process.

/// Returns the processor time of a process in user and kernel mode, in seconds; 0 if it cannot be read.
pub(crate) fn cpu_seconds(process: u32) -> f64 {
    // Fields 14 and 15, counted from the name's end: the name may hold spaces.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default();
    let mut ticks = fields
        .split_whitespace()
        .skip(11)
        .map(|f| f.parse().unwrap_or(0.0));
    let (user, kernel): (f64, f64) = (ticks.next().unwrap_or(0.0), ticks.next().unwrap_or(0.0));
    // Linux reports hundredths of a second on all relevant platforms.
    (user + kernel) / 100.0
}

/// Returns the peak memory of a process, in bytes; 0 if it cannot be read.
pub(crate) fn peak_bytes(process: u32) -> u64 {
    status_bytes(process, "VmHWM:")
}

/// Returns the memory of a process at present, in bytes; 0 if it cannot be read.
pub(crate) fn resident_bytes(process: u32) -> u64 {
    status_bytes(process, "VmRSS:")
}

fn status_bytes(process: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
