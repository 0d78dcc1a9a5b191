//! RAM as an accelerator: copies run when they are queued, so there is nothing to wait for. The device's
//! allocator keeps freed blocks for the next storage of the same size, as those of frameworks do.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

use ebbtide_core::{Accelerator, BackendError, Direction, End, Facts};

/// Blocks begin at a multiple of this, as in the frameworks' allocators.
const ALIGN: usize = 64;

pub(crate) struct Ram {
    arena: Vec<u8>,
    /// Where the first aligned byte is, and the first that was never given out.
    next: usize,
    /// Offsets of free blocks, by size.
    free: HashMap<u64, Vec<usize>>,
}

/// A storage: where its bytes are, and how many; `None` while it is away.
pub(crate) type RamStorage = Rc<Cell<Option<(usize, u64)>>>;

impl Ram {
    /// Memory for so many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        let arena = vec![1; bytes + ALIGN];
        let next = arena.as_ptr().align_offset(ALIGN);
        Self { arena, next, free: HashMap::new() }
    }

    /// A storage with undefined content.
    ///
    /// # Errors
    /// The arena is full.
    pub(crate) fn storage(&mut self, bytes: u64) -> Result<RamStorage, BackendError> {
        let offset = self.allocate(bytes)?;
        Ok(Rc::new(Cell::new(Some((offset, bytes)))))
    }

    fn allocate(&mut self, bytes: u64) -> Result<usize, BackendError> {
        if let Some(offset) = self.free.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(offset);
        }
        let (offset, length) = (self.next, usize::try_from(bytes).unwrap_or(usize::MAX));
        let end = offset.checked_add(length).filter(|end| *end <= self.arena.len());
        let end = end.ok_or_else(|| BackendError::new("the device is out of memory"))?;
        self.next = end.next_multiple_of(ALIGN);
        Ok(offset)
    }
}

fn copy_bytes(from: &[u8], at: u64, to: &mut [u8], to_at: u64, bytes: u64) -> Option<()> {
    let range = |at: u64| Some(usize::try_from(at).ok()?..usize::try_from(at + bytes).ok()?);
    to.get_mut(range(to_at)?)?.copy_from_slice(from.get(range(at)?)?);
    Some(())
}

impl Accelerator for Ram {
    type Storage = RamStorage;
    /// Never made: the device gathers.
    type Block = std::convert::Infallible;
    type Host = Mutex<Box<[u8]>>;
    type Stream = ();
    type Event = ();

    fn key(&self, storage: &RamStorage) -> usize {
        Rc::as_ptr(storage).addr()
    }

    fn facts(&self, storage: &RamStorage) -> Option<Facts> {
        Some(Facts { bytes: storage.get().map_or(0, |(_, bytes)| bytes), version: 0 })
    }

    fn compute(&self) {}

    fn copy_stream(&mut self, _: Direction) -> Result<(), BackendError> {
        Ok(())
    }

    fn record(&mut self, (): ()) -> Result<(), BackendError> {
        Ok(())
    }

    fn wait(&mut self, (): (), (): &()) -> Result<(), BackendError> {
        Ok(())
    }

    fn is_done(&mut self, (): &()) -> bool {
        true
    }

    fn sync(&mut self, (): &()) -> Result<(), BackendError> {
        Ok(())
    }

    fn sync_stream(&mut self, (): ()) -> Result<(), BackendError> {
        Ok(())
    }

    fn free(&mut self, storage: &mut RamStorage) -> Result<(), BackendError> {
        if let Some((offset, bytes)) = storage.take() {
            self.free.entry(bytes).or_default().push(offset);
        }
        Ok(())
    }

    fn restore(&mut self, storage: &mut RamStorage, bytes: u64) -> Result<(), BackendError> {
        storage.set(Some((self.allocate(bytes)?, bytes)));
        Ok(())
    }

    fn stage(&mut self, bytes: u64) -> Result<Self::Block, BackendError> {
        Err(BackendError::new(format!("no staging of {bytes} bytes where RAM is the device")))
    }

    fn pin(&mut self, bytes: u64) -> Result<Self::Host, BackendError> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        Ok(Mutex::new(vec![0; bytes].into_boxed_slice()))
    }

    fn copy(
        &mut self,
        (): (),
        from: End<'_, Self>,
        to: End<'_, Self>,
        bytes: u64,
    ) -> Result<(), BackendError> {
        let place = |storage: &RamStorage, at| Some(storage.get()?.0 as u64 + at);
        let done = match (from, to) {
            (End::Storage(from, at), End::Host(to, to_at)) => {
                let mut to = to.lock().unwrap_or_else(PoisonError::into_inner);
                place(from, at).and_then(|at| copy_bytes(&self.arena, at, &mut to, to_at, bytes))
            }
            (End::Host(from, at), End::Storage(to, to_at)) => {
                let from = from.lock().unwrap_or_else(PoisonError::into_inner);
                place(to, to_at).and_then(|to| copy_bytes(&from, at, &mut self.arena, to, bytes))
            }
            _ => None,
        };
        done.ok_or_else(|| BackendError::new("a copy that does not fit its ends"))
    }

    fn gathers(&self) -> bool {
        true
    }
}
