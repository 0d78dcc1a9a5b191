//! What a run takes: bytes on the Rust heap, and pages of the process.

use std::fs;

use ebbtide_candle::Heap;

/// Counts every allocation of the process, whoever makes it, so that no engine measures itself.
#[global_allocator]
static HEAP: Heap = Heap::new();

/// Device bytes now.
pub(crate) fn live_bytes() -> u64 {
    HEAP.live_bytes()
}

/// The allocator, for who measures parts of a step.
pub(crate) fn heap() -> &'static Heap {
    &HEAP
}

/// Most device bytes while `f` ran, beyond those that were there before it.
pub(crate) fn peak_of(f: impl FnOnce()) -> u64 {
    let before = HEAP.live_bytes();
    HEAP.reset_peak();
    f();
    HEAP.peak_bytes().saturating_sub(before)
}

/// Memory from a moment on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meter {
    /// Device bytes when the meter was started.
    pub(crate) base_bytes: u64,
}

impl Meter {
    /// Forgets earlier peaks.
    pub(crate) fn start() -> Self {
        // 5 resets the peak resident size (proc(5)); where that is not allowed, the peak since the
        // start of the process is reported, which can only be higher.
        let _ = fs::write("/proc/self/clear_refs", "5");
        HEAP.reset_peak();
        Self { base_bytes: HEAP.live_bytes() }
    }

    /// A step begins: what was used between steps does not belong to it.
    pub(crate) fn begin_step() {
        HEAP.reset_peak();
    }

    /// Most device bytes since the step began, at any moment.
    pub(crate) fn peak_bytes() -> u64 {
        HEAP.peak_bytes()
    }

    /// Most resident bytes of the process since the start, if the system tells.
    pub(crate) fn peak_rss_bytes() -> Option<u64> {
        kib_field(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
    }
}

/// Reads a line such as `VmHWM:  1234 kB`.
pub(crate) fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_are_kibibytes() {
        let text = "Name:\tx\nVmHWM:\t    1234 kB\nVmRSS:\t 9 kB\n";
        assert_eq!(kib_field(text, "VmHWM:"), Some(1234 * 1024));
        assert_eq!(kib_field(text, "VmSwap:"), None);
    }

    #[test]
    fn the_peak_sees_what_has_been_freed_again() {
        let meter = Meter::start();
        drop(std::hint::black_box(vec![1u8; 50_000_000]));
        assert!(Meter::peak_bytes() >= meter.base_bytes + 49_000_000);
    }
}
