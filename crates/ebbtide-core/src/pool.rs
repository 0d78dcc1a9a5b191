//! Which host buffer a copy uses, when it may be used again, and how much there is of it.
//!
//! # Access contract of a buffer
//!
//! | where | who may touch the bytes | leaves by |
//! | --- | --- | --- |
//! | free | nobody | `acquire`, `shrink` |
//! | handed out | copies that the owner queues | `release` |
//! | pending | copies queued before the event that it was released with | the event, seen complete |
//!
//! A buffer is handed out again only when the pool has *seen* the event of its last reader and writer
//! complete: order between streams is never assumed (row G8). A [`Buffer`] can't be copied, so it can't
//! be released twice.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::PoolId;
use crate::accel::Accelerator;
use crate::class;
use crate::error::{Error, Kind};
use crate::mark::{Mark, hit};

/// A host buffer handed out by a [`HostPool`].
pub struct Buffer<A: Accelerator> {
    memory: A::Host,
    bytes: u64,
    pool: PoolId,
}

impl<A: Accelerator> Buffer<A> {
    /// The memory.
    pub fn memory(&self) -> &A::Host {
        &self.memory
    }

    /// Size of the memory in bytes: at least what was asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The pool that it belongs to.
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// Lends the memory to someone who needs to own it for a while. What is left is a place to put it
    /// back into.
    pub(crate) fn lend(self) -> (A::Host, Place) {
        (self.memory, Place { bytes: self.bytes, pool: self.pool })
    }
}

/// What remains of a buffer while its memory is lent.
#[derive(Debug)]
pub(crate) struct Place {
    bytes: u64,
    pool: PoolId,
}

impl Place {
    /// Size of the memory that is lent.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn back<A: Accelerator>(self, memory: A::Host) -> Buffer<A> {
        Buffer { memory, bytes: self.bytes, pool: self.pool }
    }
}

/// Bytes of a [`HostPool`] (row P3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// All that it has allocated: the sum of the four below.
    pub allocated: u64,
    /// Handed out.
    pub in_use: u64,
    /// Released, waiting for an event.
    pub pending: u64,
    /// Ready to be handed out.
    pub free: u64,
    /// Out of use: the device did not say whether their last copies have ended.
    pub lost: u64,
    /// The most that was ever allocated.
    pub high_water: u64,
}

/// Bytes that one pool may allocate, or that several may allocate together. Clones are the same budget;
/// pools of several threads may share one.
#[derive(Clone, Debug)]
pub struct Budget {
    maximum: u64,
    allocated: Arc<AtomicU64>,
}

impl Budget {
    /// Nothing of `maximum` bytes is allocated.
    pub fn new(maximum: u64) -> Self {
        Self { maximum, allocated: Arc::default() }
    }

    /// The bound in bytes.
    pub fn maximum(&self) -> u64 {
        self.maximum
    }

    /// Bytes that are allocated now.
    pub fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Bytes that may still be allocated.
    pub fn room(&self) -> u64 {
        self.maximum.saturating_sub(self.allocated())
    }

    /// Takes so many bytes, or none.
    fn reserve(&self, bytes: u64) -> bool {
        let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= self.maximum);
        self.allocated.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Free buffers of one class.
struct Rack<A: Accelerator> {
    buffers: Vec<A::Host>,
    /// The fewest that have been here since the last end of a step.
    fewest: usize,
    /// Steps in a row that left at least one untouched.
    idle_steps: u32,
}

/// A bounded pool of host buffers in size classes (rows P1 to P3).
///
/// The pool decides; the [`Accelerator`] allocates. It is not locked: whoever shares it between
/// threads puts it behind a lock, as the front ends do.
pub struct HostPool<A: Accelerator> {
    id: PoolId,
    budget: Budget,
    /// By class.
    racks: Vec<Rack<A>>,
    pending: VecDeque<(Buffer<A>, A::Event)>,
    /// Buffers whose last copy can't be proven to have ended. They are not used before it is.
    lost: Vec<(Buffer<A>, Option<A::Event>)>,
    stats: PoolStats,
}

/// After so many steps without use a free buffer is given back (case C14).
pub const IDLE_STEPS: u32 = 8;

impl<A: Accelerator> HostPool<A> {
    /// An empty pool that never allocates more than `maximum` bytes. Buffers count with the size of
    /// their class (see [`class`]), also the last one that fits.
    pub fn new(id: PoolId, maximum: u64) -> Self {
        Self::sharing(id, Budget::new(maximum))
    }

    /// An empty pool that shares its bound with others. Its free buffers make no room for these: see
    /// [`HostPool::shrink_to`].
    pub fn sharing(id: PoolId, budget: Budget) -> Self {
        let (pending, lost) = (VecDeque::new(), Vec::new());
        Self { id, budget, racks: Vec::new(), pending, lost, stats: PoolStats::default() }
    }

