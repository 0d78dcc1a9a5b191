//! Settings of the file tier.

use std::path::PathBuf;
use std::time::Instant;

use crate::fault::Fault;

/// Settings of a [`FileStore`](crate::FileStore).
///
/// ```
/// let config = ebbtide_store::FileConfig { workers: 1, ..Default::default() };
/// assert_eq!(config.queue_bytes, 256 << 20);
/// ```
#[derive(Clone, Debug)]
pub struct FileConfig {
    /// The folder of the spill file. Default: the system's folder for temporary files.
    pub dir: PathBuf,
    /// Number of threads, at least 1. Default: 2, enough to keep a disk busy while one copies.
    pub workers: usize,
    /// How the threads ask for their I/O. Default: [`IoChoice::Auto`].
    pub io: IoChoice,
    /// Bytes of the buffer that each thread copies through where direct I/O can't reach a block,
    /// at least 1, rounded up to 4096. Default: 1 MiB.
    pub staging_bytes_per_worker: usize,
    /// Bytes of jobs that are accepted and unfinished, at most; a single larger job is accepted
    /// when there is no other. `put` and `get` block while there is no room. Default: 256 MiB.
    pub queue_bytes: u64,
    /// Bytes that the file may grow to. Default: `None`, as far as the disk allows.
    pub capacity_bytes: Option<u64>,
    /// Whether each block's checksum (XXH3, 64 bits) is taken when it is written, kept in memory
    /// and compared when the block has been read. A block that differs is an error whose cause is a
    /// [`Mismatch`](crate::Mismatch). Default: no. It costs each worker one more pass over the
    /// block in each direction: 13 % of the bandwidth of writes was measured on two busy cores.
    pub checksums: bool,
    /// Whether the file is emptied as soon as nothing is in it, by the call of `discard` that gave
    /// the last slot back. Default: no: the next blocks are faster where the disk's space is taken
    /// already. If it fails, the space stays taken. See [`FileStore::shrink`](crate::FileStore::shrink).
    pub empty_when_unused: bool,
    /// Zero of the times in [`Timing`](ebbtide_core::Timing). Default: the time of the call.
    pub origin: Instant,
    /// Rates that the tier is held to, one thread for each direction then. Default: `None`, as fast
    /// as it goes.
    pub throttle: Option<Throttle>,
    /// A planned failure, for tests.
    #[doc(hidden)]
    pub fault: Option<Fault>,
}

impl FileConfig {
    /// The defaults, with this folder.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), ..Self::default() }
    }
}

impl Default for FileConfig {
    fn default() -> Self {
        Self {
            dir: std::env::temp_dir(),
            workers: 2,
            io: IoChoice::Auto,
            staging_bytes_per_worker: 1 << 20,
            queue_bytes: 256 << 20,
            capacity_bytes: None,
            checksums: false,
            empty_when_unused: false,
            origin: Instant::now(),
            throttle: None,
            fault: None,
        }
    }
}

/// How fast a tier may be: to try out what a plan does on a slower one.
///
/// ```
/// use ebbtide_store::{FileConfig, Throttle};
/// let throttle = Throttle { out_bytes_per_s: 5e8, in_bytes_per_s: 5e8 };
/// let config = FileConfig { throttle: Some(throttle), ..FileConfig::default() };
/// assert!(config.throttle.is_some());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throttle {
    /// Bytes a second out, in all. At least 1.
    pub out_bytes_per_s: f64,
    /// Bytes a second in, in all. At least 1.
    pub in_bytes_per_s: f64,
}

/// How the threads of a [`FileStore`](crate::FileStore) are to ask the kernel for their I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoChoice {
    /// Whichever is faster: both are measured when the store is opened, which takes less than 60
    /// ms. Where that is not possible or makes no sense, [`Threads`](Self::Threads).
    #[default]
    Auto,
    /// One call of `pread` or `pwrite` after the other in each thread.
    Threads,
    /// A ring (`io_uring`) for each thread, with several chunks of a block on their way at once.
    /// An error if the kernel refuses it.
    Uring,
}
