//! Memory that spans come home to, used again for the next ones.
//!
//! Fresh memory costs a fault for each of its pages, about as much as copying into it does. Layers of a
//! model are alike, so what one layer's backward drops fits what is loaded next.
//!
//! # Access contract
//!
//! * A block lies on the shelf only as long as as many spans of its size are away: [`Awaited`] is their count,
//!   one for each, and what is too much goes back to the system when one ends. So the shelf never holds more
//!   than what is going to come home, and is empty when all of it has.
//! * [`Memory`] may be dropped on any thread. The lock is never held while anything else runs. A forked child
//!   has a copy of the lock that a thread of the parent may have held, and there nothing is kept.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use ebbtide_core::BackendError;
use ebbtide_store::AlignedBuf;

use crate::owned::Process;

/// Where blocks lie between two spans.
#[derive(Debug)]
pub(crate) struct Shelf {
    /// By size in bytes.
    sizes: Mutex<HashMap<usize, Row>>,
    process: Process,
}

#[derive(Debug, Default)]
struct Row {
    free: Vec<AlignedBuf>,
    /// Spans of this size that are to come home.
    away: usize,
}

/// A block of memory that goes back to its shelf, if it came from one.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Always there, until it is dropped.
    block: Option<AlignedBuf>,
    shelf: Option<Arc<Shelf>>,
}

/// A span is away and will ask for so much memory.
#[derive(Debug)]
pub(crate) struct Awaited {
    shelf: Arc<Shelf>,
    bytes: usize,
}

impl Shelf {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { sizes: Mutex::default(), process: Process::here() })
    }

    fn with<R>(&self, change: impl FnOnce(&mut HashMap<usize, Row>) -> R) -> Option<R> {
        let here = self.process.is_here();
        here.then(|| change(&mut self.sizes.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// So many bytes, of undefined content.
    ///
    /// # Errors
    /// The system has no memory.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Result<Memory, BackendError> {
        let used = self.with(|sizes| sizes.get_mut(&bytes)?.free.pop()).flatten();
        let block = used.map_or_else(|| AlignedBuf::zeroed(bytes), Ok)?;
        Ok(Memory { block: Some(block), shelf: Some(Arc::clone(self)) })
    }

    /// Says that so many bytes will be asked for.
    pub(crate) fn awaits(self: &Arc<Self>, bytes: usize) -> Awaited {
        self.with(|sizes| sizes.entry(bytes).or_default().away += 1);
        Awaited { shelf: Arc::clone(self), bytes }
    }

    /// Keeps a block, or gives it back if nobody will ask for it.
    fn put(&self, block: AlignedBuf) -> Option<AlignedBuf> {
        let mut block = Some(block);
        self.with(|sizes| {
            let row = block.as_ref().and_then(|block| sizes.get_mut(&block.len()));
            if let Some(row) = row.filter(|row| row.free.len() < row.away) {
                row.free.extend(block.take());
            }
        });
        block
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        let surplus = self.shelf.with(|sizes| {
            let row = sizes.get_mut(&self.bytes)?;
            row.away -= 1;
            if row.away == 0 {
                return sizes.remove(&self.bytes).map(|row| row.free);
            }
            Some(row.free.drain(row.away.min(row.free.len())..).collect())
        });
        // Given back to the system here, where nobody waits for the lock.
        drop(surplus);
    }
}

impl From<AlignedBuf> for Memory {
    /// A block without a shelf.
    fn from(block: AlignedBuf) -> Self {
        Self { block: Some(block), shelf: None }
    }
}

impl Deref for Memory {
    type Target = AlignedBuf;

    fn deref(&self) -> &AlignedBuf {
        self.block.as_ref().expect("a block is there until it is dropped")
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut AlignedBuf {
        self.block.as_mut().expect("a block is there until it is dropped")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let (Some(block), Some(shelf)) = (self.block.take(), &self.shelf) {
            drop(shelf.put(block));
        }
    }
}