    /// The bound in bytes.
    pub fn maximum(&self) -> u64 {
        self.budget.maximum
    }

    /// What it holds now.
    pub fn stats(&self) -> PoolStats {
        self.stats
    }

    /// A buffer of at least `bytes` bytes: a free one of the same class, else a new one, else the
    /// smallest sufficient free one, else room made by giving free ones up, else the earliest pending
    /// one that can serve.
    ///
    /// # Errors
    /// No room, even with everything that was released: [`Error::is_no_room`] is true. Or memory can't
    /// be allocated; its reservation is given back.
    pub fn acquire(&mut self, device: &mut A, bytes: u64) -> Result<Buffer<A>, Error> {
        self.find_buffer(device, bytes, false)
    }

    /// [`HostPool::acquire`], but never a larger buffer than the class of `bytes`: for a store that
    /// fills a whole buffer.
    pub(crate) fn acquire_exact(&mut self, device: &mut A, bytes: u64) -> Result<Buffer<A>, Error> {
        self.find_buffer(device, bytes, true)
    }

    fn find_buffer(&mut self, device: &mut A, bytes: u64, exact: bool) -> Result<Buffer<A>, Error> {
        self.reclaim(device);
        let class = class::of(bytes);
        loop {
            if let Some(memory) = self.take(class) {
                hit(Mark::PoolSameClass);
                return Ok(self.handed_out(memory, class));
            }
            let wanted = class::bytes(class);
            if self.budget.reserve(wanted) {
                return self.allocate(device, class);
            }
            let larger = if exact { 0..0 } else { class + 1..self.racks.len() };
            let sufficient = larger.into_iter().find_map(|c| Some((self.take(c)?, c)));
            if let Some((memory, class)) = sufficient {
                hit(Mark::PoolLarger);
                return Ok(self.handed_out(memory, class));
            }
            let missing = wanted.saturating_sub(self.budget.room());
            if self.stats.free >= missing {
                hit(Mark::PoolMadeRoom);
                self.shrink_to(self.stats.allocated - missing);
            } else if self.settle_earliest(device)? {
                hit(Mark::PoolWaited);
            } else {
                hit(Mark::PoolNoRoom);
                return Err(self.no_room(bytes));
            }
        }
    }

    fn no_room(&self, bytes: u64) -> Error {
        let requested = class::bytes(class::of(bytes));
        let (pooled, maximum) = (self.budget.allocated(), self.budget.maximum);
        let hint = "raise the bound of host memory, add a file tier, or swap fewer layers";
        Error::new(Kind::NoRoom { requested, pooled, maximum }).with_hint(hint)
    }

    fn take(&mut self, class: usize) -> Option<A::Host> {
        let rack = self.racks.get_mut(class)?;
        let memory = rack.buffers.pop()?;
        rack.fewest = rack.fewest.min(rack.buffers.len());
        self.stats.free -= class::bytes(class);
        Some(memory)
    }

    fn handed_out(&mut self, memory: A::Host, class: usize) -> Buffer<A> {
        let bytes = class::bytes(class);
        self.stats.in_use += bytes;
        Buffer { memory, bytes, pool: self.id }
    }

    /// A new buffer, whose bytes are reserved.
    fn allocate(&mut self, device: &mut A, class: usize) -> Result<Buffer<A>, Error> {
        let bytes = class::bytes(class);
        let memory = device.pin(bytes).map_err(|cause| {
            hit(Mark::PinFailed);
            self.budget.give_back(bytes);
            let hint = "lower the bound of host memory";
            Error::caused_by(Kind::Pin { bytes }, cause).or_hint(hint)
        })?;
        hit(Mark::PoolNew);
        self.stats.allocated += bytes;
        self.stats.high_water = self.stats.high_water.max(self.stats.allocated);
        Ok(self.handed_out(memory, class))
    }

    /// Gives a buffer back. With an event it can be used again once the event has completed; without,
    /// at once: the host knows that no copy uses it.
    ///
    /// # Errors
    /// It is another pool's; it comes back.
    pub fn release(
        &mut self,
        buffer: Buffer<A>,
        event: Option<A::Event>,
    ) -> Result<(), (Buffer<A>, Error)> {
        if buffer.pool != self.id {
            return Err((buffer, Error::new(Kind::Foreign)));
        }
        self.stats.in_use -= buffer.bytes;
        self.take_back(buffer, event);
        Ok(())
    }

