//! RAM as an accelerator: the device of the host tier for tensors of the CPU.
//!
//! Copies are queued as pairs of addresses and run when their end is marked: all of them in one go,
//! without the GIL, the memory of the next being fetched while one runs. So there is never anything to
//! wait for.
//!
//! # Access contract
//!
//! | bytes | who may touch them | until |
//! | --- | --- | --- |
//! | torch's, of a span | any reader; a copy out | the aliases go ([`Accelerator::free`]) |
//! | torch's, of a storage in place | the copies, between `restore` and `free` | it is emptied |
//! | a host buffer's | the copies | the engine's pool gives it away: after the copies |
//! | a restored span's | the copy in, then whoever has a handle | the last handle goes |
//!
//! # Unsafe
//!
//! * An address is that of bytes which the table above keeps until the queue has run, and the engine
//!   marks the end of every copy before it gives anything back. The two ends of a copy never overlap:
//!   one is torch's, one a host buffer.
//! * Kernels of the CPU are complete when torch returns. What another thread writes into a saved tensor
//!   meanwhile is a race with the copy, and is found by the tensor's version: the copy is then never
//!   read. The bytes are plain data: any value is valid.
#![expect(unsafe_code, reason = "copies from and to torch's memory")]

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

use ebbtide_core::{
    Accelerator, BackendError, Budget, Bytes, Direction, End, Facts, NoDisk, PoolId, Staged,
};
use ebbtide_store::{AlignedBuf, prefetch, prefetch_to_write};
use pyo3::intern;
use pyo3::prelude::*;

use crate::held::{Freed, Held, backend_error, phase};
use crate::ram::Tally;
use crate::shelf::Memory;
use crate::unit::Streams;
use crate::view::ALIGN;
use crate::waiting::released;

/// From host memory and back into torch's.
pub(crate) type HostMover = Staged<Gatherer, NoDisk>;

/// Spans of at most this size share their memory when they come back.
const SMALL: usize = 64 << 10;
/// Bytes of such memory.
const SLAB: usize = 1 << 20;

/// Copies within RAM.
#[derive(Debug)]
pub(crate) struct Gatherer {
    queued: Vec<Piece>,
    slab: Option<Slab>,
    tally: Arc<Tally>,
}

/// A copy, by addresses.
#[derive(Clone, Copy, Debug)]
struct Piece {
    from: usize,
    to: usize,
    len: usize,
}

/// Memory that small spans which come back one after the other share: a mapping for each would cost
/// more than its copy.
#[derive(Debug)]
struct Slab {
    buffer: Arc<Memory>,
    next: usize,
}

/// A host buffer: pages of its own, and where they are.
#[derive(Debug)]
pub(crate) struct Pages {
    buffer: AlignedBuf,
    start: usize,
}

impl Pages {
    fn new(bytes: usize) -> Result<Self, BackendError> {
        let mut buffer = AlignedBuf::zeroed(bytes)?;
        let start = buffer.as_mut_slice().as_mut_ptr().expose_provenance();
        Ok(Self { buffer, start })
    }
}

impl Bytes for Pages {
    fn bytes(&self) -> &[u8] {
        self.buffer.as_slice()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut_slice()
    }

    fn size(&self) -> usize {
        self.buffer.len()
    }
}

impl Gatherer {
    pub(crate) fn new(tally: Arc<Tally>) -> Self {
        Self { queued: Vec::new(), slab: None, tally }
    }

    /// Runs what is queued.
    fn flush(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        let queued = &self.queued;
        released(|| run(queued));
        self.queued.clear();
        // Later spans begin new memory, so that none keeps what was given to another step.
        self.slab = None;
    }

    /// Memory for a span that begins like the one at `address`, and where in it the span begins.
    fn room(&mut self, address: usize, len: usize) -> Result<(Arc<Memory>, usize), BackendError> {
        if len > SMALL {
            let at = phase(address);
            return Ok((Arc::new(AlignedBuf::zeroed(at + len)?.into()), at));
        }
        if let Some(slab) = &mut self.slab {
            let at = slab.next.next_multiple_of(ALIGN) + phase(address);
            if at + len <= SLAB {
                slab.next = at + len;
                return Ok((Arc::clone(&slab.buffer), at));
            }
        }
        let buffer = Arc::<Memory>::new(AlignedBuf::zeroed(SLAB)?.into());
        let at = phase(address);
        self.slab = Some(Slab { buffer: Arc::clone(&buffer), next: at + len });
        Ok((buffer, at))
    }
}

/// Copies all pieces. The processor is asked for the memory of the next piece while it copies one.
fn run(pieces: &[Piece]) {
    for (number, piece) in pieces.iter().enumerate() {
        if let Some(next) = pieces.get(number + 1) {
            // SAFETY: see the module.
            unsafe {
                prefetch(std::slice::from_raw_parts(with_exposed_provenance(next.from), next.len));
                let to = with_exposed_provenance_mut(next.to);
                prefetch_to_write(std::slice::from_raw_parts_mut(to, next.len));
            }
        }
        let from = with_exposed_provenance::<u8>(piece.from);
        let to = with_exposed_provenance_mut::<u8>(piece.to);
        // SAFETY: see the module.
        unsafe { std::ptr::copy_nonoverlapping(from, to, piece.len) };
    }
}

