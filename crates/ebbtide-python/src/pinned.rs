//! Pinned host memory, from torch's own allocator, and the way of it into a tier below.
//!
//! Torch rounds what it pins up to a power of two, so a large buffer is several blocks: the powers of two
//! that its size consists of, at most four for the sizes that the engine asks for (case C13).
//!
//! # Access contract
//!
//! | a block is | who may touch the bytes |
//! | --- | --- |
//! | in a buffer of the engine's pool | copies of the device, by the engine's events |
//! | in a job of the tier below ([`Parted`]) | the tier's thread that runs the job |
//!
//! A block keeps its tensor, and comes back from the tier with the outcome of the job, so it is never
//! dropped without the GIL while anybody wants its memory.
//!
//! A device that checks the order of accesses can't see those of the host. Its module in torch may have a
//! function `_ebbtide_host_access(address, bytes, writes)`; it is told of them.
//!
//! # Unsafe
//!
//! A block's bytes are those of a tensor that the block alone has, at an address that never changes.
#![expect(unsafe_code, reason = "threads of a tier copy from and to torch's pinned memory")]

use std::collections::HashMap;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use ebbtide_core::{BackendError, Bytes, Done, Failed, Outcome, Store, StoreStats, Ticket, Timing};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::torch::Torch;

/// From this size on a buffer is cut into blocks, in bytes: below, further copies cost more than what
/// rounding wastes.
const CUT_FROM: u64 = 1 << 20;

/// A block of pinned memory.
#[derive(Debug)]
pub(crate) struct Part {
    tensor: Py<PyAny>,
    start: usize,
    len: usize,
}

/// A host buffer: blocks that follow one another.
#[derive(Debug)]
pub(crate) struct Pinned {
    parts: Vec<Part>,
}

/// A piece of one block, as a tensor of bytes, and how many bytes of the whole are in front of it.
pub(crate) struct Slice<'py> {
    pub(crate) bytes: Bound<'py, PyAny>,
    pub(crate) before: u64,
    pub(crate) len: u64,
}

impl Part {
    fn new(torch: &Torch, py: Python<'_>, bytes: u64) -> PyResult<Self> {
        let kwargs = PyDict::new(py);
        kwargs.set_item(intern!(py, "dtype"), torch.uint8.bind(py))?;
        kwargs.set_item(intern!(py, "device"), "cpu")?;
        kwargs.set_item(intern!(py, "pin_memory"), true)?;
        let tensor =
            torch.module.bind(py).call_method(intern!(py, "empty"), (bytes,), Some(&kwargs))?;
        let start = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        Ok(Self { tensor: tensor.unbind(), start, len: usize::try_from(bytes)? })
    }
}

impl Bytes for Part {
    fn bytes(&self) -> &[u8] {
        // SAFETY: see the module.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance(self.start), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: see the module.
        unsafe { std::slice::from_raw_parts_mut(with_exposed_provenance_mut(self.start), self.len) }
    }

    fn size(&self) -> usize {
        self.len
    }

    /// Pinning is slow: the memory goes back to the pool.
    fn release(self) -> Option<Self> {
        Some(self)
    }
}

impl Pinned {
    /// Exactly `bytes` bytes.
    ///
    /// # Errors
    /// Torch can't pin as much.
    pub(crate) fn new(torch: &Torch, py: Python<'_>, bytes: u64) -> PyResult<Self> {
        let parts = cut(bytes).map(|bytes| Part::new(torch, py, bytes));
        Ok(Self { parts: parts.collect::<PyResult<_>>()? })
    }

    /// The blocks' pieces that make up a range of the buffer.
    ///
    /// # Errors
    /// Torch refuses.
    pub(crate) fn slices<'py>(
        &self,
        py: Python<'py>,
        at: u64,
        bytes: u64,
    ) -> PyResult<Vec<Slice<'py>>> {
        let mut slices = Vec::with_capacity(1);
        let (mut start, end) = (0, at + bytes);
        for part in &self.parts {
            let after = start + part.len as u64;
            let (from, to) = (at.max(start), end.min(after));
            if from < to {
                let tensor = part.tensor.bind(py);
                let bytes = narrow(tensor, from - start, to - from)?;
                slices.push(Slice { bytes, before: from - at, len: to - from });
            }
            start = after;
        }
        Ok(slices)
    }
}

/// A range of a tensor of bytes.
///
/// # Errors
/// Torch refuses.
pub(crate) fn narrow<'py>(
    bytes: &Bound<'py, PyAny>,
    at: u64,
    len: u64,
) -> PyResult<Bound<'py, PyAny>> {
    bytes.call_method1(intern!(bytes.py(), "narrow"), (0, at, len))
}

/// The sizes of the blocks, the largest first.
fn cut(bytes: u64) -> impl Iterator<Item = u64> {
    let whole = (bytes < CUT_FROM).then_some(bytes);
    let powers = (0..64).rev().map(|bit| 1 << bit).filter(move |power| bytes & power != 0);
    whole.into_iter().chain(powers.filter(move |_| bytes >= CUT_FROM))
}

/// A tier for buffers of several blocks, made of one for blocks.
#[derive(Debug)]
pub(crate) struct Parted<S> {
    inner: S,
    witness: Option<Py<PyAny>>,
    /// The jobs of each buffer's job.
    jobs: HashMap<Ticket, Vec<Ticket>>,
    next: u64,
}