    fn take_back(&mut self, buffer: Buffer<A>, event: Option<A::Event>) {
        match event {
            Some(event) => {
                self.stats.pending += buffer.bytes;
                self.pending.push_back((buffer, event));
            }
            None => self.put_away(buffer),
        }
    }

    fn put_away(&mut self, buffer: Buffer<A>) {
        let class = class::of(buffer.bytes);
        while self.racks.len() <= class {
            self.racks.push(Rack { buffers: Vec::new(), fewest: 0, idle_steps: 0 });
        }
        self.stats.free += buffer.bytes;
        self.racks[class].buffers.push(buffer.memory);
    }

    /// Takes a buffer out of use, because nobody can tell whether its last copy has ended. Of the copies
    /// before that one `event` tells.
    pub(crate) fn lose(&mut self, buffer: Buffer<A>, event: Option<A::Event>) {
        self.stats.in_use -= buffer.bytes;
        self.stats.lost += buffer.bytes;
        self.lost.push((buffer, event));
    }

    /// The last copies have ended after all.
    pub(crate) fn recover_lost(&mut self) {
        for (buffer, event) in std::mem::take(&mut self.lost) {
            self.stats.lost -= buffer.bytes;
            self.take_back(buffer, event);
        }
    }

    /// Someone who had borrowed a buffer's memory has freed it.
    pub(crate) fn freed(&mut self, Place { bytes, pool }: Place) {
        debug_assert_eq!(pool, self.id, "a buffer carries the number of its pool");
        self.stats.in_use -= bytes;
        self.forget(bytes);
    }

    /// So many bytes are freed.
    fn forget(&mut self, bytes: u64) {
        self.stats.allocated -= bytes;
        self.budget.give_back(bytes);
    }

    /// Moves pending buffers whose events have completed to the free ones, in the order in which they
    /// were released: one question is enough to know that nothing has changed. A buffer behind a slower
    /// stream's may stay pending a little longer than it has to.
    pub fn reclaim(&mut self, device: &mut A) {
        while let Some((buffer, event)) = self.pending.pop_front() {
            if !device.is_done(&event) {
                self.pending.push_front((buffer, event));
                return;
            }
            self.stats.pending -= buffer.bytes;
            self.put_away(buffer);
        }
    }

    /// Waits for the buffer that was released first. `false` if there is none.
    fn settle_earliest(&mut self, device: &mut A) -> Result<bool, Error> {
        let Some((buffer, event)) = self.pending.pop_front() else { return Ok(false) };
        if let Err(cause) = device.sync(&event) {
            let bytes = buffer.bytes;
            self.pending.push_front((buffer, event));
            return Err(Error::caused_by(Kind::Settle { bytes }, cause));
        }
        self.stats.pending -= buffer.bytes;
        self.put_away(buffer);
        Ok(true)
    }

    /// Frees free buffers, the largest first, until at most `bytes` bytes are allocated or none is
    /// left. Returns the bytes given back.
    pub fn shrink_to(&mut self, bytes: u64) -> u64 {
        let before = self.stats.allocated;
        for class in (0..self.racks.len()).rev() {
            while self.stats.allocated > bytes {
                let Some(memory) = self.take(class) else { break };
                drop(memory);
                self.forget(class::bytes(class));
            }
        }
        before - self.stats.allocated
    }

    /// A step is over. A free buffer that [`IDLE_STEPS`] steps in a row had no use for is given back.
    pub fn end_of_step(&mut self, device: &mut A) {
        self.reclaim(device);
        for class in 0..self.racks.len() {
            let rack = &mut self.racks[class];
            let idle = rack.fewest;
            rack.idle_steps = if idle == 0 { 0 } else { rack.idle_steps + 1 };
            let over = if rack.idle_steps >= IDLE_STEPS { idle } else { 0 };
            for _ in 0..over {
                hit(Mark::PoolIdle);
                drop(self.take(class));
                self.forget(class::bytes(class));
            }
            let rack = &mut self.racks[class];
            rack.fewest = rack.buffers.len();
        }
    }

    /// Waits for everything pending, so that the pool can be dropped.
    ///
    /// # Errors
    /// The device is lost; what is still pending stays so.
    pub fn settle(&mut self, device: &mut A) -> Result<(), Error> {
        while self.settle_earliest(device)? {}
        Ok(())
    }
}

impl<A: Accelerator> Drop for HostPool<A> {
    /// What it has allocated goes with it, and with the buffers that it has handed out.
    fn drop(&mut self) {
        self.budget.give_back(self.stats.allocated);
    }
}

impl<A: Accelerator> std::fmt::Debug for HostPool<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostPool")
            .field("id", &self.id)
            .field("budget", &self.budget)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl<A: Accelerator> std::fmt::Debug for Buffer<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("bytes", &self.bytes)
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}
