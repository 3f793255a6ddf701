//! Memory of the process.

/// Largest resident set so far in bytes (`VmHWM`); 0 where the system does not tell.
pub fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    parse(&status, "VmHWM:").unwrap_or(0)
}

/// Resident set now in bytes (`VmRSS`); 0 where the system does not tell.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    parse(&status, "VmRSS:").unwrap_or(0)
}

/// The value of a line such as `VmHWM:  1234 kB`.
fn parse(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_high_water_mark() {
        assert_eq!(parse("VmPeak:\t 9 kB\nVmHWM:\t    2048 kB\n", "VmHWM:"), Some(2 << 20));
        assert_eq!(parse("VmPeak:\t 9 kB\n", "VmHWM:"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn peak_grows_with_use() {
        let before = peak_bytes();
        let block = vec![1u8; (before as usize) + (64 << 20)];
        assert!(peak_bytes() > before && block.iter().map(|&b| u64::from(b)).sum::<u64>() > 0);
    }
}