impl<S: Store<Part>> Parted<S> {
    /// `witness` is told of the host's accesses.
    pub(crate) fn new(inner: S, witness: Option<Py<PyAny>>) -> Self {
        Self { inner, witness, jobs: HashMap::new(), next: 0 }
    }

    fn tell<'a>(&self, parts: impl IntoIterator<Item = &'a Part>, writes: bool) {
        let Some(witness) = &self.witness else { return };
        Python::attach(|py| {
            for part in parts {
                let told = witness.bind(py).call1((part.start, part.len, writes));
                if let Err(error) = told {
                    error.write_unraisable(py, None);
                }
            }
        });
    }

    fn job(&mut self, tickets: Vec<Ticket>) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.jobs.insert(ticket, tickets);
        ticket
    }

    /// Starts a job for each block. If one can't be started the others are waited for and undone.
    fn start(
        &mut self,
        block: Pinned,
        mut job: impl FnMut(&mut S, usize, Part) -> Result<Ticket, Failed<Part>>,
    ) -> Result<Ticket, Failed<Pinned>> {
        let mut tickets = Vec::with_capacity(block.parts.len());
        let mut parts = block.parts.into_iter();
        while let Some(part) = parts.next() {
            match job(&mut self.inner, tickets.len(), part) {
                Ok(ticket) => tickets.push(ticket),
                Err(Failed { error, block: part }) => {
                    let mut back = Ended::of(&mut self.inner, tickets);
                    back.discard(&mut self.inner);
                    back.parts.push(part);
                    back.parts.extend(parts);
                    return Err(Failed { error, block: Pinned { parts: back.parts } });
                }
            }
        }
        Ok(self.job(tickets))
    }
}

/// What the jobs of a buffer's blocks have left.
struct Ended<Slot> {
    parts: Vec<Part>,
    slots: Vec<Slot>,
    timing: Option<Timing>,
    error: Option<BackendError>,
}

impl<Slot> Ended<Slot> {
    fn of<S: Store<Part, Slot = Slot>>(inner: &mut S, tickets: Vec<Ticket>) -> Self {
        let mut ended = Self { parts: Vec::new(), slots: Vec::new(), timing: None, error: None };
        for ticket in tickets {
            match inner.wait(ticket) {
                Ok((done, timing)) => {
                    match done {
                        Done::Stored(slot, part) => {
                            ended.slots.push(slot);
                            ended.parts.extend(part);
                        }
                        Done::Loaded(part) => ended.parts.push(part),
                    }
                    ended.timing = Some(hull(ended.timing, timing));
                }
                Err(Failed { error, block }) => {
                    ended.parts.push(block);
                    ended.error.get_or_insert(error);
                }
            }
        }
        ended
    }

    fn discard<S: Store<Part, Slot = Slot>>(&mut self, inner: &mut S) {
        self.slots.drain(..).for_each(|slot| inner.discard(slot));
    }
}

/// From the first byte touched to the last one.
fn hull(one: Option<Timing>, other: Timing) -> Timing {
    let Some(one) = one else { return other };
    Timing {
        started_ns: one.started_ns.min(other.started_ns),
        finished_ns: one.finished_ns.max(other.finished_ns),
        worker: other.worker,
    }
}

impl<S: Store<Part>> Store<Pinned> for Parted<S> {
    type Slot = Vec<S::Slot>;

    fn put(&mut self, block: Pinned) -> Result<Ticket, Failed<Pinned>> {
        self.tell(&block.parts, false);
        self.start(block, |inner, _, part| inner.put(part))
    }

    fn get(&mut self, slots: &Vec<S::Slot>, block: Pinned) -> Result<Ticket, Failed<Pinned>> {
        self.tell(&block.parts, true);
        self.start(block, |inner, number, part| match slots.get(number) {
            Some(slot) => inner.get(slot, part),
            None => {
                Err(Failed { error: BackendError::new("a buffer of another size"), block: part })
            }
        })
    }

    fn is_done(&mut self, ticket: Ticket) -> bool {
        let tickets = self.jobs.get(&ticket);
        tickets.is_none_or(|tickets| tickets.iter().all(|&ticket| self.inner.is_done(ticket)))
    }

    fn wait(&mut self, ticket: Ticket) -> Outcome<Pinned, Vec<S::Slot>> {
        let tickets = self.jobs.remove(&ticket).unwrap_or_default();
        let mut ended = Ended::of(&mut self.inner, tickets);
        let timing = ended.timing.unwrap_or_default();
        if let Some(error) = ended.error.take() {
            ended.discard(&mut self.inner);
            return Err(Failed { error, block: Pinned { parts: ended.parts } });
        }
        let block = Pinned { parts: ended.parts };
        if ended.slots.is_empty() {
            self.tell(&block.parts, true);
            return Ok((Done::Loaded(block), timing));
        }
        let block = (!block.parts.is_empty()).then_some(block);
        Ok((Done::Stored(ended.slots, block), timing))
    }

    fn discard(&mut self, slots: Vec<S::Slot>) {
        for slot in slots {
            self.inner.discard(slot);
        }
    }

    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }
}
