//! What the engine asks of a device with streams, events and pinned memory.
//!
//! The engine validates every call before it makes it, so implementations need not check again; they
//! report only what the engine cannot know: out of memory, a failed call, a lost device. A call that
//! returns an error has had no effect.
//!
//! # Order
//!
//! * Work on one stream runs in the order in which it was queued; streams run beside each other.
//! * [`record`](Accelerator::record) marks the work queued on a stream so far. [`wait`](Accelerator::wait)
//!   lets a stream go on only behind a mark; the host does not wait.
//! * Memory of the device comes from an allocator that follows the *compute* stream: what is freed may
//!   be handed out again at once, for work that is queued on the compute stream later. Work on another
//!   stream has to be ordered behind the allocation, and in front of the freeing, by events.
//! * Host memory belongs to the host: it may be freed, read or written by the host only when the host
//!   knows that the copies which use it are complete ([`sync`](Accelerator::sync),
//!   [`is_done`](Accelerator::is_done)).

use std::fmt::Debug;

use crate::backend::Facts;
use crate::error::BackendError;

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Out of the device (D2H).
    Out,
    /// Back to the device (H2D).
    In,
}

/// One end of a copy: memory of some kind, and the byte it starts at.
#[derive(Debug)]
pub enum End<'a, A: Accelerator + ?Sized> {
    /// A storage of the framework.
    Storage(&'a A::Storage, u64),
    /// Staging memory on the device.
    Block(&'a A::Block, u64),
    /// A (pinned) host buffer.
    Host(&'a A::Host, u64),
}

impl<A: Accelerator + ?Sized> Clone for End<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: Accelerator + ?Sized> Copy for End<'_, A> {}

/// A device that computes on a stream and copies on others.
pub trait Accelerator {
    /// Names one allocation of the framework and keeps its (possibly empty) storage object alive.
    type Storage;
    /// Staging memory on the device. Dropping it frees it on the compute stream.
    type Block;
    /// A host buffer that copies can reach; its address never changes. Dropping it frees it at once.
    type Host: Send + 'static;
    /// A queue of work.
    type Stream: Copy + PartialEq + Debug;
    /// A mark in a stream.
    type Event: Clone;

    /// An identity of the allocation that is valid while `storage` is held: two registered storages
    /// with the same key are one allocation.
    fn key(&self, storage: &Self::Storage) -> usize;

    /// Size and version of a storage now. `None` for a framework in which neither can change.
    fn facts(&self, storage: &Self::Storage) -> Option<Facts>;

    /// The stream that the framework computes on now.
    fn compute(&self) -> Self::Stream;

    /// A stream for copies in one direction. The engine asks once for each, when it is first needed.
    ///
    /// # Errors
    /// None can be made.
    fn copy_stream(&mut self, direction: Direction) -> Result<Self::Stream, BackendError>;

    /// Marks what has been queued on a stream so far.
    ///
    /// # Errors
    /// The device refuses; nothing is marked.
    fn record(&mut self, stream: Self::Stream) -> Result<Self::Event, BackendError>;

    /// Later work on `stream` runs behind the mark. The host goes on at once.
    ///
    /// # Errors
    /// The device refuses; the stream does not wait.
    fn wait(&mut self, stream: Self::Stream, event: &Self::Event) -> Result<(), BackendError>;

    /// Whether the work behind a mark is complete. After `true` the host is ordered behind it.
    fn is_done(&mut self, event: &Self::Event) -> bool;

    /// The host waits for a mark.
    ///
    /// # Errors
    /// The device is lost, or work in front of the mark failed.
    fn sync(&mut self, event: &Self::Event) -> Result<(), BackendError>;

    /// The host waits for everything on a stream.
    ///
    /// # Errors
    /// The device is lost, or work on the stream failed.
    fn sync_stream(&mut self, stream: Self::Stream) -> Result<(), BackendError>;

    /// Frees a storage's memory on the compute stream. The storage object lives on with size 0, so
    /// that every view is attached to the memory that [`restore`](Accelerator::restore) brings.
    ///
    /// # Errors
    /// The framework refuses; the memory is untouched.
    fn free(&mut self, storage: &mut Self::Storage) -> Result<(), BackendError>;

    /// Gives an emptied storage memory of `bytes` bytes again, on the compute stream. Its content is
    /// undefined. Does not count as a change in place.
    ///
    /// # Errors
    /// Out of device memory; the storage stays empty.
    fn restore(&mut self, storage: &mut Self::Storage, bytes: u64) -> Result<(), BackendError>;

    /// Staging memory, allocated on the compute stream.
    ///
    /// # Errors
    /// Out of device memory.
    fn stage(&mut self, bytes: u64) -> Result<Self::Block, BackendError>;

    /// A host buffer of exactly `bytes` bytes.
    ///
    /// # Errors
    /// Out of host memory, or it can't be pinned.
    fn pin(&mut self, bytes: u64) -> Result<Self::Host, BackendError>;

    /// Queues a copy of `bytes` bytes. Both ends must stay until the copy is complete. A copy into a
    /// storage does not count as a change in place.
    ///
    /// # Errors
    /// The device refuses; nothing is queued.
    fn copy(
        &mut self,
        stream: Self::Stream,
        from: End<'_, Self>,
        to: End<'_, Self>,
        bytes: u64,
    ) -> Result<(), BackendError>;

    /// Whether many small copies between storages and one host buffer are as fast as one large copy,
    /// as they are where the device's memory is RAM. Packing then needs no staging.
    fn gathers(&self) -> bool {
        false
    }
}
