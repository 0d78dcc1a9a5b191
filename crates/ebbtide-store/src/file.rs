//! The file tier: one spill file, a few threads, direct I/O.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use ebbtide_core::{BackendError, Bytes, Done, Failed, Store, StoreStats, Ticket, Timing};

use crate::extent::Extent;
use crate::fault::{Fault, FaultyFile};
use crate::queue::{Queue, Task};
use crate::raw::RawFile;
use crate::spill::SpillFile;
use crate::transfer::Io;
use crate::worker::Worker;
use crate::{AlignedBuf, GRAIN};

/// Settings of a [`FileStore`].
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
    /// Bytes of the buffer that each thread copies through where direct I/O can't reach a block,
    /// at least 1, rounded up to 4096. Default: 1 MiB.
    pub staging_bytes_per_worker: usize,
    /// Bytes of jobs that are accepted and unfinished, at most; a single larger job is accepted
    /// when there is no other. `put` and `get` block while there is no room. Default: 256 MiB.
    pub queue_bytes: u64,
    /// Bytes that the file may grow to. Default: `None`, as far as the disk allows.
    pub capacity_bytes: Option<u64>,
    /// Zero of the times in [`Timing`]. Default: the time of the call.
    pub origin: Instant,
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
            staging_bytes_per_worker: 1 << 20,
            queue_bytes: 256 << 20,
            capacity_bytes: None,
            origin: Instant::now(),
            fault: None,
        }
    }
}

/// Where a block's bytes are in the spill file.
#[derive(Debug)]
pub struct FileSlot {
    pub(crate) extent: Extent,
    pub(crate) bytes: u64,
}

impl FileSlot {
    /// Length of the block that was put, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The range of the file that holds them.
    pub fn extent(&self) -> &Extent {
        &self.extent
    }
}

/// A tier in one unnamed file. Blocks are written and read by a few threads, loads before writes.
///
/// A block that was put is dropped by the thread that wrote it, as soon as it is written: waiting
/// for the ticket is not needed for device memory to be freed.
///
/// Dropping the store ends its threads. Jobs that are running are completed, jobs in the queue are
/// dropped, and the file is gone.
pub struct FileStore<B> {
    queue: Arc<Queue<B>>,
    threads: Vec<JoinHandle<()>>,
    dir: PathBuf,
    direct: bool,
    notices: Vec<String>,
}

impl<B: Bytes + Send + 'static> FileStore<B> {
    /// Opens the spill file and starts the threads.
    ///
    /// # Errors
    /// The folder does not serve (see [`SpillFile::open`]), a setting is 0 that must not be, or
    /// there is no memory or no thread left.
    pub fn open(config: &FileConfig) -> Result<Self, BackendError> {
        if config.workers == 0 || config.staging_bytes_per_worker == 0 {
            return Err(BackendError::new("the file tier needs a worker and a staging buffer"));
        }
        let SpillFile { file, dir, mem_align, notices } = SpillFile::open(&config.dir)?;
        let duplicate = || {
            let failed = |e| BackendError::new("can't duplicate a file descriptor").with_source(e);
            file.try_clone().map_err(failed)
        };
        let cached = if mem_align.is_none() { Some(duplicate()?) } else { None };
        let raw: Box<dyn RawFile> = match config.fault {
            Some(fault) => Box::new(FaultyFile::new(file, fault)),
            None => Box::new(file),
        };
        let mut store = Self {
            queue: Arc::new(Queue::new(config.queue_bytes, config.capacity_bytes)),
            threads: Vec::new(),
            dir,
            direct: mem_align.is_some(),
            notices,
        };
        // An error below drops the store, which ends the threads started so far.
        store.start(config, &Arc::new(Io { raw, mem_align, cached }))?;
        Ok(store)
    }

    fn start(&mut self, config: &FileConfig, io: &Arc<Io>) -> Result<(), BackendError> {
        let staging = config.staging_bytes_per_worker.checked_next_multiple_of(GRAIN);
        for number in 0..config.workers {
            let worker = Worker {
                queue: Arc::clone(&self.queue),
                io: Arc::clone(io),
                staging: AlignedBuf::zeroed(staging.unwrap_or(usize::MAX))?,
                number: u32::try_from(number).unwrap_or(u32::MAX),
                origin: config.origin,
                dir: self.dir.clone(),
                dirty: (0, 0),
            };
            let builder = std::thread::Builder::new().name(format!("ebbtide-io-{number}"));
            let thread = builder.spawn(move || worker.run()).map_err(|e| {
                BackendError::new("can't start a thread for the file tier").with_source(e)
            })?;
            self.threads.push(thread);
        }
        Ok(())
    }

    /// Whether reads and writes bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// What the user should know about the folder, one sentence each, without a full stop.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }
}

impl<B: Bytes + Send + 'static> Store<B> for FileStore<B> {
    type Slot = FileSlot;

    fn put(&mut self, block: B) -> Result<Ticket, Failed<B>> {
        let bytes = block.size() as u64;
        match self.queue.reserve(bytes) {
            Ok(extent) => Ok(self.queue.push(Task::Write(extent), block, bytes)),
            Err(no_room) => {
                let dir = self.dir.display();
                let error = BackendError::new(format!(
                    "the spill file in {dir} has no room for a block of {bytes} bytes"
                ));
                let hint = "let the spill file grow further, or swap fewer layers";
                let error = error.with_hint(hint).with_source(no_room);
                Err(Failed { error, block })
            }
        }
    }

    /// # Panics
    /// The block has not the length of the one that was put: it would read its neighbour's bytes.
    fn get(&mut self, slot: &FileSlot, block: B) -> Result<Ticket, Failed<B>> {
        let bytes = block.size() as u64;
        assert_eq!(bytes, slot.bytes, "length of the block to load into");
        Ok(self.queue.push(Task::Read { offset: slot.extent.offset() }, block, bytes))
    }

    fn is_done(&mut self, ticket: Ticket) -> bool {
        self.queue.is_done(ticket)
    }

    /// # Panics
    /// The ticket was waited for already, or is another store's.
    fn wait(&mut self, ticket: Ticket) -> Result<(Done<B, FileSlot>, Timing), Failed<B>> {
        self.queue.wait(ticket)
    }

    /// # Panics
    /// The slot is another store's.
    fn discard(&mut self, slot: FileSlot) {
        self.queue.release(slot.extent);
    }

    /// `bytes_held` includes the room of writes that are not finished.
    fn stats(&self) -> StoreStats {
        self.queue.stats()
    }
}

impl<B> Drop for FileStore<B> {
    fn drop(&mut self) {
        // Outside of the queue's lock: blocks have destructors of their own.
        drop(self.queue.close());
        for thread in self.threads.drain(..) {
            // It has reported its panic, if any, on stderr; there is nobody else to tell.
            let _ = thread.join();
        }
    }
}

impl<B> fmt::Debug for FileStore<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore")
            .field("dir", &self.dir)
            .field("direct", &self.direct)
            .field("workers", &self.threads.len())
            .field("stats", &self.queue.stats())
            .finish_non_exhaustive()
    }
}
