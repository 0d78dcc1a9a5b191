//! What memory, a disk and the file tier can do here: for programs that report it.
//!
//! Everything is measured on this machine at this moment, so whatever else runs on it shows. Where
//! two things are compared, they take turns, and the ratio is the median of the ratios of turns.
//!
//! | function | measures |
//! | --- | --- |
//! | [`memory_copy_gbps`] | copying within memory, one thread |
//! | [`disk`] | direct writes and reads in a folder: bandwidth, latency, what is possible there |
//! | [`file_tier`] | a [`FileStore`](crate::FileStore) against a plain loop of direct I/O |

mod mount;
mod plain;
mod tier;

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use ebbtide_core::BackendError;

use self::plain::{PlainFile, filled};
pub use self::tier::{TierRates, TierReport, file_tier};
use crate::{AlignedBuf, GRAIN, uring_available};

/// Bytes of one call of the plain loop.
const CALL: usize = 8 << 20;
/// No direction of [`disk`] goes on for longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Calls of 4096 bytes whose median is the latency, and the time they may take.
const SMALL_CALLS: usize = 200;
const SMALL_PATIENCE: Duration = Duration::from_secs(1);

/// A bandwidth each way, in 10⁹ bytes a second, or a ratio of two.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// From memory to the disk.
    pub write: f64,
    /// From the disk to memory.
    pub read: f64,
}

/// What [`disk`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskReport {
    /// Bandwidth of one thread that writes, then reads, blocks of 8 MiB one after the other, or one
    /// smaller block.
    pub gbps: Rates,
    /// Bytes that were written, and read back.
    pub bytes: u64,
    /// Microseconds that writing 4096 bytes takes, median.
    pub write_4k_us: f64,
    /// Microseconds that reading 4096 bytes takes, median.
    pub read_4k_us: f64,
    /// Whether the page cache is bypassed; if not, why. Without it the figures tell more about
    /// memory than about the disk.
    pub direct: Result<(), String>,
    /// Whether this process may use `io_uring`; if not, what the kernel answered.
    pub uring: Result<(), String>,
    /// Type of the file system, such as `ext4` or `tmpfs`; `unknown` if nothing tells.
    pub file_system: String,
}

/// Bandwidth of copying within memory, in 10⁹ bytes a second: the median of several copies of 64
/// MiB by one thread. Takes about a tenth of a second.
///
/// # Errors
/// There are no 128 MiB of memory.
///
/// # Examples
/// ```
/// assert!(ebbtide_store::measure::memory_copy_gbps()? > 0.0);
/// # Ok::<(), ebbtide_core::BackendError>(())
/// ```
pub fn memory_copy_gbps() -> Result<f64, BackendError> {
    let source = filled(64 << 20, 1)?;
    let mut target = filled(64 << 20, 2)?;
    let rates = (0..7).map(|_| {
        let begin = Instant::now();
        target.as_mut_slice().copy_from_slice(black_box(source.as_slice()));
        black_box(target.as_mut_slice());
        gbps(source.len() as u64, begin.elapsed())
    });
    Ok(median(rates.collect()))
}

