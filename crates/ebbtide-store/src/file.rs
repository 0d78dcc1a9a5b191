//! The file tier: one spill file, a few threads, direct I/O.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use ebbtide_core::{BackendError, Bytes, Done, Failed, Store, StoreStats, Ticket, Timing};

use crate::choose::{Chosen, IoReport, choose};
use crate::config::FileConfig;
use crate::extent::Extent;
use crate::fault::FaultyFile;
use crate::owner::Owner;
use crate::queue::{Queue, Task, Way};
use crate::raw::RawFile;
use crate::ring::Ring;
use crate::space;
use crate::spill::SpillFile;
use crate::throttle::Pace;
use crate::transfer::{Io, Lane};
use crate::worker::Worker;

/// Where a block's bytes are in the spill file.
#[derive(Debug)]
pub struct FileSlot {
    pub(crate) extent: Extent,
    pub(crate) bytes: u64,
    pub(crate) sum: Option<u64>,
}

impl FileSlot {
    /// Length of the block that was put, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// XXH3 (64 bits) of the block, if the store takes checksums.
    pub fn checksum(&self) -> Option<u64> {
        self.sum
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
///
/// # After a fork
/// The store belongs to the process that opened it. In a child that was forked from it there are no
/// threads, and the file is the parent's, so there every call touches nothing and blocks for
/// nothing: `put`, `get` and [`check_owner`](Self::check_owner) return an error, `discard` and
/// `drop` forget what they got, `stats` is zero, `is_done` is true. An error of `wait` would have
/// to come with a block, which is out of reach: `wait` answers with an empty slot that no call
/// accepts. The child keeps the file open, and so its space taken, until it ends or executes a
/// program. Whoever waits for loads in a process that may be a child calls `check_owner` before.
pub struct FileStore<B> {
    owner: Owner,
    queue: Arc<Queue<B>>,
    io: Arc<Io>,
    threads: Vec<JoinHandle<()>>,
    dir: PathBuf,
    report: IoReport,
    notices: Vec<String>,
    empty_when_unused: bool,
}

impl<B: Bytes + Send + 'static> FileStore<B> {
    /// Opens the spill file, chooses the way of I/O and starts the threads.
    ///
    /// # Errors
    /// The folder does not serve (see [`SpillFile::open`]), a setting is 0 that must not be,
    /// `io_uring` is asked for and the kernel refuses it, or there is no memory or no thread left.
    ///
    /// # Examples
    /// ```
    /// use ebbtide_store::{AlignedBuf, FileConfig, FileStore, IoChoice, IoKind};
    ///
    /// let config = FileConfig { io: IoChoice::Threads, checksums: true, ..Default::default() };
    /// let store = FileStore::<AlignedBuf>::open(&config)?;
    /// assert_eq!(store.io().kind, IoKind::Threads);
    /// # Ok::<(), ebbtide_core::BackendError>(())
    /// ```
    pub fn open(config: &FileConfig) -> Result<Self, BackendError> {
        if config.workers == 0 || config.staging_bytes_per_worker == 0 {
            return Err(BackendError::new("the file tier needs a worker and a staging buffer"));
        }
        let SpillFile { file, dir, mem_align, notices } = SpillFile::open(&config.dir)?;
        let file = Arc::new(file);
        let raw: Box<dyn RawFile> = match config.fault {
            Some(fault) => Box::new(FaultyFile::new(Arc::clone(&file), fault)),
            None => Box::new(Arc::clone(&file)),
        };
        let io = Arc::new(Io { file, raw, mem_align });
        let Chosen { report, rings } = choose(config, &io)?;
        let mut store = Self {
            owner: Owner::here(),
            queue: Arc::new(Queue::new(config.queue_bytes, config.capacity_bytes)),
            io,
            threads: Vec::new(),
            dir,
            report,
            notices,
            empty_when_unused: config.empty_when_unused,
        };
        // An error below drops the store, which ends the threads started so far.
        store.start(config, rings)?;
        Ok(store)
    }

    fn start(&mut self, config: &FileConfig, rings: Vec<Ring>) -> Result<(), BackendError> {
        let mut rings = rings.into_iter();
        let paces = config.throttle.map(Pace::both);
        let mut paces =
            paces.into_iter().flat_map(|(out, back)| [(Way::Out, out), (Way::In, back)]);
        let workers = if config.throttle.is_some() { 2 } else { config.workers };
        for number in 0..workers {
            let worker = Worker {
                queue: Arc::clone(&self.queue),
                io: Arc::clone(&self.io),
                lane: Lane::new(config.staging_bytes_per_worker, rings.next())?,
                checksums: config.checksums,
                number: u32::try_from(number).unwrap_or(u32::MAX),
                origin: config.origin,
                dir: self.dir.clone(),
                dirty: (0, 0),
                pace: paces.next(),
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
        self.io.is_direct()
    }

    /// Which way of asking for I/O is in use, and why not the other.
    pub fn io(&self) -> &IoReport {
        &self.report
    }

    /// What the user should know about the folder, one sentence each, without a full stop.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Whether this process is the one that opened the store.
    ///
    /// # Errors
    /// It is a child that was forked from that one: see [`FileStore`].
    pub fn check_owner(&self) -> Result<(), BackendError> {
        self.owner.check()
    }

    /// Bytes of the disk that the file takes, with the blocks in which the file system lists its
    /// pieces. Freed slots keep theirs for the next blocks, until [`shrink`](Self::shrink).
    ///
    /// # Errors
    /// The file system does not tell, or the process is not the owner.
    pub fn file_bytes(&self) -> Result<u64, BackendError> {
        self.owner.check()?;
        space::allocated(&self.io.file).map_err(|e| {
            let message =
                format!("can't tell the size of the spill file in {}", self.dir.display());
            BackendError::new(message).with_source(e)
        })
    }

    /// Gives the disk space of everything that is not in use back, and tells how many bytes that
    /// were. Slots and unfinished jobs are not touched. Cheap if there is nothing to give.
    ///
    /// The file becomes shorter where its end is free; holes in the middle are punched, which not
    /// every file system can: they stay then.
    ///
    /// # Errors
    /// The file system reports an error, or the process is not the owner. Slots stay valid.
    ///
    /// # Examples
    /// ```
    /// use ebbtide_core::{Done, Store};
    /// use ebbtide_store::{AlignedBuf, FileConfig, FileStore};
    ///
    /// let mut store = FileStore::open(&FileConfig::default())?;
    /// let ticket = store.put(AlignedBuf::zeroed(1 << 20)?).map_err(|failed| failed.error)?;
    /// let (Done::Stored(slot, _), _) = store.wait(ticket).map_err(|failed| failed.error)? else {
    ///     unreachable!("a put stores");
    /// };
    /// assert!(store.file_bytes()? >= 1 << 20);
    /// store.discard(slot);
    /// assert!(store.shrink()? >= 1 << 20);
    /// assert_eq!(store.file_bytes()?, 0);
    /// # Ok::<(), ebbtide_core::BackendError>(())
    /// ```
    pub fn shrink(&mut self) -> Result<u64, BackendError> {
        self.owner.check()?;
        // Only `put` takes ranges, and it needs `&mut self`, too: what is free here stays free
        // until the kernel is done, even if jobs that are running free more.
        let (holes, end) = self.queue.trim();
        space::give_back(&self.io.file, &holes, end).map_err(|e| {
            let message = format!("can't shrink the spill file in {}", self.dir.display());
            BackendError::new(message).with_source(e)
        })
    }
}

impl<B: Bytes + Send + 'static> Store<B> for FileStore<B> {
    type Slot = FileSlot;

    /// # Errors
    /// The capacity is used up, or the process is not the owner.
    fn put(&mut self, block: B) -> Result<Ticket, Failed<B>> {
        if let Err(error) = self.owner.check() {
            return Err(Failed { error, block });
        }
        let bytes = block.size() as u64;
        match self.queue.reserve(bytes) {
            Ok(extent) => Ok(self.queue.push(Task::Write(extent), block, bytes)),
            Err(no_room) => {
                let dir = self.dir.display();
                let error = BackendError::new(format!(
                    "the spill file in {dir} has no room for a block of {bytes} bytes"
                ));
                let hint = "let the spill file grow further, or swap fewer layers";
                let error = error.no_room().with_hint(hint).with_source(no_room);
                Err(Failed { error, block })
            }
        }
    }

    /// # Errors
    /// The process is not the owner.
    ///
    /// # Panics
    /// The block has not the length of the one that was put: it would read its neighbour's bytes.
    fn get(&mut self, slot: &FileSlot, block: B) -> Result<Ticket, Failed<B>> {
        if let Err(error) = self.owner.check() {
            return Err(Failed { error, block });
        }
        let bytes = block.size() as u64;
        assert_eq!(bytes, slot.bytes, "length of the block to load into");
        let task = Task::Read { offset: slot.extent.offset(), sum: slot.sum };
        Ok(self.queue.push(task, block, bytes))
    }

    fn is_done(&mut self, ticket: Ticket) -> bool {
        !self.owner.is_here() || self.queue.is_done(ticket)
    }

    /// # Panics
    /// The ticket was waited for already, or is another store's.
    fn wait(&mut self, ticket: Ticket) -> Result<(Done<B, FileSlot>, Timing), Failed<B>> {
        if self.owner.is_here() {
            return self.queue.wait(ticket);
        }
        // The block is behind a lock that may be held for ever, so there is none for an error.
        let nowhere = FileSlot { extent: Extent::NONE, bytes: 0, sum: None };
        Ok((Done::Stored(nowhere, None), Timing::default()))
    }

    /// # Panics
    /// The slot is another store's.
    fn discard(&mut self, slot: FileSlot) {
        if !self.owner.is_here() {
            return;
        }
        self.queue.release(slot.extent);
        if self.empty_when_unused && self.queue.is_empty() {
            // Nobody is told, and nothing is lost: the space stays taken.
            let _ = self.shrink();
        }
    }

    /// `bytes_held` includes the room of writes that are not finished.
    fn stats(&self) -> StoreStats {
        if self.owner.is_here() { self.queue.stats() } else { StoreStats::default() }
    }
}

impl<B> Drop for FileStore<B> {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The threads are not in this process, and what they use may be half-changed: the
            // copies of it are leaked, and the descriptor is the child's own to be leaked.
            std::mem::forget(std::mem::take(&mut self.threads));
            std::mem::forget((Arc::clone(&self.queue), Arc::clone(&self.io)));
            return;
        }
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
        let mut text = f.debug_struct("FileStore");
        text.field("dir", &self.dir).field("direct", &self.io.is_direct());
        text.field("io", &self.report.kind).field("workers", &self.threads.len());
        if self.owner.is_here() {
            text.field("stats", &self.queue.stats());
        } else {
            text.field("owner", &self.owner);
        }
        text.finish_non_exhaustive()
    }
}
