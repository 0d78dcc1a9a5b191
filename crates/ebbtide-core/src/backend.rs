//! What the engine asks of a device and of a store.
//!
//! The engine validates every call before it makes it, so implementations need not check again;
//! they report only what the engine cannot know: out of memory, I/O errors, a lost device.
//!
//! # Who owns the bytes
//!
//! A [`Device::Block`] is device memory without a name. It is in exactly one place at a time:
//!
//! 1. inside its storage (state `device`),
//! 2. inside the store's queue, from [`Store::put`] until the job is done (state `d2h`); the store
//!    frees it when every byte has been copied, or hands it back with the error,
//! 3. nowhere (state `host`): the bytes live in the store's slot,
//! 4. inside the store's queue, from [`Store::get`] until the job is done (state `h2d`).
//!
//! Since a block moves, nothing can be freed while a copy reads it, and no copy can be forgotten.
//!
//! A device whose framework gives no memory away *lends* it ([`Device::LENDS`]): its block points into
//! the storage and keeps it alive, the storage stays usable in state `d2h`, and its memory goes when
//! the engine calls [`Device::vacate`].

use crate::error::BackendError;

/// Memory that can be read and written as plain bytes.
///
/// `bytes` and `bytes_mut` describe the same range, whose length never changes.
pub trait Bytes {
    /// The content, in memory order.
    fn bytes(&self) -> &[u8];
    /// The content, to be overwritten. May take the memory only now, on the thread that fills it.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Number of bytes. Asking never takes memory.
    fn size(&self) -> usize {
        self.bytes().len()
    }
    /// Called once, by whoever copied the bytes out: they are safe elsewhere now. Memory that is worth
    /// keeping (a pinned buffer of a pool) comes back and is handed on; by default it is freed.
    fn release(self) -> Option<Self>
    where
        Self: Sized,
    {
        None
    }
}

/// What the engine compares before it copies a storage, after, and when it is used (row T5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Size of the storage now, in bytes.
    pub bytes: u64,
    /// The framework's count of changes in place.
    pub version: u64,
}

/// Memory that moves by changing its owner: RAM, on a CPU machine.
pub trait Device {
    /// Names one allocation and keeps its (possibly empty) storage object alive.
    type Storage;
    /// The memory of a storage, taken out of it.
    type Block: Bytes + Send + 'static;

    /// An identity of the allocation that is valid while `storage` is held: two registered
    /// storages with the same key are one allocation.
    fn key(&self, storage: &Self::Storage) -> usize;

    /// What may have changed since the storage was registered. `None` for a framework in which
    /// neither can change; nothing is compared then.
    fn facts(&self, _: &Self::Storage) -> Option<Facts> {
        None
    }

    /// Whether [`Device::detach`] leaves the memory where it is until [`Device::vacate`].
    const LENDS: bool = false;

    /// Takes the memory out of the storage. What is left behind must make every later read an
    /// error of the framework, never a wrong value. A device that lends hands out access to it instead.
    ///
    /// # Errors
    /// The storage can't be emptied (for example, a dtype the device can't move). Nothing changed.
    fn detach(&mut self, storage: &Self::Storage) -> Result<Self::Block, BackendError>;

    /// Lets the memory of a storage go whose bytes have been copied, on a device that lends.
    ///
    /// # Errors
    /// The framework refuses; the storage is as it was.
    fn vacate(&mut self, _: &Self::Storage) -> Result<(), BackendError> {
        Ok(())
    }

    /// Puts memory back into a storage that was emptied by [`Device::detach`]. Every view of the
    /// storage sees the bytes again. A block that was only lent changes nothing.
    ///
    /// # Errors
    /// The storage is not empty or the framework refuses; the block is then lost.
    fn attach(&mut self, storage: &Self::Storage, block: Self::Block) -> Result<(), BackendError>;

    /// Fresh memory of the size and dtype that `storage` had when it was detached.
    ///
    /// # Errors
    /// Out of device memory.
    fn allocate(&mut self, storage: &Self::Storage) -> Result<Self::Block, BackendError>;

    /// A load has failed whose memory [`Device::allocate`] gave: the storage is empty again, since what
    /// is in it is no value of anybody. Nothing where the memory was not the storage's yet.
    fn retract(&mut self, _: &Self::Storage) {}
}

/// Names one job of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// When a job ran, in nanoseconds since an origin that is the store's own choice. The engine only
/// passes it on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// First byte touched.
    pub started_ns: u64,
    /// Last byte arrived.
    pub finished_ns: u64,
    /// Which of the store's workers ran it.
    pub worker: u32,
}

/// A failed job: the reason, and the block it was given.
#[derive(Debug)]
pub struct Failed<B> {
    /// What went wrong.
    pub error: BackendError,
    /// The block, unchanged for a failed `put`, of undefined content for a failed `get`.
    pub block: B,
}

/// What a finished job leaves.
#[derive(Debug)]
pub enum Done<B, Slot> {
    /// A `put` is done: the bytes are in the slot. The block is freed, or comes back if its
    /// [`Bytes::release`] said so.
    Stored(Slot, Option<B>),
    /// A `get` is done: the block holds the bytes. The slot still does, too.
    Loaded(B),
}

/// How a job ended.
pub type Outcome<B, Slot> = Result<(Done<B, Slot>, Timing), Failed<B>>;

/// What a store has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Bytes written by finished jobs.
    pub bytes_out: u64,
    /// Bytes read by finished jobs.
    pub bytes_in: u64,
    /// Bytes that occupied slots hold, rounded as the store rounds them.
    pub bytes_held: u64,
    /// Nanoseconds the caller was blocked, in `wait` and for room in the queue.
    pub blocked_ns: u64,
}

/// A tier below the device.
///
/// Jobs may run in any order and at any time between the call and the end of `wait`; the engine
/// never asks for a slot whose `put` has not finished.
pub trait Store<B> {
    /// Where stored bytes live. Given back exactly once, by [`Store::discard`].
    type Slot;

    /// Starts copying the block out. May block while the queue is full.
    ///
    /// # Errors
    /// The job can't be accepted (no room in the tier); the block comes back.
    fn put(&mut self, block: B) -> Result<Ticket, Failed<B>>;

    /// Starts copying a slot into the block, which has the size of the one that was put.
    ///
    /// # Errors
    /// The job can't be accepted; the block comes back, the slot stays valid.
    fn get(&mut self, slot: &Self::Slot, block: B) -> Result<Ticket, Failed<B>>;

    /// Whether [`Store::wait`] for this ticket would return at once.
    fn is_done(&mut self, ticket: Ticket) -> bool;

    /// Waits for the job and takes its result. Each ticket is waited for exactly once.
    ///
    /// # Errors
    /// The job failed; its block comes back.
    fn wait(&mut self, ticket: Ticket) -> Outcome<B, Self::Slot>;

    /// Gives a slot back. No job reads it any more.
    fn discard(&mut self, slot: Self::Slot);

    /// Totals since the store was made.
    fn stats(&self) -> StoreStats;
}
