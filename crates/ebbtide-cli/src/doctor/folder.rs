//! The folder of the spill file: what it is on, and how fast that is both ways.

use std::path::Path;
use std::time::Instant;

use ebbtide_store::free_space;
use ebbtide_store::measure::{self, DiskReport};
use serde::Serialize;

use super::wear::round_trip_gb_per_s;
use crate::failure::Failure;

/// Bytes of the first look, which says how many can be measured in time.
const FIRST: u64 = 8 << 20;
/// Bytes that are measured at most: enough to pass the caches of most disks' controllers.
const MOST: u64 = 1 << 30;
/// Bytes that are measured at least, however little is free.
const LEAST: u64 = 4096;
/// Seconds of writing and reading together.
const LONG: f64 = 5.;
const SHORT: f64 = 0.8;

/// The folder and its disk.
#[derive(Debug, Serialize)]
pub(super) struct Folder {
    pub(super) path: String,
    /// Its type, such as `ext4`.
    pub(super) file_system: String,
    pub(super) in_ram: bool,
    pub(super) free_bytes: Option<u64>,
    pub(super) direct_io: bool,
    /// Null where it is direct.
    pub(super) why_not_direct: Option<String>,
    /// Whether this process may use it: it was tried.
    pub(super) io_uring: bool,
    /// What the kernel answered; null where it may.
    pub(super) why_not_io_uring: Option<String>,
    pub(super) measured_bytes: u64,
    pub(super) write_gb_per_s: f64,
    pub(super) read_gb_per_s: f64,
    pub(super) write_4k_us: f64,
    pub(super) read_4k_us: f64,
}

impl Folder {
    /// Looks at the folder and measures its disk.
    pub(super) fn measure(dir: &Path, quick: bool) -> Result<Self, Failure> {
        let free_bytes = free_space(dir);
        let report = timed(dir, free_bytes, if quick { SHORT } else { LONG })?;
        Ok(Self {
            path: dir.display().to_string(),
            in_ram: matches!(report.file_system.as_str(), "tmpfs" | "ramfs"),
            file_system: report.file_system,
            free_bytes,
            direct_io: report.direct.is_ok(),
            why_not_direct: report.direct.err(),
            io_uring: report.uring.is_ok(),
            why_not_io_uring: report.uring.err(),
            measured_bytes: report.bytes,
            write_gb_per_s: report.gbps.write,
            read_gb_per_s: report.gbps.read,
            write_4k_us: report.write_4k_us,
            read_4k_us: report.read_4k_us,
        })
    }

    /// Whether there was no room for even the first look.
    pub(super) fn is_tiny(&self) -> bool {
        self.measured_bytes < FIRST
    }
}

/// Measures for about so many seconds, and leaves half of the free space free. More bytes at each
/// try, because a disk may be fast only for the first of them.
fn timed(dir: &Path, free: Option<u64>, seconds: f64) -> Result<DiskReport, Failure> {
    let most = free.map_or(MOST, |free| (free / 2).clamp(LEAST, MOST));
    let begin = Instant::now();
    let mut bytes = FIRST.min(most);
    loop {
        let report = measure::disk(dir, bytes)?;
        let left = seconds - begin.elapsed().as_secs_f64();
        let next = affordable(&report, left).min(bytes.saturating_mul(4)).min(most);
        // A try that is hardly longer says nothing new.
        if next < bytes.saturating_mul(2) {
            return Ok(report);
        }
        bytes = next;
    }
}

/// Bytes that go out and come back in so many seconds at the speed of the first look.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
fn affordable(report: &DiskReport, seconds: f64) -> u64 {
    let gb_per_s = round_trip_gb_per_s(report.gbps.write, report.gbps.read);
    (gb_per_s * seconds * 1e9) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_what_is_free_is_measured_where_that_is_little() {
        let dir = tempfile::tempdir().unwrap();
        for (free, measured) in [(64 << 10, 32 << 10), (2 << 20, 1 << 20), (0, LEAST)] {
            assert_eq!(timed(dir.path(), Some(free), 0.).unwrap().bytes, measured);
        }
    }
}
