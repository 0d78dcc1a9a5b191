//! RAM as the device of the file tier: memory is lent to the tier's workers, which copy straight from
//! torch's storage and straight into what becomes one.
//!
//! # Unsafe
//!
//! A lent block is read, and a storage in place is written, by a worker without the GIL:
//!
//! * The block keeps the [`Held`], which keeps the storage until [`Device::vacate`], which the engine
//!   calls when the copy is over; a storage in place is never resized in between, since only the engine
//!   does that. Of a storage outside, its keeper promises the same ([`outside`](crate::outside)).
//! * What a user writes meanwhile is a race with the copy, and is found by its version: the copy is then
//!   never read (`held.rs`, and row T5 in the engine). The bytes are plain data: any value is valid.
#![expect(unsafe_code, reason = "workers copy from and to torch's memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ebbtide_core::{BackendError, Bytes, Device, Facts};
use pyo3::intern;
use pyo3::prelude::*;

use crate::held::{Freed, Held, backend_error, phase};
use crate::shelf::{Memory, Shelf};

/// What a unit tells the hub beside the engine's own counters.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) tensors_out: AtomicU64,
    /// Storages that were let go while something else still referred to them.
    pub(crate) not_freed: AtomicU64,
    pub(crate) not_freed_bytes: AtomicU64,
}

impl Tally {
    /// A storage of so many bytes was let go.
    pub(crate) fn let_go(&self, freed: Freed, bytes: u64) {
        self.tensors_out.fetch_add(1, Ordering::Relaxed);
        if freed == Freed::StillUsed {
            self.not_freed.fetch_add(1, Ordering::Relaxed);
            self.not_freed_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}

/// Lends torch's memory.
#[derive(Debug)]
pub(crate) struct Lender {
    tally: Arc<Tally>,
    shelf: Arc<Shelf>,
}

impl Lender {
    pub(crate) fn new(tally: Arc<Tally>) -> Self {
        Self { tally, shelf: Shelf::new() }
    }
}

/// Memory that a worker copies.
pub(crate) enum Block {
    /// Torch's, in one direction or the other.
    Lent { start: usize, len: usize, _held: Arc<Held> },
    /// To become the memory of a span, from byte `at` on.
    Fresh { buffer: Memory, at: usize, len: usize },
}

impl Bytes for Block {
    fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: see the module.
            Self::Lent { start, len, .. } => unsafe {
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance(*start), *len)
            },
            Self::Fresh { buffer, at, len } => &buffer.as_slice()[*at..*at + *len],
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            // SAFETY: see the module.
            Self::Lent { start, len, .. } => unsafe {
                std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(*start), *len)
            },
            Self::Fresh { buffer, at, len } => &mut buffer.as_mut_slice()[*at..*at + *len],
        }
    }

    fn size(&self) -> usize {
        match self {
            Self::Lent { len, .. } | Self::Fresh { len, .. } => *len,
        }
    }
}

impl Lender {
    /// All of the memory that a storage has now.
    fn lend(held: &Arc<Held>) -> Result<Block, BackendError> {
        if let Some(outside) = held.keeper() {
            let start = outside.lend()?;
            return Self::block(held, start, outside.bytes());
        }
        let (start, len) = match held.named() {
            None => (held.range().start, held.range().len()),
            Some(named) => Python::attach(|py| -> PyResult<(usize, usize)> {
                let storage = named.storage.bind(py);
                let start = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
                Ok((start, storage.call_method0(intern!(py, "nbytes"))?.extract()?))
            })
            .map_err(|error| refused("can't find the memory of a storage", &error))?,
        };
        Self::block(held, start, len)
    }

    fn block(held: &Arc<Held>, start: usize, len: usize) -> Result<Block, BackendError> {
        if start == 0 {
            return Err(BackendError::new("a storage without memory"));
        }
        Ok(Block::Lent { start, len, _held: Arc::clone(held) })
    }
}

fn refused(what: &str, error: &PyErr) -> BackendError {
    Python::attach(|py| backend_error(py, what, error))
}

impl Device for Lender {
    type Storage = Arc<Held>;
    type Block = Block;

    const LENDS: bool = true;

    fn key(&self, storage: &Arc<Held>) -> usize {
        storage.engine_key()
    }

    fn facts(&self, storage: &Arc<Held>) -> Option<Facts> {
        storage.facts()
    }

    fn detach(&mut self, storage: &Arc<Held>) -> Result<Block, BackendError> {
        Self::lend(storage)
    }

    fn vacate(&mut self, storage: &Arc<Held>) -> Result<(), BackendError> {
        if let Some(outside) = storage.keeper() {
            outside.vacate()?;
            self.tally.let_go(Freed::Yes, outside.bytes() as u64);
            return Ok(());
        }
        let range = storage.range();
        let bytes = range.len() as u64;
        let freed = Python::attach(|py| match storage.named() {
            None => storage.let_go(py),
            Some(_) => storage.empty(py).map(|()| Freed::Yes),
        });
        let freed = freed.map_err(|error| refused("torch can't let go of a storage", &error))?;
        storage.is_awaited(self.shelf.awaits(phase(range.start) + range.len()));
        self.tally.let_go(freed, bytes);
        Ok(())
    }

    fn attach(&mut self, storage: &Arc<Held>, block: Block) -> Result<(), BackendError> {
        if let Some(outside) = storage.keeper() {
            return outside.arrive();
        }
        if let Block::Fresh { buffer, at, .. } = block {
            storage.come_home(Arc::new(buffer), at);
        }
        Ok(())
    }

    fn allocate(&mut self, storage: &Arc<Held>) -> Result<Block, BackendError> {
        if let Some(outside) = storage.keeper() {
            let start = outside.allocate()?;
            return Self::block(storage, start, outside.bytes());
        }
        let Some(named) = storage.named() else {
            let range = storage.range();
            let at = phase(range.start);
            let len = range.len();
            return Ok(Block::Fresh { buffer: self.shelf.take(at + len)?, at, len });
        };
        let bytes = named.facts.bytes;
        Python::attach(|py| storage.resize(py, bytes))
            .map_err(|error| refused("no memory to bring a storage back to", &error))?;
        Self::lend(storage)
    }

    fn retract(&mut self, storage: &Arc<Held>) {
        if let Some(outside) = storage.keeper() {
            outside.retract();
        }
        if storage.named().is_some() {
            // If torch refuses, it has refused to free memory, and the next load tries again.
            let _ = Python::attach(|py| storage.empty(py));
        }
    }
}