/// Where a storage's bytes are now.
fn address(held: &Held) -> Result<usize, BackendError> {
    let start = match held.named() {
        None => held.address(),
        Some(named) => Python::attach(|py| {
            let start = named.storage.bind(py).call_method0(intern!(py, "data_ptr"));
            start
                .and_then(|start| start.extract::<usize>())
                .map(|start| Some(start).filter(|s| *s != 0))
        })
        .map_err(|error| refused("can't find the memory of a storage", &error))?,
    };
    start.ok_or_else(|| BackendError::new("a storage without memory"))
}

fn refused(what: &str, error: &PyErr) -> BackendError {
    Python::attach(|py| backend_error(py, what, error))
}

fn number(bytes: u64) -> Result<usize, BackendError> {
    usize::try_from(bytes)
        .map_err(|_| BackendError::new(format!("{bytes} bytes do not fit into RAM")))
}

impl Accelerator for Gatherer {
    type Storage = Arc<Held>;
    /// Never made: the device gathers.
    type Block = std::convert::Infallible;
    type Host = Pages;
    type Stream = ();
    type Event = ();

    fn key(&self, storage: &Arc<Held>) -> usize {
        storage.engine_key()
    }

    fn facts(&self, storage: &Arc<Held>) -> Option<Facts> {
        storage.facts()
    }

    fn compute(&self) {}

    fn copy_stream(&mut self, _: Direction) -> Result<(), BackendError> {
        Ok(())
    }

    fn record(&mut self, (): ()) -> Result<(), BackendError> {
        self.flush();
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
        self.flush();
        Ok(())
    }

    fn free(&mut self, storage: &mut Arc<Held>) -> Result<(), BackendError> {
        if storage.named().is_none() && !storage.is_as_saved() {
            // The memory of a load that failed.
            storage.leave_again();
            return Ok(());
        }
        let bytes = storage.range().len() as u64;
        let freed = Python::attach(|py| match storage.named() {
            Some(_) => storage.empty(py).map(|()| Freed::Yes),
            None => storage.let_go(py),
        });
        let freed = freed.map_err(|error| refused("torch can't let go of a storage", &error))?;
        self.tally.let_go(freed, bytes);
        Ok(())
    }

    fn restore(&mut self, storage: &mut Arc<Held>, bytes: u64) -> Result<(), BackendError> {
        if storage.named().is_some() {
            let done = Python::attach(|py| storage.resize(py, bytes));
            return done.map_err(|e| refused("no memory to bring a storage back to", &e));
        }
        let (buffer, at) = self.room(storage.range().start, number(bytes)?)?;
        storage.come_home(buffer, at);
        Ok(())
    }

    fn stage(&mut self, bytes: u64) -> Result<Self::Block, BackendError> {
        Err(BackendError::new(format!("no staging of {bytes} bytes where RAM is the device")))
    }

    fn pin(&mut self, bytes: u64) -> Result<Pages, BackendError> {
        Pages::new(number(bytes)?)
    }

    fn copy(
        &mut self,
        (): (),
        from: End<'_, Self>,
        to: End<'_, Self>,
        bytes: u64,
    ) -> Result<(), BackendError> {
        let (storage, host) = match (from, to) {
            (End::Storage(storage, at), End::Host(host, host_at))
            | (End::Host(host, host_at), End::Storage(storage, at)) => {
                (address(storage)? + number(at)?, host.start + number(host_at)?)
            }
            _ => return Err(BackendError::new("RAM has no staging to copy from or to")),
        };
        let out = matches!(from, End::Storage(..));
        let (from, to) = if out { (storage, host) } else { (host, storage) };
        self.queued.push(Piece { from, to, len: number(bytes)? });
        Ok(())
    }

    fn gathers(&self) -> bool {
        true
    }
}

impl Streams for HostMover {
    /// Copies within RAM have ended when they are marked: a stream has nothing to say.
    fn asked(&mut self, stream: &Bound<'_, PyAny>) -> Result<(), BackendError> {
        crate::stream::is_stream(stream)
    }

    fn shrink(&mut self) -> u64 {
        HostMover::shrink(self, 0)
    }

    fn add_pool(&mut self, budget: &Budget) -> Option<PoolId> {
        Some(self.add_pool_sharing(budget.clone()))
    }

    fn shrink_pool(&mut self, pool: PoolId) -> u64 {
        HostMover::shrink_pool(self, pool)
    }

    fn host_bytes(&self) -> (u64, u64) {
        let pool = self.pool_stats(PoolId(0)).unwrap_or_default();
        (pool.allocated, pool.in_use)
    }
}
