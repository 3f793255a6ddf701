//! The machine a run is on, as far as its system tells.

use serde::Serialize;
use std::fs;

/// What can make the bits or the speed of a run differ from another machine's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Machine {
    pub cpu: String,
    /// Logical cores this process may use.
    pub cores: usize,
    pub memory_bytes: Option<u64>,
    pub system: String,
    pub kernel: String,
    /// Widest vector instructions: `avx512`, `avx2`, `neon`, or `baseline`.
    pub simd: String,
}

impl Machine {
    /// This one.
    pub fn this() -> Machine {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpu = field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
        Machine {
            cpu,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: field(&read("/proc/meminfo"), "MemTotal").and_then(|text| kilobytes(&text)),
            system: std::env::consts::OS.into(),
            kernel: read("/proc/sys/kernel/osrelease").trim().into(),
            simd: simd().into(),
        }
    }
}

/// Bytes that this process can still use without swapping: what the system has left, or its control group if that is less.
/// None where the system does not tell.
pub fn available_bytes() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let system = field(&read("/proc/meminfo"), "MemAvailable").and_then(|text| kilobytes(&text));
    let number = |path: &str| read(path).trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(most, used)| left_of_group(most, used, &read("/sys/fs/cgroup/memory.stat")));
    [system, group].into_iter().flatten().min()
}

/// What a control group has left of `most` bytes: its cached files go when memory is needed and count as left.
fn left_of_group(most: u64, used: u64, stat: &str) -> u64 {
    let value = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        ["active_file", "inactive_file"].contains(&name).then(|| bytes.trim().parse::<u64>().ok())?
    };
    let cached: u64 = stat.lines().filter_map(value).sum();
    most.saturating_sub(used.saturating_sub(cached))
}

/// The value of the first line `NAME: VALUE`.
fn field(text: &str, name: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.split_once(':').filter(|(key, _)| key.trim() == name))?.1;
    Some(value.trim().to_string())
}

/// `1234 kB` in bytes.
fn kilobytes(text: &str) -> Option<u64> {
    text.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(target_arch = "x86_64")]
fn simd() -> &'static str {
    if std::is_x86_feature_detected!("avx512f") {
        "avx512"
    } else if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
        "avx2"
    } else {
        "baseline"
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn simd() -> &'static str {
    if cfg!(target_feature = "neon") { "neon" } else { "baseline" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemTotal:       2048 kB\nMemAvailable:   1024 kB\nmodel name\t: A CPU @ 3 GHz\n";
        assert_eq!(field(text, "MemTotal").and_then(|text| kilobytes(&text)), Some(2 << 20));
        assert_eq!(field(text, "model name").as_deref(), Some("A CPU @ 3 GHz"));
        assert_eq!((field(text, "Mem"), kilobytes("12")), (None, None));
    }

    #[test]
    fn cached_files_of_a_control_group_count_as_left() {
        let stat = "anon 300\nfile 650\ninactive_file 400\nactive_file 200\nslab 10\n";
        assert_eq!(left_of_group(1000, 950, stat), 650);
        assert_eq!(left_of_group(1000, 950, ""), 50);
        assert_eq!(left_of_group(1000, 2000, ""), 0);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_cores_and_memory() {
        let machine = Machine::this();
        assert!(machine.cores >= 1 && !machine.cpu.is_empty() && machine.kernel.contains('.'), "{machine:?}");
        let (all, left) = (machine.memory_bytes.unwrap(), available_bytes().unwrap());
        assert!(left > 1 << 20 && left <= all, "{left} of {all}");
    }
}