/// Writes `bytes` (rounded up to whole blocks of 8 MiB, or to 4096 if it is less than one) into an unnamed file in `dir` and reads them back, with
/// direct I/O where the folder allows it, without threads or queues. Each direction ends after five
/// seconds in any case. The disk has to have room for `bytes`; nothing is left there.
///
/// # Errors
/// The folder does not serve (see [`SpillFile::open`](crate::SpillFile::open)), an I/O error, or
/// no memory.
///
/// # Examples
/// ```
/// let report = ebbtide_store::measure::disk(&std::env::temp_dir(), 16 << 20)?;
/// assert_eq!(report.bytes, 16 << 20);
/// println!("{}: writes {:.1} GB/s", report.file_system, report.gbps.write);
/// # Ok::<(), ebbtide_core::BackendError>(())
/// ```
pub fn disk(dir: &Path, bytes: u64) -> Result<DiskReport, BackendError> {
    let file = PlainFile::open(dir)?;
    let (bytes, call) = whole_calls(bytes);
    let mut block = filled(call, 3)?;
    // What is measured is the disk, not how the file system finds room.
    file.preallocate(bytes)?;

    let begin = Instant::now();
    let mut written = 0;
    while written < bytes && (written == 0 || begin.elapsed() < PATIENCE) {
        file.write(block.as_slice(), written)?;
        written += call as u64;
    }
    let write = gbps(written, begin.elapsed());
    let begin = Instant::now();
    let mut read = 0;
    while read < written && (read == 0 || begin.elapsed() < PATIENCE) {
        file.read(block.as_mut_slice(), read)?;
        read += call as u64;
    }
    let read_rate = gbps(read, begin.elapsed());
    let (write_4k_us, read_4k_us) = latencies(&file, written)?;
    Ok(DiskReport {
        gbps: Rates { write, read: read_rate },
        bytes: written,
        write_4k_us,
        read_4k_us,
        direct: file.direct(),
        uring: uring_available().map_err(|e| e.to_string()),
        file_system: mount::file_system(dir).unwrap_or_else(|| "unknown".into()),
    })
}

/// Bytes to measure, and those of one call.
fn whole_calls(bytes: u64) -> (u64, usize) {
    let call = usize::try_from(bytes).unwrap_or(CALL).clamp(1, CALL).next_multiple_of(GRAIN);
    (bytes.max(1).next_multiple_of(call as u64), call)
}

/// Medians of small writes and reads all over the first `bytes` of the file.
fn latencies(file: &PlainFile, bytes: u64) -> Result<(f64, f64), BackendError> {
    let mut small = AlignedBuf::zeroed(GRAIN)?;
    let grains = bytes / GRAIN as u64;
    let (mut writes, mut reads) = (Vec::new(), Vec::new());
    let begin = Instant::now();
    for call in 0..SMALL_CALLS {
        if call > 0 && begin.elapsed() > SMALL_PATIENCE {
            break;
        }
        // A stride without a common factor with a power of two: far apart, and never the same.
        let offset = (call as u64 * 40_503) % grains * GRAIN as u64;
        let write = Instant::now();
        file.write(small.as_slice(), offset)?;
        writes.push(write.elapsed().as_secs_f64() * 1e6);
        let read = Instant::now();
        file.read(small.as_mut_slice(), offset)?;
        reads.push(read.elapsed().as_secs_f64() * 1e6);
    }
    Ok((median(writes), median(reads)))
}

fn gbps(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(1e-9) / 1e9
}

/// The value in the middle, or the mean of the two there; 0 of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[len / 2],
        len => f64::midpoint(values[len / 2 - 1], values[len / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        let exactly = |values: &[f64], median_is: f64| {
            assert_eq!(median(values.to_vec()).to_bits(), median_is.to_bits(), "{values:?}");
        };
        exactly(&[], 0.0);
        exactly(&[3.0, 1.0, 2.0], 2.0);
        exactly(&[4.0, 1.0, 2.0, 3.0], 2.5);
    }

    #[test]
    fn few_bytes_are_one_small_call() {
        let large = CALL as u64;
        assert_eq!(whole_calls(0), (4096, 4096));
        assert_eq!(whole_calls(4097), (8192, 8192));
        assert_eq!(whole_calls(large - 1), (large, CALL));
        assert_eq!(whole_calls(large + 1), (2 * large, CALL));
    }

    #[test]
    fn a_disk_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        for bytes in [1, CALL as u64] {
            let report = disk(dir.path(), bytes).unwrap();
            assert_eq!(report.bytes, bytes.max(GRAIN as u64));
            let DiskReport { gbps, write_4k_us, read_4k_us, .. } = report;
            assert!([gbps.write, gbps.read, write_4k_us, read_4k_us].iter().all(|&v| v > 0.0));
        }
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn ram_is_not_direct_and_says_so() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        let report = disk(dir.path(), 1).unwrap();
        assert_eq!(report.file_system, "tmpfs");
        assert!(report.direct.unwrap_err().contains("is RAM"));
    }
}
