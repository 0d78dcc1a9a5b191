//! What a program holds: storages, blocks, host buffers, slots, streams and events.
//!
//! Handles name memory; work that is queued holds none of them, so that a drop is always seen.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::call::Call;
use crate::clock::Clock;
use crate::memory::Span;
use crate::objects::Name;
use crate::shadow::Role;
use crate::state::Place;
use crate::world::World;

/// A storage object of the framework. A clone is another reference to the same object.
///
/// When the last reference goes, its memory is freed on the compute stream, and its
/// [key](ebbtide_core::Accelerator::key) is given to the next storage that is made.
#[derive(Clone)]
pub struct SimStorage(pub(crate) Arc<Object>);

pub(crate) struct Object {
    pub(crate) world: World,
    pub(crate) number: usize,
    pub(crate) id: u64,
    pub(crate) made: Place,
}

impl SimStorage {
    /// A number that no other storage of the world has or will have.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Bytes of memory that it has now: 0 while it is empty.
    pub fn bytes(&self) -> u64 {
        self.memory().map_or(0, |memory| memory.bytes)
    }

    /// Whether it has no memory now.
    pub fn is_empty(&self) -> bool {
        self.memory().is_none()
    }

    /// How often it was changed in place.
    pub fn version(&self) -> u64 {
        let state = self.0.world.lock();
        state.storages[self.0.number].as_ref().map_or(0, |storage| storage.version)
    }

    /// How many references to the object there are.
    pub fn references(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// A kernel on the compute stream overwrites a part of it, and the version grows.
    #[track_caller]
    pub fn modify_in_place(&self, range: Range<u64>, seed: u64) {
        self.0.world.modify(self, range, seed);
    }

    fn memory(&self) -> Option<Span> {
        self.0.world.lock().storages[self.0.number].as_ref()?.memory
    }

    pub(crate) fn name(&self) -> Name {
        Name::Storage(self.0.number)
    }
}

impl fmt::Debug for SimStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "storage#{}", self.0.id)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        self.world.lock().drop_storage(self.number, self.made);
    }
}

/// Staging memory on the device. Dropping it frees it on the compute stream.
pub struct SimBlock {
    pub(crate) world: World,
    pub(crate) id: u64,
    pub(crate) bytes: u64,
    pub(crate) made: Place,
}

impl SimBlock {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn name(&self) -> Name {
        Name::Block(self.id)
    }
}

impl fmt::Debug for SimBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block#{}", self.id)
    }
}

impl Drop for SimBlock {
    fn drop(&mut self) {
        self.world.lock().drop_block(self.id, self.made);
    }
}

/// A pinned host buffer. Dropping it frees it at once.
pub struct SimHost {
    pub(crate) world: World,
    pub(crate) id: u64,
    pub(crate) memory: Span,
    pub(crate) made: Place,
}

impl SimHost {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes
    }

    /// The host reads it: an access that copies into it must be ordered before.
    #[track_caller]
    pub fn read(&self) -> Vec<u8> {
        let place = std::panic::Location::caller();
        let mut state = self.world.lock();
        let call = state.begin(format!("read host#{}", self.id), place);
        let op = state.by_host(&call, Role::Use);
        state.reads(self.memory, &op);
        state.memory.read(self.memory)
    }

    pub(crate) fn name(&self) -> Name {
        Name::Host(self.id)
    }
}

impl fmt::Debug for SimHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host#{}", self.id)
    }
}

impl Drop for SimHost {
    fn drop(&mut self) {
        self.world.lock().drop_host(self.id, self.made);
    }
}

/// Bytes on the disk. Forgetting to [discard](ebbtide_core::Store::discard) one is a leak.
#[derive(Debug)]
pub struct SimSlot {
    pub(crate) world: u64,
    pub(crate) id: u64,
    pub(crate) bytes: u64,
}

impl SimSlot {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A second name of the slot, as a wrong program would keep it.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        Self { world: self.world, id: self.id, bytes: self.bytes }
    }
}

/// A queue of work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SimStream {
    pub(crate) world: u64,
    pub(crate) number: usize,
}

impl fmt::Debug for SimStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream#{}", self.number)
    }
}

/// A mark in a stream.
#[derive(Clone)]
pub struct SimEvent(pub(crate) Arc<Mark>);

pub(crate) struct Mark {
    pub(crate) world: u64,
    pub(crate) id: u64,
    pub(crate) time: u64,
    pub(crate) clock: Clock,
    pub(crate) call: Call,
}

impl fmt::Debug for SimEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event#{} of {}", self.0.id, self.0.call)
    }
}
